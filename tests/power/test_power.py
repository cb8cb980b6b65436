"""Power failures: a run goes on from whatever was on the disk at a moment, and every result is there exactly once.

With durability="power" always. With "process" the logs may be of different moments then, and a start may refuse them
with what is missing; but whenever it goes on, every result is right. `make soak` does it two hundred times each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import whimbrel as wb
from tests.power.disk import Disk, build_shim
from tests.power.job import expected, job
from whimbrel.core.errors import Refused, Stop, WhimbrelError
from whimbrel.host.contract import INLINE, MICRO_BATCH
from whimbrel.lab.chaos.deployed import SHORT_LIFE

FAILURES = int(os.environ.get("WHIMBREL_POWER_FAILURES", "3"))
"""How many, of each durability."""
AT_ONCE = 40
"""Images of one run at most."""
SECONDS = 1.5
"""Between two of them, about."""

pytestmark = pytest.mark.timeout(6 * 3600)
CASES = [
    ("power", INLINE),
    ("process", INLINE),
    pytest.param("power", MICRO_BATCH, marks=pytest.mark.spark),
    pytest.param("process", MICRO_BATCH, marks=[pytest.mark.spark, pytest.mark.skipif(FAILURES < 10, reason="soak")]),
]


def images(disk: Disk, folder: Path, durability: str, host: str, number: int, rows: int, seed: int) -> Iterator[Path]:
    """Let a run run, and cut the power at some moments of it."""
    random = Random(seed)
    with (folder / "errors.txt").open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.power.job", str(disk.root), durability, str(rows), host],
            env={**os.environ, **disk.environment, "JAVA_TOOL_OPTIONS": SHORT_LIFE},
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line == "runs\n":
                    break
            assert child.poll() is None, (folder / "errors.txt").read_text()[-3000:]
            for one in range(number):
                deadline = time.monotonic() + random.uniform(0.2, 2 * SECONDS)
                while time.monotonic() < deadline:
                    time.sleep(0.01)
                assert child.poll() is None, "the run has ended too early"
                _all(child.pid, signal.SIGSTOP)
                disk.image(folder / f"image-{one}", random if one % 2 else None)
                _all(child.pid, signal.SIGCONT)
        finally:
            _all(child.pid, signal.SIGKILL)
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    for one in range(number):
        yield folder / f"image-{one}"


def _all(leader: int, number: signal.Signals) -> None:
    """Every process of the run: Spark's workers have groups of their own, but share its session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(path.parent.name), number)
        except (OSError, IndexError):  # it ended just now
            pass


def goes_on(root: Path, image: Path, durability: str, rows: int, **host: Any) -> WhimbrelError | None:
    """Start from an image, and run to the end; the error, if that is refused."""
    shutil.rmtree(root)
    shutil.copytree(image, root)
    try:
        with wb.run(job(root, rows, None), data=root / "data", durability=durability, **host):
            pass
    except (Refused, Stop) as refusal:
        return refusal
    found: dict[str, list[tuple[int, int, int]]] = {}
    for line in (root / "out.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        found.setdefault(values["key"], []).append((values["row"], values["count"], values["total"]))
    assert found == expected(rows), f"results are lost, doubled or wrong; the image is {image}"
    return None


@pytest.mark.parametrize(("durability", "host"), CASES)
def test_a_power_failure_costs_nothing_or_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, host: str
) -> None:
    how: dict[str, Any] = {"host": host}
    if host == MICRO_BATCH:
        monkeypatch.setattr("whimbrel.spark.engine.SparkEngine.warm_ups", 1)
        how["spark"] = request.getfixturevalue("spark")
    shim, refusals, done = build_shim(tmp_path), list[WhimbrelError](), 0
    while done < FAILURES:
        number = min(AT_ONCE, FAILURES - done)
        folder = tmp_path / f"run-{done}"
        disk = Disk(folder / "disk", folder / "shadow", shim)
        rows = int(250 * (number * 3 * SECONDS + 30))
        for image in images(disk, folder, durability, host, number, rows, seed=done):
            refusal = goes_on(disk.root, image, durability, rows, **how)
            refusals += [refusal] if refusal is not None else []
            shutil.rmtree(image)
        done += number
        shutil.rmtree(folder)
    print(f"\n{durability}, {host}: {done} power failures, {len(refusals)} refused", *map(str, refusals), sep="\n  ")
    assert durability == "process" or not refusals, refusals
    signs = ("lack", "is gone", "old", "this run did not write", "that this run wrote to it")
    assert all(any(sign in str(refusal) for sign in signs) for refusal in refusals)
