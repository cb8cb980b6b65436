"""What two places say to each other over one connection: seven frames, and how they become bytes.

    sender                                   receiver
    Hello ───────────────────────────────▶   version, deployment and names agree?
          ◀─────────────────────────────── Welcome, or Failed
    Batch(first, entries) ───────────────▶   appends them in order
    Batch ───────────────────────────────▶
          ◀────────────────────────────── Ack(position): every entry below it is durable
    Piece(a part of a Batch) ────────────▶   keeps it
          ◀────────────────────────────── Taken
    Piece(the last part) ────────────────▶   as the whole Batch
          ◀────────────────────────────── Ack
          ◀─────────────────────────────── Failed: nothing more is taken on this connection

The sender does not wait for one Ack before the next Batch: several are in flight. Acknowledgements are cumulative.
Each frame has one answer, in order. A sender that yields the link (window.py) sends large batches in pieces, so that
records on another connection do not wait for a whole batch.
After a `Failed`, or when the connection breaks, the sender begins a new one at the first entry without an Ack.

Bytes of a frame: byte 0 says how the rest is encoded (0: MessagePack; 1: four bytes of length, then zstd of it).
The frames `Hello`, `Welcome` and `Failed` are never compressed, and their fields are only added to: two versions
must be able to tell each other that they differ. Entries are the spool's blobs as they are, each with its own version
and checksum (core/wire.py): they are checked at the place where they are decoded, and nowhere on the way.
"""

from __future__ import annotations

import struct
from typing import Annotated, Literal

import msgspec
import pyarrow as pa

from whimbrel.core.errors import Corrupt, Diverged, Refused, Retry, Unavailable, WhimbrelError
from whimbrel.core.names import Name
from whimbrel.transport.spool import ENTRY

VERSION = 2
"""The version of this protocol. Only equal versions exchange batches."""
BATCH = 1 << 20
"""Bytes of entries in a batch, unless one entry is larger."""
FRAME = ENTRY + BATCH
"""Maximum bytes of a frame, compressed or not."""
ENTRIES = 1 << 16
"""Maximum entries of a batch: more than `BATCH` bytes can hold."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of a sender: who it is, whose spool it carries, and to whom."""

    version: int
    deployment: str
    place: Name
    to: Name
    kind: str = ""
    """The class of the spool: a place has one connection for each."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The receiver takes batches."""

    version: int
    place: Name


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Consecutive entries of a spool."""

    first: int
    """The position of the first one."""
    entries: Annotated[list[bytes], msgspec.Meta(max_length=ENTRIES)]


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Every entry below this position of the spool is durable at the receiver."""

    position: int


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """A part of the bytes of a `Batch`, in order."""

    part: bytes
    more: bool
    """Whether another part follows."""


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """A piece has arrived that is not the last of its batch. Nothing of it is durable yet."""


Kind = Literal["retry", "refused", "diverged"]
"""What a sender does about it: try again later, or stop."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The receiver takes nothing more on this connection, and why."""

    kind: str
    why: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """The answer for an error at the receiver. What is not the sender's fault may pass."""
        kinds: dict[type[WhimbrelError], Kind] = {Retry: "retry", Diverged: "diverged", Refused: "refused"}
        kind = next((kind for type, kind in kinds.items() if isinstance(error, type)), "retry")
        return cls(kind, str(error) or type(error).__name__)

    def error(self, place: str) -> WhimbrelError:
        """The error for the sender. An unknown kind, of a newer version, may pass."""
        kinds = {"diverged": Diverged, "refused": Refused}
        return kinds.get(self.kind, Unavailable)(f"{place} answers: {self.why}")


Frame = Hello | Welcome | Batch | Piece | Taken | Ack | Failed

PLAIN, ZSTD = 0, 1
_HEAD = struct.Struct(">BI")
LEAST = 1024
"""Bytes below which compression costs more than it saves."""
WORTH = 0.9
"""A compressed frame is sent if it has at most this fraction of the bytes."""
SKIPPED = 15
"""Frames that go uncompressed after one that did not shrink enough."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Compressor:
    """Encodes the frames of one connection, and compresses them where it pays: it tries again now and then."""

    def __init__(self) -> None:
        self._codec = pa.Codec("zstd", compression_level=1)
        self._skip = 0

    def encode(self, frame: Frame) -> bytes:
        """The bytes of a frame."""
        plain = _encoder.encode(frame)
        if isinstance(frame, Batch) and len(plain) >= LEAST:
            if self._skip:
                self._skip -= 1
            else:
                packed: bytes = self._codec.compress(plain, asbytes=True)
                if len(packed) <= WORTH * len(plain):
                    return _HEAD.pack(ZSTD, len(plain)) + packed
                self._skip = SKIPPED
        return bytes((PLAIN,)) + plain


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, not compressed."""
    return bytes((PLAIN,)) + _encoder.encode(frame)


def decode(blob: bytes) -> Frame:
    """The frame of these bytes. Raises `Corrupt`, never anything else, and never needs more memory than `FRAME`."""
    try:
        if blob[:1] == bytes((PLAIN,)):
            return _decoder.decode(memoryview(blob)[1:])
        kind, size = _HEAD.unpack_from(blob)
        if kind != ZSTD or size > FRAME:
            raise Corrupt(f"a frame of kind {kind} with {size:,} bytes; known are {PLAIN} and {ZSTD}, up to {FRAME:,}")
        return _decoder.decode(pa.decompress(memoryview(blob)[_HEAD.size :], size, "zstd", asbytes=True))
    except (ValueError, RecursionError, OSError, struct.error) as error:
        raise Corrupt(f"not a frame of the transport: {error}") from error
