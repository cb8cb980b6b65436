"""An outlet with a thread of its own, as in production.

After a transient error (a full disk, a locked journal) the outlet goes back to its last commit, as after a crash, and
tries again, without a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from whimbrel.core.record import Move
from whimbrel.egress.outlet import LOGGER, Dispatch, Keep, Letter, Outlet, Watch
from whimbrel.egress.sinks import Sink
from whimbrel.log.backoff import Backoff, may_pass
from whimbrel.log.contract import Log
from whimbrel.log.kept import kept

PAUSE = 0.05
"""Seconds until the thread polls the outboxes again, unless it is woken before."""


class ThreadedOutlet(Outlet):
    """Calls `step` whenever there may be work."""

    def __init__(
        self,
        stage: str,
        outboxes: Mapping[str, Log],
        sinks: list[Sink],
        send: Callable[[Letter, int], None],
        save: Callable[[bytes], None],
        clock_us: Callable[[], int],
        watch: Watch = lambda results, now_us: None,
        keep: Keep | None = None,
        dispatch: Dispatch = lambda name, position, parts: parts,
    ) -> None:
        """As an `Outlet`."""
        super().__init__(stage, outboxes, sinks, send, save, clock_us, watch, keep, dispatch=dispatch)
        self.error: Exception | None = None
        """The permanent error that has stopped it."""
        self.backoff = Backoff(f"the outlet of {stage}", LOGGER)
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"outlet-{stage}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Deliver everything in the outboxes, and stop."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.close()

    def wake(self) -> None:
        """Wake the thread: an outbox may have a new entry."""
        self._wake.set()

    def fence(self, move: Move, timeout: float) -> bool:
        """Refuse all results of a lost owner. Returns whether the fence is durable; False: not yet, call again."""
        raised = threading.Event()
        self.ask_fence(move, raised.set)
        self._wake.set()
        return raised.wait(timeout)

    def _run(self) -> None:
        while True:
            stopping = self._stopping
            try:
                worked = self.step(closing=stopping)
            except Exception as error:  # the status shows it, and waiting callers raise it
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
