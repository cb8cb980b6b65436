"""Keys that leave: what the source instance of a move does.

Between BEGIN and CUTOVER the source goes on as if nothing happened (phase LEAVING): it applies, it emits. Beside that
it ships the state of each leaving key once, as many per batch as the byte budget allows. A key's luggage says up to
which `seq` it reaches, so keys may leave at different moments: the destination replays what it lacks.

With `hold`, the routers keep the keys' records from BEGIN on, so the keys stand still here until CUTOVER or ABORT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from whimbrel.core.keys import bin_of
from whimbrel.core.record import Aborted, Closed, Emissions, Kind, Luggage, Move, Parcel, Post, Record, Shipped

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance


class Departure(msgspec.Struct):
    """How far a move has come at one part of its source. Sets name the routers a marker has come from."""

    move: Move
    begun: dict[str, int] = {}
    """By router: the `seq` at which its BEGIN stood."""
    cut: set[str] = set()
    off: set[str] = set()
    queue: list[str] | None = None
    """Keys still to ship; None before every router has begun."""
    shipped: bool = False
    state_bytes: int = 0
    sent_bytes: int = 0

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
                out.notices.append(Closed(*part, self.move.selection, self.move.epoch, *weight))
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
        load: dict[int, dict[str, Luggage]] = {}
        while self.queue and left > 0:
            key = self.queue.pop()
            luggage = self._luggage(instance, key)
            left -= len(luggage.state) + 64
            self.state_bytes += len(luggage.state)
            if len(luggage.state) > self.move.chunk:
                self._post_pieces(instance, key, luggage, out)
            else:
                load.setdefault(bin_of(key), {})[key] = luggage
        for bin, keys in load.items():
            self._post(instance, Parcel(self.move.id, bin, keys), out)
        if self.queue:
            out.posts.append(instance.post(instance.name, Kind.NUDGE))
        else:
            self.shipped = True
            shipped = Shipped(self.move.id, instance.part, instance.parts)
            self._send(instance.post(self.move.destination, Kind.SHIPPED, shipped), out)

    def _luggage(self, instance: Instance, key: str) -> Luggage:
        """A key's state, with the place in its router's stream up to which it reaches."""
        saved = instance.entries[key].saved
        assert saved is not None, "every key is sealed before it is shipped"
        reach = self.begun.get(saved.src, -1) if self.move.hold else instance.positions.get(saved.src, -1)
        return msgspec.structs.replace(saved, seq=max(saved.seq, reach))

    def _post_pieces(self, instance: Instance, key: str, luggage: Luggage, out: Emissions) -> None:
        size, state = self.move.chunk, luggage.state
        pieces = -(-len(state) // size)
        for piece in range(pieces):
            part = msgspec.structs.replace(luggage, state=state[piece * size : (piece + 1) * size])
            self._post(instance, Parcel(self.move.id, bin_of(key), {key: part}, piece, pieces), out)

    def _post(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        self._send(instance.post(self.move.destination, Kind.PARCEL, parcel, parcel.bin), out)

    def _send(self, post: Post, out: Emissions) -> None:
        self.sent_bytes += len(post.body)
        out.posts.append(post)
