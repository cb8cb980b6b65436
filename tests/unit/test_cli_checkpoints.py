"""`whimbrel checkpoints`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Increment
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.increments import Version
from whimbrel.core.keys import bin_of

WHIMBREL = Path(sys.executable).with_name("whimbrel")
MARCH = 1_772_366_400_000_000  # 2026-03-01 12:00 UTC


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two checkpoints of one stage, one of another, a damaged one."""
    store = CentralStore(str(tmp_path / "store"))
    for stage, number in [("average", 1), ("average", 2), ("average", 3), ("total", 1)]:
        versions = [Version(key, bin_of(key), 0, number, b"x" * 600) for key in ("a", "b")[:number]]
        store.write(stage, Increment("i-1", 0, number, 0, (number << 20) + 7, versions))
        assert store.checkpoint(stage, {"i-1": 1}, MARCH + number * 1_000_000) == number
    (tmp_path / "store" / "average" / "checkpoints" / "0000000003").write_bytes(b"\x01no")
    return tmp_path / "store"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["checkpoints", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_checkpoints_are_listed_by_stage_with_what_they_hold(store: Path) -> None:
    status, output = run(str(store))
    assert status == 0
    damage = "average/checkpoints/0000000003: 3 bytes are too few for any message"
    assert [line.split() for line in output.splitlines()] == [
        ["stage", "checkpoint", "made", "keys", "bytes", "horizon", "damage"],
        ["average", "1", "2026-03-01", "12:00:01Z", "1", "600", "1.7"],
        ["average", "2", "2026-03-01", "12:00:02Z", "2", "1,200", "2.7"],
        ["average", "3", *damage.split()],
        ["total", "1", "2026-03-01", "12:00:01Z", "1", "600", "1.7"],
    ]


def test_one_stage_and_a_file(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "list.json"
    status, output = run(f"file://{store}", "--stage", "total", "--json", str(path))
    assert (status, "average" in output) == (0, False)
    report = json.loads(path.read_text())
    figures = {"number": 1, "at_us": MARCH + 1_000_000, "keys": 1, "bytes": 600, "horizon": (1 << 20) + 7, "damage": ""}
    assert (report["url"], report["stages"]) == (f"file://{store}", {"total": [figures]})


def test_an_empty_store_is_said_to_be_empty(tmp_path: Path) -> None:
    assert run(str(tmp_path / "nothing")) == (0, f"no checkpoints at {tmp_path / 'nothing'}\n")


def test_what_is_not_there_is_answered_with_what_is(store: Path) -> None:
    with pytest.raises(UnknownName, match="unknown stage 'nobody'; there is: average, total"):
        run(str(store), "--stage", "nobody")
    with pytest.raises(Refused, match="not a store address"):
        run("gopher://store")


def test_the_installed_command_tells_an_error_in_one_line(store: Path) -> None:
    done = subprocess.run([WHIMBREL, "checkpoints", store, "--stage", "../x"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "whimbrel: unknown stage '../x'; there is: average, total\n")


def test_help_has_an_example() -> None:
    assert "whimbrel checkpoints s3://bucket/whimbrel --stage average" in run("--help")[1]
