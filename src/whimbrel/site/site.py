"""A site: a place that runs instances. It starts, stops and takes over their hosts, and keeps their checkpoints.

    <folder>/<instance>/      the checkpoint of an instance that runs, or ran, here

The orchestrator decides what runs where; the site carries it out. But the site itself restarts a host that dies here:
that needs no decision, and must not wait for another process. It reports a host that keeps dying, and retries it with
growing pauses. While its disk is full the site pauses: no host begins a batch, and one that the full disk has ended is
retried until there is space.

An instance whose checkpoint does not match its logs (host/starting.py), or whose repeated batch has another output than
the first time, is not restarted: that would lose or duplicate records. The site reports it as stale until it is ordered
to start anew, or its keys are restored elsewhere.

The site does not know what kind of host it runs (host/contract.py).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whimbrel.core.errors import Full, Overloaded, Refused, Retry, Stale, Stop, Unavailable, Unstarted
from whimbrel.host.contract import Host, Saved
from whimbrel.log.backoff import Backoff
from whimbrel.log.disk import SIGNS, Disk, is_full
from whimbrel.log.durability import sync, sync_tree
from whimbrel.log.kept import kept
from whimbrel.log.private import below
from whimbrel.site.links import Network
from whimbrel.site.status import InstanceStatus, SiteStatus, described

Make = Callable[[str, Path], Host]
"""Creates the host of an instance with a checkpoint."""

LOGGER = logging.getLogger("whimbrel.site")
PERIOD = 0.2
RESTARTS = 3
WINDOW = 300.0
"""An instance whose host dies more than `RESTARTS` times in `WINDOW` seconds is reported, and retried less often."""
LONGEST = 4.0
"""Maximum seconds until it is retried."""
AT_START = 3
"""Tries of a start that fails as is typical of an overloaded machine."""
COPIED = "copied.json"
"""A file in a checkpoint that was copied here: the last batch planned before the copy."""
PAST = 10_000
"""Maximum number of batch times of ended hosts that are stored."""
CALM = 60.0
"""Seconds after which a host restarted on a disk with space counts as recovered, even if it had no batch to run."""
STARTS = 10
"""A host whose start fails this often in a row, though the disk has space, needs a new process."""
CHECKS = 180
"""As does a site whose watch has not looked around between so many checks."""


@dataclass
class Tries:
    """An instance that is retried: its back-off, the reason, whether it was started since it last failed, and when."""

    backoff: Backoff
    why: str
    runs: bool = True
    begun: float = 0.0
    unstarted: int = 0
    """How many of the last starts failed by themselves, for another reason than a full disk."""


class Site:
    """One site."""

    def __init__(
        self,
        name: str,
        folder: Path,
        make: Make,
        saved: Callable[[Path], Saved],
        links: Network,
        disk: Disk | None = None,
        durable: bool = False,
    ) -> None:
        """`saved` reads the checkpoint in a folder. `durable`: copied checkpoints survive a power failure."""
        self.name, self.folder, self._make, self._saved = name, folder, make, saved
        self.links, self._durable = links, durable
        self._disk = disk or Disk(name, [folder])
        self._low: str | None = None
        """Why no host may begin a batch at the moment, if the disk is full."""
        self._tries: dict[str, Tries] = {}
        self.hosts: dict[str, Host] = {}
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
        self._unseen = 0
        """The number of checks since the watch last looked around: time may have stood still for this process."""
        self._changing = threading.RLock()
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._watch_all, name=f"site-{name}", daemon=True)

    def open(self) -> None:
        """Start the thread that restarts dead hosts."""
        self._watch.start()

    def close(self) -> None:
        """Stop restarting hosts."""
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
                if instance in self.hosts and self.hosts[instance].is_active:
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
        if instance in self.hosts:  # a dead one: its last write to the checkpoint must not follow the new one's
            self.hosts[instance].stop()
        host = self._make(instance, self.checkpoint(instance))
        if anew:
            host.renew()
        host.start()
        self.hosts[instance] = host

    def wait(self) -> None:
        """Wait until everything that was started here serves."""
        for instance in list(self.hosts):
            self._await(instance)

    def _await(self, instance: str) -> None:
        for left in reversed(range(AT_START)):
            try:
                self.hosts[instance].wait()
                return
            except Unavailable as error:
                self.stop(instance)
                if not left or self._closing.is_set() or not isinstance(error, Overloaded):
                    raise
                with self._changing:
                    self._run(instance)

    def _batches_begun(self, instance: str) -> int:
        """The number of the last batch that was begun from the checkpoint here."""
        return self._saved(self.checkpoint(instance)).planned

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
            host = self.hosts.pop(instance, None)
            for noted in (self._failed, self._stale, self._tries, self._logged):
                noted.pop(instance, None)
        if host is not None:
            host.stop()
            self._past += host.progress

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
            shutil.copytree(there, whole, ignore=self._saved(there).needless)
            batch = self._saved(whole).planned
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

    def check(self) -> None:
        """Raise `Unavailable` if only a new process can restart a host. To be called once a second."""
        self._unseen += 1
        if self._unseen > CHECKS:
            raise Unavailable(f"the watch of site {self.name} does not return")
        for instance, tries in list(self._tries.items()):
            if tries.unstarted >= STARTS:
                raise Unavailable(f"{instance} at {self.name} could not be started {STARTS} times: {tries.why}")

    def _watch_all(self) -> None:
        while not self._closing.wait(PERIOD):
            self._unseen = 0
            try:
                self._look_at_disk()
                for instance in list(self.hosts):
                    self._check(instance)
            except Exception as error:  # any error is reported, and the watch continues
                self.error = kept(LOGGER, f"the watch of site {self.name}", error, self.error)

    def _look_at_disk(self) -> None:
        """Hold all hosts before their next batch while there is too little space; then release them."""
        low = self._disk.full
        with self._changing:
            for host in self.hosts.values() if (low is None) != (self._low is None) else ():
                host.hold(low is not None)
            self._low = low

    def _check(self, instance: str) -> None:
        """Restart a host that died, from its checkpoint; report one that keeps dying, and retry it after a pause; do
        not restart one whose checkpoint does not match its logs."""
        with self._changing:
            host = self.hosts.get(instance)
            if host is None or instance in self._awaited or instance in self._stale:
                return
            if host.is_active or host.exception is None:
                self._forgive(instance, host)
                return
            contradiction = host.contradiction
            if contradiction is not None:
                self._set_stale(instance, Stale(contradiction))
                return
            if instance in self._tries or is_full(host.exception):
                self._try_again(instance, host.exception)
                return
            if self._low is not None:
                return
            now = time.monotonic()
            deaths = [moment for moment in self._deaths.get(instance, ()) if now - moment < WINDOW]
            self._deaths[instance] = [*deaths, now]
            if len(deaths) < RESTARTS:
                LOGGER.warning(
                    "the host of %s at %s has died and is restarted: %s",
                    instance,
                    self.name,
                    described(host.exception),
                    exc_info=host.exception,
                )
                with suppress(Full):  # since this moment: it is retried later
                    self._run(instance)
            else:
                self._failed[instance] = f"{instance} at {self.name} keeps failing: {described(host.exception)}"
                self._try_again(instance, host.exception)

    def _try_again(self, instance: str, error: Exception) -> None:
        """Restart a host after a pause, without a limit: the disk may have space then, or the load may be lower."""
        now = time.monotonic()
        tries = self._tries.get(instance)
        if tries is None:
            backoff = Backoff(f"the host of {instance} at {self.name}", LOGGER, most=LONGEST)
            tries = self._tries[instance] = Tries(backoff, _gist(error))
        if tries.runs:
            tries.runs = False
            tries.backoff.failed(error)
        elif tries.backoff.is_due and self._low is None:
            tries.begun = now
            try:
                self._run(instance)
                tries.runs, tries.unstarted = True, 0
            except Stop as stop:
                self._set_stale(instance, stop)
            except Exception as again:
                tries.why = _gist(again)
                tries.unstarted = 0 if is_full(again) else tries.unstarted + 1
                tries.backoff.failed(again)

    def _set_stale(self, instance: str, error: Exception) -> None:
        """Report an instance that is not restarted automatically."""
        before = self._logged.get(instance)
        self._logged[instance] = kept(
            LOGGER, f"{instance} at {self.name} is not restarted automatically", error, before
        )
        self._stale[instance] = str(error)

    def _forgive(self, instance: str, host: Host) -> None:
        """Reset the back-off of a host that has recovered: its next failure is the first one again."""
        tries = self._tries.get(instance)
        if tries is not None and (host.progress or time.monotonic() - tries.begun > CALM):
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
            instances={name: _status(host) for name, host in list(self.hosts.items())},
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
        """The durations of the batches here, in milliseconds, as far as the hosts retain them."""
        return [*self._past, *(ms for host in list(self.hosts.values()) for ms in host.progress)]


def _gist(error: Exception) -> str:
    """The line of an error that mentions the disk."""
    lines = [line.strip() for line in str(error).splitlines() if any(sign in line for sign in SIGNS)]
    return min(lines, key=len, default=described(error) or "")[:200]


def _status(host: Host) -> InstanceStatus:
    return InstanceStatus(
        running=host.is_active,
        batch_ms=host.batch_ms,
        trigger_ms=host.spec.trigger_ms,
        backlog=host.backlog,
        max_records=host.spec.max_records,
        error=described(host.exception),
    )
