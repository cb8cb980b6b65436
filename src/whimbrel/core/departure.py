"""Keys that leave: what the source instance of a move does.

Between BEGIN and CUTOVER the source goes on as if nothing happened (phase LEAVING): it applies, it emits. Beside that
it ships the state of each leaving key once, as many per batch as the byte budget allows. A key's luggage says up to
which `seq` it reaches, so keys may leave at different moments: the destination replays what it lacks.

With `hold`, the routers keep the keys' records from BEGIN on, so the keys stand still here until CUTOVER or ABORT.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Sender(msgspec.Struct):
    """Sends state to the destination of a move, and counts the bytes."""

    move: Move
    state_bytes: int = 0
    sent_bytes: int = 0

    def pack(
        self,
        instance: Instance,
        loads: dict[str, Luggage],
        out: Emissions,
        backlog: dict[str, list[Buffered]] | None = None,
        ticks: Sequence[Tick] = (),
        kind: Kind = Kind.PARCEL,
    ) -> None:
        """Send keys, and what waited for keys: one parcel a bin, but a key larger than a chunk in pieces of its own."""
        backlog = dict(backlog or {})
        by_bin: dict[int, dict[str, Luggage]] = {}
        for key, luggage in loads.items():
            self.state_bytes += len(luggage.state)
            if len(luggage.state) > self.move.chunk:
                self._send_pieces(instance, key, luggage, out, backlog.pop(key, None), ticks, kind)
            else:
                by_bin.setdefault(bin_of(key), {})[key] = luggage
        behind: dict[int, dict[str, list[Buffered]]] = {}
        for key, records in backlog.items():
            behind.setdefault(bin_of(key), {})[key] = records
        for bin in {**by_bin, **behind}:
            parcel = Parcel(self.move.id, bin, by_bin.get(bin, {}), backlog=behind.get(bin, {}), ticks=list(ticks))
            self.send(instance, kind, parcel, out, bin)

    def _send_pieces(
        self,
        instance: Instance,
        key: str,
        luggage: Luggage,
        out: Emissions,
        records: list[Buffered] | None,
        ticks: Sequence[Tick],
        kind: Kind,
    ) -> None:
        """What waited for the key goes with the last piece: not after it, for then the key is open."""
        size, state, bin = self.move.chunk, luggage.state, bin_of(key)
        pieces = -(-len(state) // size)
        for piece in range(pieces):
            load = {key: msgspec.structs.replace(luggage, state=state[piece * size : (piece + 1) * size])}
            behind = {key: records} if records and piece == pieces - 1 else {}
            parcel = Parcel(self.move.id, bin, load, piece, pieces, backlog=behind, ticks=list(ticks))
            self.send(instance, kind, parcel, out, bin)

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
                instance.drop(keys)
                del instance.moves.departures[self.move.id]
                part = (self.move.id, instance.name, instance.part, instance.parts)
                weight = (len(keys), self.state_bytes, self.sent_bytes)
                out.notices.append(Closed(*part, self.move.selection, self.move.epoch))
                out.notices.append(Left(*part, *weight))
        elif kind == Kind.ABORT:
            self.off.add(record.src)
            if self.off == routers:
                del instance.moves.departures[self.move.id]
                out.notices.append(Aborted(self.move.id, instance.name, instance.part, instance.parts))

    def ship(self, instance: Instance, out: Emissions) -> None:
        """At the end of a batch: send what the budget allows of the keys that have not left yet."""
        if self.queue is None or self.shipped or self.off or self.cut:
            return
        left = self.move.budget
        loads: dict[str, Luggage] = {}
        while self.queue and left > 0:
            key = self.queue.pop()
            loads[key] = self._luggage(instance, key)
            left -= len(loads[key].state) + 64
        self.pack(instance, loads, out)
        if self.queue:
            out.posts.append(instance.post(instance.name, Kind.NUDGE))
        else:
            self.shipped = True
            self.send(instance, Kind.SHIPPED, Shipped(self.move.id, instance.part, instance.parts), out)

    def _luggage(self, instance: Instance, key: str) -> Luggage:
        """A key's state, with the place in its router's stream up to which it reaches."""
        saved = instance.entries[key].saved
        assert saved is not None, "every key is sealed before it is shipped"
        reach = self.begun.get(saved.src, -1) if self.move.hold else instance.positions.get(saved.src, -1)
        return msgspec.structs.replace(saved, seq=max(saved.seq, reach))
