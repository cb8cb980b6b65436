"""The orders of chaos to a deployment: moves by all protocols, standbys, scaling, draining a site."""

from __future__ import annotations

from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple

from whimbrel.api.client import RemoteHandle
from whimbrel.core.errors import Refused, Retry
from whimbrel.lab.chaos.deployed import Deployed
from whimbrel.lab.chaos.plan import DRAIN, MIGRATE, SCALE, STANDBY, Move
from whimbrel.orchestrator.orders import MigrationStatus

DEADLINE = 60.0
"""The deadline of a move, in seconds."""
BUDGET = 30_000
"""Bytes that a part ships in a batch: a move takes several batches, so that faults can hit it."""
WHOLE = ("restart", "restore")
"""Protocols that move all keys of an instance."""


class Ordered(NamedTuple):
    """An order under way: between two sites, as one migration or several."""

    handle: RemoteHandle | None
    protocol: str | None
    source: str
    destination: str
    is_new: bool = False
    """Whether it was ordered just now."""

    def migrations(self) -> list[MigrationStatus]:
        """Their current status."""
        return self.handle.migrations if self.handle else []


class Orders:
    """Gives orders to one deployment."""

    def __init__(self, deployed: Deployed) -> None:
        self._deployed, self._client = deployed, deployed.client

    def order(self, move: Move) -> Ordered:
        """Order a move from any site that has keys to any other. If none is possible now, returns one that is
        under way, or none."""
        pairs = self._pairs(move)
        for source, destination in pairs:
            try:
                handle = self._give(move, source, destination)
            except (Refused, Retry):  # another move has some of the keys, or the orchestrator is unreachable
                continue
            if not handle.is_noop:
                return Ordered(handle, move.protocol, source, destination, True)
        for one in self._deployed.ask(self._client.migrations) or []:
            if not one.is_over:
                return Ordered(self._client.handle(one.id), one.protocol, one.from_site, one.to_site)
        return Ordered(None, None, *pairs[0])

    def _give(self, move: Move, source: str, destination: str) -> RemoteHandle:
        order: dict[str, Any] = {"protocol": move.protocol, "deadline": DEADLINE}
        if move.deed == SCALE:
            stage = next(stage for stage in self._client.stages() if stage.name == move.stage)
            wanted = 1 + list(stage.instances.values()).count(source) % 2
            return self._client.scale(move.stage, instances=wanted, at=source, budget=BUDGET, **order)
        if move.deed == DRAIN:
            return self._client.drain(source, budget=BUDGET, **order)
        assert move.deed in (MIGRATE, STANDBY), move.deed
        some: dict[str, Any] = {} if move.protocol in WHOLE else {"share": move.share}
        if move.protocol not in (*WHOLE, "replicate"):
            some["budget"] = BUDGET  # a standby would never be warm: each batch changes more than that
        if move.deed == STANDBY:
            some["standby"] = True
        return self._client.migrate(move.stage, to=destination, at=source, **some, **order)

    def _pairs(self, move: Move) -> list[tuple[str, str]]:
        """All pairs of sites, those first whose source has keys; rotated by `move.pick`."""
        sites = self._deployed.ask(self._client.sites) or []
        keys = {site.name: site.keys for site in sites}
        pairs = list(permutations(self._deployed.sites, 2))
        first = int(move.pick * len(pairs))
        return sorted([*pairs[first:], *pairs[:first]], key=lambda pair: not keys.get(pair[0]))

    def finish(self) -> bool:
        """Let waiting standbys take over; return whether no move is under way any more."""
        found = self._deployed.ask(self._client.migrations)
        for one in found or []:
            if one.is_standby:
                self.take_over(one.id)
        return found is not None and all(one.is_over for one in found)

    def take_over(self, id: str) -> None:
        """Let a standby take over its keys, if it still waits and the orchestrator is reachable."""
        with suppress(Refused, Retry):
            self._client.take_over(id)
