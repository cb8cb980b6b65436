"""Figures measured by others, as they state them: a reference for our own figures, not a competition.

Other machines, other engines, other loads: compare orders of magnitude and shapes. Each line names its source.
"""

from __future__ import annotations

from msgspec import Struct


class Published(Struct, frozen=True):
    """One figure from the literature."""

    system: str
    venue: str
    what: str
    figure: str
    unit: str
    condition: str


def _gomm(delay: str, figures: tuple[str, str, str]) -> tuple[Published, ...]:
    return tuple(
        Published("StreamPipes (Gomm)", "KIT 2020", "downtime", figure, "ms", f"delay {delay} ms, +{size} MiB of state")
        for size, figure in zip((0, 1, 5), figures, strict=True)
    )


MIGRATION_DOWNTIME = (
    *_gomm("0", ("48", "112", "308")),
    *_gomm("100 ± 10", ("243", "911", "1,278")),
    *_gomm("500 ± 50", ("1,057", "2,571", "3,823")),
)
CHECKPOINTS = tuple(
    Published("StreamPipes (Gomm)", "KIT 2020", "checkpoint", figure, "ms", f"+{size} MiB of state")
    for size, figure in zip((0, 1, 5), ("3.1", "23.8", "84.1"), strict=True)
)
RESTORATION = tuple(
    Published(
        "StreamPipes (Gomm)", "KIT 2020", f"restoration, each {kind} event", figure, "ms", "Raspberry Pi, 100 runs"
    )
    for kind, figure in (("reprocessed", "0.608"), ("intermediate", "1.109"))
)
FALCON = (
    Published(
        "Falcon",
        "SEC 2024",
        "interruption and latency, against Flink, Trisk and Meces",
        "2 to 4",
        "orders of magnitude less",
        "live, dual routing; 1, 5 or 6 of 10 keys, 100 and 400 keys; a cloud and two edges",
    ),
)
PAM = (
    Published("PAM", "abstract", "time to stabilise, against earlier work", "45 to 60", "% less", "push, key by key"),
    Published("PAM", "abstract", "stoppage", "10 to 15", "ms", "push, key by key"),
    Published("DRRS", "arXiv 2503.11320", "peak latency, against Megaphone and Meces", "81.1", "% less", "Flink 1.17"),
)
MECES = (
    Published("Meces", "ATC 2022", "latency peak, against Megaphone and Rhino", "about 10", "× less", "Flink, rescale"),
    Published("DRRS", "arXiv 2503.11320", "scaling time, against Megaphone and Meces", "72.8 to 86", "% less", "Flink"),
)
MEGAPHONE = (
    Published("Megaphone", "VLDB 2019", "maximum latency, fluid and batched", "10 to 100", "× less than at once", ""),
    Published("Megaphone", "VLDB 2019", "maximum latency, NEXMark Q3", "> 100 / about 10", "ms", "at once / batched"),
    Published("Megaphone", "VLDB 2019", "maximum latency, NEXMark Q4", "> 2,000 / ≤ 100", "ms", "at once / batched"),
)
TRADE_OFFS = tuple(
    Published("Spacker", "ICDCS 2025", "completion / latency spike", figure, "ms", f"{variant}, 5 GB, 4 nodes")
    for variant, figure in (
        ("at once", "4,489 / 1,739"),
        ("progressive", "21,782 / 221"),
        ("replication", "2,412 / 797"),
        ("tuned", "8,563 / 229"),
    )
)
RHINO = (
    Published(
        "Rhino", "SIGMOD 2020", "reconfiguration", "15", "× faster", "state of up to terabytes, replicated ahead"
    ),
)
