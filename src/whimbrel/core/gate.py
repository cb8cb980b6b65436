"""The gate: releases results in per-key order, each epoch after the one before.

Sits behind the outboxes of a stage's instances, before the sink or the next stage's router. At a hand-over the
destination's first results can arrive before the source's last ones. So a key has a current epoch:

    result of the current epoch   → released
    result of a later epoch       → held until the epochs between are closed
    result of an earlier epoch    → refused and counted: its former owner has not noticed the loss (a zombie)

Why this is enough: only the owner of an epoch emits results of it (emission filter), in the key's order; its CLOSED
is in its outbox behind the last of them; and the gate reads each outbox in order.

Outboxes are read independently, and a stage's results may go to several receivers, each with a gate of its own. So the
CLOSED of a later owner may come before that of an earlier one. Each CLOSED names the epoch that it ends: the gate
closes that epoch when it is the current one, and until then keeps the CLOSED. Closings of a key form a chain, and a
gate follows it whatever the order in which they come.

If an owner is lost, the gate does not wait for its CLOSED: a fence closes its epochs for good, and the gate refuses its
later output. A restoration needs the `seq` up to which each key's results are delivered. So dead letters of operators
take the same path as results. And it must not use a version of a key that is ahead of its delivered results, because
the records between would not be applied again. So the gate confirms increments. CHECKPOINTED is in an outbox behind the
results that belong to it, and the gate confirms it

    at once                   if no former owner of its instance's keys may still emit
    when those have closed    if former owners of its keys may still emit: its increments contain those keys as well
    never                     from a fence on, until it has dropped the keys that were taken from it
"""

from __future__ import annotations

import msgspec

from whimbrel.core import wire
from whimbrel.core.keys import KeyMap
from whimbrel.core.record import Checkpointed, Closed, Evicted, Move, Opened, Parked, Result

REMEMBERED = 1_000
"""Number of `Evicted` notices that a gate keeps without knowing their fence, which may arrive after them."""


class Snapshot(msgspec.Struct):
    """The durable state of a gate."""

    epochs: tuple[list[int], dict[str, int]]
    held: list[Result]
    refused: int
    letters: list[Parked] = []
    ahead: list[Opened] = []
    unsure: list[Checkpointed] = []
    evicted: list[Evicted] = []
    fences: dict[str, list[str]] = {}
    early: list[Closed] = []


