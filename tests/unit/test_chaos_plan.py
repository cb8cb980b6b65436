"""The plan of faults: a function of its seed, and fair."""

from __future__ import annotations

import pytest

from whimbrel.chaos.faults import STRIKES
from whimbrel.chaos.plan import KINDS, UNDOING, movable, phases, plan
from whimbrel.core.errors import Refused, UnknownName


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert plan(3, 300) == plan(3, 300)
    assert plan(3, 300) != plan(4, 300)


@pytest.mark.parametrize("seed", range(20))
def test_five_minutes_have_at_least_twenty_faults_in_their_order_and_in_time(seed: int) -> None:
    faults = plan(seed, 300)
    assert len(faults) >= 20
    moments = [fault.at_s for fault in faults]
    assert moments == sorted(moments)
    assert moments[0] >= 0
    assert moments[-1] < 300
    for fault in faults:
        low, high = KINDS[fault.kind].seconds
        assert fault.target in KINDS[fault.kind].targets
        assert low <= fault.seconds <= high
        assert fault.phase is None or fault.phase in phases(fault.move.protocol)


def test_everything_comes_once_before_anything_comes_twice() -> None:
    cards = {(kind, target) for kind in KINDS for target in KINDS[kind].targets}
    moments = {(name, phase) for name in movable() for phase in (*phases(name), None)}
    long = plan(1, 60 * 20)
    assert {(fault.kind, fault.target) for fault in long[: len(cards)]} == cards
    assert {(fault.move.protocol, fault.phase) for fault in long[: len(moments)]} == moments


def test_only_the_kinds_that_are_wanted() -> None:
    assert {fault.kind for fault in plan(1, 300, ["cut", "stop"])} == {"cut", "stop"}
    with pytest.raises(UnknownName, match="unknown kind of fault 'flood'; there is: away, clock"):
        plan(1, 300, ["cut", "flood"])
    with pytest.raises(Refused, match="without faults there is no chaos"):
        plan(1, 300, [])


def test_every_kind_can_be_carried_out_and_every_phase_of_undoing_exists() -> None:
    assert STRIKES.keys() == KINDS.keys()
    assert {phase for name in movable() for phase in phases(name)} >= UNDOING
