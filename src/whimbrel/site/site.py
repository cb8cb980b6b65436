"""A site: one place with Spark. It starts, stops and takes over instances; their checkpoints are in the site's folder.

    <folder>/<instance>/      the checkpoint of an instance that runs, or ran, here

The orchestrator decides what runs where; the site carries it out. But the site itself restarts a query that dies here:
that needs no decision, and must not wait for another process. It reports a query that keeps dying, and retries it with
growing pauses. While its disk is full the site pauses: no query begins a batch, and one that the full disk has ended is
retried until there is space.

An instance whose checkpoint does not match its logs (spark/checkpoint.py), or whose replayed batch has another output
than the first time, is not restarted: that would lose or duplicate records. The site reports it as stale until it is
ordered to start anew, or its keys are restored elsewhere.
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
from whimbrel.site.status import InstanceStatus, SiteStatus, described
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.query import StageQuery

Make = Callable[[str, Path], StageQuery]
"""Creates the query of an instance with a checkpoint."""

LOGGER = logging.getLogger("whimbrel.site")
PERIOD = 0.2
RESTARTS = 3
WINDOW = 300.0
"""An instance whose query dies more than `RESTARTS` times in `WINDOW` seconds is reported, and retried less often."""
LONGEST = 4.0
"""Maximum seconds until it is retried."""
AT_START = 3
"""Tries of a start that fails as is typical of an overloaded machine."""
OVERLOADED = ("failed to connect back", "exited unexpectedly")
"""Parts of Spark's messages about a Python worker in that case."""
COPIED = "copied.json"
"""A file in a checkpoint that was copied here: the last batch planned before the copy."""
PAST = 10_000
"""Maximum number of batch times of ended queries that are stored."""
CALM = 60.0
"""Seconds after which a query restarted on a disk with space counts as recovered, even if it had no batch to run."""


@dataclass
class Tries:
    """An instance that is retried: its back-off, the reason, whether it was started since it last failed, and when."""

    backoff: Backoff
    why: str
    runs: bool = True
    begun: float = 0.0


