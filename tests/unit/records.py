"""What unit tests write into a part of an instance, and an operator whose state tells all that happened to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from whimbrel.core import operator, wire
from whimbrel.core.instance import Instance
from whimbrel.core.keys import EVERY_BIN, Selection, bin_of
from whimbrel.core.operator import Context, Emit
from whimbrel.core.options import FetchOptions, HandoverOptions, PushOptions, ReplicateOptions
from whimbrel.core.record import (
    Barrier,
    Emissions,
    Fetch,
    KeyState,
    Kind,
    Message,
    Move,
    Parcel,
    Passed,
    Record,
    Shipped,
    Tick,
    marker,
)


class Tape(operator.Operator):
    """Remembers every event, and each result tells all of them, so that any slip shows in every later result.

    The event `timer 50` sets a timer for moment 50, `raise` raises, `emit 3` emits three results, the rest are words.
    """

    tries = 2

    class State(operator.State):
        """All that has happened to a key."""

        seen: list[str] = []

    def process(self, key: str, event: str, state: Any, emit: Emit, ctx: Context) -> None:
        """One event."""
        state.seen.append(event)
        word, _, argument = event.partition(" ")
        if word == "timer":
            ctx.timer(timedelta(microseconds=int(argument) - ctx.now_us))
        if word == "raise":
            emit(lost="this result must never get out")
            raise ValueError(event)
        for _ in range(int(argument) if word == "emit" else 1):
            emit(seen=" ".join(state.seen))

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        """A timer is due; the one at moment 666 always fails."""
        state.seen.append(f"@{ctx.now_us}")
        emit(seen=" ".join(state.seen))
        if ctx.now_us == 666:
            raise ValueError("timer 666")


def part(name: str = "a", number: int = 0, parts: int = 1, tape: operator.Operator | None = None) -> Instance:
    """A fresh part of an instance that runs a tape."""
    return Instance(name, tape or Tape(), str, part=number, parts=parts)


def reloaded(instance: Instance) -> Instance:
    """What a restart makes of an instance whose deltas were compacted."""
    again = Instance(instance.name, instance.serving.operator, str, part=instance.part, parts=instance.parts)
    again.load(instance.snapshot())
    return again


def data(
    key: str, seq: int, event: str, src: str = "r", *, at: int = 0, epoch: int = 0, offset: int | None = None
) -> Record:
    """A data record; `at` is its event time."""
    return Record(
        seq if offset is None else offset, Kind.DATA, bin_of(key), key, seq, epoch, src, at, 1000 + seq, event
    )


def tick(seq: int, at: int, src: str = "r", held_for: Move | None = None) -> Record:
    """A tick that says it is `at`."""
    body = wire.pack(held_for) if held_for else b""
    return Record(seq, Kind.TICK, EVERY_BIN, "", seq, 0, src, at, 1000 + seq, body)


def move(*keys: str, routers: str = "r", hold: bool = False, id: str = "m1", **more: Any) -> Move:
    """A move of some keys from `a` to `b`; `routers` has one letter for each."""
    selection = more.pop("selection", Selection(keys=frozenset(keys)))
    settings: dict[str, Any] = {"source": "a", "destination": "b", "epoch": 1, "protocol": "pause" if hold else "live"}
    settings |= {"options": HandoverOptions(hold), **more}
    return Move(id=id, stage="stage", selection=selection, routers=frozenset(routers), **settings)


def switching(*keys: str, order: str = "arrival", **more: Any) -> Move:
    """A move that switches at once."""
    kinds: dict[str, tuple[str, type[Any]]] = {
        "demand": ("fetch", FetchOptions),
        "replica": ("replicate", ReplicateOptions),
    }
    protocol, options = kinds.get(order, ("push", PushOptions))
    chosen = {name: more.pop(name) for name in options.__struct_fields__ if name in more}
    if protocol == "push":
        chosen["order"] = order
    return move(*keys, protocol=protocol, options=options(**chosen), **more)


def mark(kind: Kind, move: Move, seq: int, src: str = "r") -> Record:
    """A marker of a move."""
    return marker(kind, wire.pack(move), src, seq)


def started() -> Record:
    """What a host puts into an inbox when it starts."""
    return delivered(Message("b", Kind.WAKE, EVERY_BIN, b""))


def delivered(message: Message) -> Record:
    """A message as it comes out of the control lane it was sent to."""
    return Record(0, message.kind, message.bin, "", -1, 0, "", 0, 0, message.body)


def parcel(move: Move, key_state: dict[str, KeyState], piece: int = 0, pieces: int = 1, **more: Any) -> Record:
    """A parcel of keys of one bin, or of none."""
    bin = bin_of(next(iter(key_state))) if key_state else EVERY_BIN
    return delivered(Message("b", Kind.PARCEL, bin, wire.pack(Parcel(move.id, bin, key_state, piece, pieces, **more))))


def shipped(move: Move, part: int = 0, parts: int = 1, parcels: dict[int, int] | None = None) -> Record:
    """A part of the source has sent everything; `parcels`: by bin, how many."""
    return delivered(
        Message("b", Kind.SHIPPED, EVERY_BIN, wire.pack(Shipped(move.id, part, parts, sorted((parcels or {}).items()))))
    )


def switch(move: Move) -> Record:
    """A move will switch: what both ends are told ahead of BEGIN."""
    return delivered(Message("", Kind.SWITCH, EVERY_BIN, wire.pack(move)))


def hint(move: Move, *keys: str, seq: int, src: str = "r") -> Record:
    """Records of these keys have gone to the destination."""
    return marker(Kind.HINT, wire.pack((move.id, keys)), src, seq)


def fetch(move: Move, needed: list[int], step: list[int] | None = None) -> Record:
    """The destination asks for units."""
    return delivered(Message("a", Kind.FETCH, EVERY_BIN, wire.pack(Fetch(move.id, needed, step or []))))


def passed(move: Move, part: int = 0, parts: int = 1, ticks: list[Tick] | None = None) -> Record:
    """A part of the source has sent on everything older."""
    return delivered(Message("b", Kind.PASSED, EVERY_BIN, wire.pack(Passed(move.id, part, parts, ticks or []))))


def save(seq: int, src: str = "r", bound: int | None = None, **sizes: Any) -> Record:
    """The order to save, at a place of a router's stream."""
    return marker(Kind.BARRIER, wire.pack(Barrier(seq if bound is None else bound, **sizes)), src, seq)


def forget(move: Move) -> Record:
    """Nothing of the move can come any more."""
    return Record(0, Kind.FORGET, EVERY_BIN, "", -1, 0, "", 0, 0, wire.pack(move.id))


def key_state(seq: int, *seen: str, src: str = "r", timers: list[int] | None = None) -> KeyState:
    """The key state of a key that has seen these events."""
    return KeyState(seq, src, timers or [], wire.encode(Tape.State(seen=list(seen))))


def told(out: Emissions) -> list[tuple[str, str]]:
    """By result: its key, and everything the key had seen by then."""
    return [(result.key, result.values["seen"]) for result in out.results]


def notices(out: Emissions) -> list[str]:
    """The kinds of the notices, in order."""
    return [type(notice).__name__ for notice in out.notices]


def kinds(out: Emissions) -> list[Kind]:
    """The kinds of the messages, in order."""
    return [message.kind for message in out.messages]


def parcels(out: Emissions) -> list[Parcel]:
    """The parcels among the messages, in order."""
    return [wire.unpack(message.body, Parcel) for message in out.messages if message.kind == Kind.PARCEL]
