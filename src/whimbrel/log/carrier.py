"""The carrier: writes the output of an instance's batch to the logs. It appends, in this order:

    1. messages  to the control lane of each destination's inbox, all of one destination in one entry
    2. outbox    one entry with the results and notices of all parts, the range of the inbox that the batch applied, and
                 for each destination the last batch with messages to it. Also for an empty batch, so that a gap shows

A host repeats a batch whose commit is not proven, under the same number. So both appends have that as their counter;
a log accepts each counter of a writer once, and compares a replay with it. The writer is the instance *and* its
checkpoint: an instance that starts from an empty checkpoint counts from zero again, and its batches must not pass for
replays. There the range decides: the carrier refuses a batch that begins before the end of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Diverged
from whimbrel.core.increments import STORE
from whimbrel.core.record import Emissions, Kind, Outgoing, Result, Said
from whimbrel.log.codec import Content, encode_messages
from whimbrel.log.contract import Appendable, Entry, Lane, Log
from whimbrel.log.readers import Offset

View = tuple[int, int, memoryview]
"""A `codec.Content` as decoded here: its body may be large, and is not copied."""


class Carrier:
    """Writes the batches of one instance to the logs."""

    def __init__(
        self,
        writer: Callable[[], str],
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        operator: str = "the operator",
        encode: Callable[[Sequence[View]], bytes] = encode_messages,
    ) -> None:
        """`operator`: its name, for errors. `encode` encodes messages into an inbox entry."""
        self._writer, self._outbox, self._inbox_of = writer, outbox, inbox_of
        self._operator, self._encode = operator, encode
        self._last: Said | None = None
        """The last entry of the outbox, without its outgoing part; None: not looked up yet."""

    def carry(
        self,
        batch_id: int,
        start: Offset,
        end: Offset,
        outgoing: Sequence[bytes],
        count: int,
        messages: Mapping[str, Sequence[bytes]],
    ) -> None:
        """Append the output of one batch: of its parts, as `encoded` encodes it. `count`: the number of results."""
        before = self._before(batch_id, start)
        destinations = sorted(messages)
        for destination in destinations:
            self._send(destination, messages[destination], batch_id)
        sent = {**before.sent, **dict.fromkeys(destinations, batch_id)}
        blob = join_outgoing(outgoing, start, end, sent)
        try:
            self._outbox.append(blob, count=count, writer=self._writer(), counter=batch_id)
        except Diverged as error:
            raise Diverged(self._difference(batch_id, blob) or str(error)) from error
        self._last = Said([], start, end, sent)

    def _before(self, batch_id: int, start: Offset) -> Said:
        """The last entry of the outbox, without its outgoing part. Raises `Diverged` if a new batch overlaps it."""
        last = self._last or last_said(self._outbox)
        if batch_id <= self._outbox.counter(self._writer()):
            return last  # a replay: the log compares it
        if any(at < last.end.get(lane, 0) for lane, at in start.items()):
            raise Diverged(
                f"batch {batch_id} of {self._writer()} begins at {start} of its inbox, which an earlier batch has "
                f"applied: the last entry of its outbox ends at {last.end}. Its checkpoint is older than its outbox"
            )
        return last

    def _difference(self, batch_id: int, blob: bytes) -> str | None:
        """How the output of a replayed batch differs from the first run, if both can be compared."""
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

    def _send(self, destination: str, bodies: Sequence[bytes], batch_id: int) -> None:
        messages = [message for body in bodies for message in wire.decode(body, list[View])]
        # A part's parcels come before its PASSED and SHIPPED; sorting is stable, so its parcels stay in order.
        messages.sort(key=itemgetter(0))
        self._inbox_of(destination).append(
            # A spool is never read as records.
            wire.pack(messages) if destination == STORE else self._encode(messages),
            count=sum(kind != Kind.WAKE for kind, _, _ in messages),  # wake-ups are not backlog
            writer=self._writer(),
            counter=batch_id,
            lane=Lane.CONTROL,
        )


def encoded(emissions: Emissions, part: int, state_bytes: int) -> tuple[bytes | None, dict[str, list[Content]]]:
    """A part's output of a batch, encoded: an `Outgoing` unless it is empty, and the messages by destination."""
    outgoing = None
    if emissions.results or emissions.notices:
        # Canonical, so that a replayed batch encodes its notices to the same bytes.
        notices = msgspec.Raw(wire.encode_canonical(emissions.notices))
        outgoing = wire.encode((emissions.results, notices, part, state_bytes))
    messages: dict[str, list[Content]] = {}
    for to, kind, bin, body in emissions.messages:
        messages.setdefault(to, []).append((kind, bin, body))
    return outgoing, messages


def _shown(result: Result | None) -> str:
    return "nothing" if result is None else f"{result.values} (seq {result.seq})"


def join_outgoing(encoded: Sequence[bytes], start: Offset, end: Offset, sent: dict[str, int] | None = None) -> bytes:
    """Join the encoded `Outgoing`s of several parts into an outbox entry, `Said`, without decoding them."""
    return wire.pack(([msgspec.Raw(one) for one in encoded], start, end, dict(sorted((sent or {}).items()))))


def outgoing(entry: Entry) -> list[Outgoing]:
    """The content of an outbox entry: one `Outgoing` per part."""
    return wire.unpack(entry.blob, Said).outgoing


def last_said(outbox: Log) -> Said:
    """The last entry of an outbox; an empty one if there is none. The outlet never trims it."""
    tail = outbox.tail()
    return wire.unpack(outbox.read(tail - 1)[0].blob, Said) if tail > outbox.head() else Said([])
