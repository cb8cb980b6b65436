"""A comparison: the runs of a scenario one after the other in one session, and the report on them.

A warm-up run, which does not count, comes first, because first executions are slow. Then the candidates alternate, in
one order and in reverse (a b c, c b a, ...): changes of the machine in the course of an hour affect all alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core.errors import Refused, WhimbrelError
from whimbrel.lab.bench import report, summary
from whimbrel.lab.bench.growth import growth
from whimbrel.lab.bench.replay import prices
from whimbrel.lab.bench.run import Setting, check, run
from whimbrel.lab.bench.scenarios import MIB, Scenario, little

HEAVY = 64 * MIB
"""Bytes of state: above that, the JVM needs more memory than Spark's 1 GiB."""

Show = Callable[[int, Setting, str], None]
"""Called several times a second with the number of the run (0: the warm-up), its setting and the current activity."""
Report = Callable[[int, Setting, dict[str, Any]], None]
"""Called once per run with its number, its setting and its report."""


def plan(scenario: Scenario) -> list[Setting]:
    """All runs, in their order."""
    settings = []
    for turn in range(scenario.repeat):
        candidates = scenario.candidates[::-1] if turn % 2 else scenario.candidates
        for point in scenario.points():
            settings += [msgspec.structs.replace(point, protocol=c.protocol, options=c.options) for c in candidates]
    return settings


class Comparison:
    """The runs of a scenario; completed runs are kept, whatever happens to the rest."""

    def __init__(self, name: str, scenario: Scenario, seed: int) -> None:
        """Refuses, with the reason, settings that this version of Whimbrel lacks."""
        self.name, self.scenario, self.seed, self.plan = name, scenario, seed, plan(scenario)
        for setting in self.plan:
            try:
                check(setting)
            except Refused as error:
                raise Refused(f"scenario {name}: {error}") from error
        self.runs: list[summary.Run] = []
        self.failed: list[dict[str, Any]] = []
        self._heading = report.heading(seed)

    @property
    def memory(self) -> dict[str, str]:
        """Additional configuration of a session for large state."""
        heavy = any(setting.keys * setting.state_bytes > HEAVY for setting in self.plan)
        return {"spark.driver.memory": "6g"} if heavy else {}

    def run(self, spark: Any, show: Show, report: Report) -> None:
        """Warm up, then execute every run. One that fails is recorded, and the others continue."""
        warm_up = little(self.plan[0])
        run(spark, warm_up, self.seed, lambda what: show(0, warm_up, what))
        for number, setting in enumerate(self.plan, 1):
            try:
                done = run(spark, setting, self.seed, lambda what, n=number, s=setting: show(n, s, what))  # type: ignore[misc]
            except WhimbrelError as error:
                done = {"protocol": setting.protocol, "parameters": setting.parameters, "error": str(error)}
                self.failed.append(done)
            else:
                self.runs.append({**self._heading, **done})
            report(number, setting, done)

    @property
    def held(self) -> bool:
        """Whether all runs are done, and each held every guarantee."""
        return len(self.runs) == len(self.plan) and all(run["held"] for run in self.runs)

    def report(self) -> dict[str, Any]:
        """The report on the completed runs."""
        medians = summary.summarise(self.runs)
        found = {
            **self._heading,
            "scenario": self.name,
            "about": self.scenario.about,
            "planned": len(self.plan),
            "held": self.held,
            "summary": medians,
            "ratios": summary.ratios(medians),
            "cells": summary.cells(self.runs, self.scenario.varied),
            "published": msgspec.to_builtins(self.scenario.published),
            "failed": self.failed,
            "runs": self.runs,
        }
        if (found_prices := prices(self.runs)) is not None:
            found["restoration"] = found_prices
        if self.scenario.fits and self.runs:
            with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder:
                found["growth"] = growth(self.runs, Path(folder))
        return found
