"""The carrier: writes the output of an instance's batch to the logs. It appends, in this order:

    1. messages  to the control lane of each destination's inbox
    2. outbox    the results and notices of all parts, the range of the inbox that the batch applied, and for each
                 destination the number of the last message to it. Also for an empty batch, so that a gap shows

Both are one entry, or several if it would have more than `MOST_BYTES` bytes (log/contract.py, rule 3: an entry is
atomic, so a log must hold it in memory).

A host repeats a batch whose commit is not proven, under the same number. So an entry's counter is made of that number
and a place; a log accepts each counter of a writer once, and compares a replay with it:

    messages     the place of the entry's last message in the batch: however the batch was cut, the counter tells at
                 which message to continue (site/forwarder.py)
    outbox       the index of the piece, `WHOLE` for the last. A batch takes effect as a whole: `batches` returns it
                 when its last piece is there. Only that one has the range; a batch without it is repeated

The entries before a batch's last one may be trimmed when it is replayed: the log need not compare them (`replays`).

The writer is the instance *and* its checkpoint: an instance that starts from an empty checkpoint counts from zero
again, and its batches must not pass for replays. There the range decides: the carrier refuses a batch that begins
before the end of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import TypeVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Bug, Corrupt, Diverged
from whimbrel.core.increments import STORE
from whimbrel.core.record import Emissions, Kind, OutboxEntry, Outgoing, Result
from whimbrel.log.chunks import chunk
from whimbrel.log.codec import ROWS, Content, encode_messages
from whimbrel.log.contract import Appendable, Entry, Lane, Log
from whimbrel.log.readers import Offset

MOST_BYTES = wire.ENTRY_BYTES - (1 << 20)
"""The bytes of messages, results and notices per entry, without their envelope; more only if a single one is larger."""
WHOLE = ROWS - 1
"""The place of a batch's last outbox entry: above that of any other."""

View = tuple[int, int, memoryview]
"""A `codec.Content` as decoded here: its body may be large, and is not copied."""
T = TypeVar("T")


class Carrier:
    """Writes the batches of one instance to the logs."""

    def __init__(
        self,
        writer: Callable[[], str],
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        operator: str = "the operator",
        encode: Callable[[Sequence[View]], bytes] = encode_messages,
        most: int | None = None,
    ) -> None:
        """`operator`: its name, for errors. `encode` encodes messages into an inbox entry. `most`: bytes per
        entry, None for `MOST_BYTES`."""
        self._most = MOST_BYTES if most is None else most
        self._writer, self._outbox, self._inbox_of = writer, outbox, inbox_of
        self._operator, self._encode = operator, encode
        self._last: OutboxEntry | None = None
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
        numbers = {to: self._send(to, messages[to], batch_id) for to in sorted(messages)}
        sent = {**before.sent, **numbers}
        entries = outbox_entries(batch_id, outgoing, count, start, end, sent, most=self._most)
        self._check_pieces(batch_id, len(entries) - 1)
        for counter, blob, results in entries:
            self._say(counter, blob, results)
        self._last = OutboxEntry([], start, end, sent)

    def _say(self, counter: int, blob: bytes, count: int) -> None:
        is_last = counter % ROWS == WHOLE
        try:
            self._outbox.append(blob, count=count, writer=self._writer(), counter=counter, replays=not is_last)
        except Diverged as error:
            raise Diverged(self._difference(counter, blob) or str(error)) from error

    def _check_pieces(self, batch_id: int, pieces: int) -> None:
        """Raise `Diverged` if an unfinished first run of a batch has written more pieces than the batch has now."""
        written = self._outbox.counter(self._writer()) - number(batch_id, -1)
        if pieces < written < WHOLE:
            raise Diverged(
                f"batch {batch_id} of {self._writer()} was repeated, and has {pieces + 1} outbox entries now; at first "
                f"it wrote {written} and had more. {self._operator} must depend on nothing but its arguments"
            )

    def _before(self, batch_id: int, start: Offset) -> OutboxEntry:
        """The last entry of the outbox, without its outgoing part. Raises `Diverged` if a new batch overlaps it."""
        last = self._last or last_entry(self._outbox)
        if batch_id <= self._outbox.counter(self._writer()) // ROWS:
            return last  # a replay: the log compares it
        if last.end and any(at < last.end.get(lane, 0) for lane, at in start.items()):
            raise Diverged(
                f"batch {batch_id} of {self._writer()} begins at {start} of its inbox, which an earlier batch has "
                f"applied: the last entry of its outbox ends at {last.end}. Its checkpoint is older than its outbox"
            )
        return last

    def _difference(self, counter: int, blob: bytes) -> str | None:
        """How an entry of a replayed batch differs from the first run, if both can be compared."""
        now, batch_id = wire.unpack(blob, OutboxEntry), counter // ROWS
        before = next(
            (entry for entry in _backwards(self._outbox) if entry.piece == now.piece), OutboxEntry([], renewed=True)
        )
        if before.renewed or batch_id != self._outbox.counter(self._writer()) // ROWS:
            return None
        text = f"batch {batch_id} of {self._writer()} was repeated, and differs from the first time"
        if (before.start, before.end) != (now.start, now.end):
            return f"{text}: it applied {before.start} to {before.end} of its inbox, now {now.start} to {now.end}"
        pairs = zip_longest(*([result for one in entry.outgoing for result in one.results] for entry in (before, now)))
        for first, again in pairs:
            if first != again:
                key = (first or again).key
                return (
                    f"{text}: {self._operator} gave {_shown(first)} for key {key!r}, now {_shown(again)}. An operator "
                    "must depend on nothing but its arguments (ctx.now and ctx.random in place of clock and random), "
                    "and its code must not change while a batch is unfinished"
                )
        return None

    def _send(self, destination: str, bodies: Sequence[bytes], batch_id: int) -> int:
        """Append all messages to one destination; return the number of the last one."""
        messages = [message for body in bodies for message in wire.decode(body, list[View])]
        # A part's parcels come before its PASSED and SHIPPED; sorting is stable, so its parcels stay in order.
        messages.sort(key=itemgetter(0))
        if len(messages) > ROWS:
            raise Bug(f"batch {batch_id} of {self._writer()} sends {len(messages)} messages to {destination}")
        end = 0
        for some in _entries(messages, self._most):
            end += len(some)
            self._inbox_of(destination).append(
                # A spool is never read as records.
                wire.pack(some) if destination == STORE else self._encode(some),
                count=sum(kind != Kind.WAKE for kind, _, _ in some),  # wake-ups are not backlog
                writer=self._writer(),
                counter=number(batch_id, end - 1),
                lane=Lane.CONTROL,
                replays=end < len(messages),
            )
        return number(batch_id, end - 1)


