"""Event time of what has none of its own: elapsed time, steered towards the wall clock.

A wall clock may be set. Were it event time itself, an hour ahead for a moment would fire every timer of that hour, and
stop time for an hour when the clock is right again: time must not go back. So the wall clock only steers. While `e`
seconds elapse by a clock that nobody sets, event time advances by what the wall clock says, but

    at least  e / 2              it never stands still; an offset ahead shrinks by half a second a second
    at most   e + credit         credit grows by e, up to `STEP`, and is used up by what goes beyond e

So in any stretch of length T it advances by T/2 to 2T + STEP. An offset below STEP is followed at once, a larger one at
twice the speed. A start takes the wall clock as it is, unless the log is further: then it goes on from the log.
"""

from __future__ import annotations

import threading
import time

STEP = 2.0
"""Seconds by which it may jump forward."""
_STEP_NS = round(STEP * 1e9)


def wall_us() -> int:
    """The wall clock, in microseconds."""
    return time.time_ns() // 1000


def uptime_ns() -> int:
    """Nanoseconds by a clock that nobody sets, and which goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class EventClock:
    """A clock that is told the wall clock and the uptime at each look. Any thread may look."""

    def __init__(self, least_us: int | None = None) -> None:
        """`least_us`: what it must not go behind, as a log says; None: nothing."""
        self._least_us = least_us
        self._now = self._uptime = self._credit = 0
        self._runs = False
        self._lock = threading.Lock()

    def look(self, wall_us: int, uptime: int) -> int:
        """Event time now, in microseconds. `uptime` is in nanoseconds."""
        wall = wall_us * 1000
        with self._lock:
            if not self._runs:
                self._runs, self._credit = True, _STEP_NS
                self._now = wall if self._least_us is None else max(wall, self._least_us * 1000)
                self._uptime = uptime
                return self._now // 1000
            elapsed = max(uptime - self._uptime, 0)
            credit = min(self._credit + elapsed, _STEP_NS)
            advance = min(max(wall - self._now, elapsed // 2), elapsed + credit)
            self._credit = credit - max(advance - elapsed, 0)
            self._now, self._uptime = self._now + advance, max(uptime, self._uptime)
            return self._now // 1000
