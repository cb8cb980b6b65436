"""Compaction: bounds the size of a store by the state that it retains, independent of how much was written to it.

    1. the retention determines which checkpoints are kept; `first` is the oldest of them
    2. increments up to `first` without versions are no longer needed. If the others have grown as large as the base
       before them, or are too many, the newest versions as of `first` are written as a new base: each piece is read
       back and compared, then its index is written, and read back as well
    3. older checkpoints are deleted, then all bases but the last two, then the manifests of increments that are in the
       older of the two, then their segments: always a reference before its target

So there are two copies of each version, in two bases, or in a base and in an increment: one damaged object loses
nothing. The older base is deleted when another one was made from the newer base, which was read and intact then.

A compaction may crash between any two writes: the store stays readable, and the next compaction does the rest. As a
base is written only when it is worthwhile, each byte is copied about once per complete rewrite of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from whimbrel.checkpoints import names
from whimbrel.checkpoints.catalog import Catalog, Newest, Sources
from whimbrel.checkpoints.names import IncrementId
from whimbrel.checkpoints.version import Base, Moment, Retention, Segment, cut, has
from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Refused
from whimbrel.core.increments import IndexEntry
from whimbrel.core.keys import EVERYTHING

MANY = 2000
"""With more increments than this since a base, a new one is due, however small they are: readers read each."""
Sizes = dict[IncrementId, int | None]
"""Bytes of key state by increment, None if it has no versions. It is a cache: manifests do not change."""


def compact(catalog: Catalog, sizes: Sizes, retention: Retention, now_us: int, slack: float) -> None:
    """Compact a stage. With `slack` 0 a new base is written if there is any increment."""
    first = _first(catalog.readable(), retention, now_us)
    if first is None:
        return
    sources = catalog.sources(first)
    unknown = [saved for saved in sources.increments if saved not in sizes]
    sizes.update((saved, _size(manifest.segments)) for saved, manifest in catalog.manifests(unknown))
    empty = {saved for saved in sources.increments if sizes[saved] is None}
    sources = Sources(sources.base, [saved for saved in sources.increments if saved not in empty])
    if _is_due(sources, sizes, slack):
        _write_base(catalog, first)
    _give_up(catalog, first, empty)
    left = set(catalog.increments())
    for saved in [saved for saved in sizes if saved not in left]:
        del sizes[saved]


def _first(moments: list[Moment], retention: Retention, now_us: int) -> Moment | None:
    if retention.checkpoints < 1:
        raise Refused(f"the retention must be at least 1 checkpoint, got {retention.checkpoints}")
    newest, age_us = moments[-retention.checkpoints :], retention.seconds * 1_000_000
    return next((one for one in moments if one in newest or 0 < age_us > now_us - one.at_us), None)


def _is_due(sources: Sources, sizes: Sizes, slack: float) -> bool:
    if sources.base is None or slack <= 0 or len(sources.increments) > MANY:
        return bool(sources.increments)
    beside = sum(sizes[saved] or 0 for saved in sources.increments)
    return beside > slack * (_size(sources.base.segments) or 0)


def _size(segments: list[list[IndexEntry]]) -> int | None:
    return sum(line.size for index in segments for line in index) if any(segments) else None


def _write_base(catalog: Catalog, first: Moment) -> None:
    segments: list[list[IndexEntry]] = []
    newest = Newest(catalog, EVERYTHING, first)
    for piece, versions in enumerate(cut(newest)):
        name = names.base_segment(catalog.stage, first.number, piece)
        blob = wire.pack(Segment(name, msgspec.Raw(wire.encode(versions))))
        catalog.objects.put(name, blob)
        if catalog.objects.get(name) != blob:
            raise _unlike(name)
        segments.append([IndexEntry.of(version) for version in versions])
    newest.check()
    base = Base(first.number, first.upto, segments, newest.base.number if newest.base else None)
    name = names.base(catalog.stage, first.number)
    catalog.objects.put(name, wire.pack(base))
    try:
        is_written = catalog.base(first.number) == base
    except Corrupt:
        is_written = False
    if not is_written:
        catalog.objects.delete([name])
        raise _unlike(name)


def _unlike(name: str) -> Corrupt:
    return Corrupt(f"{name} is not what was just written: the storage damages its data; nothing was deleted")


def _give_up(catalog: Catalog, first: Moment, empty: set[IncrementId]) -> None:
    """Delete what no retained checkpoint needs. Segments of increments that two bases cover are deleted, whether
    committed or not."""
    _delete(catalog, "checkpoints", lambda name: _number(name) < first.number)
    _delete(catalog, "manifests", lambda name: names.increment_of(name) in empty)
    base = catalog.sources(first).base
    if base is None:
        return
    for kind in ("bases", "base-segments"):
        _delete(catalog, kind, lambda name: _number(name) < base.number and _number(name) != base.source)
    ways = [way.base for way in catalog.ways(first)]
    twice = next((older.upto for older in ways if older and older.number == base.source), {})
    for kind in ("manifests", "segments"):
        _delete(catalog, kind, lambda name: (saved := names.increment_of(name)) is not None and has(twice, *saved))


def _delete(catalog: Catalog, kind: str, is_old: Callable[[str], bool]) -> None:
    catalog.objects.delete([name for name in catalog.names(kind) if is_old(name)])


def _number(name: str) -> float:
    number = names.number_of(name)
    return math.inf if number is None else number