class Gate:
    """The gate behind one stage."""

    def __init__(self) -> None:
        self.epochs = KeyMap(0)
        self.held: dict[str, list[Result]] = {}
        self.letters: list[Parked] = []
        """Dead letters, held back like results."""
        self._freed: list[Parked] = []
        """Dead letters that closings have released, until `let_go`."""
        self.ahead: list[Opened] = []
        """Owners of keys whose former owners may still emit."""
        self.unsure: list[Checkpointed] = []
        """Increments of those owners, not confirmed yet."""
        self.evicted: list[Evicted] = []
        """Parts that have dropped the keys that a restoration has taken from them."""
        self.fences: dict[str, list[str]] = {}
        """By restoration: the instances that must drop its keys. Removed, with their notices, when all have."""
        self.early: list[Closed] = []
        """Closings of epochs that have not begun: an earlier owner has not closed yet."""
        self.refused = 0
        self._plain = True
        """No key has moved yet: every result is of epoch 0 and passes."""

    def offer(self, results: list[Result]) -> list[Result]:
        """Accept results in the order of one outbox; return those that may be released now."""
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
        """The current epoch of a key, whose results are released."""
        return self.epochs[key]

    def refuse(self, result: Result, released: list[Result]) -> None:
        """Refuse a zombie's result."""
        self.refused += 1

    def close(self, closed: Closed) -> list[Result]:
        """Close an epoch and return the results held for the next one. No effect if a fence came first."""
        self._plain = False
        mine = closed.selection.of_part(closed.part, closed.parts)
        self.early.append(msgspec.structs.replace(closed, selection=mine))
        return self._follow()

    def _follow(self) -> list[Result]:
        """Close the epochs that are current now; forget the closings that are done, or that a fence has overtaken."""
        released: list[Result] = []
        waiting, self.early = self.early, []
        for closed in sorted(waiting, key=lambda one: one.was):  # one closing may make the next one due
            ending = self.epochs.select(closed.was, closed.selection)
            if ending:
                self.epochs.lift(ending, closed.epoch)
                freed = [key for key in self.held if key in ending]
                released += self.offer([result for key in freed for result in self.held.pop(key)])
                self._freed += self._sorted_out()  # before the next closing, which may end their epoch
            if any(epoch < closed.was for epoch in self.epochs.values(closed.selection)):
                self.early.append(closed)
        return released

    def park(self, letter: Parked) -> list[Parked]:
        """Accept a dead letter of an operator; return it if it may be released now."""
        return self._sort([letter])

    def let_go(self) -> list[Parked]:
        """After an epoch was closed: the held dead letters that may be released now."""
        freed, self._freed = self._freed + self._sorted_out(), []
        return freed

    def _sorted_out(self) -> list[Parked]:
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
        """Close all epochs before a restoration's, for good: the gate refuses results of them, held or yet to come.

        A repeated fence may be late: all instances have dropped the keys, and the gate has removed the fence.
        """
        self._plain = False
        if min(self.epochs.values(move.selection), default=move.epoch) >= move.epoch:
            return  # already fenced, or there are no keys to drop
        self.epochs.lift(move.selection, move.epoch)
        self.fences[move.id] = sorted(move.parties)
        self._forget_fence(move.id)
        self.unsure = [saved for saved in self.unsure if not self._is_barred(saved)]
        fenced = [key for key in self.held if key in move.selection]
        released = self.offer([result for key in fenced for result in self.held.pop(key)])
        released += self._follow()
        assert not released, "no result can be of an epoch that has just begun"

    # ── Increments ──────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, notice: Opened | Evicted) -> None:
        """A part owns keys, or has dropped some and will save all others again."""
        if isinstance(notice, Opened):
            self.ahead.append(notice)
        else:
            self.evicted.append(notice)
            part = (notice.instance, notice.part)
            self.unsure = [saved for saved in self.unsure if (saved.instance, saved.part) != part]
            self._forget_fence(notice.move)
            if len(self.evicted) > REMEMBERED:  # a notice without a fence by now is of a restoration without keys
                stray = next((one for one in self.evicted if one.move not in self.fences), None)
                self.evicted = [one for one in self.evicted if one is not stray]

    def _forget_fence(self, id: str) -> None:
        """Remove a fence and its notices when all instances concerned have dropped its keys."""
        parts: dict[str, set[int]] = {}
        for one in self.evicted:
            if one.move == id:
                parts.setdefault(one.instance, set(range(one.parts))).discard(one.part)
        if id in self.fences and all(name in parts and not parts[name] for name in self.fences[id]):
            del self.fences[id]
            self.evicted = [one for one in self.evicted if one.move != id]

    def confirm(self, *increments: Checkpointed) -> list[Checkpointed]:
        """Accept the CHECKPOINTED notices of parts; return all confirmed increments. Also called after each close."""
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

    # ── Snapshots ────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> bytes:
        """The durable state as bytes."""
        held = [result for results in self.held.values() for result in results]
        saved = (self.ahead, self.unsure, self.evicted, self.fences, self.early)
        return wire.pack(Snapshot(self.epochs.encode(), held, self.refused, self.letters, *saved))

    def restore(self, blob: bytes) -> None:
        """Restore the state from a snapshot."""
        snapshot = wire.unpack(blob, Snapshot)
        self.epochs.restore(snapshot.epochs)
        self.refused, self.letters, self._plain = snapshot.refused, snapshot.letters, False
        self.ahead, self.unsure = snapshot.ahead, snapshot.unsure
        self.evicted, self.fences, self.early = snapshot.evicted, snapshot.fences, snapshot.early
        for result in snapshot.held:
            self.held.setdefault(result.key, []).append(result)
