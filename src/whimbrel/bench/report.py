"""The report of a run: one JSON file, with the names that every command uses."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec


def heading(seed: int) -> dict[str, Any]:
    """What every report begins with: which Whimbrel, which revision, which machine."""
    return {
        "whimbrel": installed("whimbrel"),
        "revision": revision(),
        "seed": seed,
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "python": platform.python_version(),
            "spark": installed("pyspark"),
        },
    }


def installed(package: str) -> str | None:
    """A package's version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def revision() -> str | None:
    """The git revision of the checkout this code lies in, None outside of one."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(report: Any, path: Path) -> None:
    """Write a report where people and programs can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
