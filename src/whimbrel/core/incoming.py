"""What comes to a part from other instances: taken as a whole, or refused as a whole.

It may be damaged, or of another version of the job. What is refused ends its move, and the coordinator hears why. Where
there is no way back, because the source has forgotten what it sent, the message is kept, and tried again when the
instance has been started again: that may be another version, which can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whimbrel.core import wire
from whimbrel.core.arrival import Arrival
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Emissions, Kind, Parcel, Passed, Record, Rejected, Shipped

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance
    from whimbrel.core.moves import Taking

MESSAGES: Mapping[int, Any] = {
    Kind.PARCEL: Parcel,
    Kind.REPLICA: Parcel,
    Kind.SHIPPED: Shipped,
    Kind.REPLICATED: Shipped,
    Kind.PASSED: Passed,
}
"""What comes, by kind."""
COPIES = (Kind.REPLICA, Kind.REPLICATED)
"""What comes to a standby."""
REFUSED = " "
"""Where messages are kept that were refused and cannot be had again; no move and no key has this name."""


class Incoming:
    """What comes to one part."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def take(self, record: Record, out: Emissions) -> None:
        """Take all of a message, or nothing."""
        instance, moves = self._instance, self._instance.moves
        try:
            message = wire.unpack(record.body, MESSAGES[record.kind])
            id, copies = message.move, record.kind in COPIES
            if instance.is_off(id) or (copies and id not in moves.standbys):
                return
            role: Taking = moves.standbys[id] if copies else moves.coming_with(id) or self.arrival(id, out)
            if record.kind != Kind.REPLICA or message.pieces > 1:
                instance.note_move()
            if role.rejected and role.keeps:
                self._keep(record)
            elif isinstance(message, Parcel):
                role.install(instance, message, out)
            elif isinstance(message, Shipped):
                role.complete(instance, message, out)
            elif id in moves.switches_in:
                moves.switches_in[id].pass_on(instance, message, out)
            else:
                raise Corrupt(f"move {id} passes nothing on")
        except (Corrupt, NewerFormat) as error:
            self._reject(record, error, out)

    def arrival(self, id: str, out: Emissions) -> Arrival:
        """Our part in a move that brings keys, though only its parcels may have come."""
        moves = self._instance.moves
        if id not in moves.arrivals:
            moves.arrivals[id] = Arrival()
            if moves.unread:
                self.turn_down({id: moves.arrivals[id]}, moves.unread, out)
                moves.unread = ""
        return moves.arrivals[id]

    # ── What cannot be taken ─────────────────────────────────────────────────────────────────────────────────────

    def _reject(self, record: Record, error: Exception, out: Emissions) -> None:
        """Refuse a message. If it cannot be read, it may have come with any move that is not complete, and with one
        that has not begun here: the next to do so is called off as well."""
        instance, moves, copies = self._instance, self._instance.moves, record.kind in COPIES
        instance.note_move()
        reason = f"{instance.name} refuses a {Kind(record.kind).name}: {error}"
        roles: dict[str, Taking] = {
            **(moves.standbys if copies else {**moves.arrivals, **moves.switches_in, **moves.restorations})
        }
        try:
            id = wire.unpack(record.body, MESSAGES[record.kind]).move
            roles = {id: roles[id]}
        except (Corrupt, NewerFormat):
            moves.unread = moves.unread if copies else f"{reason}; it came before this move had begun"
        concerned = {id: role for id, role in roles.items() if not role.ready}
        self.turn_down(concerned, reason, out)
        if any(role.keeps for role in concerned.values()):
            self._keep(record)

    def turn_down(self, roles: Mapping[str, Taking], reason: str, out: Emissions) -> bool:
        """These cannot become ready (True); the coordinator, which can call them off, hears why."""
        instance = self._instance
        for id, role in roles.items():
            if not role.rejected:
                role.rejected = reason
                out.notices.append(Rejected(id, instance.name, instance.part, instance.parts, reason))
        return True

    def _keep(self, record: Record) -> None:
        """Keep a message that nobody else has, until it can be read."""
        self._instance.table.keep_piece(REFUSED, wire.pack((record.kind, record.body)))

    @property
    def has_refused(self) -> bool:
        """Whether messages are kept that could not be read."""
        return REFUSED in self._instance.table.gathered

    def try_again(self, out: Emissions) -> None:
        """Look once more at what was refused, in the order in which it came."""
        instance = self._instance
        instance.note_move()
        kept = instance.table.give_pieces(REFUSED)
        for role in instance.moves.taking():
            role.rejected = "" if role.keeps else role.rejected
        for blob in kept:
            kind, body = wire.unpack(blob, tuple[int, bytes])
            self.take(Record(0, kind, EVERY_BIN, "", -1, 0, "", 0, 0, body), out)
