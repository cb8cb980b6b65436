"""The examples run, and say what the documents say they do: each in a process and a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.spark


def run(script: Path, *arguments: str, folder: Path) -> str:
    """What a script prints; it must succeed."""
    ran = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_case1_gives_the_same_averages_with_and_without_a_move(tmp_path: Path) -> None:
    printed = run(ROOT / "examples" / "01_case1.py", "--out", str(tmp_path / "out"), folder=tmp_path)
    assert "to edge-1 is done" in printed
    assert "cutting: Left average-1" in printed
    assert printed.splitlines()[-1] == "1,891 averages of 20 sensors; with and without the move: identical"


def test_the_readmes_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", readme, re.DOTALL)
    assert example is not None
    script = tmp_path / "example.py"
    script.write_text(example[1], encoding="utf-8")
    assert run(script, folder=tmp_path) == example[2]
