"""The orchestrator: knows the stages, sites and migrations; decides, journals, and only then lets it be done.

Off the data path: if it dies, data keeps flowing, and the next one finishes from its journal what it had ordered.
What is decided is in decisions.py, what is done in deeds.py. Here are the threads: workers carry commands out, those of
one migration in their order (workers.py), a watch looks after deadlines; events come in from any thread.
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
"""Seconds between two looks at what is due."""
DEADLINE = 120.0
"""Seconds after which a migration that can still be undone is abandoned, unless its order says otherwise."""


class Orchestrator(Decisions):
    """`Decisions` with threads: from `start` on, what is decided is done."""

    def __init__(
        self,
        journal: Journal,
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        clock_us: Callable[[], int],
        chores: Callable[[], None] = lambda: None,
        needs: Callable[[Migration], bool] = lambda migration: False,
    ) -> None:
        """`chores`: what else there is to do, several times a second. `needs`: whether a migration that is over must be
        known to do it."""
        self._workers = Workers(self._work)
        super().__init__(journal, self._workers, clock_us, lambda: time.monotonic(), needs)
        self.sites, self._chores = sites, chores
        self.error: Exception | None = None
        self._complaint: Exception | None = None
        """What was last said of an instance that fails; forgotten when none does any more."""
        self._left: set[str] = set()
        """Instances that keep failing, which have been reported."""
        self._stopping = threading.Event()
        self._has_ended = False
        self._deeds = Deeds(self, sites, gateway, self._answer, self._stopping.wait)
        self._watcher = threading.Thread(target=self._watch, name="orchestrator-watch", daemon=True)

    def start(self) -> None:
        """Begin to carry commands out."""
        self._workers.start()
        self._watcher.start()

    def stop(self) -> None:
        """Stop; what is not finished goes on at the next start. A call that takes too long is not waited for, and what
        it answers is not listened to any more."""
        self._stopping.set()
        self._workers.stop()
        if self._watcher.is_alive():
            self._watcher.join(GRACE)
        with self._changed:
            self._has_ended = True

    def waiting_of(self, stage: str) -> dict[str, str]:
        """By migration of a stage: why a command of it has to be repeated."""
        return {id: why for (name, id), why in self._workers.waiting.items() if name == stage}

    def wait(self, stage: str, ids: list[str], timeout: float | None, *, warm: bool = False) -> bool:
        """Until all of these are over, or warm standbys; False if the time ran out first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            found = self.stages[stage].open  # one that is forgotten was over
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
        """What came of a command. Too late after the end: a successor may have the journal."""
        with self._changed:
            if not self._has_ended:
                self.tell(stage, id, event)

    def _work(self, stage: str, id: str, command: Command) -> None:
        """Carry a command out. Called by a worker, which repeats it if it raises `Retry` or `Stale`."""
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
                except Retry:  # somebody is not there now
                    pass
                except Exception as error:  # whatever it is, it must be told, and the watch goes on
                    self.fail("the orchestrator's watch", error)

    def fail(self, what: str, error: Exception) -> None:
        """Keep what went wrong, for `status` and for those that wait."""
        self.error = kept(LOGGER, what, error, self.error)

    def _check_instances(self) -> None:
        """Moves to an instance that keeps dying are called off."""
        failed = {name: why for site in self.sites.values() for name, why in site.failed().items()}
        for name, why in failed.items():
            if name not in self._left:
                self._abandon(lambda move, _, to=name: move.destination == to, why)  # type: ignore[misc]
                LOGGER.error("moves to %s are called off: %s", name, why)
                self._complaint = Unavailable(f"{why}; see app.status()")
                self.error = self.error or self._complaint
        self._left = set(failed)
        if not failed and self.error is self._complaint:
            self.error = None
