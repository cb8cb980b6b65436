"""A thread that calls a `step` whenever there may be work, from `start` to `stop`.

A component with such a step has no thread of its own: `step` does what can be done now, and the caller decides when.
In production that is a `Stepper`, in the simulator the seed. After a transient error the step is repeated, after a
growing pause and without a limit; after another one the thread ends, and `error` says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from whimbrel.log.backoff import Backoff, may_pass
from whimbrel.log.kept import kept

PAUSE = 0.05
"""Seconds until a step without work is repeated, unless the thread is woken before."""


class Stepper:
    """Runs one `step`, which returns whether there was work."""

    def __init__(
        self,
        what: str,
        step: Callable[[], bool],
        logger: logging.Logger,
        *,
        first: float | None = None,
        most: float | None = None,
        pause: float = PAUSE,
    ) -> None:
        """`what`: what the step does, for messages: "sending the reports of count". `first`, `most`: seconds until a
        step that failed is repeated, at first and at most. `pause`: seconds until a step without work is."""
        self._what, self._step, self._logger, self._pause = what, step, logger, pause
        self.error: Exception | None = None
        """The permanent error that has ended it."""
        self.backoff = Backoff(what, logger, first=first, most=most)
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in progress."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """There may be work now."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                worked = self._step()
                self.backoff.succeeded()
            except Exception as error:
                if not may_pass(error):
                    self.error = kept(self._logger, f"{self._what} has ended for good", error)
                    return
                self._stopping.wait(self.backoff.failed(error))
                continue
            if not worked:
                self._wake.wait(self._pause)
