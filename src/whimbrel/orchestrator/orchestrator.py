"""The orchestrator: manages the stages, sites and migrations; decides, journals, and only then acts.

Off the data path: if it dies, data keeps flowing, and its successor finishes the ordered migrations from the journal.
Decisions are made in decisions.py and carried out in deeds.py. This module has the threads: workers carry out commands,
those of one migration in order (workers.py), and a watch thread checks deadlines; events arrive from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from whimbrel.core.errors import Retry, Stale, Unavailable
from whimbrel.core.protocols.machine import Command, Event, Migration
from whimbrel.log.kept import kept
from whimbrel.orchestrator.decisions import Decisions
from whimbrel.orchestrator.deeds import Deeds
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.ports import GatewayPort, SitePort
from whimbrel.orchestrator.workers import GRACE, Workers

LOGGER = logging.getLogger("whimbrel.orchestrator")
PERIOD = 0.2
"""Seconds between two checks for due work."""
DEADLINE = 120.0
"""Seconds after which a migration that can still be undone is abandoned, unless its order sets another deadline."""


class Orchestrator(Decisions):
    """`Decisions` with threads: from `start` on, decisions are carried out."""

    def __init__(
        self,
        journal: Journal,
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        clock_us: Callable[[], int],
        chores: Callable[[], None] = lambda: None,
        needs: Callable[[Migration], bool] = lambda migration: False,
    ) -> None:
        """`chores`: other periodic work, called several times per second. `needs`: whether that work still needs a
        migration that is over."""
        self._workers = Workers(self._work)
        super().__init__(journal, self._workers, clock_us, lambda: time.monotonic(), needs)
        self.sites, self._chores = sites, chores
        self.error: Exception | None = None
        self._complaint: Exception | None = None
        """The last error about a failing instance; cleared when no instance fails any more."""
        self._left: set[str] = set()
        """Instances that keep failing and have been reported."""
        self._stopping = threading.Event()
        self._has_ended = False
        self._deeds = Deeds(self, sites, gateway, self._answer, self._stopping.wait)
        self._watcher = threading.Thread(target=self._watch, name="orchestrator-watch", daemon=True)

    def start(self) -> None:
        """Start to carry out commands."""
        self._workers.start()
        self._watcher.start()

    def stop(self) -> None:
        """Stop; unfinished migrations continue at the next start. A call that takes too long is not waited for, and its
        result is ignored."""
        self._stopping.set()
        self._workers.stop()
        if self._watcher.is_alive():
            self._watcher.join(GRACE)
        with self._changed:
            self._has_ended = True

    def renew(self, stage: str, instance: str) -> None:
        """Start an instance whose checkpoint is gone from an empty one, without the state of its keys."""
        self._deeds.renew(stage, instance)

    def waiting_of(self, stage: str) -> dict[str, str]:
        """By migration of a stage: why a command of it is being retried."""
        return {id: why for (name, id), why in self._workers.waiting.items() if name == stage}

    def wait(self, stage: str, ids: list[str], timeout: float | None, *, warm: bool = False) -> bool:
        """Block until all of these are over, or warm standbys; False on timeout (in seconds)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            found = self.stages[stage].open  # a dropped migration was over
            while any(not (m.is_over or (warm and m.is_standby)) for m in (found[id] for id in ids if id in found)):
                if self.error is not None:
                    raise self.error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(PERIOD if left is None else min(left, PERIOD))
        return True

    # ── Threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(self, stage: str, id: str, event: Event) -> None:
        """Apply the outcome of a command. Ignored after `stop`: a successor may own the journal."""
        with self._changed:
            if not self._has_ended:
                self.handle(stage, id, event)

    def _work(self, stage: str, id: str, command: Command) -> None:
        """Carry out a command. Called by a worker, which retries it if it raises `Retry` or `Stale`."""
        try:
            self._deeds.do(stage, id, command)
        except (Retry, Stale):
            raise
        except Exception as error:
            with self._changed:
                if not self._has_ended:
                    self.fail(f"a command of migration {id} of {stage}", error)
                self._changed.notify_all()

    def _watch(self) -> None:
        while not self._stopping.wait(PERIOD):
            for duty in (self.check_due, self.check_deadlines, self._check_instances, self.retire, self._chores):
                try:
                    duty()
                except Retry:  # a site or the gateway is unreachable now
                    pass
                except Exception as error:  # any error must be reported, and the watch continues
                    self.fail("the orchestrator's watch", error)

    def fail(self, what: str, error: Exception) -> None:
        """Record an error, for `status` and for waiting callers."""
        self.error = kept(LOGGER, what, error, self.error)

    def _check_instances(self) -> None:
        """Abort moves to an instance that keeps dying."""
        failed = {name: why for site in self.sites.values() for name, why in site.failed().items()}
        for name, why in failed.items():
            if name not in self._left:
                self._abandon(lambda move, _, to=name: move.destination == to, why)  # type: ignore[misc]
                LOGGER.error("moves to %s are aborted: %s", name, why)
                if self.error is None:
                    self.error = self._complaint = Unavailable(f"{why}; see app.status()")
        self._left = set(failed)
        if not failed and self.error is self._complaint:
            self.error = None
