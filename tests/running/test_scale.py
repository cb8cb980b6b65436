"""Rescaling: instances come and go at a site while records come in, and the results are those of a calm run.

One application serves all tests of this file, in their order; its results are looked at in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, Job, running
from whimbrel.core.errors import Conflict
from whimbrel.host.contract import INLINE


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("scale"), host=INLINE, ballast=2_000) as job:
        yield job


def shares(job: Job) -> dict[str, tuple[str, int]]:
    """By instance: where it is, and how many keys it has."""
    instances = job.app.status()["stages"]["chain"]["instances"]
    return {name: (instance["site"], instance["keys"]) for name, instance in instances.items()}


REFUSALS: dict[str, tuple[Callable[[wb.App], Any], type[Exception], str]] = {
    "stage": (lambda app: app.scale("chian", instances=2, at="cloud"), wb.UnknownName, "there is: chain"),
    "site": (lambda app: app.scale("chain", instances=2, at="moon"), wb.UnknownName, "there is: cloud, edge-1"),
    "none": (lambda app: app.scale("chain", instances=0, at="cloud"), wb.Refused, "app.migrate('chain', at='cloud'"),
    "restart": (
        lambda app: app.scale("chain", instances=2, at="cloud", protocol="restart"),
        wb.Refused,
        "restart cannot distribute keys",
    ),
    "no keys": (lambda app: app.scale("chain", instances=2, at="edge-1"), wb.Refused, "app.migrate('chain', to="),
    "budget": (lambda app: app.scale("chain", instances=2, at="cloud", budget=0), wb.Refused, "budget"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_makes_no_sense_is_refused_with_a_way_out_and_changes_nothing(job: Job, name: str) -> None:
    job.refuses(*REFUSALS[name])


def test_one_becomes_two_that_share_the_keys(job: Job) -> None:
    assert job.app.scale("chain", instances=1, at="cloud").is_noop
    handle = job.app.scale("chain", instances=2, at="cloud", budget=1)
    with pytest.raises(Conflict, match=rf"{handle.ids[0]} \(copying\) .*wait for it or abort"):
        job.app.scale("chain", instances=3, at="cloud")
    assert handle.wait(120).outcome == "done"
    assert [migration.keys for migration in handle.migrations] == [6]
    assert shares(job) == {"chain-1": ("cloud", 6), "chain-2": ("edge-1", 0), "chain-3": ("cloud", 6)}
    assert set(job.unchanged()["owners"][0]) == {"chain-1", "chain-3"}, "keys to come are shared too"
    assert job.app.scale("chain", instances=2, at="cloud").is_noop
    assert job.app.migrate("chain", to="cloud").is_noop, "everything is there already"


def test_a_move_to_another_site_and_back_is_spread_over_its_instances(job: Job) -> None:
    away = job.app.migrate("chain", to="edge-1").wait(60)
    assert [(m.move.source, m.move.destination, m.keys) for m in away.migrations] == [
        ("chain-1", "chain-2", 6),
        ("chain-3", "chain-2", 6),
    ]
    assert shares(job) == {"chain-1": ("cloud", 0), "chain-2": ("edge-1", 12), "chain-3": ("cloud", 0)}
    back = job.app.migrate("chain", to="cloud", protocol="pause").wait(60)
    assert back.outcome == "done"
    assert [(m.move.source, m.move.destination) for m in back.migrations] == [
        ("chain-2", "chain-1"),
        ("chain-2", "chain-3"),
    ]
    assert shares(job) == {"chain-1": ("cloud", 6), "chain-2": ("edge-1", 0), "chain-3": ("cloud", 6)}


def test_a_scaling_in_that_is_called_off_leaves_everybody_in_place(job: Job) -> None:
    handle = job.app.scale("chain", instances=1, at="cloud", budget=1).abort("not now").wait(60)
    assert handle.outcome == "aborted"
    job.settle()
    until(lambda: not job.app.control.stages["chain"].instances.leaving, "it is to stay")
    assert shares(job)["chain-3"] == ("cloud", 6)


def test_two_become_one_again_and_nothing_of_the_other_is_left(job: Job) -> None:
    assert job.app.scale("chain", instances=1, at="cloud", protocol="pause").wait(60).outcome == "done"
    until(lambda: set(shares(job)) == {"chain-1", "chain-2"}, "it has left")
    assert shares(job)["chain-1"] == ("cloud", 12)
    assert "chain-3" not in job.app.sites["cloud"].hosts
    assert "chain-3" not in job.app.control.stages["chain"].seen(), "whoever still looks for it finds nothing"
    again = job.app.scale("chain", instances=2, at="cloud").wait(60)
    assert again.outcome == "done"
    assert set(shares(job)) == {"chain-1", "chain-2", "chain-4"}, "a name is given once"


def test_all_results_are_exact_after_all_of_this(job: Job) -> None:
    assert job.finish() == EXACT
    assert job.app.status()["records"] == {"sent": job.sent, "delivered": job.sent, "refused": 0, "dead_lettered": 0}
