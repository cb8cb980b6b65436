"""Orders to migrate: what makes no sense is refused with a way out and changes nothing; the rest is exact.

One application serves all tests of this file, in their order; its results are looked at in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import whimbrel as wb
from tests.app.stories import timeless
from tests.spark_app.jobs import EXACT, Job, running
from whimbrel.core.errors import Conflict
from whimbrel.core.keys import BINS, bin_of
from whimbrel.host.contract import INLINE


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("migrate"), host=INLINE) as job:
        yield job


REFUSALS: dict[str, tuple[Callable[[wb.App], Any], type[Exception], str]] = {
    "stage": (lambda app: app.migrate("chian", to="edge-1"), wb.UnknownName, "there is: chain"),
    "site": (lambda app: app.migrate("chain", to="moon"), wb.UnknownName, "there is: cloud, edge-1"),
    "origin": (lambda app: app.migrate("chain", to="edge-1", at="moon"), wb.UnknownName, "there is: cloud, edge-1"),
    "protocol": (
        lambda app: app.migrate("chain", to="edge-1", protocol="teleport"),
        wb.UnknownName,
        "there is: fetch, fluid, live, pause, push, replicate, restart",
    ),
    "key": (lambda app: app.migrate("chain", to="edge-1", keys=["k00", "k99"]), wb.UnknownName, "'k99'; there is: k0"),
    "migration": (lambda app: app.story("m99"), wb.UnknownName, "unknown migration 'm99'"),
    "share 0": (lambda app: app.migrate("chain", to="edge-1", share=0), wb.Refused, "> 0 and <= 1"),
    "share -1": (lambda app: app.migrate("chain", to="edge-1", share=-1), wb.Refused, "> 0 and <= 1"),
    "share 1.5": (lambda app: app.migrate("chain", to="edge-1", share=1.5), wb.Refused, "> 0 and <= 1"),
    "share nan": (lambda app: app.migrate("chain", to="edge-1", share=float("nan")), wb.Refused, "> 0 and <= 1"),
    "bin": (lambda app: app.migrate("chain", to="edge-1", bins=[BINS]), wb.Refused, f"0 to {BINS - 1}"),
    "keys and bins": (lambda app: app.migrate("chain", to="edge-1", keys=["k00"], bins=[1]), wb.Refused, "only one of"),
    "bins and share": (lambda app: app.migrate("chain", to="edge-1", bins=[1], share=0.5), wb.Refused, "only one of"),
    "keys and share": (
        lambda app: app.migrate("chain", to="edge-1", keys=["k00"], share=0.5),
        wb.Refused,
        "only one of",
    ),
    "budget": (lambda app: app.migrate("chain", to="edge-1", budget=0), wb.Refused, "budget"),
    "deadline": (lambda app: app.migrate("chain", to="edge-1", deadline=0), wb.Refused, "deadline"),
    "option": (
        lambda app: app.migrate("chain", to="edge-1", protocol="push", split=4),
        wb.UnknownName,
        "unknown option of push 'split'; there is: budget, chunk, order",
    ),
    "order": (
        lambda app: app.migrate("chain", to="edge-1", protocol="push", order="random"),
        wb.UnknownName,
        "there is: arrival, key",
    ),
    "restart of a part": (
        lambda app: app.migrate("chain", to="edge-1", keys=["k00"], protocol="restart"),
        wb.Refused,
        "select all of its keys, or use another protocol",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_order_that_makes_no_sense_is_refused_with_a_way_out_and_changes_nothing(job: Job, name: str) -> None:
    assert job.refuses(*REFUSALS[name])["migrations"] == {}


@pytest.mark.parametrize(
    "which", [{"keys": ["k00", "k01"]}, {"keys": "k00"}, {"bins": [bin_of("k00")]}, {}, {"share": 1.0}]
)
def test_a_move_to_where_everything_is_already_does_nothing(job: Job, which: dict[str, Any]) -> None:
    before = job.unchanged()
    handle = job.app.migrate("chain", to="cloud", **which)
    assert handle.is_noop
    assert handle.wait(0).abort().outcome == "already there"
    assert job.unchanged() == before


@pytest.mark.parametrize("protocol", ["live", "pause"])
def test_an_abort_before_the_cutover_leaves_everything_where_it_was(job: Job, protocol: str) -> None:
    """A budget of one byte a batch: the copy takes long enough for anybody to change his mind."""
    job.settle()
    handle = job.app.migrate("chain", to="edge-1", protocol=protocol, budget=1)
    with pytest.raises(Conflict, match=rf"{handle.ids[0]} .*wait for it or abort"):
        job.app.migrate("chain", to="edge-1", keys=["k03"])
    assert handle.abort("changed my mind").wait(60).outcome == "aborted"
    assert [migration.reason for migration in handle.migrations] == ["changed my mind"]
    assert any("Abandoned: changed my mind" in line for line in job.app.story(handle.ids[0]))
    assert handle.abort("once more").outcome == "aborted"
    assert set(job.unchanged()["owners"][0]) == {"chain-1"}


def test_an_abort_after_the_end_has_no_effect(job: Job) -> None:
    job.settle()
    handle = job.app.migrate("chain", to="edge-1", keys=["k00", "k03", "k07"]).wait(60)
    assert handle.outcome == "done"
    assert handle.abort("too late").wait(0).outcome == "done"
    assert [migration.reason for migration in handle.migrations] == [None]
    owners = job.app.control.stages["chain"].coordinator.table.owners
    assert {key for key in job.app.control.stages["chain"].keys.now() if owners[key] == "chain-2"} == {
        "k00",
        "k03",
        "k07",
    }
    assert job.app.migrate("chain", to="edge-1", keys=["k00", "k07"]).is_noop


def test_a_move_of_everything_takes_only_what_is_elsewhere(job: Job) -> None:
    handle = job.app.migrate("chain", to="edge-1", protocol="pause").wait(60)
    assert handle.outcome == "done"
    assert handle.migrations[0].keys == 9
    assert job.app.status()["stages"]["chain"]["instances"]["chain-2"]["keys"] == 12


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        ("push", {"budget": 50_000}),
        ("push", {"order": "key", "budget": 50_000}),
        ("fetch", {"step": 100}),
        ("fetch", {"split": 1, "step": 1000, "chunk": 5_000}),
    ],
)
def test_a_switch_brings_everything_there_and_the_next_one_back(
    job: Job, protocol: str, options: dict[str, Any]
) -> None:
    stage = job.app.control.stages["chain"]
    to = next(site for site in job.app.sites if site != stage.coordinator.sites[stage.coordinator.table.owners["k00"]])
    handle = job.app.migrate("chain", to=to, protocol=protocol, **options)
    assert handle.abort("no way back").wait(60).outcome == "done"
    assert handle.migrations[0].keys == 12
    assert handle.migrations[0].state_bytes > 12 * 20_000


def test_a_plan_moves_a_few_bins_at_a_time(job: Job) -> None:
    stage = job.app.control.stages["chain"]
    to = next(site for site in job.app.sites if site != stage.coordinator.sites[stage.coordinator.table.owners["k00"]])
    handle = job.app.migrate("chain", to=to, protocol="fluid", step=300).wait(90)
    assert handle.outcome == "done"
    assert len(handle.migrations) == 4
    assert sum(migration.keys for migration in handle.migrations) == 12


def test_a_standby_waits_and_takes_over(job: Job) -> None:
    stage = job.app.control.stages["chain"]
    to = next(site for site in job.app.sites if site != stage.coordinator.sites[stage.coordinator.table.owners["k00"]])
    handle = job.app.migrate("chain", to=to, protocol="replicate", standby=True, interval=2).wait_warm(60)
    assert handle.outcome == "standby"
    assert handle.take_over().wait(60).outcome == "done"
    assert handle.migrations[0].keys == 12
    with pytest.raises(wb.Refused, match="no standby is waiting"):
        handle.take_over()


def test_auto_takes_what_costs_least_and_says_why(job: Job) -> None:
    stage = job.app.control.stages["chain"]
    here = stage.coordinator.sites[stage.coordinator.table.owners["k00"]]
    to = next(site for site in job.app.sites if site != here)
    with pytest.raises(wb.Refused, match=r"no protocol fits: .*its bytes would be about"):
        job.app.migrate("chain", to=to, protocol="auto", max_bytes=1)
    with pytest.raises(wb.UnknownName, match="there is: max_bytes, max_duration_ms, max_stoppage_ms"):
        job.app.migrate("chain", to=to, protocol="auto", order="key")
    assert (
        job.app.status()["stages"]["chain"]["instances"][stage.coordinator.table.owners["k00"]]["state_bytes"]
        > 12 * 20_000
    )
    standby = job.app.migrate("chain", to=to, protocol="replicate", standby=True).wait_warm(60)
    handle = job.app.migrate("chain", to=to, protocol="auto").wait(60)
    assert handle.outcome == "done"
    assert handle.why[0].startswith("auto saw 12 keys with 0.")
    taken = handle.why[1].removeprefix("auto takes ").split(":")[0]
    assert handle.migrations[0].move.protocol == taken
    if taken == "replicate":
        assert handle.ids == standby.ids
    else:
        assert standby.wait(60).outcome == "aborted", "its keys have moved in another way"
        assert f"{handle.ids[0]} ordered: {handle.why[1]}" in timeless(handle.progress)


def test_all_results_are_exact_after_all_of_this(job: Job) -> None:
    assert job.finish() == EXACT
    assert job.app.status()["records"] == {"sent": job.sent, "delivered": job.sent, "refused": 0, "dead_lettered": 0}
