"""Everything that travels: the records an instance reads, and the messages, results and notices it writes.

The path of a record: gateway (assigns `seq`) → router (stamps `epoch`) → inbox → instance → result → outbox → gate.
Markers and ticks travel in the same inbox, between the data, so that each has an exact place in every key's stream.
Parcels and related messages travel in the inbox's control lane, which an instance reads first in each batch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from whimbrel.core.keys import EVERY_BIN, Selection
from whimbrel.core.options import HandoverOptions, Options, PushOptions, RestartOptions, RestoreOptions, SwitchOptions


class Kind(IntEnum):
    """The kind of a record. Zero is data, so that `any(kinds)` detects a batch that is not plain data."""

    DATA = 0
    TICK = 1
    """Event time has advanced to `event_us` (a watermark). Fires timers."""
    BEGIN = 2
    """From here on a move's records go to both instances (dual), or to neither until CUTOVER (hold)."""
    CUTOVER = 3
    """From here on a move's keys belong to the destination."""
    ABORT = 4
    """The move is aborted: the source remains the owner."""
    PARCEL = 5
    """State of moving keys."""
    PASSED = 6
    """One part of the source has forwarded every record that it received before the switch."""
    SHIPPED = 7
    """One part of the source has sent all its parcels. Messages of a batch travel in the order of these numbers."""
    FORGET = 8
    """No further message of this aborted move can arrive."""
    WAKE = 9
    """No content: makes an idle instance run a batch, so that it can continue to ship."""
    SWITCH = 10
    """A move switches at once: announced ahead of its BEGIN, which is queued behind the inbox's backlog."""
    HINT = 11
    """Keys whose first records after a switch have gone to the destination, which therefore needs them now."""
    FETCH = 12
    """The destination requests units of keys."""
    REPLICATE = 13
    """Start a standby."""
    CEASE = 14
    """Stop a standby."""
    REPLICA = 15
    """A parcel of copies for a standby."""
    REPLICATED = 16
    """One part of the source has sent a copy of every key once."""
    BARRIER = 17
    """Checkpoint barrier: send what has changed to the central store."""
    CHECKPOINTED = 18
    """To the store: one part has sent its whole increment."""
    DISCARD = 19
    """A restoration takes keys away from their holders: the receiver's state of them is void."""
    RESTORE = 20
    """Keys will be loaded from the central store."""
    RENEW = 21
    """The receiver starts without its state: which migrations it can no longer know."""


class Record(NamedTuple):
    """One entry of an inbox.

    `offset` is its position in the inbox: an instance applies records in this order.
    `seq` is its position in the ingress log of `src`, the router it came through: a hand-over is cut at a `seq`.
    """

    offset: int
    kind: int
    bin: int
    key: str
    seq: int
    epoch: int
    src: str
    event_us: int
    ingress_us: int
    body: Any
    """Data: the event. All other kinds: the bytes of one of the messages below."""


class Move(msgspec.Struct, frozen=True):
    """One migration as the data path sees it; travels in markers. Contains all that a participant needs."""

    id: str
    stage: str
    protocol: str
    source: str
    destination: str
    selection: Selection
    epoch: int
    """The epoch of the selected keys once the destination owns them."""
    routers: frozenset[str]
    """The routers of the selected keys: a phase has begun when a marker has come from each."""
    options: Options = HandoverOptions()
    """The options of the protocol."""
    budget: int = 8 << 20
    """Approximate number of bytes of state that a part of the source ships per batch, so that serving never stalls."""
    chunk: int = 1 << 20
    """A key with more bytes of state than this travels in pieces. Both sizes are part of the move, not of a site's
    settings, because a batch that is repeated after a restart must ship the same parcels again."""

    @property
    def hold(self) -> bool:
        """Whether the routers hold the keys' records from BEGIN until CUTOVER."""
        return isinstance(self.options, HandoverOptions) and self.options.hold

    @property
    def is_dual(self) -> bool:
        """Whether the keys' records go to both instances from BEGIN until CUTOVER."""
        return isinstance(self.options, HandoverOptions) and not self.options.hold

    @property
    def switch(self) -> bool:
        """Whether the keys' records go to the destination at once."""
        return isinstance(self.options, SwitchOptions)

    @property
    def hints(self) -> bool:
        """Whether the routers send HINTs to the source about the keys that the destination needs."""
        return isinstance(self.options, PushOptions) and self.options.order == "arrival"

    @property
    def relocates(self) -> bool:
        """Whether a whole instance changes its site and no key changes its owner."""
        return isinstance(self.options, RestartOptions)

    @property
    def replays(self) -> bool:
        """Whether the source is lost and the routers replay their logs."""
        return isinstance(self.options, RestoreOptions)

    @property
    def ends(self) -> frozenset[str]:
        """Migrations that this move ends, if it is a restoration."""
        return self.options.ends if isinstance(self.options, RestoreOptions) else frozenset()

    @property
    def parties(self) -> frozenset[str]:
        """Instances that must discard the restored keys, if this move is a restoration."""
        return self.options.parties if isinstance(self.options, RestoreOptions) else frozenset()


