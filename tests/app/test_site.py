"""A site takes over the checkpoint of an instance that was stopped elsewhere: whole, or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.core.errors import Unavailable
from whimbrel.core.link import IDEAL
from whimbrel.log import MemoryLog
from whimbrel.site.links import Links, SpoolFolder
from whimbrel.site.site import CHECKS, STARTS, Site
from whimbrel.spark.checkpoint import Checkpoint


def never(instance: str, checkpoint: Path) -> Any:
    raise AssertionError("no host is started here")


def nowhere(folder: Path) -> Links:
    return Links(["cloud", "edge"], IDEAL, SpoolFolder(folder), lambda _: "cloud", lambda _: MemoryLog())


@pytest.fixture
def cloud(tmp_path: Path) -> Site:
    site = Site("cloud", tmp_path / "cloud", never, Checkpoint, nowhere(tmp_path))
    for name, text in {
        "offsets/0": "first",
        "state/0/1.delta": "delta",
        "commits/.0.tmp": "half",
        "a.tmp": "half",
    }.items():
        path = site.checkpoint("s-1") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return site


@pytest.fixture
def edge(tmp_path: Path) -> Site:
    return Site("edge", tmp_path / "edge", never, Checkpoint, nowhere(tmp_path))


def files(site: Site) -> dict[str, str]:
    folder = site.folder
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


COPY = {"s-1/offsets/0": "first", "s-1/state/0/1.delta": "delta", "s-1/copied.json": '{"batch": 0}'}


def test_a_checkpoint_is_copied_whole_without_what_was_being_written(cloud: Site, edge: Site) -> None:
    assert edge.take("s-1", "cloud") == sum(map(len, COPY.values()))
    assert files(edge) == COPY
    assert len(files(cloud)) == 4, "the origin keeps its own: the move may still come back"


def test_a_copy_is_repeated_over_whatever_an_earlier_try_left(cloud: Site, edge: Site) -> None:
    for leftover in ("s-1/offsets/7", "s-1.partial/offsets/0"):
        path = edge.folder / leftover
        path.parent.mkdir(parents=True)
        path.write_text("stale")
    for _ in range(2):
        edge.take("s-1", "cloud")
        assert files(edge) == COPY


def test_a_copy_that_fails_leaves_nothing_that_looks_like_a_checkpoint(cloud: Site, edge: Site) -> None:
    with pytest.raises(Unavailable, match="s-9 cannot be copied to edge"):
        edge.take("s-9", "cloud")
    assert not edge.checkpoint("s-9").exists()


def test_stopping_what_does_not_run_is_nothing(cloud: Site) -> None:
    cloud.stop("s-1")
    assert cloud.batches() == []


class Dying:
    """A host that has died as soon as it was started, while somebody waits for it."""

    progress: tuple[float, ...] = ()
    batch_ms = 500.0
    backlog, is_active = 0, False
    contradiction: str | None = None
    exception: Exception | None = Unavailable("there is no such master")

    def start(self) -> None:
        """It dies at once."""

    def stop(self) -> None:
        """It is not there."""

    def wait(self) -> None:
        """Long enough for the watch to look at it."""
        time.sleep(5 * 0.01)
        raise Unavailable("there is no such master")


def test_the_watch_starts_nothing_that_a_start_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whimbrel.site.site.PERIOD", 0.01)
    made: list[str] = []

    def make(instance: str, checkpoint: Path) -> Any:
        made.append(instance)
        return Dying()

    site = Site("cloud", tmp_path / "cloud", make, Checkpoint, nowhere(tmp_path))
    site.open()
    try:
        with pytest.raises(Unavailable, match="s-1 does not start at cloud"):
            site.start("s-1")
        assert made == ["s-1"], "one host over one checkpoint"
    finally:
        site.close()


def test_a_host_that_cannot_be_started_again_needs_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.site.site.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.site.site.LONGEST", 0.01)
    monkeypatch.setattr("whimbrel.log.backoff.FIRST", 0.01)
    made: list[str] = []

    class Full(Dying):
        exception = OSError(28, "No space left on device")

    def make(instance: str, checkpoint: Path) -> Any:
        made.append(instance)
        if len(made) > 1:
            raise RuntimeError("a query of that name is active")
        return Full()

    site = Site("cloud", tmp_path / "cloud", make, Checkpoint, nowhere(tmp_path))
    site.start("s-1", wait=False)
    site.check()
    site.open()
    try:
        until(lambda: len(made) > STARTS, "it is tried again and again")
        with pytest.raises(Unavailable, match=r"s-1 at cloud could not be started .* a query of that name is active"):
            until(site.check, "it needs a new process")
    finally:
        site.close()


def test_a_site_whose_watch_does_not_return_needs_a_new_process(tmp_path: Path) -> None:
    site = Site("cloud", tmp_path / "cloud", never, Checkpoint, nowhere(tmp_path))
    for _ in range(CHECKS):
        site.check()
    with pytest.raises(Unavailable, match="the watch of site cloud does not return"):
        site.check()
