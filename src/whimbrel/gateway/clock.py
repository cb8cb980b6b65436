"""Event time of records that have none of their own: elapsed time, steered towards the wall clock.

A wall clock may be set. Were it event time itself, a clock one hour ahead for a moment would fire every timer of that
hour, and stop event time for an hour once corrected: event time must not go back. So the wall clock only steers. While
`e` seconds elapse on the monotonic clock, event time follows the wall clock, but advances by

    at least  e / 2              so it never stops; an offset ahead shrinks by 0.5 s per second
    at most   e + credit         credit grows by e, up to `STEP`, and any advance beyond e consumes it

So in any interval of length T it advances by T/2 to 2T + STEP. An offset below STEP is followed at once, a larger one
at twice the speed. At a start it equals the wall clock, unless the log is ahead: then it continues from the log.
"""

from __future__ import annotations

import threading
import time

STEP = 2.0
"""Seconds by which event time may jump forward."""
_STEP_NS = round(STEP * 1e9)


def wall_us() -> int:
    """The wall clock, in microseconds."""
    return time.time_ns() // 1000


def uptime_ns() -> int:
    """Nanoseconds of a monotonic clock that also runs while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class EventClock:
    """Computes event time from the wall clock and the uptime passed to each `look`. Thread-safe."""

    def __init__(self, least_us: int | None = None) -> None:
        """`least_us`: the lower bound of event time, from a log; None: no bound."""
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
