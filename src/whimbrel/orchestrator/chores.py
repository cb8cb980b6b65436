"""The orchestrator's periodic work, independent of orders: it sends the placement of the instances to the sites and the
gateway, and starts, stops and cleans up instances that are added, removed or left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from whimbrel.core.errors import Retry, Stale
from whimbrel.core.protocols.machine import Migration
from whimbrel.orchestrator.ports import GatewayPort, SitePort
from whimbrel.orchestrator.stage import StageControl


class Chores:
    """The periodic work for one pipeline. Thread-safe."""

    def __init__(
        self,
        stages: Mapping[str, StageControl],
        sites: Mapping[str, SitePort],
        gateway: GatewayPort,
        renew: Callable[[str, str], None],
    ) -> None:
        """`stages` may be filled later. `renew` starts an instance of a stage from an empty checkpoint."""
        self._stages, self._sites, self._gateway, self._start_anew = stages, sites, gateway, renew
        self._placing = threading.Lock()
        self._sent: dict[str, dict[str, str]] = {}
        """By site, with the gateway as the empty name: the placement last sent to it."""
        self._cleared = False
        self._revived: set[str] = set()
        """Relocations ended by a restoration, whose instances have been started since."""
        self.accept_loss: set[str] = set()
        """Instances that may start once from an empty checkpoint if theirs is gone."""

    def send_places(self) -> None:
        """Send the placement of all instances to each site and the gateway, unless already sent. An unreachable one
        receives it later."""
        with self._placing:
            places = {
                name: site for one in list(self._stages.values()) for name, site in [*one.coordinator.sites.items()]
            }
            for site, port in self._sites.items():
                self._send_places(site, places, partial(port.place, places))
            self._send_places("", places, self._place_stages)

    def _send_places(self, who: str, places: dict[str, str], send: Callable[[], None]) -> None:
        if self._sent.get(who) != places:
            try:
                send()
                self._sent[who] = places
            except Retry:
                self._sent.pop(who, None)

    def _place_stages(self) -> None:
        away: Retry | None = None
        for stage, control in self._stages.items():
            try:
                self._gateway.place(stage, dict(control.coordinator.sites))
            except Retry as error:  # one of several gateways: the others need the other stages, too
                away = error
        if away is not None:
            raise away

    def forget_sent(self, who: str) -> None:
        """A site, or the gateway (the empty name), has restarted and needs the placement again."""
        self._sent.pop(who, None)

    def renew(self, instance: str) -> None:
        """Start an instance whose checkpoint is gone from an empty one, without the state of its keys."""
        stage = next(name for name, one in self._stages.items() if instance in one.coordinator.sites)
        self._start_anew(stage, instance)
        self.accept_loss.discard(instance)

    def stale(self) -> list[str]:
        """Instances whose checkpoint does not match their logs, as their sites last reported."""
        # Called several times per second: fetches a full status only from sites where something fails.
        return [name for site in self._sites.values() if site.failed() for name in site.status().stale]

    def _renew_stale(self) -> None:
        """Renew stale instances that lose nothing, because their keys are elsewhere, or whose loss is accepted."""
        stale = set(self.stale())
        for stage in self._stages.values():
            for name in stale & {*stage.coordinator.sites}:
                if name in self.accept_loss or not stage.coordinator.losses.hangs_on(name):
                    self.renew(name)

    def _start_left_behind(self) -> None:
        """Start each instance that `restart` had stopped when a restoration took its keys: at its own site, empty."""
        for stage in self._stages.values():
            for one in list(stage.coordinator.migrations.values()):
                instance = one.move.source
                if self.is_left_behind(one) and instance in stage.coordinator.sites:
                    placed = stage.coordinator.sites[instance]
                    for other in {one.from_site, one.to_site} - {placed}:
                        self._sites[other].stop(instance)
                    with suppress(Stale):  # its checkpoint was used elsewhere: it is renewed
                        self._sites[placed].start(instance, wait=False)
                    self._revived.add(one.move.id)
        if self._revived:
            self._revived &= {id for stage in self._stages.values() for id in list(stage.coordinator.migrations)}

    def is_left_behind(self, migration: Migration) -> bool:
        """Whether `restart` may have left an instance stopped, because a restoration ended that migration."""
        restarted = migration.move.relocates and bool(migration.ended_by)
        return restarted and migration.move.id not in self._revived

    def do(self) -> None:
        """Do the work that is due now."""
        self.send_places()
        self._renew_stale()
        self._start_left_behind()
        if "" in self._sent:
            self._clear()
            for control in self._stages.values():
                control.see_off()

    def _clear(self) -> None:
        """Once, when no reader is left: remove the logs and files of instances that had left before this start."""
        if not self._cleared:
            self._cleared = True
            for instance in [name for control in self._stages.values() for name in control.instances.past]:
                self._gateway.remove(instance)
