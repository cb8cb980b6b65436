"""A site: one place with Spark. Starts, stops and takes over instances; each has its checkpoint in the site's folder.

    <folder>/<instance>/      the checkpoint of an instance that runs, or ran, here

The site obeys; what is to run where is decided by the orchestrator. Whatever runs here and dies is started again here,
though: that takes no decision, and must not wait for anybody. One that keeps dying is reported, and tried again after
pauses that grow. While its disk is full the site stands still: no query begins a batch, and one that the full disk has
ended is tried again until there is room.

An instance whose checkpoint does not fit its logs (spark/checkpoint.py), or whose batch differs from what it said the
first time, is not started again: that would lose or double records. It is reported as stale until it is ordered to
begin anew, or its keys are restored elsewhere.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whimbrel.core.errors import Diverged, Full, Refused, Retry, Stale, Stop, Unavailable, Unstarted
from whimbrel.log.backoff import Backoff
from whimbrel.log.disk import SIGNS, Disk, is_full
from whimbrel.log.durability import sync, sync_tree
from whimbrel.log.kept import kept
from whimbrel.log.private import below
from whimbrel.site.links import Links
from whimbrel.site.status import InstanceStatus, SiteStatus, told
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.query import StageQuery

Make = Callable[[str, Path], StageQuery]
"""Makes the query of an instance over a checkpoint."""

LOGGER = logging.getLogger("whimbrel.site")
PERIOD = 0.2
RESTARTS = 3
PATIENCE = 300.0
"""An instance whose query dies more than so often within so many seconds is reported, and tried again less often."""
LONGEST = 4.0
"""Seconds until it is tried again, at most."""
AT_START = 3
"""How often a start is tried that fails as it does on an overloaded machine."""
OVERLOADED = ("failed to connect back", "exited unexpectedly")
"""What Spark says of a Python worker then."""
COPIED = "copied.json"
"""In a checkpoint that was copied here: up to which batch it went then."""
PAST = 10_000
"""How many batch times of queries that have ended are remembered."""
CALM = 60.0
"""Seconds after which a query that was started on a disk with room is believed, though it had no batch to do."""


@dataclass
class Tries:
    """An instance that is tried again: its back-off, why, whether it was started since it last failed, and when."""

    backoff: Backoff
    why: str
    runs: bool = True
    begun: float = 0.0


class Site:
    """One place."""

    def __init__(
        self, name: str, folder: Path, make: Make, links: Links, disk: Disk | None = None, durable: bool = False
    ) -> None:
        """`durable`: a checkpoint that was copied survives a power failure."""
        self.name, self.folder, self._make, self.links, self._durable = name, folder, make, links, durable
        self._disk = disk or Disk(name, [folder])
        self._low: str | None = None
        """Why nothing is taken in at the moment."""
        self._tries: dict[str, Tries] = {}
        self.queries: dict[str, StageQuery] = {}
        self.places: Mapping[str, str] = {}
        """By instance, where it runs, as the orchestrator last said."""
        self.error: Exception | None = None
        self._failed: dict[str, str] = {}
        self._stale: dict[str, str] = {}
        self._logged: dict[str, Exception] = {}
        """By instance: why it is stale, as it was last logged; an order to start it may be repeated."""
        self._copying: dict[str, threading.Lock] = {}
        self._deaths: dict[str, list[float]] = {}
        self._awaited: set[str] = set()
        self._past: deque[float] = deque(maxlen=PAST)
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

    def start(self, instance: str, wait: bool = True, anew: bool = False) -> None:
        """Run an instance, from its checkpoint if it has one here; returns when it serves, unless told not to wait.

        Nothing happens if it runs. What does not start raises `Unstarted` if it has done no batch since its checkpoint
        was copied here, in this life of the site or an earlier one; else `Retry`: its checkpoint has moved on, here
        and nowhere else. `anew`: from an empty checkpoint, without the state of its keys, if it does not run.
        """
        begun = self._begun(instance)
        try:
            with self._changing:
                if instance in self.queries and self.queries[instance].is_active:
                    return
                for noted in (self._failed, self._stale, self._deaths, self._tries):
                    noted.pop(instance, None)
                if wait:
                    self._awaited.add(instance)
                self._run(instance, anew)
            if wait:
                self._await(instance)
        except Unavailable as error:
            if self._batches_begun(instance) > begun:
                raise Retry(f"{instance} began to run at {self.name} and stopped: {error}") from error
            raise Unstarted(f"{instance} does not start at {self.name}: {error}") from error
        except Stale as error:
            self._set_stale(instance, error)
            raise
        finally:
            self._awaited.discard(instance)

    def _run(self, instance: str, anew: bool = False) -> None:
        low = self._disk.full
        if low is not None:
            raise Full(low)
        self.links.look(instance)
        if instance in self.queries:  # one that died: its last word to the checkpoint must not come after the new one's
            self.queries[instance].stop()
        query = self._make(instance, self.checkpoint(instance))
        if anew:
            query.renew()
        query.start()
        self.queries[instance] = query

    def wait(self) -> None:
        """Until everything that was started here serves."""
        for instance in list(self.queries):
            self._await(instance)

    def _await(self, instance: str) -> None:
        for left in reversed(range(AT_START)):
            try:
                self.queries[instance].wait()
                return
            except Unavailable as error:
                self.stop(instance)
                if not left or self._closing.is_set() or not any(sign in str(error) for sign in OVERLOADED):
                    raise
                with self._changing:
                    self._run(instance)

    def _batches_begun(self, instance: str) -> int:
        """The number of the last batch that Spark has planned from the checkpoint here."""
        return Checkpoint(self.checkpoint(instance)).planned

    def _begun(self, instance: str) -> int:
        """The last batch that was planned before the instance came here, or before now if it was not copied."""
        try:
            copied = json.loads((self.checkpoint(instance) / COPIED).read_text(encoding="utf-8"))
            return int(copied["batch"])
        except (OSError, ValueError, KeyError, TypeError):
            return self._batches_begun(instance)

    def stop(self, instance: str) -> None:
        """Stop an instance and wait for its end. Nothing happens if it does not run."""
        with self._changing:
            query = self.queries.pop(instance, None)
            for noted in (self._failed, self._stale, self._tries, self._logged):
                noted.pop(instance, None)
        if query is not None:
            query.stop()
            self._past += query.progress

    def take(self, instance: str, origin: str) -> int:
        """Copy the checkpoint of a stopped instance from another site; return its size. May be repeated."""
        there = below(self.folder.parent, origin, instance)
        if there == self.checkpoint(instance):
            raise Refused(f"the checkpoint of {instance} lies at {self.name} already; name the site it comes from")
        # One at a time: an order that is repeated finds the first copy under way, whoever has given up waiting for it.
        with self._changing:
            copying = self._copying.setdefault(instance, threading.Lock())
        with copying:
            return self._copy(instance, there)

    def _copy(self, instance: str, there: Path) -> int:
        here, whole = self.checkpoint(instance), below(self.folder, f"{instance}.partial")
        for leftover in (whole, here):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            shutil.copytree(there, whole, ignore=Checkpoint(there).needless)
            batch = Checkpoint(whole).planned
            (whole / COPIED).write_text(json.dumps({"batch": batch}), encoding="utf-8")
            if self._durable:
                sync_tree(whole)
            whole.rename(here)
            if self._durable:
                sync(here.parent)
        except (OSError, shutil.Error) as error:
            shutil.rmtree(whole, ignore_errors=True)  # a full disk needs the room
            raise Unavailable(f"the checkpoint of {instance} cannot be copied to {self.name}: {error}") from error
        return sum(file.stat().st_size for file in here.rglob("*") if file.is_file())

    def place(self, places: dict[str, str]) -> None:
        """Hear which instance runs at which site."""
        self.places = places

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        """Append messages to an instance's inbox, behind all that an instance here has sent to it."""
        self.links.send(source, destination, blob, count, writer, counter)

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
                self.error = kept(LOGGER, f"the watch of site {self.name}", error, self.error)

    def _look_at_disk(self) -> None:
        """Let nothing begin a batch while there is too little room, and everything when there is enough."""
        low = self._disk.full
        with self._changing:
            for query in self.queries.values() if (low is None) != (self._low is None) else ():
                query.hold(low is not None)
            self._low = low

    def _check(self, instance: str) -> None:
        """A query that died is started again from its checkpoint; one that keeps dying is reported, and tried again
        after a while; one that is not where it was is left alone."""
        with self._changing:
            query = self.queries.get(instance)
            if query is None or instance in self._awaited or instance in self._stale:
                return
            if query.is_active or query.exception is None:
                self._forgive(instance, query)
                return
            contradiction = _contradiction(query.exception)
            if contradiction is not None:
                self._set_stale(instance, Stale(contradiction))
                return
            if instance in self._tries or is_full(query.exception):
                self._try_again(instance, query.exception)
                return
            if self._low is not None:
                return
            now = time.monotonic()
            deaths = [moment for moment in self._deaths.get(instance, ()) if now - moment < PATIENCE]
            self._deaths[instance] = [*deaths, now]
            if len(deaths) < RESTARTS:
                LOGGER.warning(
                    "the query of %s at %s has died and is started again: %s",
                    instance,
                    self.name,
                    told(query.exception),
                    exc_info=query.exception,
                )
                with suppress(Full):  # just now: it waits
                    self._run(instance)
            else:
                self._failed[instance] = f"{instance} at {self.name} keeps failing: {told(query.exception)}"
                self._try_again(instance, query.exception)

    def _try_again(self, instance: str, error: Exception) -> None:
        """Start a query after a pause, as often as it takes: there may be room on the disk then, or less to do."""
        now = time.monotonic()
        tries = self._tries.get(instance)
        if tries is None:
            backoff = Backoff(f"the query of {instance} at {self.name}", LOGGER, most=LONGEST)
            tries = self._tries[instance] = Tries(backoff, _gist(error))
        if tries.runs:
            tries.runs = False
            tries.backoff.failed(error)
        elif tries.backoff.is_due and self._low is None:
            tries.runs, tries.begun = True, now
            try:
                self._run(instance)
            except Retry as again:
                tries.why = _gist(again)
            except Stop as stop:
                self._set_stale(instance, stop)

    def _set_stale(self, instance: str, error: Exception) -> None:
        """Report an instance that is not started again by itself."""
        before = self._logged.get(instance)
        self._logged[instance] = kept(LOGGER, f"{instance} at {self.name} is not started by itself", error, before)
        self._stale[instance] = str(error)

    def _forgive(self, instance: str, query: StageQuery) -> None:
        """There was room for a batch: the next time that the disk is full is the first one."""
        tries = self._tries.get(instance)
        if tries is not None and (query.progress or time.monotonic() - tries.begun > CALM):
            tries.backoff.succeeded()
            del self._tries[instance]
            self._failed.pop(instance, None)

    def failed(self) -> dict[str, str]:
        """Instances that keep dying, or that must not be started again, with the reason."""
        return {**self._failed, **self._stale}

    @property
    def stale(self) -> list[str]:
        """Instances whose checkpoint and logs do not fit."""
        return sorted(self._stale)

    def status(self) -> SiteStatus:
        """How things are here."""
        return SiteStatus(
            instances={name: _status(query) for name, query in list(self.queries.items())},
            links=self.links.status(self.name),
            failed=self.failed(),
            stale=self.stale,
            error=told(self.error or self.links.error),
            disk=self._low or next(map(self._disk.told, self._full()), None),
        )

    def _full(self) -> list[str]:
        """What the instances say that a full disk has ended."""
        return [tries.why for name, tries in list(self._tries.items()) if name not in self._failed]

    def batches(self) -> list[float]:
        """How long the micro-batches here took, in milliseconds, as far as Spark remembers."""
        return [*self._past, *(ms for query in list(self.queries.values()) for ms in query.progress)]


def _gist(error: Exception) -> str:
    """The line of an error that speaks of the disk."""
    lines = [line.strip() for line in str(error).splitlines() if any(sign in line for sign in SIGNS)]
    return min(lines, key=len, default=type(error).__name__)[:200]


def _contradiction(error: Exception) -> str | None:
    """What a query died of, if another start would only do it again: it is not where its logs are."""
    found = re.search(rf"errors\.(?:{Diverged.__name__}|{Stale.__name__}): (.+)", str(error))
    return found[1] if found else None


def _status(query: StageQuery) -> InstanceStatus:
    return InstanceStatus(
        running=query.is_active,
        batch_ms=query.batch_ms,
        trigger_ms=query.trigger_ms,
        backlog=query.backlog,
        max_records=query.spec.max_records,
        error=told(query.exception),
    )
