"""A log on a full disk: an append fails whole, and succeeds when there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.full import FullDisk
from whimbrel.core.errors import Full, Retry
from whimbrel.log import EmbeddedLog, Lane

BIG = b"x" * 100_000


def test_an_append_without_room_changes_nothing_and_succeeds_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch, tmp_path)
    log = EmbeddedLog(tmp_path / "a.db")
    assert log.append(b"first", count=1, writer="w", counter=0) == 0
    disk.fill(log)
    for _ in range(2):
        with pytest.raises(Full, match="no room on the disk") as raised:
            log.append(BIG, count=1, writer="w", counter=1)
        assert isinstance(raised.value, Retry)
        assert (log.tail(), log.counter("w")) == (1, 0)
        assert [entry.blob for entry in log.read(0)] == [b"first"], "what is there can be read"
    disk.make_room()
    assert log.append(BIG, count=1, writer="w", counter=1) == 1
    assert log.append(BIG, count=1, writer="w", counter=1) is None
    assert [entry.blob for entry in log.read(0)] == [b"first", BIG]


def test_a_trimmed_log_goes_on_in_the_room_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append sweeps what was trimmed: a reader that goes on makes room for the writer."""
    disk = FullDisk(monkeypatch, tmp_path)
    log = EmbeddedLog(tmp_path / "a.db")
    for number in range(8):
        log.append(BIG, count=1, writer="w", counter=number)
    log.trim(8)
    log.append(b"", count=0, writer="w", counter=8)
    disk.fill(log)
    assert log.append(BIG, count=1, writer="w", counter=9) == 9


def test_both_lanes_are_whole_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk(monkeypatch, tmp_path)
    log = EmbeddedLog(tmp_path / "a.db")
    disk.fill(log)
    for lane in Lane:
        with pytest.raises(Full):
            log.append(BIG, count=1, writer="w", counter=0, lane=lane)
    disk.make_room()
    for lane in Lane:
        assert log.append(BIG, count=1, writer="w", counter=0, lane=lane) == 0
