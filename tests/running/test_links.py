"""Moves over links: exact, counted, and patient with a link that is cut.

One application serves all tests of this file, in their order; its results are looked at in the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, KEYS, Job, running
from whimbrel.host.contract import INLINE
from whimbrel.orchestrator.stage import BUDGET, LEAST_BUDGET

LINK = "delay=50ms,rate=10mbit"
BALLAST = 100_000
BETWEEN = ("cloud", "edge-1")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("links"), None, BALLAST, host=INLINE, links={BETWEEN: LINK}) as job:
        yield job


def links(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """There and back."""
    status = job.app.status()["links"]
    assert set(status) == {"cloud->edge-1", "edge-1->cloud"}
    return status["cloud->edge-1"], status["edge-1->cloud"]


def test_while_nothing_moves_no_byte_crosses_a_link(job: Job) -> None:
    delivered = job.app.status()["records"]["delivered"]
    until(lambda: job.app.status()["records"]["delivered"] > delivered + 300, "both sites have worked for a while")
    idle = {"link": LINK, "cut": False, "sent_bytes": 0, "under_way_bytes": 0}
    assert links(job) == (idle, idle)


def test_links_that_are_not_there_cannot_be_cut(job: Job) -> None:
    for act in (job.app.cut, job.app.mend):
        with pytest.raises(wb.UnknownName, match="there is: cloud, edge-1"):
            act("cloud", "moon")


def test_a_live_move_crosses_the_link_and_its_bytes_are_counted(job: Job) -> None:
    handle = job.app.migrate("chain", to="edge-1").wait(60)
    assert handle.outcome == "done"
    (migration,) = handle.migrations
    assert migration.keys == KEYS
    there, back = links(job)
    assert there["sent_bytes"] == migration.sent_bytes > KEYS * BALLAST
    assert (there["under_way_bytes"], back["sent_bytes"]) == (0, 0)
    assert LEAST_BUDGET <= migration.move.budget < BUDGET


def test_a_cut_during_a_live_move_delays_it_and_mending_finishes_it(job: Job) -> None:
    before = links(job)[1]["sent_bytes"]
    handle = job.app.migrate("chain", to="cloud")
    until(lambda: links(job)[1]["sent_bytes"] > before, "the first parcels have crossed")
    job.app.cut(*BETWEEN)
    until(lambda: links(job)[1]["under_way_bytes"] > 0, "parcels wait")
    held = links(job)[1]
    delivered = job.app.status()["records"]["delivered"]
    until(lambda: job.app.status()["records"]["delivered"] > delivered + 300, "the source serves on")
    assert held["cut"]
    assert links(job)[1]["sent_bytes"] == held["sent_bytes"]
    assert not handle.migrations[0].is_over
    assert not job.app.links.is_idle()
    job.app.mend(*BETWEEN)
    assert handle.wait(60).outcome == "done"
    assert links(job)[1]["sent_bytes"] - before == handle.migrations[0].sent_bytes


def test_an_abort_leaves_nothing_under_way_and_the_next_move_succeeds(job: Job) -> None:
    handle = job.app.migrate("chain", to="edge-1")
    until(lambda: links(job)[0]["under_way_bytes"] > 0, "parcels are under way")
    job.app.cut(*BETWEEN)
    assert handle.abort("changed my mind").wait(60).outcome == "aborted"
    job.app.mend(*BETWEEN)
    until(lambda: not list(job.app.control.stages["chain"].coordinator.open.values()), "the destination has cleaned up")
    assert job.app.migrate("chain", to="edge-1", protocol="pause").wait(60).outcome == "done"


def test_all_results_are_exact_after_all_of_this(job: Job) -> None:
    assert job.finish() == EXACT
    assert job.app.links.is_idle()
    assert job.app.status()["records"]["delivered"] == job.sent