class KeyState(msgspec.Struct, frozen=True, array_like=True):
    """The complete keyed state of one key, as a parcel carries it and as an instance stores it."""

    seq: int
    """The position in the stream of `src` that this state includes: no record or tick up to it may be applied again."""
    src: str
    timers: list[int]
    state: bytes


class Buffered(msgspec.Struct, frozen=True, array_like=True):
    """A record that waits for its key's state, in the form in which it is stored and forwarded."""

    offset: int
    bin: int
    key: str
    seq: int
    epoch: int
    src: str
    event_us: int
    ingress_us: int
    body: bytes


class Tick(msgspec.Struct, frozen=True, array_like=True):
    """A tick that a key may have to process once its state has arrived."""

    seq: int
    src: str
    event_us: int
    ingress_us: int

    @classmethod
    def of(cls, record: Record) -> Tick:
        """The tick of a record."""
        return cls(record.seq, record.src, record.event_us, record.ingress_us)


class Parcel(msgspec.Struct, frozen=True):
    """State of some keys of one bin. A key too large for one parcel travels in `pieces` parcels, numbered `piece`.

    After a switch it also carries the backlog of these keys at the source: records, and the ticks among them.
    """

    move: str
    bin: int
    keys: dict[str, KeyState]
    piece: int = 0
    pieces: int = 1
    backlog: dict[str, list[Buffered]] = {}
    ticks: list[Tick] = []
    absent: list[str] = []
    """Keys that were named in a HINT and that the source has never had."""
    units: list[int] = []
    """Units of which the source holds nothing any more."""
    delivered: dict[str, int] = {}
    """From the store, by key: the `seq` up to which results are delivered; also for keys without a version."""
    shape: str = ""
    """Digest of the states' class at the source (`operator.shape_of`); empty if unknown."""


class Passed(msgspec.Struct, frozen=True):
    """One part of the source has forwarded every record that it received before the switch."""

    move: str
    part: int
    parts: int
    ticks: list[Tick] = []
    stale: list[str] = []
    """Keys whose copies at a standby are out of date."""


class Fetch(msgspec.Struct, frozen=True):
    """The destination requests units: those it needs now, and those of the next step."""

    move: str
    needed: list[int]
    step: list[int]


