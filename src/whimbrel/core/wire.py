"""How anything becomes bytes: MessagePack behind a version and a checksum. Never pickle: parcels cross trust borders.

    byte 0        format version
    bytes 1-4     CRC-32 of the rest, big endian
    bytes 5-      MessagePack

Every blob that Whimbrel writes to a log, a state store or a wire goes through `pack` and comes back through `unpack`.
"""

from __future__ import annotations

from typing import Any, TypeVar
from zlib import crc32

import msgspec

from whimbrel.core.errors import Corrupt, NewerFormat

VERSION = 1
T = TypeVar("T")


def _plain(value: Any) -> Any:
    """What is not MessagePack but knows its plain Python value, as numpy's numbers do."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be stored or sent: use numbers, text, lists, dictionaries, times")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
"""The MessagePack of a value, without version and checksum: for what stands inside a message."""


def pack(value: Any) -> bytes:
    """The bytes of a value."""
    payload = encode(value)
    return b"".join((bytes((VERSION,)), crc32(payload).to_bytes(4, "big"), payload))


def unpack(blob: bytes, type: type[T]) -> T:
    """The value of some bytes, checked against its type. Raises `Corrupt` or `NewerFormat`, never anything else."""
    if len(blob) < 5:
        raise Corrupt(f"{len(blob)} bytes are too few for any message")
    if blob[0] > VERSION:
        raise NewerFormat(f"format {blob[0]}, this version reads up to {VERSION}")
    payload = memoryview(blob)[5:]
    if blob[0] != VERSION or crc32(payload) != int.from_bytes(blob[1:5], "big"):
        raise Corrupt("the checksum does not fit")
    try:
        return msgspec.msgpack.decode(payload, type=type)
    except (
        ValueError,
        RecursionError,
    ) as error:  # msgspec's own errors are ValueErrors, and so is a text's wrong UTF-8
        raise Corrupt(f"not a {getattr(type, '__name__', type)}: {error}") from error
