"""Compaction: keeps a store as large as what it is for, whatever was ever written to it.

    1. which checkpoints are kept, by the retention; `first` is the oldest of them
    2. savings up to `first` without versions are of no use any more. If the others have grown as large as the fold
       before them, or are too many, the newest versions as of `first` are written as a new fold: each piece is read
       back and compared, then its index is written, and read back as well
    3. older checkpoints are taken away, then all folds but the last two, then the seals of savings that are in the
       older of the two, then their segments: always what points before what is pointed at

So there are two copies of each version, in two folds, or in a fold and in a saving: one damaged object costs nothing.
The older fold goes when a next one has been made of the newer, which was read, and whole, then.

It may die between any two writes: what is there can be read, and the next compaction takes up what is left. As a fold
waits until it is worth it, each byte is copied about once for each time that the state has been saved anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from whimbrel.checkpoints import names
from whimbrel.checkpoints.catalog import Catalog, Newest, Sources
from whimbrel.checkpoints.names import Saved
from whimbrel.checkpoints.version import Base, Moment, Retention, Segment, cut, has
from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Refused
from whimbrel.core.keys import EVERYTHING
from whimbrel.core.saving import Line

MANY = 2000
"""With more savings beside it than this a new fold is due, however small they are: a reader must look at each."""
Sizes = dict[Saved, int | None]
"""Bytes of luggage by saving, None if it has no versions: what was found out before, for seals do not change."""


def compact(catalog: Catalog, sizes: Sizes, retention: Retention, now_us: int, slack: float) -> None:
    """Compact a stage. `slack` 0 folds whatever there is."""
    first = _first(catalog.readable(), retention, now_us)
    if first is None:
        return
    sources = catalog.sources(first)
    unknown = [saved for saved in sources.savings if saved not in sizes]
    sizes.update((saved, _size(seal.segments)) for saved, seal in catalog.seals(unknown))
    empty = {saved for saved in sources.savings if sizes[saved] is None}
    sources = Sources(sources.base, [saved for saved in sources.savings if saved not in empty])
    if _is_due(sources, sizes, slack):
        _fold(catalog, first)
    _give_up(catalog, first, empty)
    left = set(catalog.savings())
    for saved in [saved for saved in sizes if saved not in left]:
        del sizes[saved]


def _first(moments: list[Moment], retention: Retention, now_us: int) -> Moment | None:
    if retention.checkpoints < 1:
        raise Refused(f"{retention.checkpoints} checkpoints cannot be kept: keep one at least")
    newest, age_us = moments[-retention.checkpoints :], retention.seconds * 1_000_000
    return next((one for one in moments if one in newest or 0 < age_us > now_us - one.at_us), None)


def _is_due(sources: Sources, sizes: Sizes, slack: float) -> bool:
    if sources.base is None or slack <= 0 or len(sources.savings) > MANY:
        return bool(sources.savings)
    beside = sum(sizes[saved] or 0 for saved in sources.savings)
    return beside > slack * (_size(sources.base.segments) or 0)


def _size(segments: list[list[Line]]) -> int | None:
    return sum(line.size for lines in segments for line in lines) if any(segments) else None


def _fold(catalog: Catalog, first: Moment) -> None:
    segments: list[list[Line]] = []
    newest = Newest(catalog, EVERYTHING, first)
    for piece, versions in enumerate(cut(newest)):
        name = names.fold(catalog.stage, first.number, piece)
        blob = wire.pack(Segment(name, msgspec.Raw(wire.encode(versions))))
        catalog.objects.put(name, blob)
        if catalog.objects.get(name) != blob:
            raise _unlike(name)
        segments.append([Line.of(version) for version in versions])
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


def _give_up(catalog: Catalog, first: Moment, empty: set[Saved]) -> None:
    """Take away what no kept checkpoint needs. A piece of a saving that is in two folds, whether sealed or not."""
    _delete(catalog, "checkpoints", lambda name: _number(name) < first.number)
    _delete(catalog, "seals", lambda name: names.saved_of(name) in empty)
    base = catalog.sources(first).base
    if base is None:
        return
    for kind in ("bases", "folds"):
        _delete(catalog, kind, lambda name: _number(name) < base.number and _number(name) != base.source)
    ways = [way.base for way in catalog.ways(first)]
    twice = next((older.upto for older in ways if older and older.number == base.source), {})
    for kind in ("seals", "segments"):
        _delete(catalog, kind, lambda name: (saved := names.saved_of(name)) is not None and has(twice, *saved))


def _delete(catalog: Catalog, kind: str, is_old: Callable[[str], bool]) -> None:
    catalog.objects.delete([name for name in catalog.names(kind) if is_old(name)])


def _number(name: str) -> float:
    number = names.number_of(name)
    return math.inf if number is None else number
