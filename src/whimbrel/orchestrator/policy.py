"""Automatic recovery from dead sites: everything that their instances owned, or were to own, is restored elsewhere.

    which    every instance at a dead site, or with a lost checkpoint, if it owns keys or a migration depends on it;
             one that `restart` was about to start at such a site; and one whose restoration was abandoned
    where    at the live site with the fewest instances of its stage, among those that may be used; then at another one;
             at its own site, if that is back and no other site is alive
    what     the newest versions in the store; if they cannot be read, the newest readable checkpoint, and so on
    when     at once; after a failure with exponential back-off

All of this is derived from the state of the coordinators, so a restarted orchestrator continues it. Only which
checkpoints are damaged must be detected again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from whimbrel.core.errors import Refused, Retry, Stop
from whimbrel.core.protocols.machine import DONE, Migration
from whimbrel.core.protocols.restart import STARTING
from whimbrel.orchestrator.orchestrator import DEADLINE
from whimbrel.orchestrator.orders import Request

if TYPE_CHECKING:
    from whimbrel.orchestrator.control import Control
    from whimbrel.orchestrator.stage import StageControl

LOGGER = logging.getLogger("whimbrel.orchestrator")
FIRST_US, LONGEST_US = 500_000, 60_000_000
"""Microseconds until a failed restoration is retried: at first, then doubled each time, and at most."""


class Policy:
    """Restores the keys of dead instances."""

    def __init__(
        self, control: Control, sites: Collection[str] | None, clock_us: Callable[[], int], deadline: float = DEADLINE
    ) -> None:
        """`sites`: where keys may be restored; all if not given. `deadline`: seconds that an attempt may take."""
        self._control, self._sites, self._clock_us, self._deadline = control, sites, clock_us, deadline
        self.waiting: dict[str, str] = {}
        """By instance: why it has not been restored yet."""

    def look(self, gone: Collection[str], alive: Sequence[str], stale: Collection[str] = ()) -> None:
        """Order the restorations that are due now. `gone`: dead sites; `alive`: sites that can take keys; `stale`:
        instances whose checkpoint, with the state of their keys, is lost."""
        waiting: dict[str, str] = {}
        for stage in self._control.stages.values():
            for lost in self._missing(stage, gone, stale):
                try:
                    self._restore(stage, lost, [name for name in alive if self._sites is None or name in self._sites])
                except (Refused, Retry, Stop) as error:  # one may wait for another; or the gateway is unreachable
                    waiting[lost] = str(error)
                    if lost not in self.waiting:
                        LOGGER.warning("%s of %s cannot be restored yet: %s", lost, stage.name, error, exc_info=error)
        for done in self.waiting.keys() - waiting.keys():
            LOGGER.info("the restoration of %s no longer waits", done)
        self.waiting = waiting

    def _missing(self, stage: StageControl, gone: Collection[str], stale: Collection[str]) -> list[str]:
        coordinator = stage.coordinator
        away = [name for name, site in list(coordinator.sites.items()) if site in gone or name in stale]
        away += [one.move.source for one in list(coordinator.open.values()) if _is_stuck(one, gone)]
        dead = [name for name in away if coordinator.losses.hangs_on(name)]
        found = dict.fromkeys([*dead, *coordinator.losses.interrupted()])
        return [name for name in found if all(one.is_over for one in self._attempts(stage, name))]

    def _attempts(self, stage: StageControl, lost: str) -> list[Migration]:
        """The attempts to restore an instance since it was last restored."""
        found: list[Migration] = []
        for one in stage.coordinator.losses.attempts.get(lost, []):
            found = [] if one.phase == DONE else [*found, one]
        return found

    def _restore(self, stage: StageControl, lost: str, sites: Sequence[str]) -> None:
        failed = self._attempts(stage, lost)
        # A failure in the future was stamped before the clock was set back: it causes no back-off.
        if failed and 0 <= self._clock_us() - failed[-1].story[-1].at_us < min(FIRST_US << len(failed), LONGEST_US):
            raise Retry(f"{failed[-1].move.id} has failed: {failed[-1].reason}; it will be retried soon")
        checkpoint = self._checkpoint(stage, failed)
        self._control.check_restore(stage.name, checkpoint)
        placed = stage.coordinator.sites[lost]
        tried = Counter(one.to_site for one in failed if one.move.id not in self._control.orchestrator.spoilt)
        places = sorted(sites, key=lambda site: (site == placed, tried[site], len(stage.instances.at(site))))
        if not places:
            raise Retry("no live site may take its keys")
        source = "the newest versions" if checkpoint is None else f"checkpoint {checkpoint}"
        why = [f"{lost} at {placed} is gone: its keys are restored at {places[0]} from {source}"]
        with stage.taking(places[0], lost) as there:
            orders = stage.restorations([lost], there, checkpoint)
            self._control.orchestrator.order(orders, self._deadline, why, Request(None, by="the policy"))

    def _checkpoint(self, stage: StageControl, failed: Sequence[Migration]) -> int | None:
        """The newest source not found damaged: None for the newest versions. If all are damaged, it starts over."""
        spoilt = {one.checkpoint for one in failed if one.move.id in self._control.orchestrator.spoilt}
        if None not in spoilt:
            return None
        left = [number for number in self._control.checkpoints(stage.name) if number not in spoilt]
        return max(left, default=None)


def _is_stuck(migration: Migration, gone: Collection[str]) -> bool:
    """Whether an instance may have run at a dead site, to which `restart` was moving it."""
    return migration.move.relocates and migration.phase == STARTING and migration.to_site in gone
