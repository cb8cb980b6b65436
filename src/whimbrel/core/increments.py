"""Increments: what has changed at a part goes to the central store, so that a lost instance's keys can be had
elsewhere.

A key's state as of some `seq` follows from its records up to there, whoever applied them. So the store has versions of
keys, and a key is restored anywhere from its newest version and its records behind that.

    gateway ──BARRIER──▶ every part ──versions, CHECKPOINTED──▶ store ──Saved──▶ gateway, which trims its ingress log

BARRIER has a place between the records, like a tick: when a part meets it, it has been given everything before. What
has changed since the last BARRIER leaves at the end of the batch, as much as the byte budget allows, the rest with the
batches that follow; then the part says CHECKPOINTED, and up to where that reaches. That is no further than before while
keys are coming, whose states may be under way, or while keys leave that a router still counts as ours. Who never meets
BARRIER keeps no book.

A version contains records whose results may never get out, if its writer is lost the next moment. So CHECKPOINTED is
said twice: to the store, behind the versions, and in the outbox, behind the results. The versions of an increment count
only when the gate has confirmed it (gate.py), and nobody restores from others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from whimbrel.core import wire
from whimbrel.core.keys import EVERY_BIN, bin_of
from whimbrel.core.parcels import OVERHEAD, Cutter
from whimbrel.core.record import Barrier, Checkpointed, Emissions, KeyState, Kind, Record

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance

STORE = "@store"
"""Where increments are sent to, in place of an instance's name."""
CHUNK_BYTES = 4 << 20
"""About how many bytes of state travel together."""


