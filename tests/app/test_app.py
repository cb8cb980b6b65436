"""An application without Spark: its end, when something cannot be ended; its links; plans that lie in files."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.keys import EVERYTHING, KeyMap
from whimbrel.core.router import RouteTable
from whimbrel.deploy.embedded import App
from whimbrel.orchestrator.plan import read_plan


class Gone:
    """What a query, and a session, are when their JVM has died: every question raises."""

    progress: tuple[float, ...] = ()
    batch_ms, backlog, is_active, exception = 0.0, 0, False, None
    spec = SimpleNamespace(max_records=10, trigger_ms=500.0)

    def stop(self) -> None:
        raise ConnectionRefusedError("no JVM")


def make(data: Path, *, temporary: bool, sites: Sequence[str] = ("cloud",), **more: Any) -> App:
    pipeline = wb.Pipeline("p", source=more.pop("source", [{"k": "a"}]), key="k").stage("count", Count())
    gone: Any = Gone()
    options: dict[str, Any] = {"keep": False, "trigger": "0 seconds", "max_backlog": 10, "watch": print, **more}
    app = App(pipeline, sites, data, temporary=temporary, spark=gone, **options)
    app.sites["cloud"].hosts["count-1"] = gone
    return app


@pytest.mark.parametrize("temporary", [False, True])
def test_an_application_whose_jvm_is_gone_lets_go_of_everything_else(tmp_path: Path, temporary: bool) -> None:
    data = tmp_path / "data"
    app = make(data, temporary=temporary)
    with pytest.raises(ConnectionRefusedError):
        app.stop()
    app.stop()
    assert data.exists() is not temporary
    if not temporary:
        with (data / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_directory_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    first = make(tmp_path, temporary=False)
    with pytest.raises(wb.Refused, match="another run uses"):
        make(tmp_path, temporary=False)
    with pytest.raises(ConnectionRefusedError):
        first.stop()
    with pytest.raises(ConnectionRefusedError):
        make(tmp_path, temporary=False).stop()


@pytest.mark.parametrize(
    ("links", "budget"),
    [
        ("ideal", 8 << 20),
        ("delay=1s", 8 << 20),
        ("rate=8mbit", 125_000),  # a megabyte a second, for half a second, for four groups
        ("rate=10gbit", 8 << 20),
        ("rate=8kbit", 16 << 10),
        ({("edge-2", "cloud"): "rate=8mbit"}, 8 << 20),
        ({("edge-1", "cloud"): "rate=8mbit"}, 125_000),
    ],
)
def test_a_budget_fits_the_link_between_the_source_and_the_destination(tmp_path: Path, links: Any, budget: int) -> None:
    app = make(tmp_path, temporary=False, sites=["cloud", "edge-1", "edge-2"], links=links)
    assert app.control.stages["count"].budget("edge-1", None) == budget
    assert app.control.stages["count"].budget("edge-1", "edge-2") == 8 << 20  # nothing runs there
    with pytest.raises(ConnectionRefusedError):
        app.stop()


def test_links_that_make_no_sense_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    pipeline = wb.Pipeline("p", source=[{"k": "a"}], key="k").stage("count", Count())
    with pytest.raises(wb.UnknownName, match="there is: cloud, edge-1"):
        wb.run(pipeline, data=tmp_path / "data", links={("cloud", "moon"): "delay=1ms"})
    assert list(tmp_path.iterdir()) == []


# ── A plan in a file ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_may_lie_in_a_file(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[[3, 1], [], [2]]")
    assert read_plan({"plan": kind(file), "step": 5}) == {"plan": [[3, 1], [], [2]], "step": 5}


@pytest.mark.parametrize("text", ["", "[[1]", "[1, 2]", '{"turns": []}', '[["one"]]', "[[1.5]]", "\x00"])
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(wb.Refused, match=r"plan\.json is not a plan: .*; a plan is a JSON list of lists of bins"):
        read_plan({"plan": str(file)})


@pytest.mark.parametrize(
    "options", [{}, {"step": 5}, {"plan": "fluid"}, {"plan": [[1]]}, {"plan": "no-such-file.json"}]
)
def test_what_names_no_file_is_left_alone(options: dict[str, Any]) -> None:
    assert read_plan(options) == options


def test_a_file_called_like_a_plan_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fluid").write_text("[[1]]")
    assert read_plan({"plan": "fluid"}) == {"plan": "fluid"}


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_whose_file_is_not_there_is_refused(tmp_path: Path, kind: type) -> None:
    coordinator = Coordinator("s", RouteTable("s-1"), {"s-1": "cloud", "s-2": "edge"}, KeyMap("r"))
    with pytest.raises(wb.Refused, match=r"plan\.json"):
        coordinator.plan(
            [(EVERYTHING, "s-2")], "edge", "fluid", "m1", **read_plan({"plan": kind(tmp_path / "plan.json")})
        )


def test_waiting_for_a_source_that_failed_raises_what_it_failed_of(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"k": "a"}
        raise OSError("the cable is cut")

    app = make(tmp_path, temporary=False, source=wb.Items(rows, schema="k string"))
    app.gateway.start_feeds()
    with pytest.raises(OSError, match="the cable is cut"):
        app.wait(20)
    assert app.status()["source"] == {"ended": False, "error": "OSError: the cable is cut"}
    with pytest.raises(ConnectionRefusedError):
        app.stop()
