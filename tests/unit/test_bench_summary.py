"""Medians, ratios, lines, and the pictures drawn from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whimbrel.core.record import Result
from whimbrel.lab.bench.charts import draw
from whimbrel.lab.bench.growth import copy_ms, growth
from whimbrel.lab.bench.measure import Release, stabilised
from whimbrel.lab.bench.run import Setting, whole
from whimbrel.lab.bench.summary import cells, fit, ratios, summarise

MIB = 1 << 20


def a_run(protocol: str, duration: float, stoppage: float = 5.0, **parameters: Any) -> dict[str, Any]:
    """What a run reports, as far as a summary looks at it."""
    setting = Setting(protocol=protocol, **parameters)
    size = setting.state_bytes * (setting.moved or setting.keys)
    figures: dict[str, Any] = dict.fromkeys(("peak_ms", "p99_ratio", "stabilised_ms"), 1.0)
    figures |= {"stoppage_ms": stoppage, "duration_ms": duration, "bytes_sent": 2 * size, "state_bytes": size}
    return {
        "protocol": protocol,
        "label": setting.label,
        "parameters": setting.parameters,
        "batch_ms": {"p50": 100.0},
        "commit_ms": 3.0,
        "figures": figures,
        "series": {"seconds": [-1.0, 0.5, 2.0], "p50_ms": [1.0, 2.0, 1.0], "max_ms": [2.0, 9.0, 2.0]},
    }


def test_a_summary_is_medians_by_candidate_in_the_order_of_appearance() -> None:
    runs = [a_run("pause", 30.0), a_run("live", 10.0), a_run("live", 20.0), a_run("live", 90.0), a_run("pause", 50.0)]
    found = summarise(runs)
    assert list(found) == ["pause", "live"]
    assert (found["live"]["duration_ms"], found["pause"]["duration_ms"]) == (20.0, 40.0)
    assert found["live"]["batch_ms"] == 100.0


def test_options_make_a_candidate_of_their_own() -> None:
    assert list(summarise([a_run("push", 1.0), a_run("push", 1.0, options={"order": "key"})])) == [
        "push",
        "push order=key",
    ]


def test_a_run_that_was_never_stable_does_not_make_the_median_better() -> None:
    runs = [a_run("live", 10.0), a_run("live", 20.0), a_run("live", 30.0)]
    runs[0]["figures"]["stabilised_ms"] = None
    assert summarise(runs)["live"]["stabilised_ms"] == 1.0
    runs[1]["figures"]["stabilised_ms"] = None
    assert summarise(runs)["live"]["stabilised_ms"] is None


def released(*pairs: tuple[float, float]) -> list[Release]:
    """At these seconds, with these latencies in milliseconds."""
    times = [(round(at * 1e6), round(at * 1e6 - latency * 1000)) for at, latency in pairs]
    return [Release(at, Result("k", 0, 0, 0, 0, ingress, {})) for at, ingress in times]


def test_stable_is_what_was_seen_to_stay_so_for_ten_seconds() -> None:
    calm = [(second, 1.0) for second in range(1, 40)]
    assert stabilised(released(*calm), 0, 2000.0) == 0
    late = sorted([*calm, (4.5, 9.0), (7.5, 9.0), (25.5, 9.0)])
    assert stabilised(released(*late), 0, 2000.0) == 7500, "what comes more than ten seconds later is another story"
    assert stabilised(released(*late[:12]), 0, 2000.0) is None, "nobody has seen ten calm seconds"
    assert stabilised([], 0, 2000.0) is None


def test_cells_keep_the_points_of_a_sweep_apart() -> None:
    runs = [a_run("live", 10.0 * keys, keys=keys) for keys in (1, 2, 1, 2)]
    found = cells(runs, ["keys"])
    assert [(cell["parameters"], cell["runs"], cell["duration_ms"]) for cell in found] == [
        ({"keys": 1}, 2, 10.0),
        ({"keys": 2}, 2, 20.0),
    ]


def test_ratios_are_to_live_and_to_pause_and_never_by_zero() -> None:
    found = ratios(summarise([a_run("live", 10.0, stoppage=0.0), a_run("pause", 30.0), a_run("restart", 60.0)]))
    assert found["restart"]["vs_live"]["duration_ms"] == 6.0
    assert found["restart"]["vs_pause"]["duration_ms"] == 2.0
    assert found["pause"].keys() == {"vs_live"}
    assert "stoppage_ms" not in found["pause"]["vs_live"]


def test_a_fit_finds_the_line_and_says_how_well() -> None:
    exact = fit([1.0, 2.0, 4.0], [5.0, 7.0, 11.0])
    assert exact == pytest.approx({"slope": 2.0, "intercept": 3.0, "r2": 1.0})
    loose = fit([1.0, 2.0, 3.0, 4.0], [1.0, 9.0, 2.0, 8.0])
    assert loose is not None
    assert loose["r2"] < 0.5
    assert fit([2.0, 2.0, 3.0], [1.0, 5.0, 6.0]) is None


def test_a_move_of_several_migrations_is_told_as_one() -> None:
    def one(stoppage: float, peak: float, stabilised: float | None) -> dict[str, Any]:
        latency = {"before": {"p99": 10.0}, "during": {"p99": peak / 2, "max": peak}}
        return {
            "stoppage_ms": stoppage,
            "stabilised_ms": stabilised,
            "bytes_sent": 7,
            "state_bytes": 5,
            "latency_ms": latency,
        }

    found = whole([one(3.0, 40.0, None), one(9.0, 30.0, 8.0)], [(1000, 5000), (4000, 9000)])
    assert found == {
        "stoppage_ms": 9.0,
        "peak_ms": 40.0,
        "duration_ms": 8.0,
        "p99_ratio": 2.0,
        "stabilised_ms": 8.0,
        "bytes_sent": 14,
        "state_bytes": 10,
    }
    assert whole([], []) == {}


def test_growth_has_a_line_the_staying_keys_and_the_bare_copy(tmp_path: Path) -> None:
    runs = [a_run("live", 100.0 + 10 * mib, keys=64, moved=64, state_bytes=mib * MIB // 64) for mib in (1, 2, 4)]
    runs.append(a_run("live", 150.0, keys=640, moved=64, state_bytes=4 * MIB // 64))
    found = growth(runs[:3], tmp_path)
    assert found["fit"]["live"] == pytest.approx({"slope": 10.0, "intercept": 100.0, "r2": 1.0})
    assert found["staying"]["live"] == []
    assert list(found["copy_ms"]) == [str(mib * MIB) for mib in (1, 2, 4)]
    assert min(found["copy_ms"].values()) > 0
    (beside,) = growth(runs, tmp_path)["staying"]["live"]
    assert beside["duration_ms"] == {"0": 140.0, "576": 150.0}
    assert beside["ratio"] == pytest.approx(1.071)
    assert not list(tmp_path.iterdir()), "copies are removed"


def test_a_copy_of_nothing_takes_no_append(tmp_path: Path) -> None:
    assert copy_ms(tmp_path, 0) >= 0


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    def report(runs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"runs": runs, "summary": summarise(runs), "cells": cells(runs, ["keys"]), **more}

    runs = [a_run(protocol, 10.0, keys=keys) for keys in (1, 2, 3, 4) for protocol in ("live", "pause")]
    line = {"live": {"slope": 1.0, "intercept": 2.0, "r2": 0.9}, "pause": None}
    drawn = draw(report(runs, growth={"fit": line, "copy_ms": {"1024": 1.0, "4096": 2.0}}), tmp_path, "all")
    assert [path.name for path in drawn] == ["all-latency.png", "all-bars.png", "all-growth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    still = a_run("none", 0.0)
    still["figures"], still["series"] = {}, {}
    assert draw(report([still]), tmp_path, "none") == []
