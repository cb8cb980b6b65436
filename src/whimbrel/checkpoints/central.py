"""The central store: versions of keys, which every site can read after another one is lost.

    part ── increments ──▶ uploader ──▶ segments, then a manifest ──▶ checkpoint ──▶ compaction ──▶ base
                                                                   │
                             load: newest version of each key, or as of a checkpoint

Every object is immutable and identified by its name. An increment exists as soon as its manifest is written, a base as
soon as its index is; so a crash at any point leaves a readable store, and all writes are idempotent. Each instance has
one writer, each stage one component that makes checkpoints and compacts; there may be any number of readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from whimbrel.checkpoints import names
from whimbrel.checkpoints.catalog import Catalog, Gone, Newest, listed, merged
from whimbrel.checkpoints.compaction import Sizes, compact
from whimbrel.checkpoints.names import IncrementId
from whimbrel.checkpoints.place import Objects, Place
from whimbrel.checkpoints.version import (
    Checkpoint,
    Increment,
    Manifest,
    Moment,
    Owner,
    Retention,
    Segment,
    cut,
    has,
    opened,
)
from whimbrel.core import wire
from whimbrel.core.errors import Conflict, Unavailable
from whimbrel.core.increments import IndexEntry, Version
from whimbrel.core.keys import EVERYTHING, Selection

ATTEMPTS = 5
"""How often a reader starts again because a compaction deletes what it reads."""


class CentralStore:
    """The increments of all stages at one address: a directory, `s3://...` or `memory://...`."""

    def __init__(self, where: str | Objects) -> None:
        self.objects: Objects = Place(where) if isinstance(where, str) else where
        self._sizes: dict[str, Sizes] = {}

    # ── Increments ──────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, stage: str, increment: Increment) -> None:
        """Store an increment. Idempotent; a different one with the same number is a `Conflict`."""
        pieces = list(cut(increment.versions))
        for number, versions in enumerate(pieces):
            self.put(stage, increment, number, msgspec.Raw(wire.encode(versions)))
        self.commit(stage, increment, [[IndexEntry.of(version) for version in versions] for versions in pieces])

    def put(self, stage: str, increment: Increment, piece: int, versions: msgspec.Raw) -> None:
        """Store one piece of an increment, which does not exist until it is committed with all its pieces."""
        saved = IncrementId(increment.instance, increment.part, increment.number)
        if self.objects.get(names.manifest(stage, saved)) is None:
            name = names.segment(stage, saved, piece)
            self.objects.put(name, wire.pack(Segment(name, versions)))

    def commit(self, stage: str, increment: Increment, segments: list[list[IndexEntry]]) -> None:
        """Write the manifest of an increment whose pieces are all stored; `increment.versions` is ignored."""
        saved = IncrementId(increment.instance, increment.part, increment.number)
        name = names.manifest(stage, saved)
        blob = wire.pack(Manifest(*saved, increment.at_us, increment.reached, segments))
        known = self.objects.get(name)
        if known is None:
            self.objects.put(name, blob)
        elif known != blob:
            raise Conflict(
                f"{name} is there already and differs: an instance that starts anew must number its increments "
                "above the last one in the store"
            )

    def owner(self, stage: str) -> Owner | None:
        """The owner of a stage's states; None: there is none, or it was deleted."""
        blob = self.objects.get(names.owner(stage))
        return None if blob is None else opened(names.owner(stage), blob, Owner)

    def check_there(self, stage: str) -> None:
        """Raise `Unavailable` if a stage that was claimed has no owner: the store is unavailable."""
        if self.owner(stage) is None:
            raise Unavailable(
                f"the store has no objects of {stage}, not even its owner: it is unavailable or not mounted. To save "
                "everything again to an empty store, restart the gateway"
            )

    def claim(self, stage: str, owner: Owner) -> None:
        """Set the owner of a stage's states."""
        self.objects.put(names.owner(stage), wire.pack(owner))

    def last(self, stage: str, instance: str) -> int:
        """The highest number of an instance's increments, -1 if it has none."""
        catalog = Catalog(self.objects, stage)
        reach = merged(catalog.reach(), catalog.increments())
        return max(reach.get(instance, {}).values(), default=-1)

    # ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────

    def checkpoint(self, stage: str, parts: Mapping[str, int], at_us: int, at_most: int | None = None) -> int | None:
        """Make a checkpoint, if each part of these instances has saved since the last one; return its number.

        `parts`: every instance that owns keys, with its number of parts. They determine the horizon of the stage, which
        is limited to `at_most` because keys may be in transit between them. Increments of other instances, however old,
        belong to the checkpoint as well; so do those of the last checkpoint, and it covers no less than that: an
        instance that still receives keys has reached nothing, and the log may be trimmed by then.
        """
        catalog = Catalog(self.objects, stage)
        increments, before = catalog.increments(), catalog.reach()
        upto = merged({}, increments)
        needed = [(instance, part) for instance, count in parts.items() for part in range(count)]
        last = [IncrementId(instance, part, upto.get(instance, {}).get(part, -1)) for instance, part in needed]
        if not last or any(one.number < 0 or has(before, *one) for one in last):
            return None
        number = max([*catalog.moments(), *catalog.bases()], default=0) + 1
        horizon = min(manifest.reached for _, manifest in catalog.manifests(last))
        horizon = horizon if at_most is None else min(horizon, at_most)
        horizon = max(horizon, self.horizon(stage))
        moment = Moment(number, at_us, horizon, merged(before, increments))
        self.objects.put(names.moment(stage, number), wire.pack(moment))
        return number

    def newest(self, stage: str) -> Moment | None:
        """The newest checkpoint that can be read."""
        return Catalog(self.objects, stage).newest()

    def checkpoints(self, stage: str) -> list[Checkpoint]:
        """All checkpoints, oldest first; those that cannot be loaded with their damage."""
        catalog = Catalog(self.objects, stage)
        for _ in range(ATTEMPTS):
            try:
                return listed(catalog)
            except Gone as gone:
                missing = gone
        raise missing

    def horizon(self, stage: str, at: int | None = None) -> int:
        """The `seq` up to which a checkpoint, by default the newest, covers all records. -1: none is covered."""
        catalog = Catalog(self.objects, stage)
        moment = catalog.newest() if at is None else catalog.moment(at)
        return moment.horizon if moment else -1

    def kept(self, stage: str) -> int:
        """The `seq` up to which *every* retained checkpoint covers all records: later records are still needed."""
        return min((moment.horizon for moment in Catalog(self.objects, stage).readable()), default=-1)

    # ── Versions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, stage: str, selection: Selection = EVERYTHING, at: int | None = None) -> Iterator[Version]:
        """The newest version of each selected key that has one, or the newest as of a checkpoint, in no order.

        Damaged versions of a base are read from the previous base and the increments since. Raises `Corrupt` or
        `NewerFormat` after all readable versions, with the unreadable keys: continue with an older checkpoint.
        """
        catalog = Catalog(self.objects, stage)
        newest = Newest(catalog, selection, None if at is None else catalog.moment(at))
        for _ in range(ATTEMPTS):
            try:
                yield from newest
                newest.check()
            except Gone as gone:
                missing = gone
            else:
                return
        raise missing

    # ── Compaction and deletion ──────────────────────────────────────────────────────────────────────────────────

    def compact(self, stage: str, retention: Retention, now_us: int, slack: float = 1.0) -> None:
        """Delete checkpoints that are not to be retained, and compact what only they needed (compaction.py)."""
        compact(Catalog(self.objects, stage), self._sizes.setdefault(stage, {}), retention, now_us, slack)

    def stages(self) -> list[str]:
        """The stages that have objects here."""
        return sorted({name.partition("/")[0] for name in self.objects.names("")})

    def delete(self, stage: str) -> None:
        """Delete all objects of a stage: checkpoints and indexes first, so that no part of it can be loaded."""
        for kind in ("checkpoints", "bases", "manifests", "base-segments", "segments"):
            self.objects.delete(Catalog(self.objects, stage).names(kind))
        self.objects.delete([names.owner(stage)])
