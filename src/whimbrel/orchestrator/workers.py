"""Workers: carry out commands, those of one migration in order, those of different migrations concurrently.

    add ──▶ the migration's queue ──▶ a worker takes the first command, the next ... ──▶ the queue is empty
                     ▲                         │ not done: repeat it later
                     └─────── back-off ◀───────┘

A worker is a thread that is started when a queue is ready and ends when none is; at most `MOST` run at once. A queue in
back-off needs no worker, so an unreachable site or gateway delays only the migrations that need it. A call that takes
an hour delays one migration, and not `stop`: workers are daemon threads, and unfinished commands are retried after the
next start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from whimbrel.core.errors import Retry, Stale
from whimbrel.core.protocols.machine import Command
from whimbrel.log.backoff import Backoff
from whimbrel.orchestrator.decisions import Place

LOGGER = logging.getLogger("whimbrel.orchestrator")
MOST = 32
"""Workers at once: a bound on threads; a queue that finds none free waits for its turn."""
FIRST, LONGEST = 0.05, 2.0
"""Seconds until a command is retried: doubled after each failure, from the first up to the second value."""
GRACE = 5.0
"""Seconds that `stop` waits for running commands."""


@dataclass
class _Queue:
    """The commands of one migration. It exists from the first command until the last one is done."""

    backoff: Backoff
    commands: deque[Command] = field(default_factory=deque)


class Workers:
    """The commands that are not carried out yet."""

    def __init__(self, carry_out: Callable[[str, str, Command], None]) -> None:
        """`carry_out` receives a stage, a migration and a command. If it raises `Retry` or `Stale`, the command is
        retried."""
        self._do = carry_out
        self._changed = threading.Condition()
        self._queues: dict[Place, _Queue] = {}
        self._ready: deque[Place] = deque()
        self._later: list[tuple[float, int, Place]] = []
        """Queues in back-off: until when, a number that breaks ties in order, which queue."""
        self._ties = count()
        self._running: set[threading.Thread] = set()
        self._stopping = False
        self._starter = threading.Thread(target=self._start_workers, name="orchestrator", daemon=True)

    def add(self, place: Place, commands: Sequence[Command]) -> None:
        """Queue commands behind all that were added for this migration before."""
        with self._changed:
            if not commands:
                return
            if place not in self._queues:
                what = f"a command of migration {place[1]} of {place[0]}"
                self._queues[place] = _Queue(Backoff(what, LOGGER, first=FIRST, most=LONGEST))
                self._ready.append(place)
            self._queues[place].commands += commands
            self._changed.notify_all()

    @property
    def is_idle(self) -> bool:
        """Whether all commands are done."""
        return not self._queues

    def has(self, place: Place) -> bool:
        """Whether commands of a migration are pending."""
        return place in self._queues

    @property
    def waiting(self) -> dict[Place, str]:
        """By migration: why its next command is being retried."""
        errors = {place: queue.backoff.error for place, queue in list(self._queues.items())}
        return {place: str(error) for place, error in errors.items() if error is not None}

    def start(self) -> None:
        """Start to carry out commands."""
        self._starter.start()

    def stop(self) -> None:
        """Start no more commands, and wait up to `GRACE` seconds for the running ones."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        deadline = time.monotonic() + GRACE
        for thread in [self._starter, *self._running]:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    # ── Threads ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _start_workers(self) -> None:
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                while self._later and self._later[0][0] <= now:
                    self._ready.append(heappop(self._later)[2])
                if self._ready and len(self._running) < MOST:
                    first = (self._ready.popleft(),)
                    worker = threading.Thread(target=self._work, args=first, name="orchestrator-worker", daemon=True)
                    self._running.add(worker)
                    worker.start()
                else:
                    self._changed.wait(self._later[0][0] - now if self._later and not self._ready else None)

    def _work(self, place: Place | None) -> None:
        while place is not None:
            self._carry_out(place)
            with self._changed:
                place = self._ready.popleft() if self._ready and not self._stopping else None
                if place is None:  # under the same lock: a queue that is ready from now on finds one worker less
                    self._running.discard(threading.current_thread())
                    self._changed.notify_all()

    def _carry_out(self, place: Place) -> None:
        """Empty one queue, or stop at a command that must be retried: the commands behind it stay behind it."""
        queue = self._queues[place]
        while not self._stopping:
            try:
                self._do(*place, queue.commands[0])
            # A log that cannot be written now, or an instance that already ran there; or one whose checkpoint is stale,
            # which its site reports: its keys may be restored elsewhere, and that ends this migration.
            except (Retry, Stale) as error:
                with self._changed:
                    due = time.monotonic() + queue.backoff.failed(error)
                    heappush(self._later, (due, next(self._ties), place))
                    self._changed.notify_all()
                    return
            with self._changed:
                queue.backoff.succeeded()
                queue.commands.popleft()
                if not queue.commands:
                    del self._queues[place]
                    self._changed.notify_all()
                    return
