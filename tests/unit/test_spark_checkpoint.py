"""Spark's checkpoint, read without Spark: what cannot be read now is not taken for missing."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from whimbrel.core.errors import Unavailable
from whimbrel.spark.checkpoint import Checkpoint


@pytest.fixture
def no_files() -> Iterator[None]:
    """No file can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    held = []
    try:
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))  # holes below the limit
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    for kind in ("offsets", "commits"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "7").write_text('v1\n{}\n{"data": 3}\n')
    (tmp_path / "metadata").write_text('{"id": "q"}')
    return Checkpoint(tmp_path)


def test_without_file_handles_a_checkpoint_is_neither_empty_nor_damaged(checkpoint: Checkpoint, no_files: None) -> None:
    for read in (
        lambda: checkpoint.planned,
        lambda: checkpoint.committed,
        lambda: checkpoint.id,
        lambda: checkpoint.end(7),
    ):
        with pytest.raises(Unavailable, match="cannot be read now"):
            read()


def test_it_can_be_read_otherwise(checkpoint: Checkpoint) -> None:
    assert (checkpoint.planned, checkpoint.committed, checkpoint.id) == (7, 7, "q")
    assert checkpoint.end(7) == {"data": 3}
    assert (checkpoint.end(8), Checkpoint(checkpoint.folder / "x").planned) == ({}, -1)
