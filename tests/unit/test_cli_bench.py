"""`whimbrel bench`: what it prints, what it writes, how it ends. Nothing is measured here, and no Spark starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.test_bench_summary import a_run
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Unavailable, WhimbrelError
from whimbrel.lab.bench.run import Setting

GOOD = dict.fromkeys(("lost", "duplicated", "out_of_order", "wrong"), 0)


class NoSpark:
    """In place of a session."""

    stopped = 0

    def stop(self) -> None:
        NoSpark.stopped += 1


class Runs:
    """In place of `run`: each call answers, or raises, what comes next; the first one is the warm-up."""

    def __init__(self, *ends: BaseException | dict[str, Any] | None) -> None:
        self.ends = [None, *ends]
        self.settings: list[Setting] = []

    def __call__(self, spark: object, setting: Setting, seed: int, show: object) -> dict[str, Any]:
        self.settings.append(setting)
        end = self.ends.pop(0) if self.ends else None
        if isinstance(end, BaseException):
            raise end
        run = a_run(setting.protocol, 1000.0, **{k: v for k, v in setting.parameters.items() if k != "protocol"})
        return {**run, "records": {**GOOD, **(end or {})}, "migrations": [], "held": not end}


def invoke(monkeypatch: pytest.MonkeyPatch, runs: Runs, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("whimbrel.lab.bench.comparison.run", runs)
    monkeypatch.setattr("whimbrel.spark.session.session", lambda name, extra: NoSpark())
    before = NoSpark.stopped
    result = CliRunner().invoke(make_app(), ["bench", "compare", *arguments])
    if isinstance(result.exception, WhimbrelError):
        return 1, str(result.exception)
    assert NoSpark.stopped == before + 1
    return result.exit_code, result.output


def test_a_comparison_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    runs = Runs()
    arguments = "--link none --protocols live,pause --keys 40 --rate 9 --share 0.25 --state-bytes 5 --repeat 2 --seed 8"
    status, output = invoke(
        monkeypatch, runs, *arguments.split(), "--json", str(path), "--plots", str(tmp_path / "plots")
    )
    assert status == 0, output
    assert [setting.protocol for setting in runs.settings] == ["live", "live", "pause", "pause", "live"]
    setting = runs.settings[-1]
    assert (setting.keys, setting.rate, setting.share, setting.state_bytes, setting.link) == (40, 9.0, 0.25, 5, None)
    report = json.loads(path.read_text())
    assert (report["scenario"], report["seed"], report["held"], len(report["runs"])) == ("key-count", 8, True, 4)
    assert report["summary"]["live"]["duration_ms"] == 1000.0
    assert {line["system"] for line in report["published"]} >= {"PAM"}
    (result,) = (tmp_path / "plots").glob("key-count-*.json")
    assert json.loads(result.read_text()) == report
    assert len(list((tmp_path / "plots").glob("*.png"))) == 2
    assert "Medians" in output
    assert "Published" in output
    assert "40 keys of 5 bytes" in output


def test_a_broken_promise_or_a_failed_run_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Runs({"lost": 3}, Unavailable("waited in vain"), None)
    some = ("--protocols", "live,pause,restart")
    arguments = (*some, "--link", "none", "--repeat", "1", "--plots", str(tmp_path))
    status, output = invoke(monkeypatch, ends, *arguments)
    assert status == 1
    assert "lost 3" in output
    assert "failed: waited in vain" in output
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (report["held"], report["planned"], len(report["runs"])) == (False, 3, 2)
    assert [failed["protocol"] for failed in report["failed"]] == ["pause"]


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--link", "none", "--plots", str(tmp_path))
    status, output = invoke(monkeypatch, Runs(None, KeyboardInterrupt()), *arguments)
    assert status == 130
    assert "interrupted" in output
    assert len(json.loads(next(tmp_path.glob("*.json")).read_text())["runs"]) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--scenario", "teleport"], "unknown scenario 'teleport'"),
        (["--protocols", "teleport", "--link", "none"], "protocol 'teleport' is not there"),
        (["--workload", "teleport"], "unknown workload 'teleport'"),
    ],
)
def test_what_is_not_there_is_refused_before_spark_starts(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = invoke(monkeypatch, Runs(), *arguments)
    assert status == 1
    assert told in output


@pytest.mark.parametrize("command", ["compare", "throughput", "overhead", "latency"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(make_app(), ["bench", command, "--help"])
    assert result.exit_code == 0
    assert f"whimbrel bench {command}" in result.output
    assert "--json" in result.output
