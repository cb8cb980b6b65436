"""One stage's objects, for readers: which ones exist, and the content of their indexes.

If a compaction deletes an object while it is being read, `Gone` is raised: start again, and its replacement exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from whimbrel.checkpoints import names
from whimbrel.checkpoints.names import IncrementId
from whimbrel.checkpoints.place import Objects
from whimbrel.checkpoints.version import Base, Checkpoint, Manifest, Moment, Reach, Segment, fitting, has, opened
from whimbrel.core.errors import Corrupt, NewerFormat, UnknownName
from whimbrel.core.increments import IndexEntry, Version
from whimbrel.core.keys import Selection, bin_of

TOGETHER = 100
"""How many manifests are fetched at once."""

S = TypeVar("S", bound=msgspec.Struct)


class Gone(Corrupt):
    """A required object does not exist: a compaction has just deleted it, or it is lost."""


class Sources(NamedTuple):
    """The objects to search for versions: a base, and the increments that it does not contain."""

    base: Base | None
    increments: list[IncrementId]


class Piece(NamedTuple):
    """A segment, and its entries in the index."""

    name: str
    entries: list[IndexEntry]


class Catalog:
    """The objects of one stage."""

    def __init__(self, objects: Objects, stage: str) -> None:
        self.objects, self.stage = objects, stage

    def names(self, kind: str) -> list[str]:
        """The names of all objects of one kind."""
        return self.objects.names(names.folder(self.stage, kind))

    # ── Which objects exist ──────────────────────────────────────────────────────────────────────────────────────

    def increments(self) -> list[IncrementId]:
        """Every increment that has a manifest, in order within each part."""
        return [saved for saved in map(names.increment_of, self.names("manifests")) if saved]

    def moments(self) -> list[int]:
        """The numbers of all checkpoints, oldest first."""
        return [number for number in map(names.number_of, self.names("checkpoints")) if number is not None]

    def bases(self) -> list[int]:
        """The numbers of the checkpoints that were compacted into a base, oldest first."""
        return [number for number in map(names.number_of, self.names("bases")) if number is not None]

    def sources(self, upto: Moment | None = None) -> Sources:
        """The sources of the newest versions, or of the newest as of a checkpoint: the first of `ways`."""
        return next(self.ways(upto))

    def ways(self, upto: Moment | None = None) -> Iterator[Sources]:
        """All sources of the newest versions, or of the newest as of a checkpoint: the newest base and the increments
        since, then the base that it was made from and the increments since that. All have the same versions; some may
        be damaged.

        Raises the error of a damaged index if there are no sources at all.
        """
        increments = self.increments()  # before the bases: an increment compacted between the two calls is in a base
        known = self.bases()
        damage: Corrupt | NewerFormat | None = None
        found: list[Base | None] = []
        for number in reversed([one for one in known if upto is None or one <= upto.number]):
            try:
                found.append(self.base(number))
            except (Corrupt, NewerFormat) as error:
                damage = damage or error
        if not known or (len(known) == 1 and self._is_first(known[0], found)):
            found.append(None)
        if not found and damage is not None:
            raise damage
        for base in found or [None]:
            yield Sources(base, [one for one in increments if _is_between(one, base, upto)])

    def _is_first(self, number: int, found: list[Base | None]) -> bool:
        """Whether the only base was made of increments alone: then all of these still exist. If its index cannot be
        read: whether there are no segments of another base."""
        if found and found[0] is not None:
            return found[0].source is None
        return all(names.number_of(name) == number for name in self.names("base-segments"))

    # ── Their content ────────────────────────────────────────────────────────────────────────────────────────────

    def manifests(self, increments: Sequence[IncrementId]) -> Iterator[tuple[IncrementId, Manifest]]:
        """The manifests of increments, in the given order."""
        for start in range(0, len(increments), TOGETHER):
            some = increments[start : start + TOGETHER]
            called = [names.manifest(self.stage, saved) for saved in some]
            for saved, name, blob in zip(some, called, self.objects.get_all(called), strict=True):
                manifest = _opened(name, blob, Manifest)
                if (manifest.instance, manifest.part, manifest.number) != saved:
                    raise Corrupt(f"{name} is the manifest of another increment")
                yield saved, manifest

    def moment(self, number: int) -> Moment:
        """A checkpoint. Raises `UnknownName` if there is none with this number."""
        name = names.moment(self.stage, number)
        try:
            moment = self._open(name, Moment)
        except Gone:
            raise UnknownName("checkpoint", str(number), [str(known) for known in self.moments()]) from None
        if moment.number != number:
            raise Corrupt(f"{name} is another checkpoint")
        return moment

    def readable(self) -> list[Moment]:
        """The checkpoints that can be read, oldest first. Others are ignored: they cannot be restored."""
        found = []
        for number in self.moments():
            with suppress(Corrupt, UnknownName):
                found.append(self.moment(number))
        return found

    def newest(self) -> Moment | None:
        """The newest checkpoint that can be read."""
        for number in reversed(self.moments()):
            with suppress(Corrupt, UnknownName):
                return self.moment(number)
        return None

    def reach(self) -> Reach:
        """The increments that the newest checkpoint or base covers: compacted ones are recorded nowhere else."""
        last = self.newest() or self.sources().base
        return last.upto if last else {}

    def base(self, number: int) -> Base:
        """The index of a base."""
        name = names.base(self.stage, number)
        base = self._open(name, Base)
        if base.number != number:
            raise Corrupt(f"{name} is the base of another checkpoint")
        return base

    def pieces(self, sources: Sources) -> Iterator[Piece]:
        """All segments of the sources, with their index entries."""
        if sources.base is not None:
            for piece, index in enumerate(sources.base.segments):
                yield Piece(names.base_segment(self.stage, sources.base.number, piece), index)
        for saved, manifest in self.manifests(sources.increments):
            for piece, index in enumerate(manifest.segments):
                yield Piece(names.segment(self.stage, saved, piece), index)

    def versions(self, piece: Piece, chosen: Mapping[str, IndexEntry]) -> Iterator[Version]:
        """The versions of the chosen index entries. Raises `Corrupt` if the segment does not match its index."""
        versions = fitting(self._open(piece.name, Segment), piece.name, piece.entries)
        return (
            version for version, entry in zip(versions, piece.entries, strict=True) if chosen.get(entry.key) is entry
        )

    def _open(self, name: str, type: type[S]) -> S:
        return _opened(name, self.objects.get(name), type)


def chosen(pieces: Iterable[Piece], selection: Selection) -> list[tuple[Piece, dict[str, IndexEntry]]]:
    """The pieces with the newest versions of selected keys, each with the index entries of these."""
    found: dict[str, tuple[IndexEntry, Piece]] = {}
    for piece in pieces:
        for entry in piece.entries:
            if entry.is_newer(found[entry.key][0] if entry.key in found else None) and entry.key in selection:
                found[entry.key] = entry, piece
    wanted: dict[str, tuple[Piece, dict[str, IndexEntry]]] = {}
    for entry, piece in found.values():
        wanted.setdefault(piece.name, (piece, {}))[1][entry.key] = entry
    return list(wanted.values())


class Newest:
    """The newest version of each selected key, as of a checkpoint or of now; each once, even if iterated again.

    Versions in a damaged piece are searched in the other sources (`Catalog.ways`). After the iteration `lost` contains
    the keys whose version is in none of them, with the reason.
    """

    def __init__(self, catalog: Catalog, selection: Selection, upto: Moment | None) -> None:
        self._catalog, self._selection, self._upto = catalog, selection, upto
        self._done: set[str] = set()
        self.lost: dict[str, Corrupt | NewerFormat] = {}
        self.base: Base | None = None
        """The base of the sources that were complete."""

    def __iter__(self) -> Iterator[Version]:
        damage: Corrupt | NewerFormat | None = None
        for way in self._catalog.ways(self._upto):
            try:
                pieces = chosen(self._catalog.pieces(way), self._selection)
            except (Corrupt, NewerFormat) as error:  # of an index, which all sources may need
                damage = error
                continue
            self.lost, self.base = {}, way.base
            for piece, index in pieces:
                yield from self._read(piece, index)
            if not self.lost:
                return
        if damage is not None and not self.lost:
            raise damage

    def _read(self, piece: Piece, index: Mapping[str, IndexEntry]) -> Iterator[Version]:
        wanted = {key: entry for key, entry in index.items() if key not in self._done}
        if not wanted:
            return
        try:
            versions = list(self._catalog.versions(piece, wanted))
        except (Corrupt, NewerFormat) as error:
            self.lost.update(dict.fromkeys(wanted, error))
            return
        self._done |= wanted.keys()
        yield from versions

    def check(self) -> None:
        """Raise if versions are lost, with their keys and bins."""
        if not self.lost:
            return
        errors = list(self.lost.values())
        error = next((one for one in errors if isinstance(one, Gone)), errors[0])
        bins = sorted({bin_of(key) for key in self.lost})
        raise type(error)(
            f"{error}; that is the newest version of {len(self.lost)} keys ({_some(sorted(self.lost))}; bins "
            f"{_some(bins)}), and there is no other copy: load an older checkpoint"
        )


def _some(things: Sequence[object], most: int = 10) -> str:
    return ", ".join(map(str, things[:most])) + (", ..." if len(things) > most else "")


def listed(catalog: Catalog) -> list[Checkpoint]:
    """All checkpoints, oldest first. Their keys and bytes are counted incrementally: each index is read once."""
    found: list[Checkpoint] = []
    tally: _Tally | None = None
    for number in catalog.moments():
        try:
            moment = catalog.moment(number)
        except UnknownName:
            continue  # deleted since
        except Corrupt as error:
            found.append(Checkpoint(number, 0, 0, 0, -1, str(error)))
            continue
        tally = tally or _Tally(catalog)
        tally.advance(moment)
        found.append(Checkpoint(number, moment.at_us, len(tally.held), tally.size, moment.horizon, tally.damage))
    return found


class _Tally:
    """Counts keys and bytes, from checkpoint to checkpoint. An unreadable index damages all later checkpoints."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog, self._left = catalog, catalog.increments()
        self._base: Base | None = None
        self._is_begun = False
        self.held: dict[str, IndexEntry] = {}
        self.size, self.damage = 0, ""

    def advance(self, moment: Moment) -> None:
        try:
            if not self._is_begun:
                self._is_begun = True
                self._base = self._catalog.sources(moment).base
                self._count(self._catalog.pieces(Sources(self._base, [])))
            new = [saved for saved in self._left if has(moment.upto, *saved)]
            self._left = [saved for saved in self._left if not has(moment.upto, *saved)]
            self._count(self._catalog.pieces(Sources(None, [one for one in new if _is_between(one, self._base, None)])))
        except Gone:
            raise
        except Corrupt as error:
            self.damage = self.damage or str(error)

    def _count(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            for entry in piece.entries:
                known = self.held.get(entry.key)
                if entry.is_newer(known):
                    self.held[entry.key] = entry
                    self.size += entry.size - (known.size if known else 0)


def merged(one: Reach, other: Iterable[IncrementId]) -> Reach:
    """A reach that covers another one and these increments."""
    reach = {instance: dict(parts) for instance, parts in one.items()}
    for instance, part, number in other:
        parts = reach.setdefault(instance, {})
        parts[part] = max(number, parts.get(part, -1))
    return reach


def _opened(name: str, blob: bytes | None, type: type[S]) -> S:
    if blob is None:
        raise Gone(f"{name} is missing")
    return opened(name, blob, type)


def _is_between(saved: IncrementId, base: Base | None, upto: Moment | None) -> bool:
    if base is not None and has(base.upto, *saved):
        return False
    return upto is None or has(upto.upto, *saved)
