"""What travels: records in, and what an instance sends out.

A record's way: gateway (gives it `seq`) → router (stamps `epoch`) → inbox → instance → result → outbox → gate.
Markers and ticks travel in the same inbox, between the data, so that each has an exact place in every key's stream.
Parcels and what belongs to them travel in the inbox's control lane, which an instance sees first in each batch.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NamedTuple

import msgspec

from whimbrel.core.keys import EVERY_BIN, Selection


class Kind(IntEnum):
    """What a record is. Zero is data, so that `any(kinds)` finds a batch that is not plain data."""

    DATA = 0
    TICK = 1
    """Time has passed: `event_us` says how far. Fires timers."""
    BEGIN = 2
    """From here on a move's keys come to both instances (dual), or to none for a while (hold)."""
    CUTOVER = 3
    """From here on a move's keys belong to the destination."""
    ABORT = 4
    """The move is off: the source keeps what it has."""
    PARCEL = 5
    """State of moving keys."""
    PASSED = 6
    """One part of the source has sent on everything that came to it before the switch."""
    SHIPPED = 7
    """One part of the source has sent all its parcels. Messages of a batch travel in the order of these numbers."""
    FORGET = 8
    """Nothing of this aborted move can arrive any more."""
    WAKE = 9
    """Nothing at all: makes an idle instance run a batch, so that it can go on shipping."""
    SWITCH = 10
    """A move switches at once: said ahead of its BEGIN, which stands behind all that waits in the inbox."""
    HINT = 11
    """Keys whose first records after a switch have gone to the destination: it needs them now."""
    FETCH = 12
    """The destination asks for units of keys."""
    REPLICATE = 13
    """A standby is wanted."""
    CEASE = 14
    """It is not wanted any more."""
    REPLICA = 15
    """A parcel of copies for a standby."""
    REPLICATED = 16
    """One part of the source has sent a copy of everything once."""
    BARRIER = 17
    """Send what has changed to the central store."""
    CHECKPOINTED = 18
    """To the store: one part has sent all that it had to save."""
    DISCARD = 19
    """A restoration takes keys away from whoever has them: what is here of them is worth nothing any more."""
    RESTORE = 20
    """Keys will come out of the central store."""


