"""The report of a run: one JSON file, with the names that every command uses."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from whimbrel.cli.screen import version, write

__all__ = ["heading", "revision", "write"]


def heading(seed: int) -> dict[str, Any]:
    """The beginning of every report: the version of Whimbrel, the revision, the machine."""
    return {
        "whimbrel": version("whimbrel"),
        "revision": revision(),
        "seed": seed,
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "python": platform.python_version(),
            "spark": version("pyspark"),
        },
    }


def revision() -> str | None:
    """The git revision of the checkout that contains this code, None outside of one."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
