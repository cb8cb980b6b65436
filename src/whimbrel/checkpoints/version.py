"""The content of the store, and its format.

A key's state as of some `seq` is determined by its records up to it, independent of which instance applied them. So the
store has not the state of instances but *versions of keys*: to restore a key anywhere, load its newest version, then
replay its records behind that version's `seq`.

    Version       one key as of one seq, under one owner (epoch); the core defines the content of its key state
    Increment     what one part of an instance has changed since its last increment, as versions
    Checkpoint    a moment of a whole stage: the store has the increments of every part up to it

The rest of this file defines how they are stored, each object through `core.wire` (version, checksum, MessagePack).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Stop
from whimbrel.core.increments import IndexEntry, Version

PIECE = 8 << 20
"""Approximate maximum bytes of key state in a segment; a larger version has its own segment."""

T = TypeVar("T")


class Increment(msgspec.Struct, frozen=True):
    """The changes of a part since its last increment; none if `versions` is empty.

    A part's `number` increases with each increment and is never reset: an instance that starts anew continues above
    `CentralStore.last`. Its increments must be written in this order.
    """

    instance: str
    part: int
    number: int
    at_us: int
    reached: int
    """All records that this part received up to this `seq` are in this increment or an earlier one."""
    versions: list[Version] = []


class Checkpoint(msgspec.Struct, frozen=True):
    """A moment to which a stage can be restored."""

    number: int
    at_us: int
    keys: int
    """Number of keys of which it has a version."""
    bytes: int
    """Total bytes of their key state."""
    horizon: int
    """Every record up to this `seq` is in some version; -1: none. Records behind it are still needed."""
    damage: str = ""
    """Why it cannot be loaded, as far as is known without reading all of it."""


class Retention(msgspec.Struct, frozen=True):
    """Which checkpoints are kept: this number of the newest, and all younger than some seconds."""

    checkpoints: int = 3
    seconds: float = 0.0


# ── As stored ────────────────────────────────────────────────────────────────────────────────────────────────────────

Reach = dict[str, dict[int, int]]
"""By instance and part: the number of an increment. It includes all before it."""


class Owner(msgspec.Struct, frozen=True):
    """The owner of a stage's states. It exists from the moment from which on everything is saved here."""

    run: str
    """The unique name of a data directory."""
    since: int
    """The first increment that belongs here: it has all keys. Earlier ones were made for another store."""


class Segment(msgspec.Struct, frozen=True):
    """Some versions, as one object. It contains its own name, so that none can be mistaken for another."""

    name: str
    versions: msgspec.Raw
    """As `wire.encode` encodes them."""


class Manifest(msgspec.Struct, frozen=True):
    """The index of an increment. Written last: without it the increment does not exist."""

    instance: str
    part: int
    number: int
    at_us: int
    reached: int
    segments: list[list[IndexEntry]]


class Base(msgspec.Struct, frozen=True):
    """The index of a base: the newest versions as of a checkpoint, in place of all increments up to it."""

    number: int
    """The number of the checkpoint."""
    upto: Reach
    segments: list[list[IndexEntry]]
    source: int | None = None
    """The base it was made from, together with the increments since; None: from increments alone. Both are kept until
    another base is made from this one, which was read once more and intact then."""


class Moment(msgspec.Struct, frozen=True):
    """A checkpoint as it is stored: not its content, only the increments that it covers."""

    number: int
    at_us: int
    horizon: int
    upto: Reach


class StoreStatus(msgspec.Struct, frozen=True):
    """The status of a stage in the central store."""

    checkpoint: int | None = None
    """The number of the last checkpoint."""
    made_us: int | None = None
    """When it was made."""
    horizon: int = -1
    """Every record up to this `seq` is in some version; -1: none."""
    under_way_bytes: int = 0
    """Bytes of increments that are not in the store yet."""
    error: str | None = None
    """Why the last access to the store failed; None if it did not."""
    unsaved: int = 0
    """Number of records after `horizon`."""


def cut(versions: Iterable[Version]) -> Iterator[list[Version]]:
    """Split versions into as few pieces as their sizes allow."""
    piece: list[Version] = []
    size = 0
    for version in versions:
        size += len(version.key_state)
        if piece and size > PIECE:
            yield piece
            piece, size = [], len(version.key_state)
        piece.append(version)
    if piece:
        yield piece


def opened(name: str, blob: bytes, type: type[T]) -> T:
    """Decode a stored object. Raises `Corrupt` or `NewerFormat`, with the object's name."""
    try:
        return wire.unpack(blob, type)
    except Stop as error:
        raise error.__class__(f"{name}: {error}") from error


def fitting(segment: Segment, name: str, index: list[IndexEntry]) -> list[Version]:
    """The versions of a segment. Raises `Corrupt` if they are not those in its index."""
    versions = wire.decode(segment.versions, list[Version])
    if segment.name != name or [IndexEntry.of(version) for version in versions] != index:
        raise Corrupt(f"{name} holds other versions than its index says: load an older checkpoint")
    return versions


def has(upto: Mapping[str, Mapping[int, int]], instance: str, part: int, number: int) -> bool:
    """Whether a reach covers an increment."""
    return number <= upto.get(instance, {}).get(part, -1)
