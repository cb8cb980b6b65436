"""Bytes that were a message once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def mangled(draw: st.DrawFn, payloads: Sequence[bytes]) -> bytes:
    """A real message with a few bytes changed, taken out or put in."""
    payload = bytearray(draw(st.sampled_from(payloads)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(payload) - 1))
        payload[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
        payload = payload or bytearray(b"\0")
    return bytes(payload)
