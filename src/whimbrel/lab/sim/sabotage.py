"""Safeguards switched off, one at a time: the simulator must notice each. What it would not miss, it does not check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from whimbrel.core.arrival import Arrival
from whimbrel.core.gate import Gate
from whimbrel.core.incoming import Incoming
from whimbrel.core.instance import Instance
from whimbrel.core.record import Emissions, Kind, Move, Record, Result
from whimbrel.core.restoration import Eviction, Restoration
from whimbrel.core.serving import Serving
from whimbrel.core.switch import SwitchIn, SwitchOut
from whimbrel.lab.sim.actors import GatewayActor
from whimbrel.lab.sim.loss import StoreActor
from whimbrel.log.contract import Lane


def _release(self: Gate, result: Result, released: list[Result]) -> None:
    released.append(result)


def _release_early(self: Gate, results: list[Result]) -> list[Result]:
    """Later epochs do not wait for earlier ones; only what is closed is refused."""
    return [result for result in results if result.epoch >= self.epochs[result.key]]


def _markers_beside(self: GatewayActor, name: str, records: list[Record], position: int) -> None:
    """Markers travel in the control lane: nothing gets lost, but they have no place between the records any more."""
    inbox = self.world.inboxes[name]
    marks = [record for record in records if record.kind in (Kind.BEGIN, Kind.CUTOVER, Kind.ABORT)]
    data = [record for record in records if record not in marks]
    inbox.append(data, count=1, writer=self.name, counter=position, replays=True)
    if marks:
        inbox.append(marks, count=1, writer=self.name, counter=position, lane=Lane.CONTROL, replays=True)


def _ship_before_closing(self: SwitchOut, instance: Instance, out: Emissions) -> None:
    """The source says that it has stopped, and goes on: what came for its keys is served, not sent on."""
    _ship(self, instance, out)
    for key in [key for key in instance.table.waiting if self.takes(key)]:
        for record in instance.table.unbuffer(key):
            instance.serving.serve(record, out)
    for key in [key for key in instance.table.entries if self.takes(key) and not self.left]:
        self.forget(instance, key)


def _fence_without_wall(self: Gate, move: Move) -> None:
    """The next epoch may speak, and so may whoever spoke before."""
    _fence(self, move)
    self.refuse = lambda result, released: released.append(result)  # type: ignore[method-assign]


def _trim_what_is_routed(self: GatewayActor) -> int:
    """The log is trimmed as if there were no store."""
    return self.seq_of(self.position)


_ship, _fence = SwitchOut.ship, Gate.fence

SABOTAGES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gate": (Gate, "offer", _release_early),
    "dedup": (Serving, "is_duplicate", lambda self, entry, record: False),
    "filter": (Arrival, "is_silent", lambda self, src: False),
    "buffering": (Arrival, "buffers", lambda self, key, instance: False),
    "fencing": (Gate, "refuse", _release),
    "markers": (GatewayActor, "append", _markers_beside),
    "stopping": (SwitchOut, "ship", _ship_before_closing),
    "passing": (SwitchIn, "has_passed", lambda self, key: True),
    "absence": (SwitchIn, "is_new", lambda self, key: True),
    "freshness": (SwitchOut, "lacking", lambda self, keys, replication: set()),
    "fence": (Gate, "fence", _fence_without_wall),
    "silent": (Restoration, "silences", lambda self, record: False),
    "coverage": (GatewayActor, "covered", _trim_what_is_routed),
    "confirming": (StoreActor, "counts", lambda self, saved: True),
    "eviction": (Eviction, "drops", lambda self, record: False),
    "refusal": (Incoming, "turn_down", lambda self, roles, reason, out: None),
    "one-holder": (SwitchOut, "forget", lambda self, instance, key: None),
}


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """The world with one safeguard off."""
    if name is None:
        yield
        return
    owner, attribute, broken = SABOTAGES[name]
    with patch.object(owner, attribute, broken):
        yield
