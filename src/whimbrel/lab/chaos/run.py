"""One chaos run: a deployment, faults, a wait until it is idle, a verdict and a picture."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from whimbrel.core.errors import Refused, WhimbrelError
from whimbrel.core.protocols.machine import Migration
from whimbrel.lab.bench import picture, report
from whimbrel.lab.chaos import load, phases, verdict
from whimbrel.lab.chaos.deployed import Deployed
from whimbrel.lab.chaos.engine import Engine, Show
from whimbrel.lab.chaos.oracle import LEDGER
from whimbrel.lab.chaos.plan import KINDS, plan
from whimbrel.lab.chaos.rows import Load
from whimbrel.lab.chaos.storage import has_strace

SITES = ("cloud", "edge-1", "edge-2")
LINKS = "delay=20ms,rate=10mbit"
BAD_DISK, AWAY = "bad-disk", "away"
DEAD, LENIENT = 10.0, 60.0
"""Seconds without a heartbeat until a process is dead. If no fault stops a process for that long, a killed one has time
to restart from its checkpoint, also on a busy machine; else its keys may be restored elsewhere."""
SAVE_EVERY = 3.0
"""Seconds between two increments to the central store."""


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    seed: int = 1
    rate: float = 500.0
    data: Path | None = None
    out: Path = Path("whimbrel-chaos")


def run(
    options: Options,
    minutes: float = 5.0,
    kinds: Sequence[str] = (),
    show: Show = lambda line: None,
    sites: Sequence[str] = SITES,
) -> dict[str, Any]:
    """Inject the faults of the seed's plan, and return the report. `kinds`: only these; empty: all supported ones."""
    if BAD_DISK in kinds and not has_strace():
        raise Refused(f"{BAD_DISK} needs strace and the permission to trace, which this machine does not have")
    if not kinds and not has_strace():
        show(f"{BAD_DISK} is omitted: this machine has no strace, or does not permit it to trace")
    kinds = kinds or [kind for kind in KINDS if kind != BAD_DISK or has_strace()]
    planned = plan(options.seed, minutes * 60, kinds)
    play = Scene(options, sites, dead=DEAD if AWAY in kinds else LENIENT, show=show)
    figures = play.run(lambda engine: engine.play(planned), f"{len(planned)} faults in {minutes:g} minutes")
    return {**figures, "parameters": {**figures["parameters"], "minutes": minutes, "kinds": list(kinds)}}


def run_every_phase(
    options: Options, wanted: Sequence[phases.Case] | None = None, show: Show = lambda line: None
) -> dict[str, Any]:
    """Kill every party in every phase of every protocol, or in the `wanted` cases; the report also has `phases`."""
    wanted = phases.cases() if wanted is None else wanted
    scene = Scene(options, SITES[:2], dead=phases.TIMEOUT, show=show)
    outcomes: list[phases.Outcome] = []

    def play(engine: Engine) -> None:
        for outcome in phases.play(engine, wanted, scene.phase_of):
            outcomes.append(outcome)
            hit = "hit" if outcome.is_hit else f"not hit, but {', '.join(outcome.found)}"
            show(f"{len(outcomes)} of {len(wanted)}: {hit}; {outcome.ended}")

    figures = scene.run(play, f"{len(wanted)} kills")
    return {**figures, "phases": [_described(one) for one in outcomes]}