class Record(NamedTuple):
    """One line of an inbox.

    `offset` is its place in the inbox: the order in which an instance applies records.
    `seq` is its place in the ingress log of `src`, the router it came through: the ruler on which a hand-over is cut.
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
    """Data: the event. Everything else: bytes of one of the messages below."""


class HandoverOptions(msgspec.Struct, frozen=True, tag=True):
    """`live`, `pause` and `fluid`: CUTOVER hands the keys over."""

    hold: bool = False
    """Where records go from BEGIN until CUTOVER: to both instances, or, if set, nowhere: the routers hold them."""


class PushOptions(msgspec.Struct, frozen=True, tag=True):
    """`push`: records go to the destination at once, and the source chooses which keys leave first."""

    order: Literal["arrival", "key"] = "arrival"
    """As records need them, or by name."""


class FetchOptions(msgspec.Struct, frozen=True, tag=True):
    """`fetch`: records go to the destination at once, and it asks for the keys it needs."""

    split: int = 32
    """Into how many units a bin is cut."""
    step: int = 16
    """How many bins the destination asks for at a time, beside those it needs."""


class ReplicateOptions(msgspec.Struct, frozen=True, tag=True):
    """`replicate`: a standby has copies; at its takeover, records go to it at once."""

    interval: int = 1
    """The standby gets what has changed after every so many batches."""
    standby: bool = False
    """Whether a standby that is warm waits for the order to take over."""


class RestartOptions(msgspec.Struct, frozen=True, tag=True):
    """`restart`: the whole instance moves to another site, and no route changes."""


class RestoreOptions(msgspec.Struct, frozen=True, tag=True):
    """`restore`: the source is lost; the routers read their logs again for the destination."""

    ends: frozenset[str] = frozenset()
    """Migrations that the restoration ends."""
    parties: frozenset[str] = frozenset()
    """Instances that must discard what the restoration brings back: the lost one, and the other ends of those
    migrations."""


SwitchOptions = PushOptions | FetchOptions | ReplicateOptions
Options = HandoverOptions | SwitchOptions | RestartOptions | RestoreOptions


class Move(msgspec.Struct, frozen=True):
    """One migration as the data path sees it; travels in markers. All that a participant needs to know."""

    id: str
    stage: str
    protocol: str
    source: str
    destination: str
    selection: Selection
    epoch: int
    """The epoch of the selected keys once the destination owns them."""
    routers: frozenset[str]
    """All that write into the stage: a phase has begun when a marker has come from each."""
    options: Options = HandoverOptions()
    """What the protocol does, and how."""
    budget: int = 8 << 20
    """How many bytes of state a part of the source ships in one batch, about, so that serving never stalls."""
    chunk: int = 1 << 20
    """A key with more state than this travels in pieces. Both stand here and not in a site's settings, because a
    batch that is repeated after a restart must ship what it shipped the first time."""

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
        """Whether the routers tell the source which keys the destination needs."""
        return isinstance(self.options, PushOptions) and self.options.order == "arrival"

    @property
    def relocates(self) -> bool:
        """Whether a whole instance changes its site, and no key its owner."""
        return isinstance(self.options, RestartOptions)

    @property
    def replays(self) -> bool:
        """Whether the source is lost, and the routers read their logs again."""
        return isinstance(self.options, RestoreOptions)

    @property
    def ends(self) -> frozenset[str]:
        """Migrations that it ends, if it is a restoration."""
        return self.options.ends if isinstance(self.options, RestoreOptions) else frozenset()

    @property
    def parties(self) -> frozenset[str]:
        """Instances that must discard what it brings back, if it is a restoration."""
        return self.options.parties if isinstance(self.options, RestoreOptions) else frozenset()


class KeyState(msgspec.Struct, frozen=True, array_like=True):
    """Everything one key has: what a parcel carries of it, and how an instance stores it."""

    seq: int
    """How far this state reaches in the stream of `src`: no record, and no tick, up to here may be applied again."""
    src: str
    timers: list[int]
    state: bytes


class Buffered(msgspec.Struct, frozen=True, array_like=True):
    """A record that waits for its key's state, as it is stored, and as it is sent on."""

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
    """A tick that a key may have to catch up with once its state is here."""

    seq: int
    src: str
    event_us: int
    ingress_us: int

    @classmethod
    def of(cls, record: Record) -> Tick:
        """The tick of a record."""
        return cls(record.seq, record.src, record.event_us, record.ingress_us)


class Parcel(msgspec.Struct, frozen=True):
    """State of some keys of one bin. A key too large for one parcel comes in `pieces`, `piece` by piece.

    After a switch it also carries what has waited for these keys at the source: records, and the ticks among them.
    """

    move: str
    bin: int
    keys: dict[str, KeyState]
    piece: int = 0
    pieces: int = 1
    backlog: dict[str, list[Buffered]] = {}
    ticks: list[Tick] = []
    absent: list[str] = []
    """Keys that were hinted at, and that the source has never had."""
    units: list[int] = []
    """Units of which nothing is left at the source."""
    delivered: dict[str, int] = {}
    """From the store: up to which `seq` the results of keys are out; of keys without a version as well."""
    shape: str = ""
    """What the states' class looks like at the source (`operator.shape_of`); empty if nobody can say."""


class Passed(msgspec.Struct, frozen=True):
    """One part of the source has sent on everything that came to it before the switch."""

    move: str
    part: int
    parts: int
    ticks: list[Tick] = []
    stale: list[str] = []
    """Keys whose copies at a standby are not fresh."""


class Fetch(msgspec.Struct, frozen=True):
    """The destination asks for units: those it needs now, and those of the next step."""

    move: str
    needed: list[int]
    step: list[int]


