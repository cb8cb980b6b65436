"""How far the reader of an inbox has come: what back-pressure and "is it drained" ask (log/contract.py, rule 7)."""

from __future__ import annotations

from whimbrel.log.contract import Lane, Log

Offset = dict[str, int]
"""A position in each lane of an inbox, by the names that stand in Spark's checkpoint."""
LANES = {"data": Lane.DATA, "control": Lane.CONTROL}

INSTANCE = "instance"
"""The one reader of an inbox. Its position says up to where everything is applied, and what came of it is written. The
name is the same in every life of the instance, at whichever site: each start resets the position (spark/query.py)."""


def is_drained(inbox: Log) -> bool:
    """Whether everything that lies in an inbox now has been applied, and what came of it is written."""
    # The position first: entries that come between the two looks count as not applied.
    return all(inbox.committed(INSTANCE, lane) == inbox.tail(lane) for lane in Lane)


def positions(offset: Offset) -> dict[Lane, int]:
    """An offset as the log knows it."""
    return {lane: offset[name] for name, lane in LANES.items()}
