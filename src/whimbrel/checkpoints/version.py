"""What the store keeps, and how it lies there.

A key's state as of some `seq` follows from its records up to there, whoever applied them. So what is kept is not the
state of instances but *versions of keys*: to restore a key anywhere, take its newest version, then its records behind
that version's `seq`.

    Version       one key as of one seq, under one owner (epoch); what its key state holds is the core's affair
    Increment     what one part of an instance has changed since its last increment, as versions
    Checkpoint    a moment of a whole stage: increments of every part are there up to it

The rest of this file is how they are stored, each object through `core.wire` (version, checksum, MessagePack).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Stop
from whimbrel.core.increments import IndexEntry, Version

PIECE = 8 << 20
"""About how many bytes of key state a segment holds at most; a larger version has one to itself."""

T = TypeVar("T")


class Increment(msgspec.Struct, frozen=True):
    """What a part has changed since its last increment; nothing, if `versions` is empty.

    A part's `number` grows with each increment for ever: an instance that begins anew goes on behind
    `CentralStore.last`. Its increments must be written in this order.
    """

    instance: str
    part: int
    number: int
    at_us: int
    reached: int
    """Everything this part was given up to this seq is in this increment or an earlier one."""
    versions: list[Version] = []


class Checkpoint(msgspec.Struct, frozen=True):
    """A moment of a stage that can be gone back to."""

    number: int
    at_us: int
    keys: int
    """Keys of which it has a version."""
    bytes: int
    """Their key state together."""
    horizon: int
    """Every record up to this seq is in some version; -1: none. Records behind it are still needed."""
    damage: str = ""
    """Why it cannot be loaded, as far as is known without reading all of it."""


class Retention(msgspec.Struct, frozen=True):
    """Which checkpoints are kept: the newest so many, and all that are younger than some time."""

    checkpoints: int = 3
    seconds: float = 0.0


# ── As stored ────────────────────────────────────────────────────────────────────────────────────────────────────────

Reach = dict[str, dict[int, int]]
"""By instance and part: the number of an increment. It and all before it are meant."""


class Owner(msgspec.Struct, frozen=True):
    """Whose states a stage's are. There is one from the moment on from which everything is saved here."""

    run: str
    """The name of a data directory that nobody else has."""
    since: int
    """The first increment that belongs here: it has all there was. Earlier ones were made for another store."""


class Segment(msgspec.Struct, frozen=True):
    """Some versions, as one object. It knows its own name, so that none can stand in for another."""

    name: str
    versions: msgspec.Raw
    """As `wire.encode` makes them."""


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
    """The checkpoint's."""
    upto: Reach
    segments: list[list[IndexEntry]]
    source: int | None = None
    """The base it was made from, together with the increments since; None: from increments alone. Both are kept until a
    next base is made of this one: then it has been read once more, and was whole."""


class Moment(msgspec.Struct, frozen=True):
    """A checkpoint as it is stored: not what it holds, only up to where."""

    number: int
    at_us: int
    horizon: int
    upto: Reach


class StoreStatus(msgspec.Struct, frozen=True):
    """What a stage has in the central store."""

    checkpoint: int | None = None
    """The number of the last checkpoint."""
    made_us: int | None = None
    """When it was made."""
    horizon: int = -1
    """Every record up to this `seq` is in some version; -1: none."""
    under_way_bytes: int = 0
    """What has been saved and is not there yet."""
    error: str | None = None
    """Why the store could not be used at the last try."""
    unsaved: int = 0
    """How many records came behind `horizon`."""


def cut(versions: Iterable[Version]) -> Iterator[list[Version]]:
    """Versions in as few pieces as their sizes allow."""
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
    """A stored object. Raises `Corrupt` or `NewerFormat`, with the object's name."""
    try:
        return wire.unpack(blob, type)
    except Stop as error:
        raise error.__class__(f"{name}: {error}") from error


def fitting(segment: Segment, name: str, index: list[IndexEntry]) -> list[Version]:
    """The versions of a segment, if they are those that its index lists."""
    versions = wire.decode(segment.versions, list[Version])
    if segment.name != name or [IndexEntry.of(version) for version in versions] != index:
        raise Corrupt(f"{name} holds other versions than its index says: load an older checkpoint")
    return versions


def has(upto: Mapping[str, Mapping[int, int]], instance: str, part: int, number: int) -> bool:
    """Whether an increment lies within a reach."""
    return number <= upto.get(instance, {}).get(part, -1)
