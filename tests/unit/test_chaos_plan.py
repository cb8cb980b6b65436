"""The plan of faults: a function of its seed, and fair."""

from __future__ import annotations

import pytest

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.lab.chaos.faults import STRIKES
from whimbrel.lab.chaos.oracle import LEDGER, SHOPS
from whimbrel.lab.chaos.phases import VICTIMS, Case, cases
from whimbrel.lab.chaos.plan import DEEDS, KINDS, UNDOING, moments, phases, plan


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert plan(3, 300) == plan(3, 300)
    assert plan(3, 300) != plan(4, 300)


@pytest.mark.parametrize("seed", range(20))
def test_five_minutes_have_at_least_twenty_five_faults_in_their_order_and_in_time(seed: int) -> None:
    faults = plan(seed, 300)
    assert len(faults) >= 25
    at = [fault.at_s for fault in faults]
    assert at == sorted(at)
    assert at[0] >= 0
    assert at[-1] < 300
    for fault in faults:
        low, high = KINDS[fault.kind].seconds
        assert fault.target in KINDS[fault.kind].targets
        assert low <= fault.seconds <= high
        assert fault.phase is None or fault.phase in phases(fault.move.protocol)
    assert {fault.kind for fault in faults} == set(KINDS), "every kind strikes"


def test_everything_comes_once_before_anything_comes_twice() -> None:
    long = plan(1, 60 * 40)
    assert {fault.kind for fault in long[: len(KINDS)]} == set(KINDS)
    for kind in KINDS:
        targets = [fault.target for fault in long if fault.kind == kind]
        assert set(targets[: len(KINDS[kind].targets)]) == set(KINDS[kind].targets)
    cards = moments()
    assert {(one.move.deed, one.move.protocol, one.phase) for one in long[: len(cards)]} == set(cards)
    assert {fault.move.stage for fault in long[:2]} == {LEDGER, SHOPS}


def test_all_protocols_and_orders_are_among_the_moments() -> None:
    assert {protocol for _, protocol, _ in moments()} == set(PROTOCOLS)
    assert {deed for deed, _, _ in moments()} > set(DEEDS)


def test_only_the_kinds_that_are_wanted() -> None:
    assert {fault.kind for fault in plan(1, 300, ["cut", "stop"])} == {"cut", "stop"}
    assert {fault.kind for fault in plan(1, 60, ["checkpoint-gone"])} == {"checkpoint-gone"}
    with pytest.raises(UnknownName, match="unknown kind of fault 'flood'; there is: away, bad-disk"):
        plan(1, 300, ["cut", "flood"])
    with pytest.raises(Refused, match="without faults there is no chaos"):
        plan(1, 300, [])


def test_every_kind_can_be_carried_out_and_every_phase_of_undoing_exists() -> None:
    assert STRIKES.keys() == KINDS.keys()
    assert {phase for name in PROTOCOLS for phase in phases(name)} >= UNDOING


def test_every_phase_of_every_protocol_has_its_cases() -> None:
    assert len(cases()) == len(VICTIMS) * sum(len(phases(name)) for name in PROTOCOLS) == 100
    assert {case.phase for case in cases()} >= UNDOING
    assert cases(["restart"], ["starting"], ["orchestrator"]) == [Case("restart", "starting", "orchestrator")]
    assert {case.protocol for case in cases(wanted=["resuming"])} == {"pause", "fluid"}
    with pytest.raises(UnknownName, match="unknown victim 'cat'"):
        cases(victims=["cat"])
    with pytest.raises(Refused, match="none of push has a phase aborting"):
        cases(["push"], ["aborting"])
