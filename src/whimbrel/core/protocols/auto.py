"""`auto`: estimates the cost of each protocol in the current situation, takes the cheapest that fits, and explains why.

Not a protocol with a table: it chooses one, from measurements. The estimates are simple sums. They need not be exact,
only in the right order: the protocols differ by seconds, not by milliseconds.

    T   time to transfer the state over the link, or through the logs if there is no slower link
    B   time the source needs to process its inbox's backlog
    b   time from one micro-batch to the next

    live        stops nothing; takes B + T + 4 b; the moving keys' records are applied twice all that time
    push        stops a key for 2 b and two link delays; takes T + 3 b; both ends process the backlog
    fetch       stops a key for 3 b and three link delays; takes T and a round for each step
    pause       stops all keys for B + T + 4 b
    fluid       stops a piece's keys for its share of T + 4 b; takes as many rounds as there are turns
    replicate   if a standby is warm: stops a key for 2 b. If not, takes T first, and sends the changes meanwhile
    restart     stops everything for T and the start of a query; whole instances only
    restore     stops all keys until the store is read and the records behind its last checkpoint are applied again;
                needs a central store, but neither the link nor the source; whole instances only

The price of a protocol is the latency it causes: its stoppage, the time until the moved keys are no longer late because
of the backlog, plus small terms for its duration and its bytes.
"""

from __future__ import annotations

import msgspec

from whimbrel.core.errors import Refused
from whimbrel.core.link import Link
from whimbrel.core.protocols.fluid import STEP

LOG_RATE = 100 << 20
"""Approximate throughput of the logs of one machine, in bytes per second."""
RESTART_MS = 2_000
"""Duration of the start of a query, in milliseconds."""
STEPS = 16
"""Approximate number of rounds of `fetch`."""


class Situation(msgspec.Struct, frozen=True):
    """The measurements. Rates are per second."""

    keys: int
    state_bytes: int
    rate: float
    """Records of the moving keys per second."""
    record_bytes: int
    backlog: int
    """Records that wait at the source."""
    capacity: float
    """Records that the source can apply per second."""
    batch_ms: float
    link: Link = Link()
    is_cut: bool = False
    is_whole: bool = False
    """Whether all keys of the source move."""
    is_warm: bool = False
    """Whether a standby for exactly these keys is warm at the destination."""
    source_runs: bool = True
    destination_runs: bool = True
    shares_disk: bool = True
    """Whether the destination can read the source's checkpoint."""
    unsaved: int | None = None
    """Records that are not in the central store yet; None: there is no store."""


class Limits(msgspec.Struct, frozen=True):
    """The user's limits; None: no limit."""

    stoppage_ms: float | None = None
    duration_ms: float | None = None
    bytes: int | None = None


class Estimate(msgspec.Struct, frozen=True):
    """The estimated cost of a protocol."""

    protocol: str
    stoppage_ms: float
    duration_ms: float
    bytes: int
    extra_records: int
    """Records that are applied twice, or forwarded."""
    late_ms: float
    """How long the moved keys stay late because of the backlog."""
    unfit: str | None = None
    """Why it cannot be used."""

    @property
    def price(self) -> float:
        """The total cost in milliseconds of latency."""
        return self.stoppage_ms + self.late_ms + self.duration_ms / 50 + self.bytes / (1 << 20)

    def __str__(self) -> str:
        text = (
            f"{self.protocol}: stoppage about {self.stoppage_ms:,.0f} ms, duration {self.duration_ms:,.0f} ms, "
            f"{self.bytes / (1 << 20):,.1f} MiB, {self.extra_records:,} extra records"
        )
        return text if self.unfit is None else f"{text}; not possible: {self.unfit}"


