"""Increments: each part writes its changed keys to the central store, so that the keys of a lost instance can be
restored elsewhere.

A key's state as of some `seq` is determined by its records up to it, independent of which instance applied them. So the
store has versions of keys, and any instance can restore a key from its newest version and the records behind it.

    gateway ──BARRIER──▶ every part ──versions, CHECKPOINTED──▶ store ──Checkpointed──▶ gateway, which trims its log

BARRIER has a place between the records, like a tick: a part that reads it has received all records before it. The keys
changed since the last BARRIER leave at the end of the batch, within the byte budget, the rest with the following
batches. Then the part sends CHECKPOINTED with the `seq` it has reached. That does not advance while keys arrive, whose
states may be in transit, or while keys leave that a router still assigns to this part. A part that has never received a
BARRIER does not track changes.

A version contains records whose results may never be delivered, if its writer is lost right after. So the part sends
CHECKPOINTED twice: to the store, behind the versions, and to the outbox, behind the results. The versions of an
increment are valid only when the gate has confirmed it (gate.py); a restoration uses no others.
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
"""The address of increments, in place of an instance's name."""
CHUNK_BYTES = 4 << 20
"""Approximate bytes of state per message."""


class Increments(msgspec.Struct, kw_only=True):
    """The progress of one part's increments."""

    cutter: Cutter
    budget: int = 1
    """Approximate bytes to send per batch."""
    dirty: set[str] = set()
    """Keys that have changed since they were last saved."""
    queue: list[str] = []
    """Keys to save now, the last one first."""
    asked: list[Checkpointed] = []
    """The CHECKPOINTED to send when the queue is empty."""
    later: list[Checkpointed] = []
    """Those of BARRIERs that came meanwhile: handled when the queue is empty, or a busy part would never send
    CHECKPOINTED."""
    sizes: tuple[int, int] = (1, 1)
    """Budget and chunk of the next increments: a large key in progress is cut with its original sizes."""
    reached: dict[str, int] = {}
    """By router: the `seq` of the last CHECKPOINTED."""
    epoch: int = 0
    """The epoch of the large key in progress."""
    anew: bool = False
    """Whether the next increment must contain all keys."""

    @property
    def is_shipping(self) -> bool:
        """Whether keys are to be saved, or a CHECKPOINTED is to be sent."""
        return bool(self.asked or self.later)

    @classmethod
    def of(cls, instance: Instance) -> Increments:
        """The state of a part at its first BARRIER: all its keys are unsaved."""
        return cls(cutter=Cutter(STORE, 1), dirty=set(instance.table.entries))

    def note(self, touched: Iterable[str]) -> None:
        """These keys have changed."""
        self.dirty.update(touched)

    def begin(self, instance: Instance, record: Record, save: Barrier) -> None:
        """Handle BARRIER: all records before it have been applied here, or wait for arriving keys."""
        self.sizes = (save.budget, save.chunk)
        self.anew = self.anew or save.anew
        reached = -1 if any(instance.moves.coming()) else save.bound
        self.later.append(Checkpointed(instance.name, instance.part, instance.parts, record.src, record.seq, reached))

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows, if a BARRIER has come."""
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
        """Send keys of several bins together, since the store ignores bins; otherwise each increment would be 1,000
        messages. A chunk has the bin of one of its keys, which identifies its part."""
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
        """Whether keys have left with unsaved changes while a router still assigns them to this part."""
        moves = instance.moves
        leaving = any(role.closed and src not in role.begun for role in moves.switches_out.values())
        return leaving or any(src not in eviction.seen for eviction in moves.evictions.values())

    def give_up(self, instance: Instance) -> None:
        """Keys have been taken away: cancel the current increment; all remaining keys must be saved again."""
        self.cutter.put_down(instance.table)
        self.queue, self.asked = [], []
        self.dirty = set(instance.table.entries)

    def _line_up(self, instance: Instance) -> None:
        """Queue all changed keys, except those still arriving, which this part does not own yet."""
        if self.anew:
            self.dirty, self.anew = {*self.dirty, *instance.table.entries}, False
        roles = list(instance.moves.coming())
        coming = {key for key in self.dirty if any(role.takes(key) for role in roles)} if roles else set()
        self.queue, self.dirty = sorted(self.dirty - coming, reverse=True), coming
        self.asked, self.later = self.later, []
        self.budget, self.cutter.chunk = self.sizes

    def _send_pieces(self, instance: Instance, room: int, out: Emissions) -> int:
        """Send pieces of the stashed large key; return the remaining room."""
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
    """The key state, encoded by `wire.encode` without a checksum: the container of versions has one."""

    @classmethod
    def of(cls, key: str, epoch: int, key_state: KeyState) -> Version:
        """The version of a key with this key state."""
        return cls(key, bin_of(key), epoch, key_state.seq, wire.encode(key_state))

    def unpacked(self) -> KeyState:
        """The decoded key state."""
        return wire.decode(self.key_state, KeyState)

    def is_newer(self, other: Version | None) -> bool:
        """Whether this version replaces the other."""
        return other is None or (self.epoch, self.seq) > (other.epoch, other.seq)


class IndexEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One version in an index."""

    key: str
    epoch: int
    seq: int
    size: int

    @classmethod
    def of(cls, version: Version) -> IndexEntry:
        """The index entry of a version."""
        return cls(version.key, version.epoch, version.seq, len(version.key_state))

    def is_newer(self, other: IndexEntry | None) -> bool:
        """Whether this version replaces the other."""
        return other is None or (self.epoch, self.seq) > (other.epoch, other.seq)


class VersionChunk(msgspec.Struct, frozen=True, array_like=True):
    """The store's counterpart of a parcel: versions of keys, or a `piece` of one that is too large. The uploader
    decodes only the index, and stores the rest as it is."""

    increment: tuple[str, int]
    """The increment it belongs to."""
    index: list[IndexEntry]
    versions: msgspec.Raw
    """Encoded by `wire.encode`."""
    piece: int = 0
    pieces: int = 1

    @classmethod
    def of(cls, increment: tuple[str, int], versions: list[Version], piece: int = 0, pieces: int = 1) -> VersionChunk:
        """A chunk of these versions."""
        return cls(
            increment, [IndexEntry.of(one) for one in versions], msgspec.Raw(wire.encode(versions)), piece, pieces
        )

    def unpacked(self) -> list[Version]:
        """The decoded versions."""
        return wire.decode(self.versions, list[Version])


# ── At the store ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Assembly:
    """Reassembles the messages of one instance to the store. Needs all messages, in order, from the first of an
    increment on, because its partial pieces are in memory only."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {}

    def take(self, kind: int, body: bytes) -> VersionChunk | Checkpointed:
        """The versions that are complete now, maybe none, with their increment; or, behind all of them, its end.

        Pieces whose first piece is missing make no version: a former reader has already stored their increment.
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
    """The `seq` up to which the records of one router are in increments, so that the router's log may be trimmed.

    The horizon is the `seq` that all owners of keys have reached. An owner that has gained keys must have reached the
    position where it did: before it, the keys' last changes may be in no increment. The horizon never moves back.
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
        """The `seq` up to which all records are covered.

        `gained`: by instance, the position where it last gained keys. `routed`: the `seq` behind the last routed
        record. A restarted router that has not replayed up to the last answered BARRIER does not have the current
        owners yet, so the horizon stays.
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
