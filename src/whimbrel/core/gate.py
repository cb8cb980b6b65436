"""The gate: lets results out in the order of their key, each epoch after the one before.

Stands behind the outboxes of a stage's instances, before the sink or the next stage's router. At a hand-over the
destination's first results can be here before the source's last ones. So a key has a current epoch:

    result of the current epoch   → released
    result of a later epoch       → held until the epochs between are closed
    result of an earlier epoch    → refused and counted: its owner lost the key and does not know (a zombie)

Why this is enough: only the owner of an epoch emits results of it (emission filter), in the key's order; its CLOSED
stands in its outbox behind the last of them; and the gate reads each outbox in order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from whimbrel.core import wire
from whimbrel.core.keys import KeyMap
from whimbrel.core.record import Closed, Result


class Snapshot(msgspec.Struct):
    """All that a gate must remember."""

    epochs: tuple[list[int], dict[str, int]]
    held: list[Result]
    refused: int


class Gate:
    """The gate behind one stage."""

    def __init__(self) -> None:
        self.epochs = KeyMap(0)
        self.held: dict[str, list[Result]] = {}
        self.refused = 0
        self._plain = True
        """Nothing has moved yet: every result is of epoch zero and passes."""

    def offer(self, results: list[Result]) -> list[Result]:
        """Take results in, in the order of one outbox; return those that may go out now."""
        if self._plain and not any(result.epoch for result in results):
            return results
        released = []
        for result in results:
            current = self.current(result.key)
            if result.epoch == current:
                released.append(result)
            elif result.epoch > current:
                self.held.setdefault(result.key, []).append(result)
            else:
                self.refuse(result, released)
        return released

    def current(self, key: str) -> int:
        """The epoch that may speak for a key."""
        return self.epochs[key]

    def refuse(self, result: Result, released: list[Result]) -> None:
        """Keep a zombie's result out."""
        self.refused += 1

    def close(self, closed: Closed) -> list[Result]:
        """An epoch is closed: return what was held for the next one."""
        self._plain = False
        self.epochs.put(closed.selection, closed.epoch, closed.part, closed.parts)
        freed = [key for key in self.held if key in closed.selection]
        return self.offer([result for key in freed for result in self.held.pop(key)])

    def snapshot(self) -> bytes:
        """What lasts."""
        held: Iterable[list[Result]] = self.held.values()
        return wire.pack(Snapshot(self.epochs.dump(), [result for results in held for result in results], self.refused))

    def restore(self, blob: bytes) -> None:
        """Become what a snapshot describes."""
        snapshot = wire.unpack(blob, Snapshot)
        self.epochs.restore(snapshot.epochs)
        self.refused, self._plain = snapshot.refused, False
        for result in snapshot.held:
            self.held.setdefault(result.key, []).append(result)
