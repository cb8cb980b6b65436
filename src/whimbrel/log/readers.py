"""Positions of readers, for back-pressure, the "drained" check and restarts (log/contract.py, rule 7)."""

from __future__ import annotations

from whimbrel.log.contract import Lane, Log

Offset = dict[str, int]
"""A position in each lane of an inbox, by the lane names in checkpoints."""
LANES = {"data": Lane.DATA, "control": Lane.CONTROL}

INSTANCE = "instance"
"""The one reader of an inbox. Below its position everything is applied, and the output of it is written. The name is
the same in every incarnation of the instance, at any site: each start resets the position (host/starting.py)."""


def is_drained(inbox: Log) -> bool:
    """Whether every entry of an inbox has been applied, and its output is written."""
    # Read the position first: entries appended between the two reads count as not applied.
    return all(inbox.committed(INSTANCE, lane) == inbox.tail(lane) for lane in Lane)


def next_of(log: Log, reader: str) -> int:
    """The first data entry that a reader has not finished, and that can still be read."""
    return max(log.committed(reader) or 0, log.head())


def positions(offset: Offset) -> dict[Lane, int]:
    """An offset as positions by lane of the log."""
    return {lane: offset[name] for name, lane in LANES.items()}
