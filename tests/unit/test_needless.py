"""What a copy of a checkpoint can do without."""

from __future__ import annotations

from pathlib import Path

import pytest

from whimbrel.spark.checkpoint import Checkpoint

NAMES = [
    "3.zip",
    "3.changelog",
    "7.zip",
    "9.zip",
    "SSTs",
    "_metadata",
    *(f"{n}.changelog" for n in range(4, 12)),
    "x.zip",
    "12.changelog.tmp",
]


@pytest.mark.parametrize(
    ("committed", "first"),
    [(10, 9), (8, 9), (7, 7), (1, -1), (-1, -1)],
    ids=["all done", "just done", "the last whole one is ahead of it", "none to go on from", "nothing done"],
)
def test_state_from_before_the_last_whole_one_that_a_start_may_go_on_from(
    tmp_path: Path, committed: int, first: int
) -> None:
    (tmp_path / "commits").mkdir()
    for batch in range(committed + 1):
        (tmp_path / "commits" / str(batch)).touch()
    left = [name for name in NAMES if name not in Checkpoint(tmp_path).needless("state", NAMES)]
    wholes = [f"{n}.zip" for n in (3, 7, 9) if n >= first]
    changes = [f"{n}.changelog" for n in range(3, 12) if n > first]
    assert sorted(left) == sorted([*wholes, *changes, "SSTs", "_metadata", "x.zip"])