class Increments(msgspec.Struct, kw_only=True):
    """How far one part is with its increments."""

    cutter: Cutter
    budget: int = 1
    """Bytes that leave in one batch, about."""
    dirty: set[str] = set()
    """Keys that have changed since they were last saved."""
    queue: list[str] = []
    """Keys that shall be saved now, the last one first."""
    asked: list[Checkpointed] = []
    """What is to be said when all of them have been."""
    later: list[Checkpointed] = []
    """What was asked for meanwhile: their turn comes when the queue is empty, or a busy part would never say
    CHECKPOINTED."""
    sizes: tuple[int, int] = (1, 1)
    """Budget and chunk of the next ones: a large key that is being carried is cut as it was begun."""
    reached: dict[str, int] = {}
    """By router: what was said last."""
    epoch: int = 0
    """In which epoch the large key is saved that is being carried."""
    anew: bool = False
    """Whether the next increment shall have all there is."""

    @property
    def is_shipping(self) -> bool:
        """Whether something is to be saved, or to be said."""
        return bool(self.asked or self.later)

    @classmethod
    def of(cls, instance: Instance) -> Increments:
        """The book of a part that meets its first BARRIER: all that it has is lacking."""
        return cls(cutter=Cutter(STORE, 1), dirty=set(instance.table.entries))

    def note(self, touched: Iterable[str]) -> None:
        """These keys have changed."""
        self.dirty.update(touched)

    def begin(self, instance: Instance, record: Record, save: Barrier) -> None:
        """BARRIER has come: everything before it has been applied here, or waits for keys that are coming."""
        self.sizes = (save.budget, save.chunk)
        self.anew = self.anew or save.anew
        reached = -1 if any(instance.moves.coming()) else save.bound
        self.later.append(Checkpointed(instance.name, instance.part, instance.parts, record.src, record.seq, reached))

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: save what the budget allows, if a BARRIER has come."""
        if not self.is_shipping:
            return
        instance.note_move()
        if not self.asked:
            self._line_up(instance)
        cutter, room = self.cutter, self.budget
        versions: list[Version] = []
        while room > 0 and (cutter.key or self.queue):
            if cutter.key:
                room = self._send_pieces(instance, room, out)
                continue
            key = self.queue.pop()
            self.dirty.discard(key)
            entry = instance.table.entries.get(key)
            saved = entry.saved if entry is not None else None
            if saved is None:
                continue
            epoch = instance.epoch_of(key, saved.src)
            if cutter.is_large(saved):
                self.epoch = epoch
                cutter.stash(instance.table, key, saved)
            else:
                versions.append(Version.of(key, epoch, saved))
                room -= len(saved.state) + OVERHEAD
        self._send_together(instance, versions, out)
        if not self.queue and not cutter.key:
            self._answer(instance, out)
        if self.is_shipping:
            out.messages.append(instance.message(instance.name, Kind.WAKE))

    def _send_together(self, instance: Instance, versions: list[Version], out: Emissions) -> None:
        """In the store bins mean nothing: keys travel together, or each increment would be a thousand messages. A chunk
        has the bin of one of its keys, which tells its part."""
        start = size = 0
        for end, version in enumerate(versions, 1):
            size += len(version.key_state)
            if size >= CHUNK_BYTES or end == len(versions):
                chunk = VersionChunk.of(self.asked[-1].increment, versions[start:end])
                self._send(instance, Kind.PARCEL, chunk, out, version.bin)
                start, size = end, 0

    def _answer(self, instance: Instance, out: Emissions) -> None:
        for answer in self.asked:
            src = answer.src
            before = self.reached.get(src, -1)
            self.reached[src] = before if self._is_early(instance, src) else max(before, answer.reached)
            answer = msgspec.structs.replace(answer, reached=self.reached[src])
            self._send(instance, Kind.CHECKPOINTED, answer, out)
            out.notices.append(answer)
        self.asked = []

    def _is_early(self, instance: Instance, src: str) -> bool:
        """Whether keys are gone, their last changes unsaved, that a router still counts as ours."""
        moves = instance.moves
        leaving = any(role.closed and src not in role.begun for role in moves.switches_out.values())
        return leaving or any(src not in eviction.seen for eviction in moves.evictions.values())

    def give_up(self, instance: Instance) -> None:
        """Keys have been taken away: what is being saved never ends, and all that is left must be saved once more."""
        self.cutter.put_down(instance.table)
        self.queue, self.asked = [], []
        self.dirty = set(instance.table.entries)

    def _line_up(self, instance: Instance) -> None:
        """What has changed shall be saved, except keys that are still coming: they are not ours yet."""
        if self.anew:
            self.dirty, self.anew = {*self.dirty, *instance.table.entries}, False
        roles = list(instance.moves.coming())
        coming = {key for key in self.dirty if any(role.takes(key) for role in roles)} if roles else set()
        self.queue, self.dirty = sorted(self.dirty - coming, reverse=True), coming
        self.asked, self.later = self.later, []
        self.budget, self.cutter.chunk = self.sizes

    def _send_pieces(self, instance: Instance, room: int, out: Emissions) -> int:
        """Send pieces of the large key that was stashed away; return the room that is left."""
        key = self.cutter.key
        pieces, room = self.cutter.cut_stashed(instance.table, room)
        for piece in pieces:
            version = Version.of(key, self.epoch, piece.key_state)
            chunk = VersionChunk.of(self.asked[-1].increment, [version], piece.number, piece.total)
            self._send(instance, Kind.PARCEL, chunk, out, version.bin)
        return room

    def _send(self, instance: Instance, kind: Kind, body: Any, out: Emissions, bin: int = EVERY_BIN) -> None:
        out.messages.append(instance.message(STORE, kind, body, bin))


class Version(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key as of `seq`. Of two versions the one with the greater `(epoch, seq)` is the newer."""

    key: str
    bin: int
    epoch: int
    seq: int
    key_state: bytes
    """Everything the key has, as `wire.encode` makes it: what holds versions has the checksum."""

    @classmethod
    def of(cls, key: str, epoch: int, key_state: KeyState) -> Version:
        """The version that a key's key state is."""
        return cls(key, bin_of(key), epoch, key_state.seq, wire.encode(key_state))

    def unpacked(self) -> KeyState:
        """Everything the key has."""
        return wire.decode(self.key_state, KeyState)

    def is_newer(self, other: Version | None) -> bool:
        """Whether this one counts, and not the other."""
        return other is None or (self.epoch, self.seq) > (other.epoch, other.seq)


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version as an index knows it."""

    key: str
    epoch: int
    seq: int
    size: int

    @classmethod
    def of(cls, version: Version) -> IndexEntry:
        """The line of a version."""
        return cls(version.key, version.epoch, version.seq, len(version.key_state))

    def is_newer(self, other: IndexEntry | None) -> bool:
        """Whether this one counts, and not the other."""
        return other is None or (self.epoch, self.seq) > (other.epoch, other.seq)


class VersionChunk(msgspec.Struct, frozen=True, array_like=True):
    """What goes to the store instead of a parcel: versions of keys, or a `piece` of one that is too large. Whoever
    carries it needs its index only, and puts the rest away as it is."""

    increment: tuple[str, int]
    """The increment it belongs to."""
    index: list[IndexEntry]
    versions: msgspec.Raw
    """As `wire.encode` makes them."""
    piece: int = 0
    pieces: int = 1

    @classmethod
    def of(cls, increment: tuple[str, int], versions: list[Version], piece: int = 0, pieces: int = 1) -> VersionChunk:
        """Versions, ready to be carried."""
        return cls(
            increment, [IndexEntry.of(one) for one in versions], msgspec.Raw(wire.encode(versions)), piece, pieces
        )

    def unpacked(self) -> list[Version]:
        """What is in it."""
        return wire.decode(self.versions, list[Version])


# ── At the store ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Assembly:
    """What one instance messages to the store, put together again. To be given all messages, in order, from the first
    of a increment on: what it holds between two of them is lost with whoever holds it."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}

    def take(self, kind: int, body: bytes) -> VersionChunk | Checkpointed:
        """Versions that are whole now, maybe none, and of which increment; or, behind all of them, its end.

        Pieces whose first one never came here make no version: their increment was put away by somebody before.
        """
        if kind == Kind.CHECKPOINTED:
            return wire.unpack(body, Checkpointed)
        chunk = wire.unpack(body, VersionChunk)
        if chunk.pieces == 1:
            return chunk
        (version,) = chunk.unpacked()
        key_state = version.unpacked()
        if not chunk.piece:
            self._pieces[version.key] = []
        pieces = self._pieces.get(version.key, [])
        if len(pieces) == chunk.piece:
            pieces.append(key_state.state)
        if len(pieces) < chunk.pieces:
            return VersionChunk.of(chunk.increment, [])
        whole = msgspec.structs.replace(key_state, state=b"".join(self._pieces.pop(version.key)))
        return VersionChunk.of(chunk.increment, [Version.of(version.key, version.epoch, whole)])