class Shipped(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of the source has sent all its parcels of a move."""

    move: str
    part: int
    parts: int
    parcels: list[tuple[int, int]] = []
    """Bins, each with how many, where one that cannot be read would not be missed otherwise."""


class Barrier(msgspec.Struct, frozen=True):
    """Body of BARRIER. The two sizes stand here for the same reason as in a move."""

    bound: int
    """Up to which `seq` the router has given everything on; above it, it may hold some records back."""
    budget: int = 8 << 20
    chunk: int = 1 << 20
    anew: bool = False
    """The store is another one, and has nothing: all there is shall be saved, not only what has changed."""


class Result(NamedTuple):
    """What an operator emitted. `(key, epoch, seq, n)` is its identity."""

    key: str
    epoch: int
    seq: int
    n: int
    event_us: int
    ingress_us: int
    values: dict[str, Any]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the destination has installed everything and follows the stream silently."""

    move: str
    instance: str
    part: int
    parts: int


class Warm(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of a standby has had a copy of everything once."""

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
    """The epoch that may speak now."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the source is done with the move, and has forgotten its keys."""

    move: str
    instance: str
    part: int
    parts: int
    keys: int = 0
    """How many keys have left."""
    state_bytes: int = 0
    sent_bytes: int = 0
    """All that was sent for the move."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the destination owns the keys for good."""

    move: str
    instance: str
    part: int
    parts: int
    selection: Selection = Selection()
    epoch: int = 0
    """The epoch it speaks in."""
    replayed: int = 0
    """Of a restoration: how many records were applied again."""
    silent: int = 0
    """How many of those in silence, because their results were out."""


class Aborted(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part of the source is plain owner again, or a part of the destination has dropped its copy."""

    move: str
    instance: str
    part: int
    parts: int


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part has dropped what it had of keys that a restoration brings back elsewhere."""

    move: str
    instance: str
    part: int
    parts: int


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Notice: a part has refused something that came with a move, as a whole: it is damaged, it was written by a newer
    version, or its states are not those of the operator here."""

    move: str
    instance: str
    part: int
    parts: int
    reason: str


class Unreadable(msgspec.Struct, frozen=True, tag=True):
    """Notice: a router cannot read again what a restoration needs of its log. It has refused RESTORE, or never given it
    a place: the keys belong to nobody."""

    move: str
    router: str
    reason: str


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    """One part has sent all that it had to save: to the store, behind its versions, and as a notice, behind the
    results that go with them. Only when the gate has let those out may the versions be used."""

    instance: str
    part: int
    parts: int
    src: str
    """The router whose BARRIER this answers."""
    number: int
    """The `seq` of that BARRIER."""
    reached: int
    """Everything of this router up to here that the part was given, it has saved, or it has left with its key."""

    @property
    def increment(self) -> tuple[str, int]:
        """Which of the part's increments it is."""
        return self.src, self.number


class Parked(msgspec.Struct, frozen=True, tag=True):
    """Notice: an operator failed on a record, or on a timer, as often as it may; it goes to the dead letters."""

    instance: str
    key: str
    seq: int
    src: str
    error: str
    event: str
    epoch: int = 0
    """The epoch of the record: what a zombie parks is refused as its results are."""


Report = Ready | Warm | Left | Opened | Aborted | Evicted | Rejected | Unreadable
"""The notices that the coordinator hears."""
Notice = Report | Closed | Parked | Checkpointed


class Message(NamedTuple):
    """A control record on its way from an instance to the control lane of an inbox (its own included)."""

    to: str
    kind: Kind
    bin: int
    body: bytes


class Emissions(msgspec.Struct):
    """All that an instance says about one batch, in the order in which it must be carried out."""

    messages: list[Message] = []
    results: list[Result] = []
    notices: list[Notice] = []


class Outgoing(msgspec.Struct, frozen=True, array_like=True):
    """In an outbox entry, what one part says about a micro-batch: to the gate, to the orchestrator, to who looks on."""

    results: list[Result]
    notices: list[Notice]
    part: int = 0
    state_bytes: int = 0
    """How much state the part holds."""


class Said(msgspec.Struct, frozen=True, array_like=True):
    """An outbox entry: what an instance says about a micro-batch, and which part of its inbox the batch has applied.

    The ranges of an outbox's entries follow each other: one that begins before the end of the last has come from
    somebody who is not where the instance was, and would have its effect twice.
    """

    outgoing: list[Outgoing]
    start: dict[str, int] = {}
    """By lane of the inbox, the first position; empty if this is the first batch of a checkpoint."""
    end: dict[str, int] = {}
    """And the first one behind the batch."""
    sent: dict[str, int] = {}
    """By destination: the last batch of this checkpoint that has sent something there."""
    renewed: bool = False
    """No batch: the instance begins anew behind this entry, without the checkpoint it had."""


def marker(kind: Kind, body: bytes, src: str, seq: int, ingress_us: int = 0) -> Record:
    """A record for every part of an instance, at the writer's current place."""
    return Record(0, kind, EVERY_BIN, "", seq, 0, src, ingress_us, ingress_us, body)
