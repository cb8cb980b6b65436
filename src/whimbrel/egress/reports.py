"""The reporter: sends the reports of a stage's instances at a place to the orchestrator, in order.

The dispatcher copies reports to a log of their own, so that outboxes can be trimmed, and results delivered, while the
orchestrator is away. A report may be sent twice, after a crash: the orchestrator's tables ignore repetitions.
"""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.core import wire
from whimbrel.core.record import Report
from whimbrel.log.chunks import chunk
from whimbrel.log.contract import Lane, Log
from whimbrel.log.readers import next_of

REPORTER = "reporter"
"""The reader of the reports."""
FIRST, MOST, PAUSE = 0.2, 1.0, 0.5
"""Seconds until a report that the orchestrator did not get is sent again: at first, and at most; and until the log is
looked at again, unless a report is appended before."""


class Reporter:
    """Sends the reports of one log. Driven step by step; an `Appendable` for the dispatcher."""

    def __init__(self, log: Log, send: Callable[[Report], None]) -> None:
        """`send` raises `Retry` if the orchestrator is unreachable."""
        self._log, self._send = log, send
        self.appended: Callable[[], None] = lambda: None
        """Called after each append through this object."""

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        """Append reports to the log."""
        position = self._log.append(blob, count=count, writer=writer, counter=counter, lane=lane, replays=replays)
        self.appended()
        return position

    def step(self) -> bool:
        """Send what is new, at most a chunk; return whether there was anything. If `send` raises, the next step begins
        with the entry that failed."""
        entries = chunk(self._log, next_of(self._log, REPORTER))
        for entry in entries:
            for report in wire.unpack(entry.blob, list[Report]):
                self._send(report)
            self._log.commit(REPORTER, {Lane.DATA: entry.position + 1})
        if entries:
            self._log.trim(entries[-1].position + 1)
        return bool(entries)

    @property
    def is_idle(self) -> bool:
        """Whether everything has been sent."""
        return next_of(self._log, REPORTER) >= self._log.tail()
