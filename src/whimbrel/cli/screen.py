"""What commands show on a terminal: text from outside is made visible first, so that it cannot give orders to it.

Keys, reasons and names come from records, sites and other users. One with an escape sequence in it could clear the
screen or hide a line, one with brackets could be taken for markup. `--json` writes what was answered as it is.
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
    """Text from outside as a piece of a line with markup."""
    return escape(visible(text))


def say(*lines: object) -> None:
    """Print lines that hold text from outside, as they are."""
    for line in lines:
        Console().print(visible(line), markup=False, highlight=False)


class Sheet(Table):
    """A table of text from outside; a column whose name ends with > is one of figures."""

    def __init__(self, *columns: str) -> None:
        super().__init__(box=None)
        for name in columns:
            self.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left")

    def add(self, *cells: object) -> None:
        """A row."""
        self.add_row(*map(shown, cells))


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(answer: Any, path: Path) -> None:
    """Write an answer or a report as JSON, where people and programs can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n")
