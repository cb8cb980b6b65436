"""The keeper: looks after what a stage has in a central store. Makes checkpoints, gives old ones up, and knows what is
covered. One for a stage: where it is known who owns its keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import Retention

SLACK = 4.0
"""A new base is due when the increments beside the last one are so many times as large: a base copies everything."""


class Keeper:
    """Looks after one stage. Whoever asks it gets what it last knew, at once."""

    def __init__(
        self, store: CentralStore, stage: str, retention: Retention | None = None, slack: float = SLACK
    ) -> None:
        self.store, self.stage, self.retention, self._slack = store, stage, retention or Retention(), slack
        self.number, self.made_us = 0, 0
        """The last checkpoint, and when it was made; 0: there is none."""
        self.horizon = -1
        """Up to which seq no kept checkpoint needs the stage's records any more; -1: all are needed."""
        self._is_known = False
        self._made: tuple[int, int] | None = None
        """A checkpoint behind which the old ones have not been given up yet."""

    def look(self) -> None:
        """See what is there, as it was left."""
        if not self._is_known:
            newest = self.store.newest(self.stage)
            self.number, self.made_us = (newest.number, newest.at_us) if newest else (0, 0)
            self.horizon, self._is_known = self.store.kept(self.stage), True

    def step(self, parts: Mapping[str, int], now_us: int, at_most: int | None = None) -> None:
        """Make a checkpoint, if these parts have all saved since the last, and give up what is too old."""
        self.look()
        made = self.store.checkpoint(self.stage, parts, now_us, at_most)
        if made is not None:
            self._made = made, now_us
        if self._made is not None:
            self.store.compact(self.stage, self.retention, now_us, self._slack)
            self.horizon = self.store.kept(self.stage)
            (self.number, self.made_us), self._made = self._made, None
