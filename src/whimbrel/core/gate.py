"""The gate: lets results out in the order of their key, each epoch after the one before.

Stands behind the outboxes of a stage's instances, before the sink or the next stage's router. At a hand-over the
destination's first results can be here before the source's last ones. So a key has a current epoch:

    result of the current epoch   → released
    result of a later epoch       → held until the epochs between are closed
    result of an earlier epoch    → refused and counted: its owner lost the key and does not know (a zombie)

Why this is enough: only the owner of an epoch emits results of it (emission filter), in the key's order; its CLOSED
stands in its outbox behind the last of them; and the gate reads each outbox in order.

If an owner is lost, nobody waits for its CLOSED: a fence closes its epochs for good, and what it still says is refused.
A restoration must know up to which `seq` each key's results are out. So what operators give up takes the same way as
results. And it must use no version of a key that is ahead of its results, for the records between would not be applied
again. So the gate confirms increments: CHECKPOINTED stands in an outbox behind the results that go with it, and counts

    at once                   if its instance speaks for all keys that it owns
    when those have closed    if it owns keys whose former owners may still speak: they are in its increments as well
    never                     from a fence on, until it has dropped the keys that were taken from it
"""

from __future__ import annotations

import msgspec

from whimbrel.core import wire
from whimbrel.core.keys import KeyMap
from whimbrel.core.record import Checkpointed, Closed, Evicted, Move, Opened, Parked, Result

REMEMBERED = 1_000
"""Notices that keys were dropped which a gate keeps though it knows no fence of them: a fence may come behind them."""


class Snapshot(msgspec.Struct):
    """All that a gate must remember."""

    epochs: tuple[list[int], dict[str, int]]
    held: list[Result]
    refused: int
    letters: list[Parked] = []
    ahead: list[Opened] = []
    unsure: list[Checkpointed] = []
    evicted: list[Evicted] = []
    fences: dict[str, list[str]] = {}


class Gate:
    """The gate behind one stage."""

    def __init__(self) -> None:
        self.epochs = KeyMap(0)
        self.held: dict[str, list[Result]] = {}
        self.letters: list[Parked] = []
        """Held back as results are."""
        self.ahead: list[Opened] = []
        """Who owns keys for which others may still speak."""
        self.unsure: list[Checkpointed] = []
        """Increments of those."""
        self.evicted: list[Evicted] = []
        """Who has dropped what a restoration has taken from it."""
        self.fences: dict[str, list[str]] = {}
        """By restoration: who must. Forgotten with that when all have."""
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
        """An epoch is closed: return what was held for the next one. It comes too late if a fence was faster."""
        self._plain = False
        self.epochs.lift(closed.selection, closed.epoch, closed.part, closed.parts)
        freed = [key for key in self.held if key in closed.selection]
        return self.offer([result for key in freed for result in self.held.pop(key)])

    def park(self, letter: Parked) -> list[Parked]:
        """Take in what an operator gave up; return it if it may go out now."""
        return self._sort([letter])

    def let_go(self) -> list[Parked]:
        """After an epoch was closed: of what operators gave up, all that may go out now."""
        letters, self.letters = self.letters, []
        return self._sort(letters)

    def _sort(self, letters: list[Parked]) -> list[Parked]:
        released = []
        for letter in letters:
            current = self.current(letter.key)
            if letter.epoch == current:
                released.append(letter)
            elif letter.epoch > current:
                self.letters.append(letter)
            else:
                self.refused += 1
        return released

    def fence(self, move: Move) -> None:
        """Close all epochs before a restoration's, for good: what is held of them, or comes of them, is refused.

        Said again, it may come too late: everybody has dropped the keys, and the fence is forgotten.
        """
        self._plain = False
        if min(self.epochs.values(move.selection), default=move.epoch) >= move.epoch:
            return  # or there are no keys, and nothing to drop
        self.epochs.lift(move.selection, move.epoch)
        self.fences[move.id] = sorted(move.parties)
        self._forget_fence(move.id)
        self.unsure = [saved for saved in self.unsure if not self._is_barred(saved)]
        fenced = [key for key in self.held if key in move.selection]
        released = self.offer([result for key in fenced for result in self.held.pop(key)])
        assert not released, "nobody speaks in an epoch that has just begun"

    # ── Increments ──────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, notice: Opened | Evicted) -> None:
        """Somebody owns keys, or has dropped some, and will save all others anew."""
        if isinstance(notice, Opened):
            self.ahead.append(notice)
        else:
            self.evicted.append(notice)
            part = (notice.instance, notice.part)
            self.unsure = [saved for saved in self.unsure if (saved.instance, saved.part) != part]
            self._forget_fence(notice.move)
            if len(self.evicted) > REMEMBERED:  # what has no fence by now is of a restoration of no keys
                stray = next((one for one in self.evicted if one.move not in self.fences), None)
                self.evicted = [one for one in self.evicted if one is not stray]

    def _forget_fence(self, id: str) -> None:
        """Forget a fence, and who has dropped its keys, when all who must have."""
        parts: dict[str, set[int]] = {}
        for one in self.evicted:
            if one.move == id:
                parts.setdefault(one.instance, set(range(one.parts))).discard(one.part)
        if id in self.fences and all(name in parts and not parts[name] for name in self.fences[id]):
            del self.fences[id]
            self.evicted = [one for one in self.evicted if one.move != id]

    def confirm(self, *increments: Checkpointed) -> list[Checkpointed]:
        """Take in what parts say they have saved; return all that counts now. To be asked after each close as well."""
        self.ahead = [
            one for one in self.ahead if any(epoch < one.epoch for epoch in self.epochs.values(one.selection))
        ]
        early = {one.instance for one in self.ahead}
        known = [saved for saved in (*self.unsure, *increments) if not self._is_barred(saved)]
        self.unsure = [saved for saved in known if saved.instance in early]
        return [saved for saved in known if saved.instance not in early]

    def _is_barred(self, saved: Checkpointed) -> bool:
        part = (saved.instance, saved.part)
        dropped = {one.move for one in self.evicted if (one.instance, one.part) == part}
        return any(saved.instance in parties for id, parties in self.fences.items() if id not in dropped)

    # ── What lasts ───────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> bytes:
        """What lasts."""
        held = [result for results in self.held.values() for result in results]
        saved = (self.ahead, self.unsure, self.evicted, self.fences)
        return wire.pack(Snapshot(self.epochs.dump(), held, self.refused, self.letters, *saved))

    def restore(self, blob: bytes) -> None:
        """Become what a snapshot describes."""
        snapshot = wire.unpack(blob, Snapshot)
        self.epochs.restore(snapshot.epochs)
        self.refused, self.letters, self._plain = snapshot.refused, snapshot.letters, False
        self.ahead, self.unsure = snapshot.ahead, snapshot.unsure
        self.evicted, self.fences = snapshot.evicted, snapshot.fences
        for result in snapshot.held:
            self.held.setdefault(result.key, []).append(result)
