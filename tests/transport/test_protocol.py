"""The frames between two places: who is greeted, what is not expected, and how they become bytes."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.transport.places import Places, blobs, fill
from whimbrel.core.errors import Corrupt
from whimbrel.transport import Receiver
from whimbrel.transport.protocol import (
    PLAIN,
    SKIPPED,
    VERSION,
    ZSTD,
    Ack,
    Batch,
    Compressor,
    Failed,
    Hello,
    Welcome,
    decode,
    encode,
)


def answered(receiver: Receiver, caller: str, **given: Any) -> Any:
    hello = Hello(**{"version": VERSION, "deployment": "d1", "place": "edge-1", "to": "cloud", **given})
    session = receiver.session(caller)
    answer = decode(session.answer(encode(hello)))
    assert session.is_over is isinstance(answer, Failed)
    return answer


def test_the_greeting_tells_strangers_apart_and_names_both() -> None:
    receiver = Places().receiver()
    assert answered(receiver, "edge-1") == Welcome(VERSION, "cloud")
    other = answered(receiver, "edge-1", deployment="d9")
    assert other.kind == "refused"
    assert "'d9'" in other.why
    assert "'d1'" in other.why
    newer = answered(receiver, "edge-1", version=VERSION + 1)
    assert newer.kind == "retry", "it passes when both are upgraded"
    assert f"edge-1 speaks version {VERSION + 1}" in newer.why
    assert f"cloud speaks {VERSION}" in newer.why
    impostor = answered(receiver, "edge-2")
    assert (impostor.kind, "edge-2, as its certificate says, calls itself edge-1" in impostor.why) == ("refused", True)
    lost = answered(receiver, "edge-1", to="edge-3")
    assert (lost.kind, "this is cloud, not edge-3" in lost.why) == ("refused", True)


def test_frames_that_are_not_expected_end_the_session_and_append_nothing() -> None:
    places = Places()
    fill(places, 1)
    entries = places.spool().entries(0, 10_000)
    hello = encode(Hello(VERSION, "d1", "edge-1", "cloud"))
    for frames in (
        [encode(Batch(0, entries))],
        [hello, hello],
        [hello, encode(Ack(1))],
        [hello, b""],
        [hello, b"\1\xff\xff\xff\xff"],
        [hello, b"\0junk"],
        [hello, b"\2junk"],
        [hello, encode(Batch(0, [])), encode(Batch(5, entries))],
        [hello, encode(Batch(0, [b"damaged"]))],
    ):
        session = places.receiver().session("edge-1")
        *_, last = [decode(session.answer(frame)) for frame in frames]
        assert isinstance(last, Failed)
        assert session.is_over
        assert isinstance(decode(session.answer(encode(Batch(0, entries)))), Failed), "it stays over"
        assert blobs(places.logs["inbox"]) == []


def test_compression_is_used_where_it_pays_and_gives_back_the_same() -> None:
    compressor = Compressor()
    text, noise = Batch(0, [b"speed=12.5 " * 1000] * 3), Batch(0, [os.urandom(9000)])
    small = Batch(0, [b"x" * 100])
    packed = compressor.encode(text)
    assert packed[0] == ZSTD
    assert len(packed) < 2000
    assert compressor.encode(small)[0] == PLAIN
    assert decode(packed) == text
    frames = [compressor.encode(noise), *(compressor.encode(text) for _ in range(SKIPPED + 1))]
    assert [frame[0] for frame in frames] == [PLAIN] * (SKIPPED + 1) + [ZSTD]
    assert [decode(frame) for frame in frames] == [noise] + [text] * (SKIPPED + 1)


@given(st.binary(max_size=60), st.sampled_from([b"", b"\0", b"\1\0\0\0\x20", b"\0\x83\xa4type\xa5batch"]))
def test_whatever_bytes_arrive_are_a_frame_or_corrupt(blob: bytes, head: bytes) -> None:
    try:
        frame = decode(head + blob)
    except Corrupt:
        return
    assert decode(encode(frame)) == frame
