"""What a fresh clone relies on: a complete lock that names no place, and layers that hold."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normalised(requirement: str) -> str:
    """The bare name of a requirement as the lock spells it: `Foo_Bar[sql]>=1` is `foo-bar`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, f"not a requirement: {requirement!r}"
    return re.sub(r"[-_.]+", "-", name[0]).lower()


DECLARED = sorted({normalised(r) for r in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]})


@pytest.mark.parametrize("place", ["://", "/root", "/work", "/home", "--index-url", "--find-links"])
def test_the_lock_names_no_place(place: str) -> None:
    assert place not in LOCK


@pytest.mark.parametrize("name", DECLARED)
def test_every_dependency_is_pinned_with_hashes(name: str) -> None:
    assert re.search(rf"^{re.escape(name)}==\S+ \\\n    --hash=sha256:", LOCK, re.MULTILINE)


def test_the_layers_hold() -> None:
    lint = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