def number(batch_id: int, place: int = WHOLE) -> int:
    """The counter of an entry that ends at this place of a batch."""
    return batch_id * ROWS + place


def _entries(messages: Sequence[View], most: int) -> Iterator[list[View]]:
    """Cut the messages of a batch into entries. All CHECKPOINTED are in one: a part that answers several BARRIERs sends
    its versions with the last of them (checkpoints/uploader.py)."""
    ends = [message for message in messages if message[0] == Kind.CHECKPOINTED]
    runs = list(cut(messages[: len(messages) - len(ends)], lambda message: len(message[2]), most))
    if ends or not runs:
        runs[-1:] = [[*run, *ends] for run in runs[-1:] or [[]]]
    return iter(runs)


def cut(items: Sequence[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Cut items into runs of at most `most` bytes, in order; an item that is larger is a run of its own."""
    run: list[T] = []
    left = most
    for item in items:
        left -= size(item)
        if run and left < 0:
            yield run
            run, left = [], most - size(item)
        run.append(item)
    if run:
        yield run


def encoded(emissions: Emissions, part: int, state_bytes: int) -> tuple[bytes | None, dict[str, list[Content]]]:
    """A part's output of a batch, encoded: an `Outgoing` unless it is empty, and the messages by destination."""
    outgoing = None
    if emissions.results or emissions.notices:
        outgoing = encoded_outgoing(Outgoing(emissions.results, emissions.notices, part, state_bytes))
    messages: dict[str, list[Content]] = {}
    for to, kind, bin, body in emissions.messages:
        messages.setdefault(to, []).append((kind, bin, body))
    return outgoing, messages


def encoded_outgoing(outgoing: Outgoing) -> bytes:
    """An `Outgoing`, encoded: the columns of its results keep their order, and its notices are canonical, so that a
    replayed batch encodes them to the same bytes."""
    notices = msgspec.Raw(wire.encode_canonical(outgoing.notices))
    return wire.encode((outgoing.results, notices, outgoing.part, outgoing.state_bytes))


def _shown(result: Result | None) -> str:
    return "nothing" if result is None else f"{result.values} (seq {result.seq})"


def join_outgoing(
    encoded: Sequence[bytes],
    start: Offset,
    end: Offset,
    sent: dict[str, int] | None = None,
    piece: int = 0,
    more: bool = False,
) -> bytes:
    """Join the encoded `Outgoing`s of several parts into an outbox entry, `OutboxEntry`, without decoding them."""
    entry = ([msgspec.Raw(one) for one in encoded], start, end, dict(sorted((sent or {}).items())))
    return wire.pack((*entry, False, piece, more) if piece or more else entry)


class _Raw(msgspec.Struct, array_like=True):
    """An `Outgoing` whose results and notices are not decoded."""

    results: list[msgspec.Raw]
    notices: list[msgspec.Raw]
    part: int
    state_bytes: int


def outbox_entries(
    batch: int,
    encoded: Sequence[bytes],
    count: int,
    start: Offset | None = None,
    end: Offset | None = None,
    sent: dict[str, int] | None = None,
    *,
    most: int = MOST_BYTES,
) -> list[tuple[int, bytes, int]]:
    """The entries of a batch, usually one: counter, content and number of results of each. The last one has the range.
    `count`: the number of all results."""
    *pieces, last = pieces_of(encoded, most)
    found = [
        (number(batch, index), join_outgoing(piece, {}, {}, piece=index, more=True), _results(piece))
        for index, piece in enumerate(pieces)
    ]
    rest = count - sum(results for *_, results in found)
    return [*found, (number(batch), join_outgoing(last, start or {}, end or {}, sent, piece=len(pieces)), rest)]


def pieces_of(encoded: Sequence[bytes], most: int) -> list[list[bytes]]:
    """Cut the encoded `Outgoing`s of a batch into pieces of bounded size, usually one. A part's notices stay behind its
    results. Deterministic: the same output gives the same pieces."""
    if sum(map(len, encoded)) <= most:
        return [list(encoded)]
    return list(cut([small for one in encoded for small in _parted(one, most)], len, most))


def _parted(encoded: bytes, most: int) -> list[bytes]:
    if len(encoded) <= most:
        return [encoded]
    raw = wire.decode(encoded, _Raw)
    runs: list[tuple[list[msgspec.Raw], list[msgspec.Raw]]] = []
    runs += [(run, []) for run in cut(raw.results, _size, most)]
    runs += [([], run) for run in cut(raw.notices, _size, most)]
    return [wire.encode((results, notices, raw.part, raw.state_bytes)) for results, notices in runs]


def _size(raw: msgspec.Raw) -> int:
    return len(memoryview(raw))


def _results(piece: Sequence[bytes]) -> int:
    """The number of results in a piece."""
    return sum(len(wire.decode(one, _Raw).results) for one in piece)


def outgoing(entry: Entry) -> list[Outgoing]:
    """The content of an outbox entry: one `Outgoing` per part."""
    return wire.unpack(entry.blob, OutboxEntry).outgoing


def batches(outbox: Log, start: int) -> Iterator[tuple[int, list[Outgoing]]]:
    """The next batches of an outbox, each with the position behind its last piece: those of a chunk, the last one to
    its end. A batch that lacks its last piece is omitted: its instance will repeat it, or starts afresh behind it."""
    pieces: list[Outgoing] = []
    count = 0
    entries = chunk(outbox, start)
    while entries:
        for entry in entries:
            content = wire.unpack(entry.blob, OutboxEntry)
            if content.renewed:
                pieces, count = [], 0
            if content.piece != count:
                raise Corrupt(f"outbox entry {entry.position} is piece {content.piece} of its batch; expected {count}")
            pieces += content.outgoing
            count += 1
            if not content.more:
                yield entry.position + 1, pieces
                pieces, count = [], 0
        entries = chunk(outbox, entries[-1].position + 1) if count else []


def last_entry(outbox: Log) -> OutboxEntry:
    """The last piece of the last whole batch of an outbox; an empty one if there is none. The outlet never trims it."""
    return next((entry for entry in _backwards(outbox) if not entry.more), OutboxEntry([]))


def _backwards(outbox: Log) -> Iterator[OutboxEntry]:
    for position in range(outbox.tail() - 1, outbox.head() - 1, -1):
        yield wire.unpack(outbox.read(position, position + 1)[0].blob, OutboxEntry)
