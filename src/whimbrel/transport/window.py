"""How many bytes a sender keeps in flight: a fixed number, or what the link carries without a queue that others feel.

    records ──┐
              ├──▶ link ──▶      one queue in front of the link: whoever fills it delays everybody
    state ────┘

A `YieldingWindow` observes how long each piece takes from `send` to its answer. The shortest time seen is that of an
empty link; what exceeds it is time in a queue, of its own bytes or of others'. The window that would make the delay
`shortest + QUEUE_US` at the rate just seen is `size * (shortest + QUEUE_US) / delay`: each answer moves it there by
its share of a round trip. (`delay` is the shortest of half a round trip: pieces that were sent together wait for each
other, which is no queue that stays.) So the link always has a little to carry, a queue of about `QUEUE_US` stands in
front of it, and traffic that does not yield displaces traffic that does. The idea is LEDBAT's (RFC 6817), the rule
that of FAST TCP. At first the window grows by half in each round trip, until a queue shows: on a long link the rule
alone takes too long.

Once a minute the window is small for a round trip, so that the queue empties: otherwise a sender that never pauses
would take its own queue for the link's delay. The shortest time is that of the last two minutes: a link that becomes
longer is not taken for a full one for ever.

No clock, no I/O: the sender passes the times in.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

WINDOW = 16 << 20
"""Bytes in flight at most: 400 MB/s over a round trip of 40 ms."""
SMALLEST = 16 << 10
"""Bytes in flight that a yielding sender always may have: it never starves."""
QUEUE_US = 25_000
"""The queue that a yielding sender may cause."""
GAIN = 0.5
"""How far a round trip moves the window towards what it should be: 1 would oscillate."""
PERIOD_US = 60_000_000
"""Time between two measurements of the empty link."""
PIECES, PIECE = 8, 4 << 10
"""A window is sent in about so many pieces, of at least so many bytes: a record waits for one of them."""


class Window(Protocol):
    """How much of a spool may be in flight."""

    size: int
    """Bytes."""

    @property
    def piece(self) -> int | None:
        """Maximum bytes of a frame; larger ones are sent in pieces. None: no limit."""

    def answered(self, size: int, delay_us: int, in_flight: int, now_us: int) -> None:
        """A frame of `size` bytes was answered after `delay_us`, when so many bytes were in flight with it."""


class FixedWindow:
    """Always the same."""

    piece = None

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size

    def answered(self, size: int, delay_us: int, in_flight: int, now_us: int) -> None:
        """Changes nothing."""


class YieldingWindow:
    """Uses what others leave of the link."""

    def __init__(self, most: int = WINDOW) -> None:
        self.size, self._most = min(4 * SMALLEST, most), most
        self._shortest_us: int | None = None
        self._before_us: int | None = None
        """The shortest time of the period before this one."""
        self._renew_us, self._is_starting = 0, True
        self._last_us: deque[int] = deque(maxlen=PIECES // 2)

    @property
    def piece(self) -> int:
        """A part of the window."""
        return max(self.size // PIECES, PIECE)

    def answered(self, size: int, delay_us: int, in_flight: int, now_us: int) -> None:
        """Move towards the window that makes the queue `QUEUE_US`. A window that is not used does not grow."""
        if self._shortest_us is None or now_us >= self._renew_us:
            if self._shortest_us is not None:
                self.size, self._is_starting = min(SMALLEST, self._most), True
            self._before_us, self._shortest_us, self._renew_us = self._shortest_us, delay_us, now_us + PERIOD_US
        self._shortest_us = min(self._shortest_us, delay_us)
        self._last_us.append(delay_us)
        delay_us = min(self._last_us)
        shortest_us = min(self._shortest_us, self._before_us or self._shortest_us)
        self._is_starting = self._is_starting and delay_us < shortest_us + QUEUE_US // 2
        change = 1.0 if self._is_starting else min((shortest_us + QUEUE_US) / max(delay_us, 1) - 1, 1.0)
        if change < 0 or 2 * in_flight >= self.size:
            wanted = self.size + round(GAIN * size * change)
            self.size = max(min(wanted, self._most), min(SMALLEST, self._most))
