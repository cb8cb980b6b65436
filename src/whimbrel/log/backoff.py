"""Back-off: retries an activity that fails with a transient error, after growing pauses, without a limit.

A process suspended inside a write holds a log's lock, a disk is full, a broker is unreachable. Each activity that may
fail so has a `Backoff`: feed, outlet, the gateway's snapshots, commands of migrations, links, checkpoints. It reports
why the activity waits, for how long, and when it tries again; and it logs the first failure and the recovery.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from whimbrel.core.errors import Retry
from whimbrel.log.disk import is_full

T = TypeVar("T")
FIRST, MOST = 0.5, 15.0
"""Seconds until the next try: at first, and at most."""


class Interrupted(Exception):
    """The activity was stopped while it waited for the next try."""


class HeldUp(msgspec.Struct, frozen=True):
    """The status of an activity that waits for its next try."""

    why: str
    for_s: float
    """Seconds since the first failure."""
    retry_s: float
    """Seconds until the next try."""


class Backoff:
    """The tries of one activity. One thread reports failures and successes, any thread may read the status.

    It logs the first failure as a warning with its traceback, and a later one only if its type differs; the
    recovery as info, with the seconds and the number of failures until then.
    """

    def __init__(
        self,
        what: str,
        logger: logging.Logger,
        *,
        first: float | None = None,
        most: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        traced: bool = True,
    ) -> None:
        """`what`: the activity's name in the log. `first`, `most`: seconds until the next try, at first and at most;
        `FIRST` and `MOST` by default. `traced`: whether the log has the tracebacks; not if failures are usual, and
        their messages say all: another place is away."""
        self._what, self._logger, self._bounds, self._clock = what, logger, (first, most), clock
        self._traced = traced
        self.error: Exception | None = None
        """The error of the last try; None if it succeeded."""
        self.tries = 0
        """The number of failures since the last success."""
        self._pauses = pauses(*self._bounds)
        self._since = self._due = 0.0

    def failed(self, error: Exception) -> float:
        """Record a failure; return the seconds to wait before the next try."""
        if self.error is None:
            self._since, self._pauses = self._clock(), pauses(*self._bounds)
        pause = next(self._pauses)
        if type(error) is not type(self.error):
            trace = error if self._traced else None
            self._logger.warning("%s fails and is tried again in %g s: %s", self._what, pause, error, exc_info=trace)
        self._due = self._clock() + pause
        self.tries += 1
        self.error = error
        return pause

    def succeeded(self) -> None:
        """Record a success."""
        if self.error is not None:
            seconds = self._clock() - self._since
            self._logger.info("%s recovered after %.1f s and %d failures", self._what, seconds, self.tries)
            self.error, self.tries = None, 0

    @property
    def is_due(self) -> bool:
        """Whether the next try may begin."""
        return self.error is None or self._clock() >= self._due

    def until_done(self, act: Callable[[], T], wait: Callable[[float], bool]) -> T:
        """Call `act` until it raises no transient error; return its result.

        `wait` sleeps for some seconds and returns whether to stop; then this raises `Interrupted`.
        """
        while True:
            try:
                done = act()
            except Exception as error:
                if not may_pass(error):
                    raise
                if wait(self.failed(error)):
                    raise Interrupted from error
            else:
                self.succeeded()
                return done

    def status(self) -> HeldUp | None:
        """Why the activity waits, if it does."""
        error, now = self.error, self._clock()
        if error is None:
            return None
        return HeldUp(str(error) or type(error).__name__, now - self._since, max(self._due - now, 0.0))


def may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    return isinstance(error, Retry) or is_full(error)


def pauses(first: float | None = None, most: float | None = None) -> Iterator[float]:
    """The pauses before each further try, in seconds: doubling each time, from `first` up to `most`."""
    pause, longest = FIRST if first is None else first, MOST if most is None else most
    while True:
        yield pause
        pause = min(2 * pause, longest)
