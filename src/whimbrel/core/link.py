"""A link between two sites: the transfer time and the transferred bytes of a piece.

    sent ──▶ waits until the link is free ──▶ goes out at `rate` ──▶ `delay` ± `jitter` ──▶ arrives
                                                    │ lost
                                                    └──▶ goes out again, a timeout later

Every piece sent through a link arrives exactly once and in order, as over a TCP connection: loss costs time and bytes,
never data. The link itself is stateless and has no clock: its state is a `Line`, passed in and returned.
"""

from __future__ import annotations

import re
from decimal import Decimal
from random import Random
from typing import NamedTuple

import msgspec

from whimbrel.core.errors import Refused

TIMEOUT_US = 200_000
"""Minimum retransmission timeout of a lost piece, at least twice the longest one-way delay: as usual for TCP."""

IDEAL = "ideal"
FORM = "delay=100ms,jitter=10ms,rate=20mbit,loss=1%"
UNITS = {
    "delay": {"s": 1_000_000, "ms": 1000},
    "jitter": {"s": 1_000_000, "ms": 1000},
    "rate": {"gbit": 10**9, "mbit": 10**6, "kbit": 1000},
    "loss": {"%": 1},
}
"""The properties of a link and their units: times in microseconds, rates in bit/s; the largest unit first."""


class Line(NamedTuple):
    """The state of a link in one direction, after the last piece that was sent."""

    free_us: int = 0
    """When the next piece can go out."""
    arrives_us: int = 0
    """When the last piece arrives."""
    cost: int = 0
    """Bytes that the last piece took, including retransmissions."""


class Link(msgspec.Struct, frozen=True):
    """The properties of a link, the same in both directions. `Link()` is ideal: a transfer takes no time."""

    delay_us: int = 0
    jitter_us: int = 0
    """Maximum deviation of the delay, in either direction."""
    rate: int | None = None
    """Bit/s; None: no limit."""
    loss: float = 0.0
    """The fraction of pieces that are lost."""

    def __post_init__(self) -> None:
        if self.delay_us < 0 or self.jitter_us < 0:
            raise Refused("a link's delay and jitter must be at least 0 ms")
        if self.rate is not None and self.rate < 1:
            raise Refused("a link's rate must be at least one bit per second; omit it for no limit")
        if not 0 <= self.loss < 1:
            raise Refused("a link's loss must be at least 0% and below 100%, otherwise nothing would arrive")

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from text, e.g. `delay=100ms,jitter=10ms,rate=20mbit,loss=1%`, or `ideal`."""
        if text.strip() == IDEAL:
            return cls()
        values: dict[str, Decimal] = {}
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in UNITS:
                raise Refused(f"a link has {', '.join(UNITS)}, not {name!r}; write e.g. {FORM}, or {IDEAL}")
            if name in values:
                raise Refused(f"the link {text!r} has two values for {name}; give one")
            found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([a-z%]+)", value)
            if not found or found[2] not in UNITS[name]:
                units = " or ".join(UNITS[name])
                raise Refused(f"{name} is a number with {units}, not {value!r}; write e.g. {FORM}")
            values[name] = Decimal(found[1]) * UNITS[name][found[2]]
        return cls(
            round(values.get("delay", 0)),
            round(values.get("jitter", 0)),
            round(values["rate"]) if "rate" in values else None,
            float(values.get("loss", 0) / Decimal(100)),
        )

    def __str__(self) -> str:
        items = {"delay": self.delay_us, "jitter": self.jitter_us, "rate": self.rate}
        texts = [f"{name}={_measured(value, UNITS[name])}" for name, value in items.items() if value]
        return ",".join([*texts, *([f"loss={self.loss * 100:.9g}%"] if self.loss else [])]) or IDEAL

    @property
    def is_ideal(self) -> bool:
        """Whether a transfer takes no time."""
        return self == Link()

    @property
    def timeout_us(self) -> int:
        """How long it takes to notice that a piece was lost."""
        return max(TIMEOUT_US, 2 * (self.delay_us + self.jitter_us))

    def bytes_in(self, us: int) -> int | None:
        """Number of bytes that go out in `us` microseconds; None: no limit."""
        return None if self.rate is None else self.rate * us // 8_000_000

    def send(self, size: int, now_us: int, line: Line, random: Random) -> Line:
        """The line after a piece of `size` bytes was sent on it.

        While a lost piece is retransmitted, those behind it go out, but none arrives before it.
        """
        tries = 1
        while random.random() < self.loss:
            tries += 1
        out_us = -(-size * 8_000_000 // self.rate) if self.rate else 0
        free_us = max(now_us, line.free_us) + tries * out_us
        way_us = max(self.delay_us + random.randint(-self.jitter_us, self.jitter_us), 0)
        arrives_us = free_us + (tries - 1) * self.timeout_us + way_us
        return Line(free_us, max(arrives_us, line.arrives_us), tries * size)


def _measured(value: int, units: dict[str, int]) -> str:
    """The value in the largest unit in which it is an integer, else in the smallest unit."""
    unit = next((unit for unit, size in units.items() if value % size == 0), list(units)[-1])
    return f"{(Decimal(value) / units[unit]).normalize():f}{unit}"
