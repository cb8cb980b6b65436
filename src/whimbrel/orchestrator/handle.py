"""A handle on an order to migrate: what `migrate` returns."""

from __future__ import annotations

from collections.abc import Sequence, Set

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.protocols.machine import ABORTED, DONE, Abandoned, Migration, Takeover
from whimbrel.orchestrator.orchestrator import Orchestrator
from whimbrel.orchestrator.orders import line_of, story_of


def outcome_of(phases: Set[str]) -> str:
    """The outcome of an order whose migrations are in these phases."""
    for phase in sorted(phases - {DONE, ABORTED}):
        return phase
    return ABORTED if ABORTED in phases else DONE if phases else "already there"


class Handle:
    """An order to migrate: watch it, wait for it, abort it."""

    def __init__(self, orchestrator: Orchestrator, stage: str, ids: list[str], why: Sequence[str] = ()) -> None:
        self._orchestrator, self.stage, self.ids = orchestrator, stage, ids
        self.why = list(why)
        """Why `auto` chose its protocol, one reason per line."""

    @property
    def migrations(self) -> list[Migration]:
        """The migrations as they are now: one per instance that owned some of the keys."""
        return [self._orchestrator.migration(self.stage, id) for id in self.ids]

    @property
    def is_noop(self) -> bool:
        """Whether there was nothing to do: every key was already at the destination."""
        return not self.ids

    @property
    def outcome(self) -> str:
        """`already there`, `done`, `aborted`, or the current phase."""
        return outcome_of({migration.phase for migration in self.migrations})

    @property
    def progress(self) -> list[str]:
        """The story so far, one line per event, with its time; and what a command waits for now, if it is being
        retried."""
        waiting, found = self._orchestrator.waiting_of(self.stage), self.migrations
        held_up = [one for one in found if one.move.id in waiting and not one.ended_by]
        now_us = self._orchestrator.now_us() if held_up else 0
        return story_of(found) + [
            line_of(one.move.id, one.phase, f"waiting: {waiting[one.move.id]}", now_us) for one in held_up
        ]

    def wait(self, timeout: float | None = None) -> Handle:
        """Block until the order is over. Raises `Unavailable` on timeout (in seconds); the migrations continue."""
        if not self._orchestrator.wait(self.stage, self.ids, timeout):
            raise Unavailable(f"migration {', '.join(self.ids)} is still {self.outcome} after {timeout} s")
        return self

    def wait_warm(self, timeout: float | None = None) -> Handle:
        """Block until a standby is warm, or the order is over. Raises `Unavailable` on timeout (in seconds)."""
        if not self._orchestrator.wait(self.stage, self.ids, timeout, warm=True):
            raise Unavailable(f"standby {', '.join(self.ids)} is still {self.outcome} after {timeout} s")
        return self

    def take_over(self) -> Handle:
        """Let a warm standby take over its keys. Raises `Refused` if there is none."""
        standbys = [migration.move.id for migration in self.migrations if migration.is_standby]
        if not standbys:
            raise Refused(
                f"no standby is waiting here: it is {self.outcome}; order one with protocol='replicate', standby=True"
            )
        for id in standbys:
            self._orchestrator.handle(self.stage, id, Takeover())
        return self

    def abort(self, reason: str = "called off") -> Handle:
        """Abort the migrations. After its point of no return a migration completes instead; see `outcome`."""
        for id in self.ids:
            self._orchestrator.handle(self.stage, id, Abandoned(reason))
        return self

    def __repr__(self) -> str:
        return f"<migration {', '.join(self.ids) or '-'} of {self.stage}: {self.outcome}>"
