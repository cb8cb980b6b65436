"""Sending state: keys in parcels of one bin each, a large key in pieces, all within a byte budget per batch.

A role that sends state (departure.py, switch.py, replica.py, increments.py) has a `Cutter`, and one that sends the
parcels of a move has a `Parcels` around it. Both are persisted with the role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from whimbrel.core.keys import EVERY_BIN, bin_of
from whimbrel.core.record import Buffered, Emissions, KeyState, Kind, Move, Parcel, Tick

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance
    from whimbrel.core.table import KeyTable

OVERHEAD = 64
"""Approximate bytes that a key takes in a parcel in addition to its state."""


class Piece(NamedTuple):
    """A piece of a large key: number `number` of `total`."""

    key_state: KeyState
    number: int
    total: int

    @property
    def is_last(self) -> bool:
        """Whether the key has left completely with this piece."""
        return self.number == self.total - 1


class Cutter(msgspec.Struct):
    """Cuts one large key at a time into pieces, over several batches if necessary."""

    owner: str
    """The move, or other receiver, that the pieces are for: several owners may cut the same key."""
    chunk: int
    """A key with more state than this many bytes is large."""
    key: str = ""
    """The large key that is being cut; empty: none."""
    number: int = 0
    """The number of its next piece."""

    def is_large(self, key_state: KeyState) -> bool:
        """Whether a key has more state than fits into one parcel."""
        return len(key_state.state) > self.chunk

    @property
    def place(self) -> str:
        """The name under which the key that is being cut is stashed."""
        return f"{self.owner} {self.key}"

    def cut(self, key_state: KeyState, room: int) -> tuple[list[Piece], int]:
        """The next pieces of the key that is being cut, as long as there is room, and the remaining room in bytes."""
        size, state = self.chunk, key_state.state
        total, pieces = -(-len(state) // size), list[Piece]()
        while room > 0 and self.key:
            piece = Piece(
                msgspec.structs.replace(key_state, state=state[self.number * size : (self.number + 1) * size]),
                self.number,
                total,
            )
            pieces.append(piece)
            room -= len(piece.key_state.state) + OVERHEAD
            self.key, self.number = ("", 0) if piece.is_last else (self.key, self.number + 1)
        return pieces, room

    def stash(self, table: KeyTable, key: str, key_state: KeyState) -> None:
        """Begin to cut a key that continues to be served: its current state is what leaves."""
        self.key = key
        table.stash(self.place, key_state)

    def cut_stashed(self, table: KeyTable, room: int) -> tuple[list[Piece], int]:
        """As `cut`, for a stashed key."""
        place = self.place
        pieces, room = self.cut(table.stashed[place], room)
        if not self.key:
            table.stash(place, None)
        return pieces, room

    def put_down(self, table: KeyTable) -> None:
        """Stop cutting and drop the stashed state."""
        if self.place in table.stashed:
            table.stash(self.place, None)
        self.key, self.number = "", 0


class Parcels(msgspec.Struct):
    """The parcels that a part sends to the destination of a move; counts the bytes and parcels sent."""

    cutter: Cutter
    state_bytes: int = 0
    sent_bytes: int = 0
    numbers: dict[int, int] = {}
    """By bin: the number of parcels sent."""

    @classmethod
    def of(cls, move: Move) -> Parcels:
        """The parcels of a move that begins."""
        return cls(Cutter(move.id, move.chunk))

    def send_some(
        self,
        instance: Instance,
        move: Move,
        keys: list[str],
        state_of: Callable[[str], KeyState | None],
        out: Emissions,
        kind: Kind = Kind.PARCEL,
    ) -> None:
        """Send keys that continue to be served, within the move's budget: first the large key already begun, then
        `keys` from the end, which are removed. `state_of` returns None for a key that this part no longer holds."""
        room = move.budget
        loads: dict[str, KeyState] = {}
        while room > 0 and (self.cutter.key or keys):
            if self.cutter.key:
                key = self.cutter.key
                pieces, room = self.cutter.cut_stashed(instance.table, room)
                self.send_pieces(instance, move, key, pieces, out, kind)
                continue
            key = keys.pop()
            key_state = state_of(key)
            if key_state is not None and self.cutter.is_large(key_state):
                self.cutter.stash(instance.table, key, key_state)
            elif key_state is not None:
                loads[key] = key_state
                room -= len(key_state.state) + OVERHEAD
        self.pack(instance, move, loads, out, kind=kind)

    def put_down(self, instance: Instance) -> None:
        """Send no further pieces."""
        self.cutter.put_down(instance.table)

    def pack(
        self,
        instance: Instance,
        move: Move,
        loads: Mapping[str, KeyState],
        out: Emissions,
        backlog: Mapping[str, list[Buffered]] | None = None,
        ticks: Sequence[Tick] = (),
        kind: Kind = Kind.PARCEL,
    ) -> None:
        """Send keys and their backlog, one parcel per bin."""
        by_bin: dict[int, dict[str, KeyState]] = {}
        for key, key_state in loads.items():
            self.state_bytes += len(key_state.state)
            by_bin.setdefault(bin_of(key), {})[key] = key_state
        behind: dict[int, dict[str, list[Buffered]]] = {}
        for key, records in (backlog or {}).items():
            behind.setdefault(bin_of(key), {})[key] = records
        for bin in {**by_bin, **behind}:
            states, waited = by_bin.get(bin, {}), behind.get(bin, {})
            parcel = Parcel(move.id, bin, states, backlog=waited, ticks=list(ticks), shape=instance.table.shape)
            self.send(instance, move, kind, parcel, out, bin)

    def send_pieces(
        self,
        instance: Instance,
        move: Move,
        key: str,
        pieces: list[Piece],
        out: Emissions,
        kind: Kind = Kind.PARCEL,
        waited: Callable[[], list[Buffered]] = list,
        ticks: Sequence[Tick] = (),
    ) -> None:
        """Send pieces of a large key. Its backlog goes with the last piece, not after it, because the key opens with
        that piece."""
        for piece in pieces:
            self.state_bytes += len(piece.key_state.state)
            records = waited() if piece.is_last else []
            states, backlog, shape = {key: piece.key_state}, {key: records} if records else {}, instance.table.shape
            parcel = Parcel(
                move.id, bin_of(key), states, piece.number, piece.total, backlog, ticks=list(ticks), shape=shape
            )
            self.send(instance, move, kind, parcel, out, parcel.bin)

    def send(self, instance: Instance, move: Move, kind: Kind, body: Any, out: Emissions, bin: int = EVERY_BIN) -> None:
        """Send a message to the destination of the move, and count it."""
        if kind == Kind.PARCEL:
            self.numbers[bin] = self.numbers.get(bin, 0) + 1
        message = instance.message(move.destination, kind, body, bin)
        self.sent_bytes += len(message.body)
        out.messages.append(message)


def reaching(instance: Instance, key: str, reach: Mapping[str, int]) -> KeyState:
    """A key's state, with the `seq` it includes raised to `reach`: by router, the position in its stream."""
    saved = instance.table.entries[key].saved
    assert saved is not None, "every key is committed before it is shipped"
    return msgspec.structs.replace(saved, seq=max(saved.seq, reach.get(saved.src, -1)))
