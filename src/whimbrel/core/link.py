"""A link between two sites: how long something takes from one to the other, and what it costs.

    sent ──▶ waits until the link is free ──▶ goes out at `rate` ──▶ `delay` ± `jitter` ──▶ arrives
                                                    │ lost
                                                    └──▶ goes out again, a timeout later

Whatever goes through a link arrives, once and in order, as through a TCP connection: loss costs time and bytes, never
data. The link itself remembers nothing and has no clock: what is on it is a `Line`, handed in and given back.
"""

from __future__ import annotations

import re
from decimal import Decimal
from random import Random
from typing import NamedTuple

import msgspec

from whimbrel.core.errors import Refused

TIMEOUT_US = 200_000
"""A lost piece is missed no sooner than this, or than twice the longest way: as usual for TCP."""

IDEAL = "ideal"
FORM = "delay=100ms,jitter=10ms,rate=20mbit,loss=1%"
UNITS = {
    "delay": {"s": 1_000_000, "ms": 1000},
    "jitter": {"s": 1_000_000, "ms": 1000},
    "rate": {"gbit": 10**9, "mbit": 10**6, "kbit": 1000},
    "loss": {"%": 1},
}
"""What a link has, and in which units: times in microseconds, rates in bits a second; the largest unit first."""


class Line(NamedTuple):
    """What is on a link in one direction, seen from the last piece that was sent."""

    free_us: int = 0
    """When the next piece can go out."""
    arrives_us: int = 0
    """When the last piece arrives."""
    cost: int = 0
    """Bytes that the last piece took, with those that went out again."""


class Link(msgspec.Struct, frozen=True):
    """The properties of a link, the same in both directions. `Link()` is ideal: no time passes on it."""

    delay_us: int = 0
    jitter_us: int = 0
    """How far the delay may be off, to either side."""
    rate: int | None = None
    """Bits a second; None: no limit."""
    loss: float = 0.0
    """The share of pieces that are lost."""

    def __post_init__(self) -> None:
        if self.delay_us < 0 or self.jitter_us < 0:
            raise Refused("a link's delay and jitter are not below 0")
        if self.rate is not None and self.rate < 1:
            raise Refused("a link's rate is at least one bit a second; leave it away for no limit")
        if not 0 <= self.loss < 1:
            raise Refused("a link's loss is at least 0% and below 100%: else nothing would ever arrive")

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
        """Whether it takes no time at all."""
        return self == Link()

    @property
    def timeout_us(self) -> int:
        """How long it takes to notice that a piece was lost."""
        return max(TIMEOUT_US, 2 * (self.delay_us + self.jitter_us))

    def bytes_in(self, us: int) -> int | None:
        """How many bytes go out in so many microseconds; None: any number."""
        return None if self.rate is None else self.rate * us // 8_000_000

    def send(self, size: int, now_us: int, line: Line, random: Random) -> Line:
        """The line after a piece of `size` bytes was sent on it.

        While a lost piece is waited for, those behind it go out, but none arrives before it.
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
    """In the largest unit in which it is a whole number, or else in the smallest."""
    unit = next((unit for unit, size in units.items() if value % size == 0), list(units)[-1])
    return f"{(Decimal(value) / units[unit]).normalize():f}{unit}"
