"""`whimbrel chaos`, sampled: real processes, of which some are struck in a phase of a move, and the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whimbrel.lab.chaos.phases import Case
from whimbrel.lab.chaos.plan import DESTINATION, ORCHESTRATOR, PER_MINUTE
from whimbrel.lab.chaos.run import SITES, Options, run, run_every_phase

WANTED = [Case("push", "pushing", DESTINATION), Case("restart", "starting", ORCHESTRATOR)]
SLOW = 100.0
"""Records a second: what tests run beside needs the machine as well."""


def check(found: dict[str, Any]) -> None:
    """What every run must show."""
    assert found["broken"] == []
    assert found["held"]
    records = found["records"]
    assert records["delivered"] == records["expected"] > 0
    assert records["acknowledged"] == records["acceptable"] > 0
    assert [records[name] for name in ("lost", "duplicated", "out_of_order", "wrong")] == [0, 0, 0, 0]
    assert records["dead_lettered"] == records["dead_letters"]["expected"] > 0


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_whoever_is_killed_in_a_phase_costs_no_result(tmp_path: Path) -> None:
    said: list[str] = []
    options = Options(rate=SLOW, data=tmp_path / "data", out=tmp_path / "out")
    found = run_every_phase(options, WANTED, said.append)
    check(found)
    assert all(one["hit"] for one in found["phases"]), found["phases"]
    assert {f"{case.protocol} {case.phase}" for case in WANTED} <= {fault["phase"] for fault in found["faults"]}
    assert all(recovery["ms"] > 0 for recovery in found["recoveries"])
    assert (tmp_path / "out" / "chaos.png").stat().st_size > 10_000
    assert [line for line in said if line.startswith("kill: ")], said


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_faults_of_some_kinds_strike_are_healed_and_cost_no_result(tmp_path: Path) -> None:
    """Kinds that are over soon, each once."""
    kinds = ["calls", "store-damaged", "workers"]
    options = Options(rate=SLOW, data=tmp_path / "data", out=tmp_path / "out")
    found = run(options, len(kinds) / PER_MINUTE, kinds, sites=SITES[:2])
    check(found)
    assert {fault["kind"] for fault in found["faults"]} == set(kinds)
    assert all(recovery["back_ms"] is not None for recovery in found["recoveries"])
    left = [path.name for path in (tmp_path / "data").iterdir()]
    assert not [name for name in left if name.startswith(("clock-", "calls-", "store."))], left
