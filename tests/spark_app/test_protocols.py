"""Every protocol moves everything once under real Spark, over links, and instances come and go: all results are exact.

What the application does beyond that is tested on inline hosts: tests/running. One application serves all tests of this
file, in their order; its results are looked at in the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark_app.jobs import EXACT, Job, running

pytestmark = pytest.mark.spark

PROTOCOLS: dict[str, dict[str, Any]] = {
    "live": {"budget": 50_000},
    "push": {"budget": 50_000},
    "fetch": {"step": 100},
    "pause": {},
    "fluid": {"step": 500},
    "replicate": {"interval": 2},
    "restart": {},
}


@pytest.fixture(scope="module")
def job(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("protocols"), spark, links="delay=10ms,rate=100mbit") as job:
        yield job


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_moves_everything(job: Job, protocol: str) -> None:
    coordinator = job.app.control.stages["chain"].coordinator
    here = coordinator.sites[coordinator.table.owners["k00"]]
    to = next(site for site in job.app.sites if site != here)
    handle = job.app.migrate("chain", to=to, protocol=protocol, **PROTOCOLS[protocol]).wait(90)
    assert handle.outcome == "done"
    assert {coordinator.sites[coordinator.table.owners[key]] for key in job.app.control.stages["chain"].keys.now()} == {
        to
    }


def test_one_becomes_two_and_one_again(job: Job) -> None:
    coordinator = job.app.control.stages["chain"].coordinator
    here = coordinator.sites[coordinator.table.owners["k00"]]
    for wanted in (2, 1):
        assert job.app.scale("chain", instances=wanted, at=here).wait(60).outcome == "done"
        assert len({coordinator.table.owners[key] for key in job.app.control.stages["chain"].keys.now()}) == wanted


def test_all_results_are_exact_after_all_of_this(job: Job) -> None:
    assert job.finish() == EXACT