class Site:
    """One site."""

    def __init__(
        self, name: str, folder: Path, make: Make, links: Links, disk: Disk | None = None, durable: bool = False
    ) -> None:
        """`durable`: copied checkpoints survive a power failure."""
        self.name, self.folder, self._make, self.links, self._durable = name, folder, make, links, durable
        self._disk = disk or Disk(name, [folder])
        self._low: str | None = None
        """Why no query may begin a batch at the moment, if the disk is full."""
        self._tries: dict[str, Tries] = {}
        self.queries: dict[str, StageQuery] = {}
        self.places: Mapping[str, str] = {}
        """By instance: the site where it runs, as last sent by the orchestrator."""
        self.error: Exception | None = None
        self._failed: dict[str, str] = {}
        self._stale: dict[str, str] = {}
        self._logged: dict[str, Exception] = {}
        """By instance: why it is stale, as last logged; a command to start it may be repeated."""
        self._copying: dict[str, threading.Lock] = {}
        self._deaths: dict[str, list[float]] = {}
        self._awaited: set[str] = set()
        self._past: deque[float] = deque(maxlen=PAST)
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_all, name=f"site-{name}", daemon=True)

    def open(self) -> None:
        """Start the thread that restarts dead queries."""
        self._watch.start()

    def close(self) -> None:
        """Stop restarting queries."""
        self._closing.set()
        if self._watch.is_alive():
            self._watch.join()

    def checkpoint(self, instance: str) -> Path:
        """The folder of an instance's checkpoint."""
        return below(self.folder, instance)

    # ── Instances ────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, instance: str, wait: bool = True, anew: bool = False) -> None:
        """Run an instance, from its checkpoint if it has one here; returns when it serves, or at once without `wait`.

        Does nothing if the instance runs. If it does not start, raises `Unstarted` if it has run no batch since its
        checkpoint was copied here, in this process or an earlier one; otherwise `Retry`: its checkpoint has advanced,
        and only here. `anew`: from an empty checkpoint, without the state of its keys, if it does not run.
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
        if instance in self.queries:  # a dead one: its last write to the checkpoint must not follow the new one's
            self.queries[instance].stop()
        query = self._make(instance, self.checkpoint(instance))
        if anew:
            query.renew()
        query.start()
        self.queries[instance] = query

    def wait(self) -> None:
        """Wait until everything that was started here serves."""
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
        """Stop an instance and wait for its end. Does nothing if it does not run."""
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
            raise Refused(f"the checkpoint of {instance} is at {self.name} already; name another site to copy it from")
        # One at a time: a repeated command may find the first copy in progress, if its caller has stopped waiting.
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
            shutil.rmtree(whole, ignore_errors=True)  # a full disk needs the space
            raise Unavailable(f"the checkpoint of {instance} cannot be copied to {self.name}: {error}") from error
        return sum(file.stat().st_size for file in here.rglob("*") if file.is_file())

    def place(self, places: dict[str, str]) -> None:
        """Set which instance runs at which site."""
        self.places = places

    # ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        """Append messages to an instance's inbox, after all that `source`, an instance here, has sent to it."""
        self.links.send(source, destination, blob, count, writer, counter)

    def carry(self, to: str, size: int) -> float:
        """The seconds that a checkpoint of `size` bytes takes from here to another site."""
        return self.links.carry(self.name, to, size)

    def cut(self, other: str, is_cut: bool = True) -> None:
        """Cut the link between here and another site, until it is mended (`is_cut=False`)."""
        self.links.cut(self.name, other, is_cut=is_cut)

    def is_idle(self) -> bool:
        """Whether nothing is in transit on the links that begin here."""
        return self.links.is_idle(self.name)

    # ── Watching ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _watch_all(self) -> None:
        while not self._closing.wait(PERIOD):
            try:
                self._look_at_disk()
                for instance in list(self.queries):
                    self._check(instance)
            except Exception as error:  # any error is reported, and the watch continues
                self.error = kept(LOGGER, f"the watch of site {self.name}", error, self.error)

    def _look_at_disk(self) -> None:
        """Hold all queries before their next batch while there is too little space; then release them."""
        low = self._disk.full
        with self._changing:
            for query in self.queries.values() if (low is None) != (self._low is None) else ():
                query.hold(low is not None)
            self._low = low

    def _check(self, instance: str) -> None:
        """Restart a query that died, from its checkpoint; report one that keeps dying, and retry it after a pause; do
        not restart one whose checkpoint does not match its logs."""
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
            deaths = [moment for moment in self._deaths.get(instance, ()) if now - moment < WINDOW]
            self._deaths[instance] = [*deaths, now]
            if len(deaths) < RESTARTS:
                LOGGER.warning(
                    "the query of %s at %s has died and is restarted: %s",
                    instance,
                    self.name,
                    described(query.exception),
                    exc_info=query.exception,
                )
                with suppress(Full):  # since this moment: it is retried later
                    self._run(instance)
            else:
                self._failed[instance] = f"{instance} at {self.name} keeps failing: {described(query.exception)}"
                self._try_again(instance, query.exception)

    def _try_again(self, instance: str, error: Exception) -> None:
        """Restart a query after a pause, without a limit: the disk may have space then, or the load may be lower."""
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
        """Report an instance that is not restarted automatically."""
        before = self._logged.get(instance)
        self._logged[instance] = kept(
            LOGGER, f"{instance} at {self.name} is not restarted automatically", error, before
        )
        self._stale[instance] = str(error)

    def _forgive(self, instance: str, query: StageQuery) -> None:
        """Reset the back-off of a query that has recovered: its next failure is the first one again."""
        tries = self._tries.get(instance)
        if tries is not None and (query.progress or time.monotonic() - tries.begun > CALM):
            tries.backoff.succeeded()
            del self._tries[instance]
            self._failed.pop(instance, None)

    def failed(self) -> dict[str, str]:
        """Instances that keep dying, or that must not be restarted, with the reason."""
        return {**self._failed, **self._stale}

    @property
    def stale(self) -> list[str]:
        """Instances whose checkpoint does not match their logs."""
        return sorted(self._stale)

    def status(self) -> SiteStatus:
        """The status of the site."""
        return SiteStatus(
            instances={name: _status(query) for name, query in list(self.queries.items())},
            links=self.links.status(self.name),
            failed=self.failed(),
            stale=self.stale,
            error=described(self.error or self.links.error),
            disk=self._low or next(map(self._disk.message, self._full()), None),
        )

    def _full(self) -> list[str]:
        """The errors of the instances that a full disk has ended."""
        return [tries.why for name, tries in list(self._tries.items()) if name not in self._failed]

    def batches(self) -> list[float]:
        """The durations of the micro-batches here, in milliseconds, as far as Spark retains them."""
        return [*self._past, *(ms for query in list(self.queries.values()) for ms in query.progress)]


def _gist(error: Exception) -> str:
    """The line of an error that mentions the disk."""
    lines = [line.strip() for line in str(error).splitlines() if any(sign in line for sign in SIGNS)]
    return min(lines, key=len, default=type(error).__name__)[:200]


def _contradiction(error: Exception) -> str | None:
    """The error of a query, if a restart would only repeat it: its checkpoint does not match its logs."""
    found = re.search(rf"errors\.(?:{Diverged.__name__}|{Stale.__name__}): (.+)", str(error))
    return found[1] if found else None


def _status(query: StageQuery) -> InstanceStatus:
    return InstanceStatus(
        running=query.is_active,
        batch_ms=query.batch_ms,
        trigger_ms=query.trigger_ms,
        backlog=query.backlog,
        max_records=query.spec.max_records,
        error=described(query.exception),
    )
