"""The one that starts all others: starts again what dies, and takes all with it, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.waiting import until
from tests.faults.children import ROOT, Child

SMALL = ROOT / "tests" / "processes" / "small.py"


def lives(up: Child, name: str) -> list[int]:
    """The process ids that a child has had."""
    return [int(line.rpartition(" ")[2]) for line in list(up.lines) if line.startswith(f"{name} lives as ")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Child]:
    up = Child(SMALL, "up", "one", "two", cwd=tmp_path)
    try:
        until(lambda: lives(up, "one") and lives(up, "two"), f"both live; {up.told()}", 200)
        yield up
    finally:
        up.kill()


def test_what_dies_is_started_again(up: Child) -> None:
    for deaths in (1, 2):
        os.kill(lives(up, "one")[-1], signal.SIGKILL)
        until(lambda deaths=deaths: len(lives(up, "one")) == deaths + 1, f"it lives again; {up.told()}", 200)  # type: ignore[misc]
    assert "one has ended (SIGKILL); it is started again in 0.2 s" in up.lines
    assert "one has ended (SIGKILL); it is started again in 0.4 s" in up.lines
    assert len(lives(up, "two")) == 1


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_in_their_own_way(up: Child, how: signal.Signals) -> None:
    os.kill(up.process.pid, how)
    assert up.end(200) == 0
    assert {"ending", "one stops", "two stops", "over"} <= set(up.lines)


def test_when_it_is_killed_the_others_notice_and_end(up: Child) -> None:
    os.kill(up.process.pid, signal.SIGKILL)
    up.end(200)
    assert {"one stops", "two stops"} <= set(up.lines)
    assert "ending" not in up.lines


def test_what_cannot_run_ends_all(tmp_path: Path) -> None:
    up = Child(SMALL, "up", "one", "refused", cwd=tmp_path)
    assert up.end(200) == 1
    assert "refused cannot run; see above" in up.told()


JOB = """
import itertools
import whimbrel as wb

class Count(wb.Operator):
    class State(wb.State):
        n: int = 0

    def process(self, key, event, state, emit):
        state.n += 1

rows = wb.Items(lambda: ({"k": str(n % 3)} for n in itertools.count()), schema="k string", rate=10)
pipeline = wb.Pipeline("endless", source=rows, key="k")
pipeline.stage("count", Count()).sink(wb.JsonLines("out.jsonl"))
"""


def test_a_deployment_ends_with_its_input_even_if_its_parent_was_killed(tmp_path: Path) -> None:
    """As chaos starts one: it may be killed at any moment, and leaves nothing behind."""
    (tmp_path / "endless.py").write_text(JOB)
    starter = (
        "import subprocess, sys\n"
        "up = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)\n"
        "up.wait()"
    )
    command = ["-m", "whimbrel", "up", "endless.py", "--data", "data", "--host", "inline", "--until-input-ends"]
    parent = Child("-c", starter, *command, cwd=tmp_path)
    try:
        until(lambda: any(line.startswith("site edge-1 runs as") for line in parent.lines), "it runs", 200)
        os.kill(parent.process.pid, signal.SIGKILL)
        until(lambda: not parent.alive(), f"all processes of the deployment end; {parent.told()}", 60)
    finally:
        parent.kill()
