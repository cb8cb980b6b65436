"""Whatever comes through the control lane of an instance: it is taken, or refused, and the other keys go on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.mangling import mangled
from tests.properties.test_wire import plain
from tests.unit.records import data, key_state, mark, move, part, reloaded, switch, switching, told
from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.instance import Instance
from whimbrel.core.keys import bin_of
from whimbrel.core.operator import shape_of
from whimbrel.core.record import Fetch, Kind, Parcel, Passed, Record, Rejected, Shipped, Tick

LIVE = move("k", id="live")
PUSH = switching("p", id="push")
REPLICA = switching("c", order="replica", id="copy")
LEAVING = switching("l", id="leaving", order="demand", source="b", destination="a")

KINDS = [Kind.PARCEL, Kind.SHIPPED, Kind.PASSED, Kind.REPLICA, Kind.REPLICATED, Kind.FETCH]
SHAPE = shape_of(part().serving.operator.State)
MESSAGES: list[Any] = [
    Parcel("live", bin_of("k"), {"k": key_state(9, "x")}, shape=SHAPE),
    Parcel("live", bin_of("k"), {"k": key_state(9, "x")}, 1, 2),
    Parcel("push", bin_of("p"), {"p": key_state(9, "x")}, backlog={"p": [part().table.stored(data("p", 10, "y"))]}),
    Parcel("copy", bin_of("c"), {"c": key_state(9, "x")}, ticks=[Tick(1, "r", 2, 3)]),
    *(Shipped(id, 0, 1) for id in ("live", "push", "copy")),
    Passed("push", 0, 1, [Tick(1, "r", 2, 3)], ["c"]),
    Fetch("leaving", [1], [2, 3]),
]
PAYLOADS = [msgspec.msgpack.encode(message) for message in MESSAGES]


def framed(payload: bytes) -> bytes:
    """A payload with the right version and checksum, as only somebody who means it can write."""
    return bytes([wire.VERSION]) + crc32(payload).to_bytes(4, "big") + payload


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """A real message with one field changed to anything."""
    value = msgspec.to_builtins(draw(st.sampled_from(MESSAGES)), builtin_types=(bytes,))
    value[draw(st.sampled_from(sorted(value)))] = draw(plain)
    return wire.pack(value)


bodies = (
    st.binary(max_size=40)
    | st.binary(max_size=40).map(framed)
    | mangled(PAYLOADS)
    | mangled(PAYLOADS).map(framed)
    | altered()
    | st.sampled_from([wire.pack(message) for message in MESSAGES])
)
messages = st.lists(st.tuples(st.sampled_from(KINDS), bodies), max_size=4)


def busy() -> Instance:
    """A part that takes part in moves of all kinds, and serves a key that has nothing to do with them."""
    instance = part("b")
    replicate = Record(0, Kind.REPLICATE, -1, "", -1, 0, "", 0, 0, wire.pack(REPLICA))
    instance.apply([data("other", 1, "o"), data("l", 2, "l"), switch(PUSH), switch(LEAVING), replicate])
    instance.apply([mark(Kind.BEGIN, one, 10 + n) for n, one in enumerate((LIVE, PUSH, LEAVING))])
    return instance


@given(messages)
def test_nothing_that_comes_ends_an_instance(sent: list[tuple[Kind, bytes]]) -> None:
    instance = busy()
    refused: set[str] = set()
    for number, (kind, body) in enumerate(sent):
        out = instance.apply([Record(0, kind, -1, "", -1, 0, "", 0, 0, body), data("other", 20 + number, "+")])
        assert told(out)[-1] == ("other", " ".join(["o", *"+" * (number + 1)]))
        refused |= {notice.move for notice in out.notices if isinstance(notice, Rejected)}
    instance = reloaded(instance)
    late = [data("k", 90, "x"), data("p", 91, "x", epoch=1), data("other", 92, "!")]
    try:
        out = instance.apply(late)
    except Corrupt:  # a state that only its checksum and its shape could vouch for
        return
    assert told(out)[-1][0] == "other"
    begins = (Kind.PARCEL, Kind.SHIPPED, Kind.PASSED)  # what these say they belong to, begins with them
    assert refused <= {"live", "push", "copy"} or any(kind in begins for kind, _ in sent)


def lasting() -> list[bytes]:
    """What lasts of a part with something of everything: keys, records that wait, roles, what was refused."""
    instance = busy()
    odd = wire.pack(Parcel("push", bin_of("p"), {"p": key_state(9, "x")})) + b"?"
    instance.apply([Record(0, Kind.PARCEL, -1, "", -1, 0, "", 0, 0, odd), data("p", 30, "y", epoch=1)])
    return instance.snapshot(limit=100)


LASTING = [blob[5:] for blob in lasting()]


@given(st.lists(st.binary(max_size=60) | mangled(LASTING).map(framed), min_size=1, max_size=3))
def test_what_lasts_of_an_instance_is_loaded_or_a_clear_error_says_why_not(blobs: list[bytes]) -> None:
    with suppress(Corrupt, NewerFormat):
        part("b").load(blobs)
