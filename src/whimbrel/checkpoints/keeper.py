"""The keeper: manages a stage's checkpoints in a central store. It makes them, deletes old ones, and knows what they
cover. Each stage has one, in the process that knows the owners of its keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Retention

SLACK = 4.0
"""A new base is due when the increments since the last one are this many times as large: a base copies everything."""


class Keeper:
    """Manages the checkpoints of one stage. Its attributes have the last known values: reading them never blocks."""

    def __init__(
        self, store: CentralStore, stage: str, retention: Retention | None = None, slack: float = SLACK
    ) -> None:
        self.store, self.stage, self.retention, self._slack = store, stage, retention or Retention(), slack
        self.number, self.made_us = 0, 0
        """The last checkpoint, and when it was made; 0: there is none."""
        self.horizon = -1
        """The `seq` up to which no retained checkpoint needs the stage's records; -1: all are needed."""
        self._is_known = False
        self._made: tuple[int, int] | None = None
        """A new checkpoint after which the old ones have not been deleted yet."""

    def look(self) -> None:
        """Read which checkpoints exist, at the first call."""
        if not self._is_known:
            newest = self.store.newest(self.stage)
            self.number, self.made_us = (newest.number, newest.at_us) if newest else (0, 0)
            self.horizon, self._is_known = self.store.kept(self.stage), True

    def step(self, parts: Mapping[str, int], now_us: int, at_most: int | None = None) -> None:
        """Make a checkpoint, if all these parts have saved since the last one, and delete what is too old."""
        self.look()
        made = self.store.checkpoint(self.stage, parts, now_us, at_most)
        if made is not None:
            self._made = made, now_us
        if self._made is not None:
            self.store.compact(self.stage, self.retention, now_us, self._slack)
            self.horizon = self.store.kept(self.stage)
            (self.number, self.made_us), self._made = self._made, None
