"""Ctrl-C in a script: it ends soon, and leaves no process and no temporary folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.children import Child

pytestmark = pytest.mark.spark

SCRIPT = """
import os
from tests.spark_app.jobs import SCHEMA, Chain, rows
import whimbrel as wb

pipeline = wb.Pipeline("script", source=wb.Items(rows(10**9), schema=SCHEMA, rate=200), key="key")
pipeline.stage("chain", Chain()).sink(lambda result: os.write(1, b"result\\n"))
with wb.run(pipeline) as app:
    os.write(1, b"running\\n")
    app.wait()
"""


def test_an_interrupted_script_ends_soon_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script, temporary = tmp_path / "script.py", tmp_path / "tmp"
    script.write_text(SCRIPT)
    child = Child(script, cwd=tmp_path)
    child.wait_for("running")
    child.wait_for("result")
    assert any(path.name.startswith("whimbrel") for path in temporary.iterdir())
    start = time.monotonic()
    os.killpg(child.process.pid, signal.SIGINT)  # as a terminal does: to everybody in the foreground
    status = child.end(60)
    assert time.monotonic() - start < 30, "it takes seconds on a machine with nothing else to do"
    assert status in (1, -signal.SIGINT), child.told()
    assert "KeyboardInterrupt" in child.told()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("whimbrel")] == []
