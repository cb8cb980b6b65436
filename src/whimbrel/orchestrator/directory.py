"""Ownership of a data directory: by one pipeline, with the sites of its instances."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whimbrel.core import wire
from whimbrel.core.errors import Refused
from whimbrel.orchestrator.journal import GatewayJournal, Journal, JournalReader


def claim_directory(
    data: Path, journal: Journal | GatewayJournal, pipeline: str, stages: Sequence[str], sites: Sequence[str]
) -> None:
    """Assign a data directory to a pipeline. Raises if it belongs to another one."""
    check_directory(data, journal, pipeline, stages, sites)
    journal.save("pipeline", _belonging(pipeline, stages))


def check_directory(
    data: Path,
    journal: Journal | GatewayJournal | JournalReader,
    pipeline: str,
    stages: Sequence[str],
    sites: Sequence[str],
) -> None:
    """Raise if a data directory belongs to another pipeline, which could not read its content, or if a site with
    instances is missing. Sites may be added, not removed."""
    found = journal.load("pipeline")
    if found is not None and found != _belonging(pipeline, stages):
        other = wire.unpack(found, dict[str, Any])
        raise Refused(
            f"{data} belongs to pipeline {other['pipeline']!r} with the stages {other['stages']}, "
            f"not to {pipeline!r} with {stages}; choose another directory"
        )
    for stage in stages:
        placed = journal.load(f"instances/{stage}")
        gone = set(wire.unpack(placed, dict[str, str]).values()) - set(sites) if placed else set()
        if gone:
            raise Refused(f"{data} has instances at {', '.join(sorted(gone))}; name all its sites again")


def _belonging(pipeline: str, stages: Sequence[str]) -> bytes:
    return wire.pack({"pipeline": pipeline, "stages": stages})
