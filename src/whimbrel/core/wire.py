"""Serialization: MessagePack behind a version and a checksum. Never pickle: parcels cross trust boundaries.

    byte 0        format version
    bytes 1-4     CRC-32 of the rest, big endian
    bytes 5-      MessagePack

Every blob that Whimbrel writes to a log, a state store or a wire goes through `pack` and comes back through `unpack`.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from whimbrel.core.errors import Corrupt, NewerFormat

VERSION = 1
_HEAD = Struct(">BI")
"""Version and checksum."""
ENTRY_BYTES = 16 << 20
"""The maximum number of bytes of a log entry. Larger content is split, unless a single record is larger."""
T = TypeVar("T")


def _plain(value: Any) -> Any:
    """The plain Python value of an object that is not MessagePack but has one, like numpy's numbers."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be stored or sent: use numbers, text, lists, dictionaries, times")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
encode = _encoder.encode
"""The MessagePack of a value, without version and checksum: for values inside a message."""


def pack(value: Any) -> bytes:
    """The bytes of a value."""
    payload = encode(value)
    return _HEAD.pack(VERSION, crc32(payload)) + payload


encode_canonical = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic").encode
"""As `encode`, with sets and dictionaries sorted."""


def canonical(value: Any) -> bytes:
    """As `pack`, with sets and dictionaries sorted: the same bytes in every process and after every load.

    For values that may be appended twice: a log accepts a repetition only if it is byte-identical. Not for data whose
    order users have chosen, like the columns of a result.
    """
    payload = encode_canonical(value)
    return _HEAD.pack(VERSION, crc32(payload)) + payload


def unpack(blob: bytes, type: type[T]) -> T:
    """Decode bytes and check the value against its type. Raises `Corrupt` or `NewerFormat`, never anything else."""
    if len(blob) < _HEAD.size:
        raise Corrupt(f"{len(blob)} bytes are too few for any message")
    version, checksum = _HEAD.unpack_from(blob)
    if version > VERSION:
        raise NewerFormat(f"format {version}, this version reads up to {VERSION}")
    payload = memoryview(blob)[_HEAD.size :]
    if version != VERSION or crc32(payload) != checksum:
        raise Corrupt("the checksum does not fit")
    return decode(payload, type)


@lru_cache
def decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of a type. To make one takes longer than to decode a small message."""
    return msgspec.msgpack.Decoder(type)


def decode(payload: bytes | memoryview | msgspec.Raw, type: type[T]) -> T:
    """Decode the bytes of `encode`. Raises `Corrupt`, never anything else."""
    try:
        decoded: T = decoder(type).decode(payload)  # type: ignore[arg-type]  # every type is hashable
    # msgspec's own errors are ValueErrors, and so is invalid UTF-8.
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"not a {getattr(type, '__name__', type)}: {error}") from error
    return decoded
