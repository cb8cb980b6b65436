"""The feed: a thread that passes a source's rows to the gateway at their rate, and bad ones to the dead letters.

Rows travel in small batches, many per second: large enough to spare the log, small enough to add no relevant latency.
When the inboxes are too full, a disk is full or a log is locked, the feed waits: back-pressure ends at the source, the
only place where a record may wait without harm. If a source raises `Retry`, the feed reads it again, from the row after
the last one that it took in.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

from whimbrel.core.errors import BadRecord
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.gateway.ingress import Event
from whimbrel.gateway.intake import Intake, Taken
from whimbrel.gateway.sources import Numbered, Source
from whimbrel.log.backoff import Backoff, Interrupted
from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.gateway")
T = TypeVar("T")
PERIOD = 0.02
BATCH = 5_000
JOIN_TIMEOUT = 5.0
"""Seconds that `stop` waits for a source to return."""
WRITER = "source"
"""The writer of a pipeline's only source. In the ingress log the counter of its appends is the last row so far, in the
dead letters the row."""


class WayIn(Protocol):
    """Where rows go: the gateway of a stage, or the entrance before the gateways of several places."""

    def counter(self, writer: str) -> int:
        """The number of a writer's last row that is durable."""

    def ingest(
        self, events: Sequence[Event], writer: str, counter: int, number: Callable[[int], int] | None = None
    ) -> bool:
        """Make events durable (`Gateway.ingest`)."""

    def latest_allowed_us(self) -> int | None:
        """The event time after which an event is refused as from the future; None: there is no bound."""


class Feed:
    """Passes one source's rows to where they enter."""

    def __init__(
        self,
        source: Source,
        intake: Intake,
        gateway: WayIn,
        dead: DeadLetters,
        is_full: Callable[[], bool],
        writer: str = WRITER,
    ) -> None:
        """`writer`: the name of the source in the logs, where its rows are the counters."""
        self.writer = writer
        self.source, self.intake, self.gateway, self.dead, self.is_full = source, intake, gateway, dead, is_full
        self.ended = threading.Event()
        """Set when the source has ended, and all its rows are taken in."""
        self.error: Exception | None = None
        """The permanent error of the source or the gateway: then `ended` is not set."""
        self.backoff = Backoff(f"the feed of {source.name}", LOGGER)
        self._rows: Iterator[Numbered] | None = None
        self._next = 0
        """The number of the next row."""
        self._set_aside: set[int] = set()
        """Rows from `_next` on that are dead letters already: at a later time the intake might accept them as well."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"feed-{source.name}", daemon=True)

    def start(self) -> None:
        """Start, after the last row in the ingress log."""
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next batch. If the source blocks for longer than `JOIN_TIMEOUT`, its thread is abandoned."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT)

    def _run(self) -> None:
        try:
            self._carry()
        except Interrupted:
            pass
        except Exception as error:  # any error of the user's iterable appears in the status
            self.error = kept(LOGGER, f"the feed of {self.source.name} has failed for good", error)

    def _carry(self) -> None:
        self._next = self._persist(lambda: self.gateway.counter(self.writer) + 1)
        self._set_aside = self._persist(lambda: self.dead.positions(self.writer, self.source.name, self._next))
        due, last = 0.0, time.monotonic()
        while not self._stop.is_set():
            while self._persist(self.is_full) and not self._stop.wait(PERIOD):
                pass
            rate, now = self.source.rate, time.monotonic()
            due, last = BATCH if rate is None else due + (now - last) * rate, now
            batch = self._persist(partial(self._read, min(int(due), BATCH)))
            if due >= 1 and not batch:
                self.ended.set()
                return
            if batch:
                # Checked once: at a retry, an event may be no longer from the future.
                self._persist(partial(self._take, batch, self._persist(partial(self._judge, batch))))
                due -= len(batch)
                self._next = batch[-1][0] + 1
            if rate is not None:
                self._stop.wait(PERIOD)

    def _persist(self, act: Callable[[], T]) -> T:
        return self.backoff.until_done(act, self._stop.wait)

    def _read(self, count: int) -> list[Numbered]:
        if self._rows is None:
            self._rows = self.source.rows(self._next)
        try:
            return list(islice(self._rows, count))
        except BaseException:
            self._rows = None  # a generator that has raised yields nothing more, which would look like the end
            raise

    def _judge(self, batch: list[Numbered]) -> list[Taken | BadRecord]:
        until_us = self.gateway.latest_allowed_us()
        answers = iter(self.intake.take([row for _, row in batch if not isinstance(row, BadRecord)], until_us))
        return [row if isinstance(row, BadRecord) else next(answers) for _, row in batch]

    def _take(self, batch: list[Numbered], answers: list[Taken | BadRecord]) -> None:
        good, rows = [], []
        for (number, row), answer in zip(batch, answers, strict=True):  # in order: counters of dead letters must grow
            if isinstance(answer, BadRecord):
                whole = None if answer is row else row
                self.dead.put(answer, self.source.name, number, whole, writer=self.writer, counter=number)
            elif number not in self._set_aside:
                good.append(answer)
                rows.append(number)
        if good:
            self.gateway.ingest(good, self.writer, batch[-1][0], rows.__getitem__)