class Scene:
    """The deployment and folder of one run."""

    def __init__(self, options: Options, sites: Sequence[str], dead: float, show: Show) -> None:
        self._options, self._sites, self._dead, self._show = options, sites, dead, show
        self._load = Load(seed=options.seed, rate=options.rate)
        self._begun_us = self._zero_us = time.time_ns() // 1000
        self._folder = _folder(options.data)

    def run(self, play: Callable[[Engine], object], what: str) -> dict[str, Any]:
        """Run it and return the report: `broken` lists the violations. If there are any, the data are kept."""
        try:
            return self._run(play, what)
        except BaseException:  # it was interrupted, or did not start
            self._remove()
            raise

    def _remove(self) -> None:
        if self._options.data is None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, play: Callable[[Engine], object], what: str) -> dict[str, Any]:
        broken: list[str] = []
        saving = ["--store", str(self._folder / "store"), "--save-every", f"{SAVE_EVERY:g}"]
        with Deployed(self._folder, self._load, self._sites, LINKS, self._dead, saving) as deployed:
            engine = Engine(deployed, self._show)
            self._show("starting the processes")
            engine.warm_up()
            self._show(what)
            self._zero_us = time.time_ns() // 1000
            try:
                play(engine)
                self._show("no more faults; waiting until all work is finished")
                engine.come_to_rest()
            except WhimbrelError as error:
                broken.append(str(error))
            status = deployed.ask(deployed.client.status) or {}
            left = deployed.end()
        records = status.get("records", {})
        judged = verdict.judge(
            self._folder, self._load, engine.struck, self._begun_us, self._zero_us, records.get("sent")
        )
        judged["records"]["refused"] = records.get("refused")
        broken += [*verdict.broken(judged), *deployed.complaints]
        broken += [f"status still shows an error: {error}" for error in errors_in(status)]
        if load.emitted(self._folder) is None:
            broken.append("the source was not read to its end")
        broken += [f"processes were left over: {left}"] if left else []
        path = self._draw(judged, broken)
        if not broken:
            self._remove()
        return {
            **report.heading(self._options.seed),
            "parameters": {"sites": self._sites, "links": LINKS, "load": msgspec.to_builtins(self._load)},
            "batch_ms": _batches(status),
            **judged,
            "left_over": len(left),
            "broken": broken,
            "held": not broken,
            "picture": str(path),
            "data": str(self._folder),
        }

    def phase_of(self, id: str, at_us: int) -> tuple[str, Migration]:
        """The phase of a migration at a time, by the journal, and the migration."""
        (found,) = (one for one in verdict.journalled(self._folder, self._begun_us) if one.move.id == id)
        return verdict.phase_at(found, at_us), found

    def _draw(self, judged: dict[str, Any], broken: Sequence[str]) -> Path:
        releases = verdict.Run(self._folder, self._begun_us).releases(LEDGER)
        moves = [
            {"start_us": one.story[0].at_us, "end_us": one.story[-1].at_us, "protocol": one.move.protocol, "label": ""}
            for one in verdict.journalled(self._folder, self._begun_us)
            if one.story
        ]
        faults = judged["faults"]
        marks = [(self._zero_us + fault["at_ms"] * 1000, f"{fault['kind']} {fault['target']}") for fault in faults]
        title = f"{len(faults)} faults, seed {self._options.seed}: nothing lost, doubled or out of order"
        if broken:
            title = f"BROKEN: {broken[0].splitlines()[0]}"
        path = self._options.out / "chaos.png"
        picture.latency_over_time(path, {"all keys": releases}, moves, title, self._zero_us, marks)
        return path


def _described(outcome: phases.Outcome) -> dict[str, Any]:
    found = msgspec.to_builtins(outcome)
    del found["after"]
    return {**found, "hit": outcome.is_hit}


def errors_in(status: dict[str, Any]) -> list[str]:
    """The permanent errors in `status`."""
    stages = status.get("stages", {}).items()
    found = {"": status.get("error"), "the source: ": status.get("source", {}).get("error")}
    found |= {f"stage {name}: ": stage["error"] for name, stage in stages}
    found |= {f"{instance}: ": one["error"] for _, stage in stages for instance, one in stage["instances"].items()}
    return [f"{where}{error}" for where, error in found.items() if error]


def _batches(status: dict[str, Any]) -> dict[str, float]:
    """The median duration of the instances' last micro-batches."""
    stages = status.get("stages", {}).values()
    found = [one["batch_ms"] for stage in stages for one in stage["instances"].values() if one["batch_ms"]]
    return {"p50": median(found)} if found else {}


def _folder(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="whimbrel-chaos-"))
    if data.exists() and any(data.iterdir()):
        raise Refused(f"{data} is not empty; chaos needs an empty or a new folder")
    data.mkdir(parents=True, exist_ok=True)
    return data.resolve()