# ── At the gateway ───────────────────────────────────────────────────────────────────────────────────────────────────


class TrimHorizon:
    """Up to where the records of one router are in increments, so that the router's log may be trimmed.

    Covered is what all owners of keys have reached. One that has gained keys must have reached the place where it did:
    before that the keys' last changes may be in nobody's increment. What is covered once is covered for ever.
    """

    def __init__(self, router: str) -> None:
        self.router, self.horizon = router, -1
        self._latest = -1
        self._reached: dict[str, dict[int, int]] = {}
        self._parts: dict[str, int] = {}

    def note(self, saved: Checkpointed) -> None:
        """An increment is in the store, and the gate has confirmed it."""
        if saved.src == self.router:
            reached = self._reached.setdefault(saved.instance, {})
            reached[saved.part] = max(reached.get(saved.part, -1), saved.reached)
            self._parts[saved.instance] = saved.parts
            self._latest = max(self._latest, saved.number)

    def advance(self, owners: Iterable[str], gained: Mapping[str, int], routed: int) -> int:
        """The `seq` up to which everything is covered.

        `gained`: by instance, where it last came by keys. `routed`: the `seq` behind the last record that was routed. A
        router that comes back, and has not come as far as the last BARRIER that was answered, does not know who owns
        what.
        """
        if self._latest >= routed:
            return self.horizon
        reached = [self._all_parts(owner, gained.get(owner, -1)) for owner in owners]
        self.horizon = max(self.horizon, min(reached, default=-1))
        return self.horizon

    def _all_parts(self, owner: str, since: int) -> int:
        reached = self._reached.get(owner, {})
        if not reached or len(reached) < self._parts[owner] or min(reached.values()) <= since:
            return -1
        return min(reached.values())
