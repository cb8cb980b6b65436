"""Keys that leave: what the source instance of a move does.

Between BEGIN and CUTOVER the source goes on as if nothing happened (phase LEAVING): it applies, it emits. Beside that
it ships the state of each leaving key once, as many per batch as the byte budget allows, a large one in pieces. Its
luggage says up to which `seq` it reaches, so keys may leave at different moments: the destination replays what it
lacks.

With `hold`, the routers keep the keys' records from BEGIN on, so the keys stand still here until CUTOVER or ABORT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from whimbrel.core.keys import EVERY_BIN, bin_of
from whimbrel.core.record import (
    Aborted,
    Buffered,
    Closed,
    Emissions,
    Kind,
    Left,
    Luggage,
    Move,
    Parcel,
    Record,
    Shipped,
    Tick,
)

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


OVERHEAD = 64
"""Bytes that a key takes in a parcel beside its state, about."""


class Sender(msgspec.Struct):
    """Sends state to the destination of a move, and counts the bytes."""

    move: Move
    state_bytes: int = 0
    sent_bytes: int = 0
    carried: str = ""
    """The large key whose pieces are being sent, over several batches if need be; and the next `piece` of it."""
    piece: int = 0

    @property
    def hurries(self) -> bool:
        """Whether keys stand still elsewhere until they have been asked for here."""
        return False

    def pack(
        self,
        instance: Instance,
        loads: dict[str, Luggage],
        out: Emissions,
        backlog: dict[str, list[Buffered]] | None = None,
        ticks: Sequence[Tick] = (),
        kind: Kind = Kind.PARCEL,
    ) -> None:
        """Send keys, and what waited for keys: one parcel a bin."""
        by_bin: dict[int, dict[str, Luggage]] = {}
        for key, luggage in loads.items():
            self.state_bytes += len(luggage.state)
            by_bin.setdefault(bin_of(key), {})[key] = luggage
        behind: dict[int, dict[str, list[Buffered]]] = {}
        for key, records in (backlog or {}).items():
            behind.setdefault(bin_of(key), {})[key] = records
        for bin in {**by_bin, **behind}:
            states, waited = by_bin.get(bin, {}), behind.get(bin, {})
            parcel = Parcel(self.move.id, bin, states, backlog=waited, ticks=list(ticks), shape=instance.table.shape)
            self.send(instance, kind, parcel, out, bin)

    def luggage(self, instance: Instance, key: str, reach: Mapping[str, int]) -> Luggage:
        """A key's state, with the place up to which it reaches in its router's stream; `reach`: by router, how far."""
        saved = instance.table.entries[key].saved
        assert saved is not None, "every key is sealed before it is shipped"
        return msgspec.structs.replace(saved, seq=max(saved.seq, reach.get(saved.src, -1)))

    def is_large(self, luggage: Luggage) -> bool:
        """Whether a key has more state than one parcel takes."""
        return len(luggage.state) > self.move.chunk

    def carry(
        self,
        instance: Instance,
        luggage: Luggage,
        room: int,
        out: Emissions,
        kind: Kind = Kind.PARCEL,
        waited: Callable[[], list[Buffered]] = list,
        ticks: Sequence[Tick] = (),
    ) -> int:
        """Send pieces of the large key that is carried, as long as there is room; return the room that is left.

        What has waited for the key goes with the last piece: not after it, for then the key is open.
        """
        key, size, state = self.carried, self.move.chunk, luggage.state
        pieces = -(-len(state) // size)
        while room > 0 and self.carried:
            load = {key: msgspec.structs.replace(luggage, state=state[self.piece * size : (self.piece + 1) * size])}
            last = self.piece == pieces - 1
            records = waited() if last else []
            behind = {key: records} if records else {}
            parcel = Parcel(
                self.move.id,
                bin_of(key),
                load,
                self.piece,
                pieces,
                backlog=behind,
                ticks=list(ticks),
                shape=instance.table.shape,
            )
            self.send(instance, kind, parcel, out, parcel.bin)
            room -= len(load[key].state) + OVERHEAD
            self.carried, self.piece = ("", 0) if last else (key, self.piece + 1)
        if not self.carried:
            self.state_bytes += len(state)
        return room

    @property
    def place(self) -> str:
        """Where the key that is carried is stashed away: more than one move may carry it."""
        return f"{self.move.id} {self.carried}"

    def carry_stashed(self, instance: Instance, room: int, out: Emissions, kind: Kind = Kind.PARCEL) -> int:
        """Carry a key that is being served meanwhile: what leaves is its state as it was when it was stashed away."""
        place = self.place
        room = self.carry(instance, instance.table.stashed[place], room, out, kind)
        if not self.carried:
            instance.table.stash(place, None)
        return room

    def put_down(self, instance: Instance) -> None:
        """Carry nothing any more."""
        if self.place in instance.table.stashed:
            instance.table.stash(self.place, None)
        self.carried, self.piece = "", 0

    def send(self, instance: Instance, kind: Kind, body: Any, out: Emissions, bin: int = EVERY_BIN) -> None:
        """Post a message to the destination."""
        post = instance.post(self.move.destination, kind, body, bin)
        self.sent_bytes += len(post.body)
        out.posts.append(post)


class Departure(Sender, kw_only=True, tag=True):
    """How far a move has come at one part of its source. Sets name the routers a marker has come from."""

    begun: dict[str, int] = {}
    """By router: the `seq` at which its BEGIN stood."""
    cut: set[str] = set()
    off: set[str] = set()
    queue: list[str] | None = None
    """Keys still to ship; None before every router has begun."""
    shipped: bool = False
    parcels: dict[int, int] = {}
    """By bin: how many have been sent."""

    closed: ClassVar[bool] = False
    """It serves its keys to the end."""

    def takes(self, key: str) -> bool:
        """Whether a record of this key must wait: never, all are served."""
        return False

    def note_tick(self, record: Record) -> None:
        """A tick has come: the keys have seen it."""

    def is_frozen(self, src: str) -> bool:
        """Whether the time of keys that come through this router stands still here."""
        return src in self.cut or (self.move.hold and src in self.begun and src not in self.off)

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """A marker has come."""
        routers = self.move.routers
        if kind == Kind.BEGIN:
            self.begun[record.src] = record.seq
            if self.begun.keys() == routers and self.queue is None:
                self.queue = instance.keys_in(self.move)[::-1]
        elif kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == routers:
                keys = instance.keys_in(self.move)
                instance.table.drop(keys)
                del instance.moves.departures[self.move.id]
                part = (self.move.id, instance.name, instance.part, instance.parts)
                weight = (len(keys), self.state_bytes, self.sent_bytes)
                out.notices.append(Closed(*part, self.move.selection, self.move.epoch))
                out.notices.append(Left(*part, *weight))
        elif kind == Kind.ABORT:
            self.off.add(record.src)
            if self.off == routers:
                self.put_down(instance)
                del instance.moves.departures[self.move.id]
                out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def send(self, instance: Instance, kind: Kind, body: Any, out: Emissions, bin: int = EVERY_BIN) -> None:
        """Post a message to the destination, and count the parcels."""
        if kind == Kind.PARCEL:
            self.parcels[bin] = self.parcels.get(bin, 0) + 1
        super().send(instance, kind, body, out, bin)

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows of the keys that have not left yet."""
        if self.queue is None or self.shipped or self.off or self.cut:
            return
        room = self.move.budget
        loads: dict[str, Luggage] = {}
        while room > 0 and (self.carried or self.queue):
            if self.carried:
                room = self.carry_stashed(instance, room, out)
                continue
            key = self.queue.pop()
            luggage = self.luggage(instance, key, self.begun if self.move.hold else instance.positions)
            if self.is_large(luggage):
                self.carried = key
                instance.table.stash(self.place, luggage)
            else:
                loads[key] = luggage
                room -= len(luggage.state) + OVERHEAD
        self.pack(instance, loads, out)
        if self.queue or self.carried:
            out.posts.append(instance.post(instance.name, Kind.NUDGE))
        else:
            self.shipped = True
            parcels = sorted(self.parcels.items())
            self.send(instance, Kind.SHIPPED, Shipped(self.move.id, instance.part, instance.parts, parcels), out)
