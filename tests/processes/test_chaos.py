"""`whimbrel chaos`, sampled: real processes, of which some are killed in a phase of a move, and the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from whimbrel.chaos.phases import Case
from whimbrel.chaos.plan import DESTINATION, ORCHESTRATOR
from whimbrel.chaos.run import Options, run_every_phase

WANTED = [Case("push", "pushing", DESTINATION), Case("fetch", "fetching", ORCHESTRATOR)]


@pytest.mark.spark
@pytest.mark.timeout(1800)
def test_whoever_is_killed_in_a_phase_costs_no_result(tmp_path: Path) -> None:
    said: list[str] = []
    found = run_every_phase(Options(data=tmp_path / "data", out=tmp_path / "out"), WANTED, said.append)
    assert found["broken"] == []
    assert all(one["hit"] for one in found["phases"]), found["phases"]
    records = found["records"]
    assert records["delivered"] == records["sent"] > 0
    assert [records[name] for name in ("lost", "duplicated", "out_of_order", "wrong")] == [0, 0, 0, 0]
    assert {"push pushing", "fetch fetching"} <= {fault["phase"] for fault in found["faults"]}
    assert all(recovery["ms"] > 0 for recovery in found["recoveries"])
    assert {move["outcome"] for move in found["migrations"]} == {"done"}
    assert (tmp_path / "out" / "chaos.png").stat().st_size > 10_000
    assert [line for line in said if line.startswith("kill: ")], said
