"""The end of an application, when something of it cannot be ended: the rest is let go all the same. No Spark needed."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from whimbrel.app import App


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
