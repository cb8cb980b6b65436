"""Compaction: keeps a store as large as what it is for, whatever was ever written to it.

    1. which checkpoints are kept, by the retention; `first` is the oldest of them
    2. increments up to `first` without versions are of no use any more. If the others have grown as large as the base
       before them, or are too many, the newest versions as of `first` are written as a new base: each piece is read
       back and compared, then its index is written, and read back as well
    3. older checkpoints are taken away, then all bases but the last two, then the manifests of increments that are in
    the
       older of the two, then their segments: always what points before what is pointed at

So there are two copies of each version, in two bases, or in a base and in an increment: one damaged object costs
nothing. The older base goes when a next one has been made of the newer, which was read, and whole, then.

It may die between any two writes: what is there can be read, and the next compaction takes up what is left. As a base
waits until it is worth it, each byte is copied about once for each time that the state has been saved anew.
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
"""With more increments beside it than this a new base is due, however small they are: a reader must look at each."""
Sizes = dict[IncrementId, int | None]
"""Bytes of key state by increment, None if it has no versions: what was found out before, for manifests do not
change."""


def compact(catalog: Catalog, sizes: Sizes, retention: Retention, now_us: int, slack: float) -> None:
    """Compact a stage. `slack` 0 compacts whatever there is."""
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
        raise Refused(f"{retention.checkpoints} checkpoints cannot be kept: keep one at least")
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
    return Corrupt(f"{name} is not what was just written: the place damages what it stores; nothing was given up")


def _give_up(catalog: Catalog, first: Moment, empty: set[IncrementId]) -> None:
    """Take away what no kept checkpoint needs. A piece of an increment that is in two bases, whether committed or
    not."""
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
