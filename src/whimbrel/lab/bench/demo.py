"""The demo: a cloud and two edges on this machine, a fleet of vehicles, and three moves under load.

live      half of the vehicles, cloud → edge-1      not noticeable
pause     the other half, cloud → edge-2            a short wait
restart   edge-1's vehicles, edge-1 → cloud         the usual way today
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whimbrel.core.protocols.machine import Migration
from whimbrel.deploy import embedded as application
from whimbrel.deploy.deployment import TRIGGER
from whimbrel.gateway.clock import wall_us
from whimbrel.lab.bench import picture, report
from whimbrel.lab.bench.measure import Release, span
from whimbrel.lab.bench.oracle import FAULTS, averages
from whimbrel.lab.bench.witness import Witness
from whimbrel.lab.bench.workloads import VEHICLE_SCHEMA, AverageSpeed, vehicles
from whimbrel.log.durability import PROCESS
from whimbrel.pipeline import Items, Pipeline

SITES = ("cloud", "edge-1", "edge-2")
STAGE = "speed"
WARM_UP = 15.0
"""Seconds of load before the measurement starts: a new JVM is slow."""


@dataclass(frozen=True)
class Options:
    """The options of the demo."""

    seconds: float = 60.0
    rate: int = 2000
    keys: int = 1000
    seed: int = 1
    data: Path | None = None
    out: Path = Path("whimbrel-demo")
    trigger: str = TRIGGER
    durability: str = PROCESS


@dataclass(frozen=True)
class Act:
    """One move of the demo: its time, as a share of the duration, and its parameters."""

    at: float
    protocol: str
    to: str
    source: str
    share: float | None = None


ACTS = (
    Act(0.2, "live", "edge-1", "cloud", share=0.5),
    Act(0.45, "pause", "edge-2", "cloud"),
    Act(0.7, "restart", "cloud", "edge-1"),
)

Show = Callable[[float, "application.App", str], None]
"""Called several times a second with the time since the start, the application, and the current activity."""


def run(options: Options, show: Show = lambda seconds, app, what: None) -> dict[str, Any]:
    """Run it and return the report; the picture is in `options.out`."""
    witness = Witness()
    rows = int((WARM_UP + options.seconds) * options.rate)
    readings = vehicles(options.keys, rows, options.seed)
    source = Items(readings, VEHICLE_SCHEMA, options.rate)
    pipeline = Pipeline("whimbrel-demo", source, key="vehicle").stage(STAGE, AverageSpeed())
    settings: dict[str, Any] = {"trigger": options.trigger, "durability": options.durability}
    app = application.run(pipeline, SITES, data=options.data, watch=witness, **settings)
    moved: list[Migration] = []
    try:
        start = time.monotonic()

        def play(until: float, what: str) -> None:
            while (now := time.monotonic() - start) < until:
                show(now, app, what)
                time.sleep(0.2)

        play(WARM_UP, "warming up")
        zero = wall_us()
        for act in ACTS:
            play(WARM_UP + act.at * options.seconds, "steady")
            handle = app.migrate(STAGE, to=act.to, at=act.source, share=act.share, protocol=act.protocol)
            while not all(migration.is_over for migration in handle.migrations):
                show(time.monotonic() - start, app, f"{act.protocol}: {act.source} → {act.to} ({handle.outcome})")
                time.sleep(0.05)
            moved += handle.migrations
        play(WARM_UP + options.seconds, "steady")
        show(time.monotonic() - start, app, "delivering the remaining results")
        judged = witness.judge(app, lambda: averages(readings()), moved, timeout=120)
    finally:
        app.stop()
    return {
        **report.heading(options.seed),
        "parameters": {"seconds": options.seconds, "rate": options.rate, "keys": options.keys},
        **judged,
        "picture": str(_draw(options, witness.releases, judged, moved, zero)),
    }


def _draw(options: Options, releases: list[Release], judged: dict[str, Any], moved: list[Migration], zero: int) -> Path:
    groups = {
        f"{len(keys)} vehicles, {name}": [release for release in releases if release.result.key in keys]
        for name, keys in _halves(releases, moved)
    }
    moves = [
        {"start_us": span(m)[0], "end_us": span(m)[1], "protocol": m.move.protocol, "label": _label(m, figure)}
        for m, figure in zip(moved, judged["migrations"], strict=True)
    ]
    title = f"{options.rate:,} records/s of {options.keys:,} vehicles; nothing lost, doubled or out of order"
    broken = {name: judged["records"][name] for name in FAULTS if judged["records"][name]}
    if broken:
        title = f"BROKEN: {', '.join(f'{name} = {count}' for name, count in broken.items())}"
    path = options.out / "latency.png"
    picture.latency_over_time(path, groups, moves, title, zero)
    return path


def _halves(releases: list[Release], moved: list[Migration]) -> list[tuple[str, set[str]]]:
    """The vehicles of the first move, and the others: each half moves on its own."""
    keys = {release.result.key for release in releases}
    first = {key for key in keys if key in moved[0].move.selection}
    return [(f"moved {moved[0].move.protocol}", first), ("the others", keys - first)]


def _label(migration: Migration, figure: dict[str, Any]) -> str:
    return (
        f"{migration.move.protocol}\n{migration.from_site} → {migration.to_site}\nstop {figure['stoppage_ms']:.0f} ms"
    )
