"""`whimbrel sim`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whimbrel.cli.main import make_app
from whimbrel.core.arrival import Arrival
from whimbrel.lab.sim.run import CHOICES, search
from whimbrel.lab.sim.sabotage import SABOTAGES

WHIMBREL = Path(sys.executable).with_name("whimbrel")


def run(*arguments: str) -> tuple[int, str]:
    """The exit status and all that was printed."""
    result = CliRunner().invoke(make_app(), ["sim", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def reported(path: Path, *arguments: str) -> dict[str, Any]:
    """The report of a run, without its times."""
    run(*arguments, "--json", str(path))
    report: dict[str, Any] = json.loads(path.read_text())
    assert report.pop("seconds") >= 0
    return report


def test_a_run_that_holds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    status, output = run("--protocol", "live", "--seeds", "6", "--seed", "40", "--jobs", "2", "--json", str(path))
    assert status == 0
    assert "6 histories" in output
    assert "no guarantee violated" in output
    report = json.loads(path.read_text())
    assert report["whimbrel"] == version("whimbrel")
    assert report["revision"] is None or len(report["revision"]) == 40
    assert (report["seed"], report["schedules"]) == (40, 6)
    assert report["steps"] > 1000
    assert (report["violations"], report["first_violation"], report["sabotages"]) == (0, None, {})
    assert report["seconds"] > 0


def test_how_many_work_on_it_changes_nothing(tmp_path: Path) -> None:
    few = reported(tmp_path / "one.json", "--protocol", "pause", "--seeds", "12", "--jobs", "1")
    many = reported(tmp_path / "two.json", "--protocol", "pause", "--seeds", "12", "--jobs", "3", "--first-seed", "0")
    assert few == many


def test_every_sabotage_is_reported_with_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few: tests/simulation has them all."""
    often = {name: SABOTAGES[name] for name in ("gate", "dedup", "results-first", "effect-first")}
    monkeypatch.setattr("whimbrel.cli.sim.SABOTAGES", often)
    path = tmp_path / "report.json"
    status, output = run("--sabotage", "all", "--seeds", "300", "--jobs", "2", "--json", str(path))
    assert (status, "every sabotage was caught" in output) == (0, True)
    report = json.loads(path.read_text())
    assert list(report["sabotages"]) == list(often)
    assert all(told.startswith("caught at seed ") for told in report["sabotages"].values())
    assert (report["violations"], report["first_violation"]) == (0, None)


def test_a_sabotage_that_nobody_notices_is_a_failure(tmp_path: Path) -> None:
    """A restart changes no epoch, so nobody misses the gate."""
    path = tmp_path / "report.json"
    arguments = ["--protocol", "restart", "--sabotage", "gate", "--seeds", "2", "--jobs", "1", "--json", str(path)]
    status, output = run(*arguments)
    assert (status, "not caught: gate" in output) == (1, True)
    assert json.loads(path.read_text())["sabotages"] == {"gate": "not caught"}


@contextmanager
def here(count: int) -> Iterator[Any]:
    """In place of worker processes."""
    yield lambda slices: (search(*job) for job in slices)


def test_a_broken_promise_is_told_with_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken in this process only, so the search has to stay in it."""
    monkeypatch.setattr("whimbrel.cli.sim._workers", here)
    monkeypatch.setattr(Arrival, "is_silent", lambda self, src: False)
    first = search(["live"], range(20)).found
    assert first is not None
    path = tmp_path / "report.json"
    status, output = run("--protocol", "live", "--seeds", "20", "--json", str(path))
    assert status == 1
    assert f"whimbrel sim --protocol live --seed {first.seed} --seeds 1" in output
    report = json.loads(path.read_text())
    assert (report["violations"], report["first_violation"]["seed"]) == (1, first.seed)
    assert report["first_violation"]["what"].startswith("one emitter")
    assert report["schedules"] == first.seed + 1


@pytest.mark.parametrize(("option", "known"), [("--protocol", [*CHOICES, "all"]), ("--sabotage", [*SABOTAGES, "all"])])
def test_an_unknown_name_is_answered_with_what_there_is(option: str, known: list[str]) -> None:
    status, output = run(option, "teleport", "--seeds", "1")
    assert status == 2
    assert output == f"whimbrel: unknown {option[2:]} 'teleport'; there is: {', '.join(known)}\n"


@pytest.mark.parametrize("arguments", [["--seeds", "0"], ["--jobs", "0"], ["--seed", "-1"], ["--seeds", "many"]])
def test_nonsense_is_refused(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_help_has_an_example() -> None:
    status, output = run("--help")
    assert status == 0
    assert "whimbrel sim --protocol all --seeds 2000" in output


def test_without_a_command_there_is_help_and_there_is_a_version() -> None:
    bare = CliRunner().invoke(make_app(), [])
    assert "Usage" in bare.output
    assert "sim" in bare.output
    assert CliRunner().invoke(make_app(), ["--version"]).output == f"whimbrel {version('whimbrel')}\n"


def test_the_installed_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [WHIMBREL, "sim", "--protocol", "mixed", "--seeds", "2", "--json", "report.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 histories" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["schedules"] == 2


def test_an_interrupt_ends_it_at_once_and_leaves_nobody_behind(tmp_path: Path) -> None:
    """Sent to all of them, as a terminal does."""
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [WHIMBREL, "sim", "--seeds", "100000", "--jobs", "2"], stderr=stream, stdout=stream, start_new_session=True
        )
    try:
        wait_for(lambda: len(members(process.pid)) >= 3, "workers to start")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
        wait_for(lambda: not members(process.pid), "everybody to end")
        assert "Traceback" not in errors.read_text()
    finally:
        if members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, leader = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(leader) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
