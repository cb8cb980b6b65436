"""Whatever bytes lie in the place of an object: what is read is right, or a clear error says that it is not."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.mangling import mangled
from tests.store.objects import Memory, increment, loaded, version
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Retention
from whimbrel.core import wire
from whimbrel.core.errors import Stop, UnknownName


@cache
def sound() -> dict[str, bytes]:
    """Every kind of object: a base, two increments behind it, two checkpoints."""
    memory = Memory()
    store = CentralStore(memory)
    for number in (1, 2, 3):
        store.write("s", increment(number, version("a", number), version(f"b{number}", number), reached=number))
        store.checkpoint("s", {"s-1": 1}, number)
        if number == 2:
            store.compact("s", Retention(checkpoints=1), number, slack=0)
    return memory.blobs


NAMES = sorted(sound())
PAYLOADS = [blob[5:] for blob in sound().values()]

integers = st.integers(-(2**63), 2**64 - 1)
scalars = st.none() | st.booleans() | integers | st.floats() | st.text(max_size=5)
plain = st.recursive(
    scalars | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9) | integers, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def altered(draw: st.DrawFn) -> Any:
    """A real object with one field changed to anything."""
    value = msgspec.msgpack.decode(draw(st.sampled_from(PAYLOADS)), strict=False)
    value[draw(st.sampled_from(sorted(value)))] = draw(plain)
    return value


def framed(payload: bytes) -> bytes:
    """A payload with the right version and checksum, as only somebody who means it can write."""
    return bytes([wire.VERSION]) + crc32(payload).to_bytes(4, "big") + payload


def check(name: str, blob: bytes) -> None:
    """Everything that a store can be asked: an answer, or an error on purpose."""
    memory = Memory({**sound(), name: blob})
    store = CentralStore(memory)
    for at in (None, 2, 3):
        with suppress(Stop, UnknownName):
            loaded(store, at)
            store.horizon("s", at)
    for use in (
        lambda: store.checkpoints("s"),
        lambda: store.kept("s"),
        lambda: store.last("s", "s-1"),
        lambda: store.checkpoint("s", {"s-1": 1}, 9),
        lambda: store.compact("s", Retention(checkpoints=1), 9, slack=0),
    ):
        with suppress(Stop):
            use()


@given(st.sampled_from(NAMES), st.binary(max_size=60))
def test_random_bytes(name: str, blob: bytes) -> None:
    check(name, blob)
    check(name, framed(blob))


@given(st.sampled_from(NAMES), plain)
def test_random_values(name: str, value: Any) -> None:
    check(name, wire.pack(value))


@given(st.sampled_from(NAMES), mangled(PAYLOADS))
def test_real_objects_that_were_tampered_with(name: str, payload: bytes) -> None:
    check(name, framed(payload))


@given(st.sampled_from(NAMES), altered())
def test_real_objects_with_another_value_in_a_field(name: str, value: Any) -> None:
    check(name, wire.pack(value))


@given(st.sampled_from(NAMES), st.data())
def test_one_bit_that_is_not_as_it_was_is_noticed_by_whoever_needs_the_object(name: str, data: st.DataObject) -> None:
    blob = bytearray(sound()[name])
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    store = CentralStore(Memory({**sound(), name: bytes(blob)}))
    if not name.endswith(("s-1/00000-000000000000000003", "s-1/00000-000000000000000003-000000")):
        # A checkpoint is not needed, and what lies in a base lies in another one or in increments as well.
        assert loaded(store) == loaded(CentralStore(Memory(dict(sound()))))
        return
    with pytest.raises(Stop, match=name):
        loaded(store)


@given(st.lists(st.text(max_size=30), max_size=5))
def test_objects_of_others_in_the_same_folders_are_left_alone(words: list[str]) -> None:
    others = {
        f"s/{kind}/{word}": b"?" for kind in ("manifests", "checkpoints", "bases", "base-segments") for word in words
    }
    memory = Memory({**others, **sound()})
    store = CentralStore(memory)
    assert loaded(store) == loaded(CentralStore(Memory(dict(sound()))))
    store.compact("s", Retention(checkpoints=1), 9, slack=0)
    assert {name for name in others if name not in sound()} <= set(memory.blobs)
