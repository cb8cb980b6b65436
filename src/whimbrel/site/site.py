"""A site: one place with Spark. Starts, stops and takes over instances; each has its checkpoint in the site's folder.

    <folder>/<instance>/      the checkpoint of an instance that runs, or ran, here

The site obeys; what is to run where is decided by the orchestrator. Whatever runs here and dies is started again here,
though: that takes no decision, and must not wait for anybody. While its disk is full the site stands still: no query
begins a batch, and one that the full disk has ended is tried again until there is room.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from whimbrel.core.errors import Full, Refused, Retry, Unavailable
from whimbrel.log.disk import SIGNS, Disk, is_full, pauses
from whimbrel.log.private import below
from whimbrel.site.links import Links
from whimbrel.site.status import InstanceStatus, SiteStatus, told
from whimbrel.spark.query import StageQuery

Make = Callable[[str, Path], StageQuery]
"""Makes the query of an instance over a checkpoint."""

PERIOD = 0.2
RESTARTS = 3
PATIENCE = 300.0
"""An instance whose query dies more than so often within so many seconds is left alone."""
CALM = 60.0
"""Seconds after which a query that was started on a disk with room is believed, though it had no batch to do."""


@dataclass
class Tries:
    """An instance that a full disk has ended: why, when it is tried again, and when it was last started."""

    why: str
    due: float | None = None
    begun: float = 0.0
    waits: Iterator[float] = field(default_factory=pauses)


class Site:
    """One place."""

    def __init__(self, name: str, folder: Path, make: Make, links: Links, disk: Disk | None = None) -> None:
        self.name, self.folder, self._make, self.links = name, folder, make, links
        self._disk = disk or Disk(name, [folder])
        self._low: str | None = None
        """Why nothing is taken in at the moment."""
        self._tries: dict[str, Tries] = {}
        self.queries: dict[str, StageQuery] = {}
        self.places: Mapping[str, str] = {}
        """By instance, where it runs, as the orchestrator last said."""
        self.error: Exception | None = None
        self._failed: dict[str, str] = {}
        self._deaths: dict[str, list[float]] = {}
        self._awaited: set[str] = set()
        self._past: list[float] = []
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_all, name=f"site-{name}", daemon=True)

    def open(self) -> None:
        """Begin to start again what dies."""
        self._watch.start()

    def close(self) -> None:
        """Let nothing be started again."""
        self._closing.set()
        if self._watch.is_alive():
            self._watch.join()

    def checkpoint(self, instance: str) -> Path:
        """Where the checkpoint of an instance lies."""
        return below(self.folder, instance)

    # ── Instances ────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, instance: str, wait: bool = True) -> None:
        """Run an instance, from its checkpoint if it has one here; returns when it serves, unless told not to wait.

        Nothing happens if it runs. What cannot be started raises `Unavailable`, and nothing has run; what ran and then
        stopped raises `Retry`: its checkpoint has moved on, here and nowhere else.
        """
        begun = self._batches_begun(instance)
        with self._changing:
            if instance in self.queries and self.queries[instance].is_active:
                return
            self._failed.pop(instance, None)
            self._deaths.pop(instance, None)
            if wait:
                self._awaited.add(instance)
            self._run(instance)
        if wait:
            try:
                self._await(instance)
            except Unavailable as error:
                if self._batches_begun(instance) == begun:
                    raise
                raise Retry(f"{instance} began to run at {self.name} and stopped: {error}") from error
            finally:
                self._awaited.discard(instance)

    def _run(self, instance: str) -> None:
        low = self._disk.full
        if low is not None:
            raise Full(low)
        self.links.look(instance)
        query = self._make(instance, self.checkpoint(instance))
        query.start()
        self.queries[instance] = query

    def wait(self) -> None:
        """Until everything that was started here serves."""
        for instance in list(self.queries):
            self._await(instance)

    def _await(self, instance: str) -> None:
        try:
            self.queries[instance].wait()
        except Unavailable:
            self.stop(instance)
            raise

    def _batches_begun(self, instance: str) -> int:
        """The number of the last batch that Spark has planned from the checkpoint here."""
        offsets = self.checkpoint(instance) / "offsets"
        return max((int(file.name) for file in offsets.glob("[0-9]*") if file.name.isdigit()), default=-1)

    def stop(self, instance: str) -> None:
        """Stop an instance and wait for its end. Nothing happens if it does not run."""
        with self._changing:
            query = self.queries.pop(instance, None)
            self._failed.pop(instance, None)
            self._tries.pop(instance, None)
        if query is not None:
            query.stop()
            self._past += query.progress

    def take(self, instance: str, origin: str) -> int:
        """Copy the checkpoint of a stopped instance from another site; return its size. May be repeated."""
        there = below(self.folder.parent, origin, instance)
        here, whole = self.checkpoint(instance), below(self.folder, f"{instance}.partial")
        if there == here:
            raise Refused(f"the checkpoint of {instance} lies at {self.name} already; name the site it comes from")
        for leftover in (whole, here):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            # A query that has just ended may still be removing temporary files.
            shutil.copytree(there, whole, ignore=shutil.ignore_patterns("*.tmp", ".*.tmp"))
            whole.rename(here)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(whole, ignore_errors=True)  # a full disk needs the room
            raise Unavailable(f"the checkpoint of {instance} cannot be copied to {self.name}: {error}") from error
        return sum(file.stat().st_size for file in here.rglob("*") if file.is_file())

    def place(self, places: dict[str, str]) -> None:
        """Hear which instance runs at which site."""
        self.places = places

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        """Append posts to an instance's inbox, behind all that an instance here has posted to it."""
        self.links.post(source, destination, blob, count, writer, counter)

    def carry(self, to: str, size: int) -> float:
        """How many seconds a checkpoint of so many bytes takes from here to another site."""
        return self.links.carry(self.name, to, size)

    def cut(self, other: str, is_cut: bool = True) -> None:
        """Let nothing through between here and another site, until the link is mended (`is_cut=False`)."""
        self.links.cut(self.name, other, is_cut=is_cut)

    def is_idle(self) -> bool:
        """Whether nothing is under way on the links that begin here."""
        return self.links.is_idle(self.name)

    # ── Watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch_all(self) -> None:
        while not self._closing.wait(PERIOD):
            try:
                self._look_at_disk()
                for instance in list(self.queries):
                    self._check(instance)
            except Exception as error:  # whatever it is, it must be told, and the watch goes on
                self.error = error

    def _look_at_disk(self) -> None:
        """Let nothing begin a batch while there is too little room, and everything when there is enough."""
        low = self._disk.full
        with self._changing:
            for query in self.queries.values() if (low is None) != (self._low is None) else ():
                query.hold(low is not None)
            self._low = low

    def _check(self, instance: str) -> None:
        """A query that died is started again from its checkpoint; one that keeps dying is left, and said so."""
        with self._changing:
            query = self.queries.get(instance)
            if query is None or instance in self._awaited or instance in self._failed:
                return
            if query.is_active or query.exception is None:
                self._forgive(instance, query)
                return
            if is_full(query.exception):
                self._try_again(instance, query.exception)
                return
            if self._low is not None:
                return
            now = time.monotonic()
            deaths = [moment for moment in self._deaths.get(instance, ()) if now - moment < PATIENCE]
            self._deaths[instance] = [*deaths, now]
            if len(deaths) < RESTARTS:
                with suppress(Full):  # just now: it waits
                    self._run(instance)
            else:
                self._failed[instance] = f"{instance} at {self.name} keeps failing: {told(query.exception)}"

    def _try_again(self, instance: str, error: Exception) -> None:
        """A full disk has ended a query: nothing is wrong with it, so it is started as often as it takes."""
        now = time.monotonic()
        tries = self._tries.setdefault(instance, Tries(_gist(error)))
        if tries.due is None:
            tries.due = now + next(tries.waits)
        elif now >= tries.due and self._low is None:
            tries.due, tries.begun = None, now
            try:
                self._run(instance)
            except Exception as again:
                if not is_full(again):
                    raise
                tries.why = _gist(again)

    def _forgive(self, instance: str, query: StageQuery) -> None:
        """There was room for a batch: the next time that the disk is full is the first one."""
        tries = self._tries.get(instance)
        if tries is not None and (query.progress or time.monotonic() - tries.begun > CALM):
            del self._tries[instance]

    def failed(self) -> dict[str, str]:
        """Instances that keep dying and were left alone, with the reason."""
        return dict(self._failed)

    def status(self) -> SiteStatus:
        """How things are here."""
        return SiteStatus(
            instances={name: _status(query) for name, query in list(self.queries.items())},
            links=self.links.status(self.name),
            failed=self.failed(),
            error=told(self.error or self.links.error),
            disk=self._low or next((self._disk.told(tries.why) for tries in list(self._tries.values())), None),
        )

    def batches(self) -> list[float]:
        """How long the micro-batches here took, in milliseconds, as far as Spark remembers."""
        return self._past + [ms for query in list(self.queries.values()) for ms in query.progress]


def _gist(error: Exception) -> str:
    """The line of an error that speaks of the disk."""
    lines = [line.strip() for line in str(error).splitlines() if any(sign in line for sign in SIGNS)]
    return min(lines, key=len, default=type(error).__name__)[:200]


def _status(query: StageQuery) -> InstanceStatus:
    return InstanceStatus(
        running=query.is_active,
        batch_ms=query.batch_ms,
        trigger_ms=query.trigger_ms,
        backlog=query.backlog,
        max_records=query.spec.max_records,
        error=told(query.exception),
    )
