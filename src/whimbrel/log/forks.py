"""The gate between SQLite and fork(): no connection stays open across a fork.

A forked process that merely avoids the connections it inherited is not safe. SQLite records per file, in the memory
of the process, which locks it holds; the child inherits that memory but not the locks. A new connection of the child
then assumes locks that it does not hold, and when the parent closes its own, SQLite removes the write-ahead log that
the child uses: what the child appends from then on is acknowledged and lost. So comparing the process id on each call
is not enough; every connection must be closed *before* the fork.

Operations enter the gate; a fork shuts it, waits until no operation is inside, closes all connections, and reopens it
on both sides. The logs reconnect when they are next used. It works for every fork Python knows of: `os.fork`,
`multiprocessing`, and `subprocess` with a `preexec_fn` (without one, no code of Whimbrel runs before exec).
A signal handler must not fork: inside an operation of its own thread it would deadlock.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Protocol
from weakref import WeakSet


class Closable(Protocol):
    def close(self) -> None:
        """Close the connection; using the object again reopens it."""


class ForkGate:
    """`with gate:` around each operation on a connection. Operations of many threads may be inside at once."""

    def __init__(self) -> None:
        # Reentrant, because the thread that forks holds the lock while it closes the connections.
        self._door = threading.RLock()
        self._calm = threading.Condition()
        self._inside = 0
        self._watched: WeakSet[Closable] = WeakSet()
        self._registered = False

    def watch(self, closable: Closable) -> None:
        """Close `closable` before each fork, for as long as the object lives."""
        with self._door:
            self._watched.add(closable)
            if not self._registered:
                os.register_at_fork(before=self._shut, after_in_parent=self._open, after_in_child=self._open)
                self._registered = True

    def __enter__(self) -> None:
        with self._door, self._calm:
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._calm:
            self._inside -= 1
            if not self._inside:
                self._calm.notify_all()

    def _shut(self) -> None:
        # Take the lock first: new operations wait for it, so the fork waits for at most one operation of each thread.
        self._door.acquire()
        with self._calm:
            self._calm.wait_for(lambda: not self._inside)
        for closable in list(self._watched):
            closable.close()

    def _open(self) -> None:
        self._door.release()


FORKS = ForkGate()
"""One per process, because a fork concerns the whole process."""
