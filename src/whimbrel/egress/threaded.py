"""An outlet with a thread of its own, as the product runs it.

An error that may pass (a full disk, a journal that is locked) ends nothing: the outlet goes back to its last commit, as
after a crash, and tries again, for as long as it takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from whimbrel.core.record import Move
from whimbrel.egress.outlet import LOGGER, Keep, Outlet, Watch, Word
from whimbrel.egress.sinks import Sink
from whimbrel.log.backoff import Backoff, may_pass
from whimbrel.log.contract import Log
from whimbrel.log.kept import kept

PAUSE = 0.05
"""Seconds until outboxes are looked at again, if nothing wakes the thread before."""


class ThreadedOutlet(Outlet):
    """Steps whenever there may be something to do."""

    def __init__(
        self,
        stage: str,
        outboxes: Mapping[str, Log],
        sinks: list[Sink],
        hear: Callable[[Word, int], None],
        save: Callable[[bytes], None],
        clock_us: Callable[[], int],
        watch: Watch = lambda results, now_us: None,
        keep: Keep | None = None,
    ) -> None:
        """As an `Outlet`."""
        super().__init__(stage, outboxes, sinks, hear, save, clock_us, watch, keep)
        self.error: Exception | None = None
        """What it failed of, for good."""
        self.backoff = Backoff(f"the outlet of {stage}", LOGGER)
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"outlet-{stage}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Deliver what is there, and stop."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.close()

    def wake(self) -> None:
        """Something may have been written."""
        self._wake.set()

    def fence(self, move: Move, timeout: float) -> bool:
        """Let nothing of a lost owner out any more. Whether it lasts; False: not yet, ask again."""
        raised = threading.Event()
        self.ask_fence(move, raised.set)
        self._wake.set()
        return raised.wait(timeout)

    def _run(self) -> None:
        while True:
            stopping = self._stopping
            try:
                worked = self.step(closing=stopping)
            except Exception as error:  # told by status, and by whoever waits
                if not may_pass(error) or self._stopping:
                    self.error = kept(LOGGER, f"the outlet of {self.stage} has failed for good", error)
                    return
                pause = self.backoff.failed(error)
                self._wake.clear()
                self._rest(pause)
                continue
            if self.is_committed:
                self.backoff.succeeded()
            if stopping and not worked:
                return
            if not worked:
                self._wake.wait(PAUSE)
                self._wake.clear()

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()
