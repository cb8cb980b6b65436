"""The gateways of all places as one: each call reaches the places that it concerns, and no others."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.records import move
from whimbrel.core.errors import Unavailable
from whimbrel.core.router import Begin
from whimbrel.orchestrator.gateways import Gateways
from whimbrel.orchestrator.ports import FlowStatus, GatewayStatus

PLACES = ("cloud", "edge-1", "edge-2")


class Port:
    """Notes its calls."""

    def __init__(self, status: GatewayStatus, answer: bool = True) -> None:
        self.calls: list[str] = []
        self._status, self._answer = status, answer
        self.away = False

    def status(self) -> GatewayStatus:
        return self._status

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> bool:
            if self.away:
                raise Unavailable("no answer")
            self.calls.append(name)
            return self._answer

        return call


def gateways(**answers: bool) -> tuple[dict[str, Port], Gateways]:
    flow = {"s": FlowStatus(rate=10.0, record_bytes=100, refused=1)}
    status = GatewayStatus(sent=5, delivered=4, dead_letters={"no key": 2}, ended=True, stages=flow)
    ports = {place: Port(status, answers.get(place.replace("-", ""), True)) for place in PLACES}
    known: Any = ports
    return ports, Gateways(known, lambda stage: "edge-1", lambda instance: "edge-2")


def test_a_command_reaches_the_homes_of_its_keys_only() -> None:
    ports, every = gateways()
    ports["edge-2"].away = True
    homes = frozenset({"gateway-s@cloud", "gateway-s@edge-1"})
    every.command("s", Begin(msgspec.structs.replace(move("k"), routers=homes)))
    assert {place: port.calls for place, port in ports.items()} == {
        "cloud": ["command"],
        "edge-1": ["command"],
        "edge-2": [],
    }


def test_a_fence_reaches_every_place_and_fails_with_any() -> None:
    ports, every = gateways()
    every.fence("s", move("k"))
    assert all(port.calls == ["fence"] for port in ports.values())
    ports["edge-2"].away = True
    with pytest.raises(Unavailable):
        every.fence("s", move("k"))


def test_the_placement_reaches_all_others_though_one_is_away() -> None:
    ports, every = gateways()
    ports["cloud"].away = True
    with pytest.raises(Unavailable):
        every.place("s", {"s-1": "edge-1"})
    assert [place for place, port in ports.items() if port.calls == ["place"]] == ["edge-1", "edge-2"]


def test_the_store_is_asked_at_the_home() -> None:
    ports, every = gateways()
    every.order_checkpoint("s")
    assert [place for place, port in ports.items() if port.calls] == ["edge-1"]


def test_all_is_delivered_and_saved_only_if_it_is_everywhere() -> None:
    assert gateways()[1].is_drained("s")
    ports, every = gateways(cloud=False)
    assert not every.is_drained("s")
    assert not every.has_delivered("s", "s-1"), "delivered at its own place, but not at every other"
    assert every.has_applied("s", "s-1"), "its own place answers"
    assert [place for place, port in ports.items() if "has_applied" in port.calls] == ["edge-2"]
    assert not every.save("s")
    assert all("save" in port.calls for port in ports.values()), "each place saves, whatever the others answer"


def test_the_status_is_the_sum_of_all() -> None:
    status = gateways()[1].status()
    assert (status.sent, status.delivered, status.dead_letters, status.ended) == (15, 12, {"no key": 6}, True)
    assert (status.stages["s"].rate, status.stages["s"].record_bytes, status.stages["s"].refused) == (30.0, 100, 3)
