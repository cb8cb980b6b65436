"""Positions of readers, for back-pressure, the "drained" check and restarts (log/contract.py, rule 7)."""

from __future__ import annotations

from whimbrel.log.contract import Lane, Log

Offset = dict[str, int]
"""A position in each lane of an inbox, by the lane names in checkpoints; and `AHEAD`."""
LANES = {"data": Lane.DATA, "control": Lane.CONTROL}
AHEAD = "ahead"
"""A position in the control lane, at a start without state: what is before it comes ahead of all data."""

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


def beginning(inbox: Log) -> Offset:
    """Where an instance starts that has no checkpoint."""
    heads = {name: inbox.head(lane) for name, lane in LANES.items()}
    control = inbox.tail(Lane.CONTROL)
    return heads | {AHEAD: control} if heads["control"] < control else heads


def end_of(inbox: Log, start: Offset, records: int, size: int) -> Offset:
    """The end of the batch that begins at `start`: about `records` records of data, `size` bytes of control."""
    control = inbox.within(start["control"], size, Lane.CONTROL)
    if control < start.get(AHEAD, 0):
        return {**start, "control": control}
    return {"data": inbox.advance(start["data"], records), "control": control}


def positions(offset: Offset) -> dict[Lane, int]:
    """An offset as positions by lane of the log."""
    return {lane: offset[name] for name, lane in LANES.items()}
