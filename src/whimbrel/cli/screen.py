"""Output of commands on a terminal: control characters in external text are escaped, so that it cannot control the
terminal.

Keys, reasons and names come from records, sites and other users. An escape sequence in them could clear the screen or
hide a line, brackets could be interpreted as markup. `--json` writes the answer unchanged.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from whimbrel.core.text import visible


def shown(text: object) -> str:
    """External text, escaped for use in a line with markup."""
    return escape(visible(text))


def echo(*lines: object) -> None:
    """Print lines with external text, without markup."""
    for line in lines:
        Console().print(visible(line), markup=False, highlight=False)


class Sheet(Table):
    """A table of external text; a column whose name ends with > is right-aligned, for figures."""

    def __init__(self, *columns: str) -> None:
        super().__init__(box=None)
        for name in columns:
            self.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left")

    def add(self, *cells: object) -> None:
        """Add a row."""
        self.add_row(*map(shown, cells))


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(answer: Any, path: Path) -> None:
    """Write an answer or a report as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n")