def estimates(s: Situation, limits: Limits = Limits()) -> list[Estimate]:  # noqa: B008 (frozen)
    """The cost of each protocol, the cheapest first; those that cannot be used last."""
    b = s.batch_ms
    way = (s.link.delay_us + s.link.jitter_us) / 1000
    rate = min(LOG_RATE, s.link.rate / 8 if s.link.rate else LOG_RATE) * (1 - s.link.loss)
    T = s.state_bytes / rate * 1000 + way
    B = s.backlog / max(s.capacity, 1) * 1000
    share = s.backlog * s.record_bytes // 2

    def one(protocol: str, stop: float, took: float, bytes: int, extra: float, late: float) -> Estimate:
        return Estimate(protocol, stop, took, bytes, round(extra), late, _unfit(protocol, stop, took, bytes, s, limits))

    def doubled(ms: float) -> float:
        return s.rate * ms / 1000

    live, turns = B + T + 4 * b, max(1, 512 // STEP)
    again = s.state_bytes / LOG_RATE * 1000 + (s.unsaved or 0) / max(s.capacity, 1) * 1000 + 4 * b
    meanwhile = min(s.state_bytes, int(doubled(T) * s.state_bytes / max(s.keys, 1)))
    found = [
        one("live", 0, live, s.state_bytes + int(doubled(live) * s.record_bytes), doubled(live), B),
        one("push", 2 * b + 2 * way, T + 3 * b, s.state_bytes + share, s.backlog / 2, B / 2),
        one("fetch", 3 * b + 3 * way, T + STEPS * (2 * b + 2 * way), s.state_bytes + share, s.backlog / 2, B / 2),
        one("pause", B + T + 4 * b, B + T + 4 * b, s.state_bytes, 0, B),
        one("fluid", B + T / turns + 4 * b, B + T + turns * 4 * b, s.state_bytes, 0, B),
        one("restart", B + T + RESTART_MS, B + T + RESTART_MS, s.state_bytes, 0, B),
        one("restore", again, again, 0, s.unsaved or 0, 0),
    ]
    if s.is_warm:
        found.append(one("replicate", 2 * b + way, 4 * b, s.state_bytes // 20, s.backlog / 2, B / 2))
    else:
        took = T + 6 * b
        found.append(one("replicate", 2 * b + way, took, s.state_bytes + meanwhile, s.backlog / 2, B / 2 + took))
    return sorted(found, key=lambda estimate: (estimate.unfit is not None, estimate.price))


def choose(s: Situation, limits: Limits = Limits()) -> tuple[str, list[str]]:  # noqa: B008 (frozen)
    """The protocol to use, and the reasons, one per line. Raises `Refused` if none fits."""
    ranked = estimates(s, limits)
    best, *others = ranked
    if best.unfit is not None:
        reasons = "; ".join(f"{estimate.protocol}: {estimate.unfit}" for estimate in ranked)
        raise Refused(f"no protocol fits: {reasons}")
    link = "cut" if s.is_cut else str(s.link)
    seen = (
        f"auto saw {s.keys:,} keys with {s.state_bytes / (1 << 20):,.1f} MiB, {s.rate:,.0f} records/s of them, "
        f"{s.backlog:,} waiting, micro-batches of {s.batch_ms:,.0f} ms, link {link}"
        + ("" if s.unsaved is None else f", {s.unsaved:,} records behind the last checkpoint")
    )
    return best.protocol, [seen, f"auto takes {best}", *(f"auto left {other}" for other in others)]


def _unfit(protocol: str, stop: float, took: float, bytes: int, s: Situation, limits: Limits) -> str | None:
    if not s.destination_runs:
        return "nothing runs at the destination"
    if protocol == "restore" and s.unsaved is None:
        return "there is no central store"
    if s.is_cut and protocol != "restore":
        return "the link is cut"
    if not s.source_runs and protocol != "restore":
        return "the source does not run"
    if protocol == "restart" and not s.shares_disk:
        return "it copies a checkpoint, and the two sites do not share a disk"
    if protocol in ("restart", "restore") and not s.is_whole:
        return "it moves whole instances only"
    for name, value, limit in (
        ("stoppage", stop, limits.stoppage_ms),
        ("duration", took, limits.duration_ms),
        ("bytes", bytes, limits.bytes),
    ):
        if limit is not None and value > limit:
            return f"its {name} would be about {value:,.0f}, and {limit:,.0f} is the limit"
    return None
