"""Messages that a part receives from other instances: it accepts or refuses each as a whole.

A message may be damaged, or of another version of the job. A refusal aborts the move, and the coordinator receives the
reason. After the point of no return, when the source has dropped what it sent, the part keeps the message and retries
it after the next start of the instance: the restarted instance may run a version that can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whimbrel.core import wire
from whimbrel.core.arrival import Arrival
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Emissions, Kind, Parcel, Passed, Record, Shipped

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
"""The type of a message's body, by kind."""
COPIES = (Kind.REPLICA, Kind.REPLICATED)
"""The kinds that a standby receives."""
REFUSED = " "
"""The name under which refused messages are kept that cannot be sent again; no move and no key has this name."""


def take(instance: Instance, record: Record, out: Emissions) -> None:
    """Apply a message completely, or refuse it."""
    moves = instance.moves
    try:
        message = wire.unpack(record.body, MESSAGES[record.kind])
        id, copies = message.move, record.kind in COPIES
        if instance.is_off(id) or id in moves.undone or (copies and id not in moves.standbys):
            return
        role: Taking = moves.standbys[id] if copies else moves.coming_with(id) or arrival_of(instance, id, out)
        if record.kind != Kind.REPLICA or message.pieces > 1:
            instance.note_move()
        if role.rejected and role.keeps:
            _keep(instance, record)
        elif isinstance(message, Parcel):
            role.install(instance, message, out)
        elif isinstance(message, Shipped):
            role.complete(instance, message, out)
        elif id in moves.switches_in:
            moves.switches_in[id].pass_on(instance, message, out)
        else:
            raise Corrupt(f"move {id} does not switch, so it has no PASSED")
    except (Corrupt, NewerFormat) as error:
        _reject(instance, record, error, out)


def arrival_of(instance: Instance, id: str, out: Emissions) -> Arrival:
    """This part's role in a move that brings keys, even if only its parcels have come so far."""
    moves = instance.moves
    if id not in moves.arrivals:
        moves.arrivals[id] = Arrival()
        if moves.unread:
            moves.arrivals[id].turn_down(instance, id, moves.unread, out)
            moves.unread = ""
    return moves.arrivals[id]


# ── Refused messages ─────────────────────────────────────────────────────────────────────────────────────────────────


def _reject(instance: Instance, record: Record, error: Exception, out: Emissions) -> None:
    """Refuse a message. An unreadable one may belong to any incomplete move, or to one that has not begun here: the
    next move to begin is refused as well."""
    moves, copies = instance.moves, record.kind in COPIES
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
    for id, role in concerned.items():
        role.turn_down(instance, id, reason, out)
    if any(role.keeps for role in concerned.values()):
        _keep(instance, record)


def _keep(instance: Instance, record: Record) -> None:
    """Keep a message of which no other copy exists, until it can be read."""
    instance.table.keep_piece(REFUSED, wire.pack((record.kind, record.body)))


def has_refused(instance: Instance) -> bool:
    """Whether a part keeps refused messages."""
    return REFUSED in instance.table.gathered


def try_again(instance: Instance, out: Emissions) -> None:
    """Retry the refused messages in their order of arrival."""
    instance.note_move()
    kept = instance.table.give_pieces(REFUSED)
    for role in instance.moves.taking():
        role.rejected = "" if role.keeps else role.rejected
    for blob in kept:
        kind, body = wire.unpack(blob, tuple[int, bytes])
        take(instance, Record(0, kind, EVERY_BIN, "", -1, 0, "", 0, 0, body), out)
