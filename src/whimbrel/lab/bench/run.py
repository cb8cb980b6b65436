"""One run of a comparison: a fresh application in a shared SparkSession, a steady load, one move, and a verdict.

    start ─ fill: each key gets its state ─ settle ─ load, `before` seconds ─ the move ─ load, `after` ─ drain ─ judge

Only the move is measured. Everything before it ensures that the move starts on a running stream, with all its state, on
a warm JVM. Before a restoration the source dies: in the middle of its work, at any time between two increments. It
comes back when its keys are elsewhere, so that a zombie is part of every such run.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.link import IDEAL
from whimbrel.core.protocols import PROTOCOLS, SIZES
from whimbrel.core.protocols.machine import Migration
from whimbrel.deploy import embedded as application
from whimbrel.deploy.deployment import TRIGGER
from whimbrel.lab.bench.measure import AFTER, Release, measure, span
from whimbrel.lab.bench.oracle import key_counts
from whimbrel.lab.bench.replay import replay
from whimbrel.lab.bench.witness import Witness
from whimbrel.lab.bench.workloads import KeyCount, Load
from whimbrel.orchestrator.handle import Handle
from whimbrel.pipeline import Pipeline

SITES = ("cloud", "edge-1")
STAGE = "count"
SOURCE = f"{STAGE}-1"
"""The instance that has all keys at the beginning."""
NO_MOVE = "none"
"""In place of a protocol: nothing moves, only the load is measured."""
BIN_US = 250_000
SETTLE = 30.0
"""The maximum seconds to wait until at most one second's records are in flight."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters that may differ between two runs."""

    protocol: str = "live"
    options: dict[str, Any] = {}
    """Of the protocol: additional arguments of `migrate`."""
    keys: int = 10_000
    state_bytes: int = 1024
    """Of each key."""
    churn: bool = False
    """Whether each record changes the whole state of its key, or only the count in it."""
    rate: float = 2000.0
    skew: float = 0.0
    active: float = 1.0
    """The share of the keys that receive records; the others only have their state."""
    share: float = 0.5
    """The share of the keys that moves; `restart` and `restore` move whole instances, so all keys."""
    moved: int | None = None
    """The number of keys that move, the first ones, instead of a share."""
    instances: int | None = None
    """Instead of a move to the other site: the number of instances to scale to at the first one, if supported."""
    link: str | None = None
    """Between the two sites, as `run(links=...)` takes it."""
    trigger: str = TRIGGER
    """The minimum interval between micro-batches of a site."""
    spike: tuple[float, float] | None = None
    """From the order on: the factor of the rate, and its duration in seconds."""
    save_every: float = 5.0
    """With `restore`: seconds between two increments; only then is there a central store."""
    outage: float = 0.0
    """With `restore`: seconds between the death of the source and the order."""
    before: float = 10.5
    after: float = 11.5
    patience: float = 180.0
    """The maximum seconds for filling, moving and draining, each."""

    @property
    def label(self) -> str:
        """The candidate's name in tables and summaries: the protocol with its options."""
        return " ".join([self.protocol, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def restores(self) -> bool:
        """Whether the source dies, and its keys are restored from a central store."""
        return self.protocol == "restore"

    @property
    def parameters(self) -> dict[str, Any]:
        """Everything but the protocol, as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in plain.items() if name != "protocol"}


def described(parameters: dict[str, Any]) -> str:
    """The load and the move of a run, in words; from its parameters as they are in a report."""
    moved = f"{parameters['share']:.0%}" if parameters["moved"] is None else f"{parameters['moved']:,}"
    return (
        f"{parameters['keys']:,} keys of {parameters['state_bytes']:,} bytes, {parameters['rate']:,.4g} records/s; "
        f"{moved} of the keys move; link: {parameters['link'] or 'none'}"
    )


Show = Callable[[str], None]
"""Called several times a second with the current activity."""


def check(setting: Setting) -> None:
    """Refuse settings that this version of Whimbrel lacks, before anything starts."""
    if setting.protocol not in (*PROTOCOLS, NO_MOVE):
        raise Refused(f"protocol {setting.protocol!r} is not there; this version has: {', '.join(PROTOCOLS)}")
    for option in setting.options:
        if option not in SIZES | PROTOCOLS[setting.protocol].choices:
            raise Refused(f"protocol {setting.protocol!r} has no option {option!r}")
    if setting.keys < 1 or setting.rate <= 0 or not 0 < setting.share <= 1:
        raise Refused("a run needs at least one key, a rate above 0, and a share above 0 and up to 1")


def run(spark: Any, setting: Setting, seed: int, show: Show = lambda what: None) -> dict[str, Any]:
    """Run it. The report also has `held`, `figures` (of the move as a whole) and `series` (latency over time)."""
    check(setting)
    operator, witness = KeyCount(setting.state_bytes, setting.churn), Witness()
    load: Any = Load(
        setting.keys, setting.rate, skew=setting.skew, active=setting.active, seed=seed, state_bytes=setting.state_bytes
    )
    pipeline = Pipeline("whimbrel-bench", load, key="key").stage(STAGE, operator)
    links = setting.link or IDEAL
    show("starting")
    with tempfile.TemporaryDirectory(prefix="whimbrel-store-") as folder:
        stored: dict[str, Any] = {"store": folder, "save_every": setting.save_every} if setting.restores else {}
        app = application.run(
            pipeline, SITES, watch=witness, spark=spark, trigger=setting.trigger, links=links, **stored
        )
        try:
            for _ in _until(lambda: len(witness.releases) >= setting.keys, setting.patience, "every key has its state"):
                show(f"filling: {len(witness.releases):,} of {setting.keys:,} keys")
            _settle(app, witness, setting, show)
            _hold(setting.before, "steady", show)
            if setting.restores:
                _interrupt(app, setting, show)
            handle = order(app, setting, load.names)
            if setting.spike is not None:
                load.spike(*setting.spike)
            for _ in _until(lambda: handle is None or _is_over(handle), setting.patience, "the move is over"):
                show(f"moving ({handle.outcome if handle else ''})")
            if setting.restores:
                app.sites[SITES[0]].start(SOURCE)
            _hold(setting.after, "after the move", show)
            migrations = handle.migrations if handle else []
            _stabilise(migrations, witness.releases, setting, show)
            load.end()
            show("delivering the remaining results")
            judged = witness.judge(
                app,
                lambda: key_counts(load.emitted_keys(), setting.state_bytes, setting.churn),
                migrations,
                setting.patience,
            )
            commits = _commits(app)
        finally:
            app.stop()
    return {
        "protocol": setting.protocol,
        "label": setting.label,
        "parameters": setting.parameters,
        **judged,
        "held": judged["held"] and (bool(migrations) or setting.protocol == NO_MOVE),
        "commit_ms": commits,
        "figures": whole(judged["migrations"], [span(migration) for migration in migrations]),
        "series": series(witness.releases, migrations),
    }


def order(app: Any, setting: Setting, names: list[str]) -> Handle | None:
    """Order the move of the setting; `names` are all keys."""
    if setting.protocol == NO_MOVE:
        return None
    order = {"protocol": setting.protocol, "deadline": setting.patience, **setting.options}
    if setting.instances is not None and hasattr(app, "scale"):
        handle: Handle = app.scale(STAGE, instances=setting.instances, at=SITES[0], **order)
        return handle
    which: dict[str, Any] = {"share": setting.share}
    if setting.protocol in ("restart", "restore") or setting.moved == setting.keys:
        which = {"at": SITES[0]}
    elif setting.moved is not None:
        which = {"keys": names[: setting.moved]}
    handle = app.migrate(STAGE, to=SITES[1], **which, **order)
    return handle


def _interrupt(app: application.App, setting: Setting, show: Show) -> None:
    """Stop the source, once there is a checkpoint to restore it from."""
    for _ in _until(lambda: bool(app.control.checkpoints(STAGE)), setting.patience, "there is a checkpoint"):
        show("waiting for a checkpoint")
    _hold(random.uniform(0, setting.save_every), "some time after an increment", show)
    app.sites[SITES[0]].stop(SOURCE)
    _hold(setting.outage, "the source is dead", show)


def _settle(app: application.App, witness: Witness, setting: Setting, show: Show) -> None:
    """Wait until the backlog of filling is processed: it must not count as the usual latency. A machine that is too
    slow for the load never gets there; it is measured nevertheless, and the figures show it."""
    end = time.monotonic() + SETTLE
    while app.first.gateway.sent - len(witness.releases) > max(10, setting.rate) and time.monotonic() < end:
        show("settling")
        time.sleep(0.05)


def _stabilise(migrations: Sequence[Migration], releases: list[Release], setting: Setting, show: Show) -> None:
    """Wait until the moved keys have been stable for long enough to measure it, at most for `after` seconds more."""
    end = time.monotonic() + (setting.after if setting.after > AFTER / 1e6 else 0)
    while time.monotonic() < end:
        figures = [measure(m, m.move.selection, list(releases), 0) for m in migrations]
        if all(figure["stabilised_ms"] is not None for figure in figures):
            return
        _hold(1.0, "until it is stable", show)


def _is_over(handle: Handle) -> bool:
    return handle.is_noop or all(migration.is_over for migration in handle.migrations)


def _hold(seconds: float, what: str, show: Show) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        show(f"{what}: {left:.0f} s left")
        time.sleep(min(0.2, left))


def _until(condition: Callable[[], bool], patience: float, what: str) -> Iterator[None]:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            raise Unavailable(f"timeout: waited {patience:.0f} s until {what}")
        yield
        time.sleep(0.05)


def _commits(app: application.App) -> float | None:
    """The median time of a batch's commit of its state at the first site, in milliseconds, as Spark reports it."""
    queries: Iterable[Any] = app.sites[SITES[0]].hosts.values()
    recent = [progress for query in queries for progress in query.state_commits]
    return float(np.median(recent)) if recent else None


# ── The figures of a run ─────────────────────────────────────────────────────────────────────────────────────────────


def whole(migrations: Sequence[dict[str, Any]], spans: Sequence[tuple[int, int]]) -> dict[str, float | None]:
    """The move of a run as a whole, also if it became several migrations: the worst of each figure, bytes summed."""
    if not migrations:
        return {}
    latencies = [migration["latency_ms"] for migration in migrations]

    def worst(values: Sequence[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    return {
        "stoppage_ms": worst([migration["stoppage_ms"] for migration in migrations]),
        "peak_ms": worst([latency["during"].get("max") for latency in latencies]),
        "duration_ms": (max(end for _, end in spans) - min(start for start, _ in spans)) / 1000,
        "p99_ratio": worst(
            [_ratio(latency["during"].get("p99"), latency["before"].get("p99")) for latency in latencies]
        ),
        "stabilised_ms": worst([migration["stabilised_ms"] for migration in migrations]),
        "bytes_sent": sum(migration["bytes_sent"] for migration in migrations),
        "state_bytes": sum(migration["state_bytes"] for migration in migrations),
        **replay(migrations),
    }


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one is not None and other else None


def series(releases: Sequence[Release], migrations: Sequence[Migration]) -> dict[str, list[float]]:
    """Latency of the moved keys over time, in steps of 0.25 s; second 0 is the order."""
    if not migrations:
        return {}
    start = min(span(migration)[0] for migration in migrations)
    mine = [release for release in releases if any(release.result.key in m.move.selection for m in migrations)]
    bins = (np.array([release.at_us for release in mine], dtype=np.int64) - start) // BIN_US
    latency = np.array([release.latency_us for release in mine]) / 1000
    edges, firsts = np.unique(bins, return_index=True)  # releases are in the order of time
    parts = np.split(latency, firsts[1:])
    return {
        "seconds": [round(float(edge + 0.5) * BIN_US / 1e6, 3) for edge in edges],
        "p50_ms": [round(float(np.median(part)), 1) for part in parts],
        "max_ms": [round(float(part.max()), 1) for part in parts],
    }
