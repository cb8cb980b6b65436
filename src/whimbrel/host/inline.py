"""The inline host: runs an instance without Spark, batch by batch. For tests, documents, the simulator, and sites
without a JVM.

    inbox ──▶ plan ──▶ records by part ──▶ Instance.apply ──▶ carrier ──▶ commit ──▶ position in the inbox
              durable                                        logs         durable    and trim

The discipline is that of the micro-batch host: the end of a batch is durable before the batch is applied, its output is
in the logs before state and position are committed, together, and only then the inbox is told. So a host that dies at
any point repeats the batch, with the same records, under the same number, and the logs drop the repetition.

It has no thread: `step` does one batch, and the caller decides when. In production that is a thread (threaded.py), in
the simulator the seed. A step that raises forgets everything in memory: the next one reads the checkpoint, as after a
crash. Parts stay in memory between batches; `forget` drops them, as a worker of Spark does that loses its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from whimbrel.core import wire
from whimbrel.core.delta import LARGE_DELTA
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, part_of
from whimbrel.core.record import Emissions, Record
from whimbrel.host.checkpoint import MOST, Batch, Checkpoint, new_id
from whimbrel.host.starting import reset
from whimbrel.log import Appendable, Entry, Lane, Log
from whimbrel.log.carrier import Carrier, encoded
from whimbrel.log.codec import encode_messages
from whimbrel.log.readers import INSTANCE, LANES, Offset, beginning, end_of, positions

MOST_CONTROL = 64 << 20
"""Approximate bytes of parcels per batch: the rest waits, as it would in a link."""
TRIM_EVERY = 64
"""Entries per trim of the inbox: a trim is a write, and writers wait for each other."""


class InlineHost:
    """Runs one instance, driven step by step."""

    def __init__(
        self,
        name: str,
        parts: int,
        make: Callable[[int], Instance],
        *,
        inbox: Log,
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        checkpoint: Log,
        records: Callable[[Entry, Lane], Iterable[Record]],
        encode: Callable[..., bytes] = encode_messages,
        appended: Callable[[], None] = lambda: None,
        operator: str = "the operator",
        max_records: int = 20_000,
        trim_every: int = TRIM_EVERY,
        most: int = MOST,
        most_bytes: int | None = None,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        """`make` makes an empty part. `inbox_of` returns the destination logs of its messages. `checkpoint` is its log.
        `records` decodes an entry of the inbox, `encode` encodes messages into one. `appended` is called after each
        batch. `most`: entries of the checkpoint until it is compacted. `trim_every`: 0 if the inbox is never trimmed.
        `most_bytes`: of an entry that it writes to a log; the carrier's own bound by default.
        """
        self.name, self.count, self._make = name, parts, make
        self.inbox, self.outbox, self._inbox_of, self._saves = inbox, outbox, inbox_of, checkpoint
        self._records, self._encode, self._appended, self._operator = records, encode, appended, operator
        self._max_records, self._trim_every, self._most = max_records, trim_every, most
        self._new_id, self._most_bytes = new_id, most_bytes
        self.limit = LARGE_DELTA
        """Approximate bytes of a blob of state."""
        self._checkpoint: Checkpoint | None = None
        self._parts: dict[int, Instance] = {}
        """By number: the parts in memory, as the checkpoint has them. All of them, or some."""
        self._finished: Offset = {}
        """The position that the inbox was told last."""
        self._trimmed: Offset = {}

    # ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, *parts: int) -> None:
        """Drop these parts from memory, or everything: the next step loads it again."""
        if parts:
            for part in parts:
                self._parts.pop(part, None)
        else:
            self._checkpoint, self._parts = None, {}

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, read unless it is in memory."""
        if self._checkpoint is None:
            start = beginning(self.inbox)
            checkpoint = Checkpoint(self._saves, self.count, start, most=self._most, new_id=self._new_id)
            writer = self.writer = f"{self.name}@{checkpoint.id}"
            """The writer of its batches: the instance and its checkpoint."""
            self._carrier = Carrier(
                lambda: writer, self.outbox, self._inbox_of, self._operator, self._encode, self._most_bytes
            )
            reset(self.inbox, checkpoint.at)
            self._checkpoint, self._finished = checkpoint, checkpoint.at
        return self._checkpoint

    @property
    def parts(self) -> list[Instance]:
        """All parts, with what the checkpoint has of them; loaded unless they are in memory."""
        if len(self._parts) < self.count:
            deltas = self.checkpoint.read()
            for part in deltas.keys() - self._parts.keys():
                instance = self._make(part)
                instance.load(deltas[part])
                self._parts[part] = instance
            self._parts = dict(sorted(self._parts.items()))
        return [*self._parts.values()]

    @property
    def is_urgent(self) -> bool:
        """Whether keys are blocked until a message comes through the control lane."""
        return any(part.is_urgent for part in self._parts.values())

    @property
    def has_work(self) -> bool:
        """Whether a batch is unfinished, or entries wait in the inbox."""
        checkpoint = self.checkpoint
        return checkpoint.plan is not None or any(
            self.inbox.tail(lane) > checkpoint.at[name] for name, lane in LANES.items()
        )

    # ── A batch ──────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Do one batch; return whether there was one to do."""
        try:
            batch = self._plan()
            if batch is not None:
                self._do(batch)
            self._finish()
            return batch is not None
        except BaseException:
            self.forget()  # parts may have applied half of a batch
            raise

    def _plan(self) -> Batch | None:
        """The batch that was begun and not committed, or a new one: durable before it is applied."""
        checkpoint = self.checkpoint
        if checkpoint.plan is not None:
            return checkpoint.plan
        end = end_of(self.inbox, checkpoint.at, self._max_records, MOST_CONTROL)
        return checkpoint.begin(end) if end != checkpoint.at else None

    def _do(self, batch: Batch) -> None:
        """Apply, write the output, commit: in this order."""
        out = self._apply(batch)
        self._carry(batch, out)
        self._appended()
        self._commit(batch, out)

    def _apply(self, batch: Batch) -> dict[int, Emissions]:
        """The output of each part that has records in the batch: the control lane's first."""
        rows = [
            record
            for name, lane in (("control", Lane.CONTROL), ("data", Lane.DATA))
            for entry in self.inbox.read(batch.start[name], batch.end[name], lane)
            for record in self._records(entry, lane)
        ]
        own: dict[int, list[Record]] = {part: [] for part in range(self.count)}
        for row in rows:
            if row.bin == EVERY_BIN:
                for some in own.values():
                    some.append(row)
            else:
                own[part_of(row.bin, self.count)].append(row)
        return {part.part: part.apply(own[part.part]) for part in self.parts if own[part.part]}

    def _carry(self, batch: Batch, out: Mapping[int, Emissions]) -> None:
        """Append the output to the logs: numbered, so that a repetition has no effect."""
        outgoing: list[bytes] = []
        messages: dict[str, list[bytes]] = {}
        for part, emissions in out.items():
            said, sent = encoded(emissions, part, self._parts[part].table.state_bytes)
            outgoing += [] if said is None else [said]
            for to, ours in sent.items():
                messages.setdefault(to, []).append(wire.encode(ours))
        count = sum(len(emissions.results) for emissions in out.values())
        self._carrier.carry(batch.number, batch.start, batch.end, outgoing, count, messages)

    def _commit(self, batch: Batch, out: Mapping[int, Emissions]) -> None:
        """Make the changes and the position durable, together."""
        deltas = {part: self._parts[part].deltas(self.limit) for part in out}
        size = sum(len(blob) for blobs in deltas.values() for blob in blobs)
        weigh = lambda: sum(part.table.weigh() for part in self._parts.values())  # noqa: E731
        if self.checkpoint.is_outgrown(size, weigh):
            self.checkpoint.compact(batch, {part.part: part.snapshot(self.limit) for part in self.parts})
        else:
            self.checkpoint.commit(batch, deltas)

    def _finish(self) -> None:
        """Tell the inbox that everything up to here is applied and written, and trim it in steps."""
        at = self.checkpoint.at
        if at == self._finished:
            return
        self.inbox.commit(INSTANCE, positions(at))
        for name, lane in LANES.items() if self._trim_every else ():
            if at[name] - self._trimmed.get(name, 0) >= self._trim_every:
                self.inbox.trim(at[name], lane)
                self._trimmed[name] = at[name]
        self._finished = at
