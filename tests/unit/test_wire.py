"""Bytes: a round trip for every message, and nothing but a clear error for anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.records import key_state, move, part
from whimbrel.core import delta, gate, router, wire
from whimbrel.core.errors import Corrupt, NewerFormat, Stop
from whimbrel.core.moves import Moves
from whimbrel.core.protocols.machine import Migration, Received, StoryLine
from whimbrel.core.record import (
    Barrier,
    Closed,
    Fetch,
    Move,
    Notice,
    Outgoing,
    Parcel,
    Parked,
    Passed,
    Ready,
    Rejected,
    Result,
    Shipped,
    Tick,
)
from whimbrel.site.forwarder import Sending

MOVE = move("k", "é", routers="rs")
NOTICES: list[Notice] = [
    Ready("m1", "b", 0, 2),
    Closed("m1", "a", 1, 2, MOVE.selection, 1),
    Parked("a", "k", 7, "r", "ValueError: x", '"e"'),
    Rejected("m1", "b", 0, 2, "a checksum"),
]
MESSAGES: list[Any] = [
    MOVE,
    Parcel("m1", 179, {"k": key_state(7, "x"), "": key_state(0)}, 1, 3),
    Shipped("m1", 1, 2),
    Passed("m1", 1, 2, [Tick(1, "r", 2, 3)], ["k"]),
    Fetch("m1", [1, 2], [3]),
    Barrier(7),
    Sending("a", "b", "a@c", 3, b"posts"),
    Outgoing([Result("k", 1, 7, 0, 5, 6, {"n": 1, "text": "x", "none": None, "list": [1.5, True]})], NOTICES),
    Migration(MOVE, "cloud", "edge", "copying", {"Left": Received(2, {0})}, None, [StoryLine("ordered", "Ordered", 3)]),
    router.Snapshot((["cloud"] * 3, {"k": "edge"}), ([0, 1, 2], {}), ["m1"]),
    gate.Snapshot(([0, 1], {"k": 2}), [Result("k", 2, 0, 0, 0, 0, {})], 4),
    delta.Delta({"k": key_state(1, "x"), "gone": None}, {"w": None}, {"c": None}, {"r": 7}, b"moves"),
    Moves(),
]  # fmt: skip


def name(message: Any) -> str:
    return f"{type(message).__module__.rpartition('.')[2]}.{type(message).__name__}"


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_a_round_trip(message: Any) -> None:
    assert wire.unpack(wire.pack(message), type(message)) == message


def test_the_format_of_version_one_stays_readable() -> None:
    """These bytes lie in somebody's log."""
    blob = bytes.fromhex("01eb79ee8883a46d6f7665a26d31a47061727401a5706172747302")
    assert wire.unpack(blob, Shipped) == Shipped("m1", 1, 2)
    assert wire.pack(Shipped("m1", 1, 2)) == blob


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_every_truncation_is_corrupt(message: Any) -> None:
    blob = wire.pack(message)
    for length in range(len(blob)):
        with pytest.raises(Corrupt):
            wire.unpack(blob[:length], type(message))
    with pytest.raises(Corrupt):
        wire.unpack(blob + b"\0", type(message))


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_every_flipped_bit_is_noticed(message: Any) -> None:
    """In the version it may look like a newer format, anywhere else it is corrupt."""
    blob = wire.pack(message)
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Stop if bit < 8 else Corrupt):
            wire.unpack(bytes(flipped), type(message))


def test_a_newer_format_says_so() -> None:
    blob = wire.pack(Shipped("m1", 0, 1))
    with pytest.raises(NewerFormat, match="format 2, this version reads up to 1"):
        wire.unpack(b"\x02" + blob[1:], Shipped)
    with pytest.raises(Corrupt):
        wire.unpack(b"\x00" + blob[1:], Shipped)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"move": "m1", "part": 0}, id="a field is missing"),
        pytest.param({"move": "m1", "part": "0", "parts": 1}, id="a field has the wrong type"),
        pytest.param([1, 2, 3], id="a list"),
        pytest.param(None, id="nothing"),
        pytest.param(msgspec.Raw(b"\x81\xa4\x6d\x6f\x76\x65\xa2\xff\xfe"), id="a text that is not UTF-8"),
        pytest.param(msgspec.Raw(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"), id="far too deep"),
        pytest.param(msgspec.Raw(b"\xc1"), id="a byte that MessagePack does not use"),
        pytest.param(msgspec.Raw(b""), id="no payload"),
    ],
)
def test_a_right_checksum_over_something_else_is_corrupt(value: Any) -> None:
    """Parcels cross trust borders: a checksum is no proof of who wrote them."""
    with pytest.raises(Corrupt, match="not a Shipped"):
        wire.unpack(wire.pack(value), Shipped)


def test_an_unknown_field_of_a_later_minor_version_is_ignored() -> None:
    blob = wire.pack({"move": "m1", "part": 0, "parts": 1, "colour": "red"})
    assert wire.unpack(blob, Shipped) == Shipped("m1", 0, 1)


def test_settings_that_an_older_writer_did_not_know_have_their_defaults() -> None:
    later = ("routing", "order", "split", "step", "budget", "chunk")
    old = {key: value for key, value in msgspec.to_builtins(MOVE).items() if key not in later}
    assert wire.unpack(wire.pack(old), Move) == MOVE


def test_a_part_takes_no_damaged_delta() -> None:
    with pytest.raises(Corrupt):
        part().load([*part().deltas(), part().deltas()[0][:-1]])
