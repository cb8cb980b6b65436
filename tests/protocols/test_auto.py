"""What `auto` takes: the right one where the difference is plain, and a reason for each it leaves."""

from __future__ import annotations

import msgspec
import pytest

from whimbrel.core.errors import Refused
from whimbrel.core.link import Link
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.core.protocols.auto import Limits, Situation, choose, estimates

CALM = Situation(
    keys=5_000, state_bytes=5 << 20, rate=1_000, record_bytes=100, backlog=500, capacity=40_000, batch_ms=500
)
SLOW = Link.parse("delay=20ms,rate=10mbit")


def seen(**changes: object) -> Situation:
    return msgspec.structs.replace(CALM, **changes)


@pytest.mark.parametrize(
    ("situation", "limits", "taken"),
    [
        (CALM, Limits(), "live"),
        (seen(link=SLOW), Limits(), "live"),
        (seen(state_bytes=1 << 30, link=SLOW), Limits(), "live"),
        (seen(backlog=400_000), Limits(), "push"),
        (seen(backlog=400_000, is_warm=True), Limits(), "replicate"),
        (seen(rate=50_000, link=SLOW), Limits(bytes=6 << 20), "push"),
        (seen(is_whole=True), Limits(), "live"),
        (seen(is_whole=True, unsaved=5_000), Limits(), "live"),
        (seen(state_bytes=1 << 30, link=SLOW, is_whole=True, unsaved=5_000), Limits(), "restore"),
        (seen(state_bytes=1 << 30, link=SLOW, is_whole=True, unsaved=5_000_000), Limits(), "live"),
        (seen(state_bytes=1 << 30, link=SLOW, is_whole=True, unsaved=5_000), Limits(stoppage_ms=500), "live"),
        (seen(is_cut=True, is_whole=True, unsaved=5_000), Limits(), "restore"),
        (seen(source_runs=False, is_whole=True, unsaved=5_000), Limits(), "restore"),
    ],
    ids=[
        "calm",
        "a slow link",
        "much state",
        "a spike",
        "a warm standby",
        "few bytes",
        "a whole instance",
        "saved",
        "saved, and a link that is too slow for the state",
        "the same, but too much to apply again",
        "the same, but nobody may wait",
        "saved, and the link is cut",
        "saved, and the source is gone",
    ],
)
def test_it_takes_what_costs_least(situation: Situation, limits: Limits, taken: str) -> None:
    protocol, why = choose(situation, limits)
    assert protocol == taken
    assert len(why) == 1 + len(PROTOCOLS), "what it saw, what it takes, and what it left"
    assert f"{situation.keys:,} keys" in why[0]
    assert why[1].startswith(f"auto takes {taken}: ")


def test_every_protocol_is_weighed_once() -> None:
    assert sorted(estimate.protocol for estimate in estimates(CALM)) == sorted(PROTOCOLS)


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (seen(is_cut=True), "the link is cut"),
        (seen(source_runs=False), "the source does not run"),
        (seen(destination_runs=False), "nothing runs at the destination"),
    ],
)
def test_it_refuses_with_a_reason_where_nothing_fits(situation: Situation, reason: str) -> None:
    with pytest.raises(Refused, match=f"no protocol fits: .*live: {reason}"):
        choose(situation)


def test_a_limit_that_nothing_keeps_is_named() -> None:
    with pytest.raises(Refused, match="live: its duration would be about"):
        choose(CALM, Limits(duration_ms=1))


def unfit(situation: Situation) -> dict[str, str]:
    return {estimate.protocol: estimate.unfit for estimate in estimates(situation) if estimate.unfit}


def test_some_are_possible_for_a_whole_instance_only_or_with_a_store() -> None:
    alone, saved = "it moves whole instances only", "there is no central store"
    assert unfit(CALM) == {"restart": alone, "restore": saved}
    assert unfit(seen(unsaved=0)) == {"restart": alone, "restore": alone}
    assert unfit(seen(is_whole=True)) == {"restore": saved}
    assert unfit(seen(is_whole=True, unsaved=0)) == {}


@pytest.mark.parametrize("worse", [{"state_bytes": 1 << 30}, {"backlog": 10**6}, {"batch_ms": 5000}])
def test_what_gets_worse_never_costs_less(worse: dict[str, object]) -> None:
    usual = {estimate.protocol: estimate.price for estimate in estimates(CALM)}
    now = {estimate.protocol: estimate.price for estimate in estimates(seen(**worse))}
    assert all(now[protocol] >= usual[protocol] for protocol in usual)
    assert now["pause"] > usual["pause"]
