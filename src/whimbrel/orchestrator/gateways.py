"""The gateways of all places, as one: what the orchestrator asks of a stage concerns those that the stage needs.

a command                  the places of its routers: the homes of the moved keys, and no others
a fence, all is delivered  every place: each may receive results of the stage
the central store          the stage's only home
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from whimbrel.core.errors import Bug, Retry
from whimbrel.core.names import place_of as place_of_router
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Move
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore
from whimbrel.orchestrator.known_keys import Seen
from whimbrel.orchestrator.ports import FlowStatus, GatewayPort, GatewayStatus


class Gateways:
    """A `GatewayPort` over those of all places."""

    def __init__(
        self,
        ports: Mapping[str, GatewayPort],
        home_of: Callable[[str], str],
        place_of: Callable[[str], str],
    ) -> None:
        """`ports`: by place. `home_of`: the place that stores the increments of a stage. `place_of`: of an instance."""
        self._ports, self._home_of, self._place_of = ports, home_of, place_of

    def command(self, stage: str, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        for place in sorted(map(place_of_router, command.move.routers)):
            self._ports[place].command(stage, command)

    def fence(self, stage: str, move: Move) -> None:
        for port in self._ports.values():
            port.fence(stage, move)

    def check_restore(self, stage: str, checkpoint: int | None) -> None:
        self._home(stage).check_restore(stage, checkpoint)

    def load(self, stage: str, move: Move, checkpoint: int | None) -> Loaded:
        return self._home(stage).load(stage, move, checkpoint)

    def checkpoints(self, stage: str) -> list[int]:
        return self._home(stage).checkpoints(stage)

    def order_checkpoint(self, stage: str) -> None:
        self._home(stage).order_checkpoint(stage)

    def place(self, stage: str, instances: dict[str, str]) -> None:
        away: Retry | None = None
        for port in self._ports.values():
            try:
                port.place(stage, instances)
            except Retry as error:  # the others must not wait for it
                away = error
        if away is not None:
            raise away

    def save(self, stage: str) -> bool:
        saved = [port.save(stage) for port in self._ports.values()]
        return all(saved)

    def has_applied(self, stage: str, instance: str) -> bool:
        return self._ports[self._place_of(instance)].has_applied(stage, instance)

    def has_delivered(self, stage: str, instance: str) -> bool:
        # In the order of a result's way: dispatched at its place, carried, released where it is needed.
        there = self._ports[self._place_of(instance)].has_delivered(stage, instance)
        return there and self.is_idle() and all(port.has_delivered(stage, instance) for port in self._ports.values())

    def is_drained(self, stage: str) -> bool:
        # Twice: what the first pass has dispatched to another place has arrived there before the second.
        return all(self.is_idle() and all(port.is_drained(stage) for port in self._ports.values()) for _ in range(2))

    def keys(self, stage: str, start: int) -> Seen:
        raise Bug("the keys of a stage are read from each place by itself")

    def is_idle(self) -> bool:
        # Twice: what arrives at a home may be passed on from there.
        return all(port.is_idle() for _ in range(2) for port in self._ports.values())

    def cut(self, other: str, is_cut: bool = True) -> None:
        raise Bug("a link is cut at both its ends")

    def remove(self, instance: str) -> None:
        for port in self._ports.values():
            port.remove(instance)

    def status(self) -> GatewayStatus:
        """All of them together; what waits, and errors, with the place."""
        found = {place: port.status() for place, port in self._ports.items()}
        letters: Counter[str] = Counter()
        for one in found.values():
            letters.update(one.dead_letters)
        names = dict.fromkeys(name for one in found.values() for name in one.stages)
        return GatewayStatus(
            sent=sum(one.sent for one in found.values()),
            delivered=sum(one.delivered for one in found.values()),
            dead_letters=dict(letters),
            ended=all(one.ended for one in found.values()),
            error=next((f"{place}: {one.error}" for place, one in found.items() if one.error), None),
            stages={
                name: _joined([one.stages[name] for one in found.values() if name in one.stages]) for name in names
            },
            disk=next((one.disk for one in found.values() if one.disk), None),
            held_up={f"{what} at {place}": why for place, one in found.items() for what, why in one.held_up.items()},
            links={way: link for one in found.values() for way, link in one.links.items()},
        )

    def _home(self, stage: str) -> GatewayPort:
        return self._ports[self._home_of(stage)]


def _joined(flows: list[FlowStatus]) -> FlowStatus:
    rate = sum(one.rate for one in flows)
    weighed = sum(one.rate * one.record_bytes for one in flows)
    return FlowStatus(
        rate=rate,
        record_bytes=round(weighed / rate) if rate else max(one.record_bytes for one in flows),
        state_bytes={name: size for one in flows for name, size in one.state_bytes.items()},
        refused=sum(one.refused for one in flows),
        error=next((one.error for one in flows if one.error), None),
        store=next((one.store for one in flows if one.store), None),
    )
