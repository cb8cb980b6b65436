"""A comparison, very small: every run is exact, and the report has all that it promises."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from whimbrel.lab.bench.comparison import Comparison
from whimbrel.lab.bench.run import Setting
from whimbrel.lab.bench.scenarios import LIVE_PAUSE, Scenario

pytestmark = pytest.mark.spark

SMALL = Setting(keys=30, state_bytes=500, churn=True, rate=150.0, skew=0.8, spike=(2.0, 1.0), before=1.0, after=1.0)


def test_live_and_pause_are_compared_and_nothing_goes_wrong(spark: SparkSession) -> None:
    shown: list[int] = []
    told: list[str] = []
    comparison = Comparison("small", Scenario(about="small", base=SMALL, candidates=LIVE_PAUSE, repeat=1), 7)

    def tell(number: int, setting: Setting, run: dict[str, Any]) -> None:
        told.append(run["label"])

    comparison.run(spark, lambda number, setting, what: shown.append(number), tell)
    assert (sorted(set(shown)), told) == ([0, 1, 2], ["live", "pause"])
    report = comparison.report()
    assert (comparison.held, report["held"], report["failed"]) == (True, True, [])
    for run in report["runs"]:
        counts = run["records"]
        assert {name: counts[name] for name in ("lost", "duplicated", "out_of_order", "wrong")} == {
            "lost": 0,
            "duplicated": 0,
            "out_of_order": 0,
            "wrong": 0,
        }
        assert counts["sent"] == counts["delivered"] > SMALL.keys
        (migration,) = run["migrations"]
        assert migration["stoppage_ms"] >= 0
        assert migration["latency_ms"].keys() == {"before", "during", "after"}
        assert {phase["phase"] for phase in migration["phases"]}
        assert (migration["outcome"], migration["protocol"]) == ("done", run["protocol"])
        assert 10 <= migration["keys"] <= 20
        assert migration["state_bytes"] > 500 * migration["keys"]
        assert run["figures"]["duration_ms"] == pytest.approx(migration["duration_ms"], abs=0.1)
        assert run["parameters"]["rate"] == 150.0
        assert run["series"]["seconds"][0] < 0 < run["series"]["seconds"][-1]
        assert (run["seed"], run["batch_ms"]["p50"] > 0, run["commit_ms"] is not None) == (7, True, True)
    assert list(report["summary"]) == ["live", "pause"]
    assert all(figures["bytes_sent"] > 0 for figures in report["summary"].values())
    assert report["summary"]["live"]["bytes_sent"] > report["summary"]["pause"]["bytes_sent"], "records went twice"
