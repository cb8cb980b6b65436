"""Components log an error with its traceback when they first keep it, and not for each try, batch or record."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_feed import SCHEMA, Line, row
from tests.app.test_orchestrator import House
from tests.app.test_outlet import Died, Office, results, said
from tests.app.test_workers import Recorder
from tests.app.waiting import until
from whimbrel.core.errors import Unavailable
from whimbrel.gateway import sources
from whimbrel.orchestrator import workers
from whimbrel.orchestrator.workers import Workers

Logged = tuple[str, str, bool]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "whimbrel")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[Logged]:
    """Logger, message and whether there is a traceback, of each line."""
    return [(one.name, one.getMessage(), bool(one.exc_info and one.exc_info[2])) for one in log.records]


def test_a_source_that_fails_is_logged_once_and_its_rows_are_not(log: pytest.LogCaptureFixture) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from map(row, range(12_000))
        raise ValueError("bad disk")

    Line().run(sources.Items(rows, SCHEMA, None))
    assert lines(log) == [
        ("whimbrel.gateway", "the feed of items has failed for good: ValueError: bad disk", True),
    ]


def test_an_outlet_that_fails_for_good_is_logged_with_its_traceback(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    outlet = Office(tmp_path, {"s-1": [said((results("b", 0, 1), []))]}, kill_at=4).open()
    until(lambda: outlet.error, "it to fail")
    outlet.stop()
    assert isinstance(outlet.error, Died)
    assert lines(log) == [("whimbrel.egress", "the outlet of s has failed for good: Died: ", True)]


def test_a_command_that_is_repeated_is_logged_when_it_first_fails_and_when_it_is_done(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FIRST", 0.001)
    recorder = Recorder(failures=5)
    recorder.gate.set()
    pool: Any = Workers(recorder)
    pool.start()
    pool.add(("s", "m1"), ["one", "two"])
    until(lambda: pool.is_idle, "both to be done")
    pool.stop()
    failed, went_on = lines(log)
    assert failed == (
        "whimbrel.orchestrator",
        "a command of migration m1 of s fails and is tried again in 0.001 s: not now",
        True,
    )
    assert went_on[1].startswith("a command of migration m1 of s recovered after ")
    assert went_on[1].endswith(" s and 5 failures")


def test_a_watch_that_fails_again_and_again_is_logged_once(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.005)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.005)
    failures: list[str] = []

    class Failing(House):
        def ports(self) -> Any:
            found = super().ports()
            found.failed = self.fail
            return found

        def fail(self) -> dict[str, str]:
            failures.append("once more")
            raise (Unavailable("away") if len(failures) % 2 else RuntimeError("a bug"))

    house = Failing(tmp_path)
    until(lambda: len(failures) > 10, "some looks")
    house.end()
    assert lines(log) == [("whimbrel.orchestrator", "the orchestrator's watch: RuntimeError: a bug", True)]
