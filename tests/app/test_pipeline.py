"""What is wrong with a pipeline is said before anything runs, with the way out, and nothing is left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb


class Count(wb.Operator):
    """How many records a key has had."""

    class State(wb.State):
        """One number."""

        n: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Any) -> None:
        """One record."""
        state.n += 1
        emit(key=key, n=state.n)


class Nothing(wb.Operator):
    """Has no `process`."""


class NoDefault(Count):
    """A state that cannot begin."""

    class State(wb.State):
        """A field without a default."""

        n: int


class Unreadable(Count):
    """Wants what nobody gives."""

    def process(self, key: str) -> None:  # type: ignore[override]
        """Too few parameters."""


def pipeline(source: Any = None, key: str = "k", event_time: str | None = None) -> wb.Pipeline:
    return wb.Pipeline("p", source=source or [{"k": "a", "text": "x"}], key=key, event_time=event_time)


def counting() -> wb.Pipeline:
    return pipeline().stage("count", Count())


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "no stage": (lambda: wb.run(pipeline()), r"pipeline\.stage\("),
    "no site": (lambda: wb.run(counting(), sites=[]), "at least one"),
    "a site twice": (lambda: wb.run(counting(), sites=["cloud", "cloud"]), "no site name twice"),
    "a stage twice": (lambda: counting().stage("count", Count()), "a unique name"),
    "a stage with an odd name": (lambda: pipeline().stage("my stage", Count()), "letters, digits"),
    "a second stage without key": (lambda: counting().stage("two", Count(), schema="k string"), "key='...'"),
    "a second stage without schema": (lambda: counting().stage("two", Count(), key="k"), "schema='name type"),
    "a second stage with an odd schema": (lambda: counting().stage("two", Count(), key="k", schema="k text"), "string"),
    "no process": (lambda: pipeline().stage("s", Nothing()), r"process\(key, event, state, emit\)"),
    "a state without default": (lambda: pipeline().stage("s", NoDefault()), "needs a default"),
    "an odd process": (lambda: pipeline().stage("s", Unreadable()), "maybe ctx"),
    "no sink at all": (lambda: counting().sink("averages.csv"), "use Csv, JsonLines"),  # type: ignore[arg-type]
    "a key that is no column": (lambda: wb.run(pipeline(key="sensor").stage("s", Count())), "it has: k, text"),
    "a time that is no column": (lambda: wb.run(pipeline(event_time="at").stage("s", Count())), "it has: k, text"),
    "a time that is no time": (lambda: wb.run(pipeline(event_time="text").stage("s", Count())), "timestamp"),
    "a key that the second stage has not": (
        lambda: wb.run(counting().stage("two", Count(), key="sensor", schema="key string, n long")),
        "it has: key, n",
    ),
    "a source at a place": (
        lambda: wb.run(pipeline(wb.Items([{"k": "a"}], at="edge-1")).stage("s", Count())),
        "place 'edge-1', and here all sites share one disk",
    ),
    "no rows and no schema": (lambda: wb.run(pipeline(wb.Items([])).stage("s", Count())), "schema='name type"),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_said_before_anything_runs_and_leaves_nothing_behind(
    temporary: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, told = REFUSALS[name]

    def no_session(*_: Any) -> Any:
        raise AssertionError("Spark was started for a pipeline that cannot run")

    monkeypatch.setattr("whimbrel.deploy.embedded.engine_of", no_session)
    with pytest.raises(wb.Refused, match=told):
        act()
    assert list(temporary.iterdir()) == []


def test_a_file_that_is_not_there_is_said_before_anything_runs(temporary: Path) -> None:
    with pytest.raises(wb.Refused, match=r"nowhere\.csv"):
        wb.run(pipeline(wb.Csv("nowhere.csv")).stage("count", Count()))
    assert list(temporary.iterdir()) == []


def test_sources_and_sinks_are_made_anew_for_each_run(tmp_path: Path) -> None:
    """So that one description can run twice."""
    job = wb.Pipeline("p", source=[{"k": "a"}], key="k").stage("count", Count())
    for sink in (wb.Csv(tmp_path / "a.csv"), wb.JsonLines(tmp_path / "a.jsonl"), wb.Parquet(tmp_path / "a"), print):
        job.sink(sink)
    assert [list(job.placed_sources()[0].make().rows(0)) for _ in range(2)] == [[(0, {"k": "a"})]] * 2
    first, second = ([one.make() for one in job.placed_sinks()] for _ in range(2))
    assert [type(sink) for sink in first] == [type(sink) for sink in second]
    assert not {id(sink) for sink in first} & {id(sink) for sink in second}
