"""Workers: carry out the commands of migrations, those of one in their order, those of different ones side by side.

    add ──▶ the migration's queue ──▶ a worker takes the first command, the next ... ──▶ the queue is empty
                     ▲                         │ not done: repeat it later
                     └─────── back-off ◀───────┘

A worker is a thread that is started when a queue is ready and ends when none is; at most `MOST` run at once. A queue
that waits for its back-off to pass needs no worker, so a party that is away holds up only what needs it. A call that
takes an hour holds up one migration, and not `stop`: workers are daemons, and what they have not done is repeated after
the next start.
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
"""Workers at once: a bound on threads; what finds none free waits for its turn."""
FIRST, LONGEST = 0.05, 2.0
"""Seconds until a command is repeated: twice as long after each failure, up to so many."""
GRACE = 5.0
"""Seconds that `stop` waits for commands that are being carried out."""


@dataclass
class _Queue:
    """What is to be done for one migration. It exists from its first command until its last one is done."""

    backoff: Backoff
    commands: deque[Command] = field(default_factory=deque)


class Workers:
    """The commands that have not been carried out yet."""

    def __init__(self, carry_out: Callable[[str, str, Command], None]) -> None:
        """`carry_out` is given a stage, a migration and a command. If it raises `Retry` or `Stale`, the command has to
        be repeated."""
        self._do = carry_out
        self._changed = threading.Condition()
        self._queues: dict[Place, _Queue] = {}
        self._ready: deque[Place] = deque()
        self._later: list[tuple[float, int, Place]] = []
        """Queues that back off: until when, a number that keeps ties in their order, which."""
        self._ties = count()
        self._running: set[threading.Thread] = set()
        self._stopping = False
        self._starter = threading.Thread(target=self._start_workers, name="orchestrator", daemon=True)

    def add(self, place: Place, commands: Sequence[Command]) -> None:
        """Carry these out behind all that was added for this migration before."""
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
        """Whether everything that was added is done."""
        return not self._queues

    def has(self, place: Place) -> bool:
        """Whether something is to be done for a migration."""
        return place in self._queues

    @property
    def waiting(self) -> dict[Place, str]:
        """By migration: why its next command has to be repeated."""
        errors = {place: queue.backoff.error for place, queue in list(self._queues.items())}
        return {place: str(error) for place, error in errors.items() if error is not None}

    def start(self) -> None:
        """Begin to carry out."""
        self._starter.start()

    def stop(self) -> None:
        """Begin nothing any more, and wait for what has begun, but not for ever."""
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
                if place is None:  # in the same turn: whatever is ready from now on finds one worker less
                    self._running.discard(threading.current_thread())
                    self._changed.notify_all()

    def _carry_out(self, place: Place) -> None:
        """Empty one queue, or come to a command that has to be repeated: what is behind it stays behind it."""
        queue = self._queues[place]
        while not self._stopping:
            try:
                self._do(*place, queue.commands[0])
            # A log that cannot be written now, an instance that ran there already; or one whose checkpoint is stale,
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
