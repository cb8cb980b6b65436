"""Whatever bytes come, `unpack` gives a value of the right type or one of two clear errors."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.mangling import mangled
from tests.unit.test_wire import MESSAGES
from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, NewerFormat
from whimbrel.core.record import Outgoing

TYPES: list[Any] = [*{type(message) for message in MESSAGES}, list[Outgoing], str]
PAYLOADS = [msgspec.msgpack.encode(message) for message in MESSAGES]

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
plain = st.recursive(
    scalars | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def framed(payload: bytes) -> bytes:
    """A payload with the right version and checksum, as only somebody who means it can write."""
    return bytes([wire.VERSION]) + crc32(payload).to_bytes(4, "big") + payload


def check(blob: bytes) -> None:
    for type in TYPES:
        try:
            value = wire.unpack(blob, type)
        except (Corrupt, NewerFormat):
            continue
        msgspec.convert(msgspec.to_builtins(value), type)


@given(st.binary(max_size=60))
def test_random_bytes(blob: bytes) -> None:
    check(blob)


@given(st.binary(max_size=60))
@example(b"\xa2\xff\xfe")  # a text that is not UTF-8
def test_random_bytes_under_a_right_checksum(payload: bytes) -> None:
    check(framed(payload))


@given(plain)
def test_random_values(value: Any) -> None:
    check(wire.pack(value))


@given(mangled(PAYLOADS))
def test_real_messages_that_were_tampered_with(payload: bytes) -> None:
    check(framed(payload))
