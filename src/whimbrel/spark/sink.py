"""The sink: carries out what a micro-batch of an instance said.

The last station inside Spark. It collects the few rows the groups made of the batch and appends, in this order:

    1. posts     to the control lane of each inbox they go to, all of one destination in one entry
    2. outbox    one entry with the results and notices of all groups, the range of the inbox they come from, and up to
                 which batch it has posted to whom: also if it says nothing, so that a missing entry shows

Spark repeats a batch that it cannot prove to have finished, under the same batch id. So both appends are numbered with
the batch id, and a log takes each number of a writer once, and compares what is repeated. The writer is the instance
*and* its checkpoint: an instance that starts anew from an empty checkpoint counts from zero again, and must not be
taken for its own past. Then its range tells: a batch that begins before the end of the last one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import msgspec
from pyspark.sql import DataFrame

from whimbrel.core import wire
from whimbrel.core.errors import Diverged
from whimbrel.core.record import Kind, Outgoing, Result, Said
from whimbrel.core.saving import STORE
from whimbrel.log import Appendable, Entry, Lane, Log
from whimbrel.log.codec import encode_posts
from whimbrel.log.reading import Offset
from whimbrel.spark.checkpoint import last_said
from whimbrel.spark.nearby import NOWHERE, Nearby
from whimbrel.spark.processor import HURRY, OUTGOING, POSTS

Ranges = Callable[[int], tuple[Offset, Offset]]
"""By batch id: from where to where a batch goes in its inbox. The start is empty if nobody knows."""

View = tuple[int, int, memoryview]
"""A `codec.Message` as it is read here: its body may be large, and is not copied."""


class Sink:
    """One instance's sink; `append` is its `foreachBatch` function."""

    def __init__(
        self,
        writer: Callable[[], str],
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        appended: Callable[[], None] = lambda: None,
        hurry: Callable[[bool], None] = lambda hurries: None,
        nearby: Nearby = NOWHERE,
        ranges: Ranges = lambda batch_id: ({}, {}),
        operator: str = "the operator",
        synced: Callable[[], None] = lambda: None,
    ) -> None:
        """`appended` is called after each batch that said something, `hurry` with whether any of its parts hurries.
        `nearby`: where workers leave what is large. `operator`: its name, for errors. `synced` is called before
        anything is appended: it makes what the checkpoint has of the batch survive a power failure, if asked."""
        self._writer, self._outbox, self._inbox_of = writer, outbox, inbox_of
        self._ranges, self._operator, self._synced = ranges, operator, synced
        self._appended, self._hurry = appended, hurry
        self._nearby = nearby
        self._hurrying: set[int] = set()
        self._last: Said | None = None
        """The last entry of the outbox, without what it says; None: not looked up yet."""

    def append(self, batch: DataFrame, batch_id: int) -> None:
        """Carry out one batch. May be called again with the same batch and id."""
        rows = self._rows(batch)
        start, end = self._ranges(batch_id)
        before = self._before(batch_id, start)
        self._synced()
        posts = [row for row in rows if row._kind == POSTS]
        destinations = sorted({row._to for row in posts})
        for destination in destinations:
            self._post(destination, [row._body for row in posts if row._to == destination], batch_id)
        outgoing = [row for row in rows if row._kind == OUTGOING]
        count = sum(row._count for row in outgoing)
        posted = {**before.posted, **dict.fromkeys(destinations, batch_id)}
        blob = join_outgoing([row._body for row in outgoing], start, end, posted)
        try:
            self._outbox.append(blob, count=count, writer=self._writer(), counter=batch_id)
        except Diverged as error:
            raise Diverged(self._difference(batch_id, blob) or str(error)) from error
        self._last = Said([], start, end, posted)
        if rows:
            self._note_hurry(rows)
            self._appended()

    def _before(self, batch_id: int, start: Offset) -> Said:
        """The last entry of the outbox, without what it says. Raises `Diverged` if a new batch begins in it."""
        last = self._last or last_said(self._outbox)
        if batch_id <= self._outbox.counter(self._writer()):
            return last  # a repetition: the log compares it
        if any(at < last.end.get(lane, 0) for lane, at in start.items()):
            raise Diverged(
                f"batch {batch_id} of {self._writer()} begins at {start} of its inbox, where an earlier one has been: "
                f"the last entry of its outbox reaches to {last.end}. Its checkpoint is older than its outbox"
            )
        return last

    def _difference(self, batch_id: int, blob: bytes) -> str | None:
        """What a repeated batch says differently from the first time, if both can be seen."""
        before, now = last_said(self._outbox), wire.unpack(blob, Said)
        if before.renewed or batch_id != self._outbox.counter(self._writer()):
            return None
        told = f"batch {batch_id} of {self._writer()} was repeated, and differs from the first time"
        if (before.start, before.end) != (now.start, now.end):
            return f"{told}: it applied {before.start} to {before.end} of its inbox, now {now.start} to {now.end}"
        pairs = zip_longest(*([result for one in said.outgoing for result in one.results] for said in (before, now)))
        for first, again in pairs:
            if first != again:
                key = (first or again).key
                return (
                    f"{told}: {self._operator} gave {_shown(first)} for key {key!r}, now {_shown(again)}. An operator "
                    "must depend on nothing but its arguments (ctx.now and ctx.random in place of clock and random), "
                    "and its code must not change while a batch is unfinished"
                )
        return None

    def _rows(self, batch: DataFrame) -> list[Any]:
        """A batch's rows, by part. Through Arrow: `collect` takes bytes for text, which is five times slower."""
        rows = [SimpleNamespace(**row) for row in batch.toArrow().to_pylist()]
        for row in rows:
            row._body = self._nearby.blob(row._body, row._file)
        self._nearby.sweep()  # Spark repeats a batch from its source on
        return sorted(rows, key=lambda row: row._part)

    def _post(self, destination: str, bodies: list[bytes], batch_id: int) -> None:
        posts = [post for body in bodies for post in wire.decode(body, list[View])]
        # A part's parcels come before its PASSED and SHIPPED; sorting is stable, so its parcels stay in order.
        posts.sort(key=itemgetter(0))
        self._inbox_of(destination).append(
            # Nobody reads a spool as records.
            wire.pack(posts) if destination == STORE else encode_posts(posts),
            count=sum(kind != Kind.NUDGE for kind, _, _ in posts),  # nobody waits for a nudge
            writer=self._writer(),
            counter=batch_id,
            lane=Lane.CONTROL,
        )

    def _note_hurry(self, rows: Sequence[Any]) -> None:
        """Parts of which a batch says nothing are as they were."""
        before = self._hurrying
        self._hurrying = before - {row._part for row in rows} | {row._part for row in rows if row._kind == HURRY}
        if bool(self._hurrying) != bool(before):
            self._hurry(bool(self._hurrying))


def _shown(result: Result | None) -> str:
    return "nothing" if result is None else f"{result.values} (seq {result.seq})"


def join_outgoing(encoded: list[bytes], start: Offset, end: Offset, posted: dict[str, int] | None = None) -> bytes:
    """An outbox entry, `Said`, of several groups' encoded `Outgoing`s, without decoding them."""
    return wire.pack(([msgspec.Raw(one) for one in encoded], start, end, dict(sorted((posted or {}).items()))))


def outgoing(entry: Entry) -> list[Outgoing]:
    """What an outbox entry says: one `Outgoing` a group."""
    return wire.unpack(entry.blob, Said).outgoing
