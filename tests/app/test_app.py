"""The end of an application, when something of it cannot be ended: the rest is let go all the same; and plans that lie
in files. No Spark needed."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from whimbrel.app import App, _read_plan
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.keys import EVERYTHING
from whimbrel.core.router import RouteTable


class Gone:
    """What a query, and a session, are when their JVM has died: every question raises."""

    progress: tuple[float, ...] = ()

    def stop(self) -> None:
        raise ConnectionRefusedError("no JVM")


def make(data: Path, *, temporary: bool) -> App:
    pipeline = wb.Pipeline("p", source=[{"k": "a"}], key="k").stage("count", Count())
    gone: Any = Gone()
    options: dict[str, Any] = {"keep": False, "trigger": "0 seconds", "max_backlog": 10, "watch": print}
    app = App(pipeline, ["cloud"], data, temporary=temporary, spark=gone, **options)
    app.sites["cloud"].queries["count-1"] = gone
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


# ── A plan in a file ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_may_lie_in_a_file(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "plan.json"
    file.write_text("[[3, 1], [], [2]]")
    assert _read_plan({"plan": kind(file), "step": 5}) == {"plan": [[3, 1], [], [2]], "step": 5}


@pytest.mark.parametrize("text", ["", "[[1]", "[1, 2]", '{"turns": []}', '[["one"]]', "[[1.5]]", "\x00"])
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(wb.Refused, match=r"plan\.json holds no plan: .*; a plan is a JSON list of lists of bins"):
        _read_plan({"plan": str(file)})


@pytest.mark.parametrize(
    "options", [{}, {"step": 5}, {"plan": "fluid"}, {"plan": [[1]]}, {"plan": "no-such-file.json"}]
)
def test_what_names_no_file_is_left_alone(options: dict[str, Any]) -> None:
    assert _read_plan(options) == options


def test_a_file_called_like_a_plan_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fluid").write_text("[[1]]")
    assert _read_plan({"plan": "fluid"}) == {"plan": "fluid"}


NOT_REFUSED = pytest.mark.xfail(strict=True, raises=TypeError, reason="a path that is no file is taken for a list")


@pytest.mark.parametrize("kind", [str, pytest.param(Path, marks=NOT_REFUSED)])
def test_a_plan_whose_file_is_not_there_is_refused(tmp_path: Path, kind: type) -> None:
    coordinator = Coordinator("s", RouteTable("s-1"), {"s-1": "cloud", "s-2": "edge"}, frozenset({"r"}))
    with pytest.raises(wb.Refused, match=r"plan\.json"):
        coordinator.plan(
            [(EVERYTHING, "s-2")], "edge", "fluid", "m1", **_read_plan({"plan": kind(tmp_path / "plan.json")})
        )
