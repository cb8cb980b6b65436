"""What a restoration's records cost: the prices are found again in times that were made of them."""

from __future__ import annotations

from typing import Any

import pytest

from whimbrel.lab.bench.replay import prices, replay


def run(silent: int, intermediate: int) -> dict[str, Any]:
    took = 0.05 * silent + 0.2 * intermediate + 700
    phases = [{"phase": "fencing", "ms": 30.0}, {"phase": "replaying", "ms": took}]
    return {"figures": replay([{"replayed": silent + intermediate, "silent": silent, "phases": phases}])}


def test_a_runs_restorations_in_three_figures() -> None:
    assert run(1000, 200)["figures"] == {"silent": 1000, "intermediate": 200, "replay_ms": 790.0}
    assert replay([{"phases": []}]) == {}, "another move"


def test_the_prices_are_the_slopes() -> None:
    runs = [run(silent, intermediate) for silent in (0, 4000) for intermediate in (100, 3000)]
    assert prices(runs) == {
        "silent_ms": 0.05,
        "intermediate_ms": 0.2,
        "once_ms": 700.0,
        "r2": 1.0,
        "record_ms": pytest.approx(4440 / 14200, abs=1e-4),
    }


@pytest.mark.parametrize("runs", [[run(1, 2), run(2, 1), run(0, 9)], [run(5, 5)] * 6, [{"figures": {}}] * 6])
def test_runs_that_do_not_tell_have_no_prices(runs: list[dict[str, Any]]) -> None:
    assert prices(runs) is None
