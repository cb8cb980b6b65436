"""The keeper: looks after a central store. Makes checkpoints, gives old ones up, compacts, and knows what is covered.

One for a deployment: where the stages' instances are known. It works in a thread of its own; whoever asks it gets what
it last knew, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from whimbrel.store.central import CentralStore
from whimbrel.store.version import Retention

Parts = Mapping[str, Mapping[str, int]]
"""By stage: every instance that owns keys, with how many parts it has."""


class Keeper:
    """Looks after one store. `step` does all there is to do once; `start` lets a thread do so every so often."""

    def __init__(
        self,
        store: CentralStore,
        parts: Callable[[], Parts],
        now_us: Callable[[], int],
        retention: Retention | None = None,
        every: float = 2.0,
        slack: float = 1.0,
    ) -> None:
        self.store, self.retention = store, retention or Retention()
        self._parts, self._now_us, self._every, self._slack = parts, now_us, every, slack
        self.error: Exception | None = None
        """What went wrong at the last try: the next one may succeed."""
        self._covered: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Stop."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def covered(self, stage: str) -> int:
        """Up to which seq no kept checkpoint needs the stage's records any more; -1: all are needed."""
        return self._covered.get(stage, -1)

    def step(self) -> None:
        """Make each stage's checkpoint, if its parts have all saved since the last, and give up what is too old."""
        for stage, parts in self._parts().items():
            if self.store.checkpoint(stage, parts, self._now_us()) is not None or stage not in self._covered:
                self.store.compact(stage, self.retention, self._now_us(), self._slack)
                self._covered[stage] = self.store.kept(stage)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step()
                self.error = None
            except Exception as error:  # the store may be away, or wait for somebody to look at it
                self.error = error
            self._stopping.wait(self._every)
