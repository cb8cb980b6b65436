"""A deployment whose sites run Spark: one is killed amid a move, one has a full disk, and nothing of a JVM is left.

One deployment serves all tests of this file, in their order, as in test_kills.py.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes.test_kills import Deployed, deployment
from whimbrel.host.contract import MICRO_BATCH

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployment(tmp_path_factory.mktemp("deployment"), MICRO_BATCH) as deployed:
        yield deployed


def test_a_site_that_is_killed_amid_a_move_comes_back_and_the_move_is_done(deployed: Deployed) -> None:
    deployed.flow()
    deployed.wait(lambda: deployed.states() == {"alive"}, "all live")
    name = f"site {deployed.at}"
    id = deployed.begin("live", "copying")
    deployed.kill(name)
    deployed.finish(id)
    deployed.flow()
    assert len(deployed.pids(name)) == 2


def test_a_site_whose_disk_is_full_stands_still_says_so_and_goes_on(deployed: Deployed) -> None:
    """A limit on the size of files is what a full disk looks like that needs no disk of its own: every write fails."""
    deployed.flow()
    name = f"site {deployed.at}"
    life = deployed.pids(name)
    limit(life[-1], 0)
    try:
        deployed.wait(lambda: deployed.at in deployed.client.status()["disks"], "it says so")
        told = deployed.client.status()["disks"][deployed.at]
        assert told.startswith(f"the disk of {deployed.at} is full (")
        assert [site.disk for site in deployed.client.sites() if site.name == deployed.at] == [told]
    finally:
        limit(life[-1], resource.RLIM_INFINITY)
    deployed.flow()
    deployed.wait(lambda: not deployed.client.status()["disks"], "it says no more")
    assert deployed.pids(name) == life, "nobody had to start it again"
    deployed.finish(deployed.begin("live", "copying"))


def limit(pid: int, size: int) -> None:
    """Let no file of a process, and of all that it started, grow beyond this; children that it starts inherit it."""
    for _ in range(2):  # and those that were started meanwhile by one whose turn had not come
        for one in [pid, *descendants(pid)]:
            with suppress(ProcessLookupError):
                hard = resource.prlimit(one, resource.RLIMIT_FSIZE)[1]
                resource.prlimit(one, resource.RLIMIT_FSIZE, (size, hard))


def descendants(pid: int) -> list[int]:
    found = []
    for tasks in Path("/proc", str(pid), "task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, tasks.read_text().split()):
                found += [child, *descendants(child)]
    return found


def test_all_results_are_exact_after_all_of_this(deployed: Deployed) -> None:
    deployed.check_end()


def test_when_the_one_that_started_them_is_killed_nothing_is_left(deployed: Deployed) -> None:
    os.kill(deployed.up.process.pid, signal.SIGKILL)
    deployed.up.end(60)
