"""Command execution: carries out the commands of migrations through the ports of the gateway and the sites.

Every command is idempotent and may be retried. Its outcome is an event of its migration and goes back to `Decisions`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from uuid import uuid4

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Stop, Unavailable, Unstarted
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.protocols import machine
from whimbrel.core.protocols.machine import (
    Abandoned,
    Command,
    Copied,
    Event,
    Failed,
    Fenced,
    Migration,
    Started,
    Stopped,
)
from whimbrel.core.protocols.restore import FENCING, LOADING
from whimbrel.core.record import Kind, Unreadable
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore, body_with
from whimbrel.log import codec
from whimbrel.log.kept import kept
from whimbrel.orchestrator.decisions import Decisions
from whimbrel.orchestrator.ports import GatewayPort, SitePort

LOGGER = logging.getLogger("whimbrel.orchestrator")
PERIOD = 0.2
"""Seconds between two checks of a migration whose checkpoint is in transit."""


class Deeds:
    """Executes the commands of the migrations of all stages."""

    def __init__(
        self,
        decisions: Decisions,
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        answer: Callable[[str, str, Event], None],
        pause: Callable[[float], bool],
        encode: Callable[[Sequence[codec.Content]], bytes] = codec.encode_messages,
    ) -> None:
        """`answer` receives the outcome of a command, with its stage and migration. `pause` sleeps for some seconds;
        True: the orchestrator is stopping. `encode` turns messages into an inbox entry."""
        self._decisions, self._sites, self._gateway = decisions, sites, gateway
        self._answer, self._pause, self._encode = answer, pause, encode

    def do(self, stage: str, id: str, command: Command) -> None:
        """Carry out a command. Raises `Retry` or `Stale` if it must be retried."""
        try:
            self._carry_out(stage, id, command)
        except Unavailable as error:  # this call has done nothing
            # Only the site itself knows whether an instance has run there, so an unreachable site proves nothing.
            fails = {machine.CopyCheckpoint: Unavailable, machine.StartInstance: Unstarted}.get(type(command))
            if fails is None or not isinstance(error, fails):
                raise
            self._pause(PERIOD)
            self._answer(stage, id, Failed(str(error)))

    def _carry_out(self, stage: str, id: str, command: Command) -> None:
        migration = self._decisions.migration(stage, id)
        if migration.ended_by:
            return
        match command:
            case Begin() | Cutover() | Abort():
                self._gateway.command(stage, command)
            case Restore():
                self._replay(stage, id, command)
            case Fence(move) if migration.phase == FENCING:
                self._gateway.command(stage, command)
                self._gateway.fence(stage, move)
                self._answer(stage, id, Fenced())
            case machine.Load(move) if migration.phase == LOADING:
                self._load(stage, migration)
            case machine.Announce(kind, move, instance):
                self._send(stage, instance, instance, kind, body_with(move), f"coordinator/{id}/{kind.name}")
            case machine.Forget(move) if move.destination in self._decisions.stages[stage].sites:
                # Behind all parcels that are in transit. A destination that scaling has removed needs nothing.
                self._send(stage, move.source, move.destination, Kind.FORGET, wire.pack(move.id), f"coordinator/{id}")
            case machine.StopInstance(instance):
                self._sites[migration.from_site].stop(instance)
                self._answer(stage, id, Stopped())
            case machine.CopyCheckpoint(instance, site):
                size = self._sites[site].take(instance, migration.from_site)
                self._travel(stage, id, self._sites[migration.from_site].carry(site, size))
                self._answer(stage, id, Copied(size))
            case machine.StartInstance(instance, site):
                for other in {migration.from_site, migration.to_site} - {site}:
                    self._sites[other].stop(instance)
                self._sites[site].start(instance)
                self._answer(stage, id, Started(site))

    def renew(self, stage: str, instance: str) -> None:
        """Start an instance whose checkpoint is gone from an empty one, without the state of its keys. Ahead of all
        data it receives which migrations it can no longer know."""
        coordinator = self._decisions.stages[stage]
        renewal = wire.canonical(self._decisions.renewal(stage, instance))
        writer = f"coordinator/{uuid4().hex}"  # its state may be lost more than once
        self._send(stage, instance, instance, Kind.RENEW, renewal, writer)
        self._sites[coordinator.sites[instance]].start(instance, wait=False, anew=True)

    def _travel(self, stage: str, id: str, seconds: float) -> None:
        """Wait for the seconds that a checkpoint takes over a link, but only while the migration waits for it."""
        phase = self._decisions.migration(stage, id).phase
        while seconds > 0 and self._decisions.migration(stage, id).phase == phase:
            if self._pause(min(seconds, PERIOD)):
                return
            seconds -= PERIOD

    def _load(self, stage: str, migration: Migration) -> None:
        move = migration.move
        try:
            loaded = self._gateway.load(stage, move, migration.checkpoint)
        except (Stop, Refused) as error:  # a retry would fail the same way
            kept(LOGGER, f"the stored keys for migration {move.id} of {stage} cannot be read", error)
            self._decisions.spoilt.add(move.id)
            self._answer(stage, move.id, Abandoned(f"the store cannot be read: {error}"))
        else:
            self._answer(stage, move.id, loaded)

    def _replay(self, stage: str, id: str, command: Restore) -> None:
        try:
            self._gateway.command(stage, command)
        except Stop as error:  # a retry would fail the same way: the log lacks entries
            self._answer(stage, id, Unreadable(id, "", str(error)))

    def _send(self, stage: str, source: str, destination: str, kind: Kind, body: bytes, writer: str) -> None:
        """Send a message to all parts of an instance, once, on the path that another instance's messages take to it."""
        places = self._decisions.stages[stage].sites
        site = self._sites[places.get(source, places[destination])]
        site.send(source, destination, self._encode([(kind, EVERY_BIN, body)]), 1, writer, 0)