class Shipped(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of the source has sent all its parcels of a move."""

    move: str
    part: int
    parts: int
    parcels: list[tuple[int, int]] = []
    """Number of parcels by bin, where the loss of an unreadable parcel would otherwise go unnoticed."""


class Barrier(msgspec.Struct, frozen=True):
    """Body of BARRIER. It contains the two sizes for the same reason as a move does."""

    bound: int
    """The `seq` up to which the router has forwarded everything; above it, it may hold some records back."""
    budget: int = 8 << 20
    chunk: int = 1 << 20
    anew: bool = False
    """The store is a new, empty one: a part must save all its keys, not only the changed ones."""


class Result(NamedTuple):
    """One result of an operator. `(key, epoch, seq, n)` is its identity."""

    key: str
    epoch: int
    seq: int
    n: int
    event_us: int
    ingress_us: int
    values: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the destination has installed all keys and applies the stream without emitting."""

    move: str
    instance: str
    part: int
    parts: int


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of a standby has received a copy of every key once."""

    move: str
    instance: str
    part: int
    parts: int


class Closed(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the source has emitted its last result of these keys."""

    move: str
    instance: str
    part: int
    parts: int
    selection: Selection
    epoch: int
    """The epoch whose results the gate may release from now on."""
    was: int = 0
    """The epoch that ends: that of the part's results of these keys."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the source has finished the move and dropped its keys."""

    move: str
    instance: str
    part: int
    parts: int
    keys: int = 0
    """Number of keys that have left."""
    state_bytes: int = 0
    sent_bytes: int = 0
    """All bytes that were sent for the move."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the destination is now the owner of the keys."""

    move: str
    instance: str
    part: int
    parts: int
    selection: Selection = Selection()
    epoch: int = 0
    """The epoch of its results."""
    replayed: int = 0
    """Of a restoration: number of records that were applied again."""
    silent: int = 0
    """How many of those without emitting, because their results had been delivered."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the source is ordinary owner again, or a part of the destination has dropped its copy."""

    move: str
    instance: str
    part: int
    parts: int


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part has dropped its state of keys that a restoration restores elsewhere."""

    move: str
    instance: str
    part: int
    parts: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part has refused a message of a move: it is damaged, newer, or does not fit the operator."""

    move: str
    instance: str
    part: int
    parts: int
    reason: str


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """Notice: a router cannot replay what a restoration needs, and has refused RESTORE: the keys have no owner."""

    move: str
    router: str
    reason: str


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    """One part has sent its whole increment. Sent to the store, behind the versions, and as a notice, behind the
    results that belong to them. The versions may be used only after the gate has released those results."""

    instance: str
    part: int
    parts: int
    src: str
    """The router whose BARRIER this answers."""
    number: int
    """The `seq` of that BARRIER."""
    reached: int
    """Every record of this router up to this `seq` that the part received is saved, or has left with its key."""

    @property
    def increment(self) -> tuple[str, int]:
        """The identity of the increment among those of the part."""
        return self.src, self.number


class Parked(msgspec.Struct, frozen=True, tag=True):
    """Notice: an operator failed on a record or timer in all allowed tries; the record becomes a dead letter."""

    instance: str
    key: str
    seq: int
    src: str
    error: str
    event: str
    epoch: int = 0
    """The epoch of the record: the gate refuses a zombie's dead letters like its results."""


Report = Ready | Warm | Left | Opened | Aborted | Evicted | Rejected | Unreadable
"""The notices that the coordinator receives."""
Notice = Report | Closed | Parked | Checkpointed


class Message(NamedTuple):
    """A control record that an instance sends to the control lane of an inbox (possibly its own)."""

    to: str
    kind: Kind
    bin: int
    body: bytes


class Emissions(msgspec.Struct):
    """The output of an instance for one batch, in the order in which it must be carried out."""

    messages: list[Message] = []
    results: list[Result] = []
    notices: list[Notice] = []


class Outgoing(msgspec.Struct, frozen=True, array_like=True):
    """In an outbox entry: the output of one part for a batch, for gate, orchestrator and monitoring."""

    results: list[Result]
    notices: list[Notice]
    part: int = 0
    state_bytes: int = 0
    """Bytes of state that the part holds."""


class OutboxEntry(msgspec.Struct, frozen=True, array_like=True):
    """An outbox entry: the output of an instance for a batch, and the range of its inbox that the batch applied. Large
    output is in several entries: the range is in the last one, and without it none of them counts.

    The ranges of consecutive entries are adjacent. An entry that begins before the end of the last one was written by a
    query with an older checkpoint than the instance's, and would take effect twice.
    """

    outgoing: list[Outgoing]
    start: dict[str, int] = {}
    """By lane of the inbox, the first position; empty if this is the first batch of a checkpoint."""
    end: dict[str, int] = {}
    """By lane of the inbox, the first position behind the batch."""
    sent: dict[str, int] = {}
    """By destination: the number of the last message of this checkpoint that was sent there."""
    renewed: bool = False
    """Not a batch: the instance starts afresh behind this entry, without its former checkpoint."""
    piece: int = 0
    """The index of this entry among those of the batch."""
    more: bool = False
    """Whether further entries of the batch follow."""


def marker(kind: Kind, body: bytes, src: str, seq: int, ingress_us: int = 0) -> Record:
    """A record for every part of an instance, at the writer's current position."""
    return Record(0, kind, EVERY_BIN, "", seq, 0, src, ingress_us, ingress_us, body)
