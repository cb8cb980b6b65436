"""An uploader: carries an instance's savings from its spool to the central store.

    posts ──▶ crates ──▶ segments ──▶ a seal, when the gate has confirmed the saving

What is posted lies in the spool (spool.py) until its saving is sealed. So processing never waits for the store: it
may be slow, or away, and all that grows is the spool. An uploader that died begins again at the first post of the first
saving that has no seal yet; what it writes again is the same.

A saving may come in pieces, over several batches. One that is never finished is given up when the same part's next one
begins, one that is never confirmed when a later one is: its part has dropped keys since, and saves all others anew.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import PIECE, Saving
from whimbrel.core.keys import part_of
from whimbrel.core.record import Saved
from whimbrel.core.saving import Assembly, Crate, Line
from whimbrel.log import Lane
from whimbrel.log.codec import Message
from whimbrel.log.spool import Confirmed, Spool


class _Open(msgspec.Struct):
    """A saving without a seal: its number, where its first post lies, what has not been put and what has been."""

    number: int
    position: int
    waiting: list[Crate] = []
    segments: list[list[Line]] = []
    is_whole: bool = False


class Uploader:
    """One spool's way to the store. `step` carries what there is."""

    def __init__(
        self,
        stage: str,
        instance: str,
        parts: int,
        spool: Spool,
        store: CentralStore,
        sealed: Callable[[Saved], None],
        since: int = 0,
    ) -> None:
        """`sealed` is called when a saving is in the store, perhaps once more after a crash. `since`: the first saving
        that belongs there; older ones, made for another store, are given up."""
        self.stage, self.instance, self.parts = stage, instance, parts
        self.spool, self.store, self._sealed, self._since = spool, store, sealed, since
        self._read, self._heard = spool.head(), spool.head(Lane.CONTROL)
        self._assembly = Assembly()
        self._open: dict[int, list[_Open]] = {part: [] for part in range(parts)}
        """By part: its savings in their order; only the last one may not be whole yet."""
        self._due: list[Confirmed] = []
        """What counts and is not sealed."""

    def step(self) -> None:
        """Carry on all there is. If it raises `Retry`, the next step goes on from there."""
        heard = self.spool.confirmed(self._heard)  # before the posts: then these are there
        self._due += heard
        self._heard += len(heard)
        self._put_full()
        while (posts := self.spool.posts(self._read)) is not None:
            self._take(posts)
            self._put_full()
        while self._due:
            self._seal(self._due[0])
            del self._due[0]
        open_at = (one.position for savings in self._open.values() for one in savings)
        self.spool.trim(min([self._read, *open_at]), self._heard)

    # ── In ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, posts: list[Message]) -> None:
        ended: dict[int, int] = {}
        for kind, bin, body in posts:
            taken = self._assembly.take(kind, body)
            if isinstance(taken, Saved):
                # A part that was asked several times answers all at once, and its versions are in the last saving.
                ended[taken.part] = max(taken.number, ended.get(taken.part, -1))
            else:
                one = self._saving(part_of(bin, self.parts), taken.saving[1], self._read)
                one.waiting += [taken] if taken.lines else []
        for part, number in ended.items():
            self._saving(part, number, self._read).is_whole = True
        self._read += 1

    def _saving(self, part: int, number: int, position: int) -> _Open:
        savings = self._open[part]
        if not savings or savings[-1].number != number:
            savings[:] = [*(one for one in savings if one.is_whole), _Open(number, position)]
        return savings[-1]

    # ── Out ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _put_full(self) -> None:
        """Put what has grown large, so that no saving must fit into memory."""
        for part, savings in self._open.items():
            for one in savings:
                self._put(one, Saving(self.instance, part, one.number, 0, -1), PIECE)

    def _put(self, one: _Open, saving: Saving, least: int) -> None:
        while one.waiting and sum(len(memoryview(crate.versions)) for crate in one.waiting) >= least:
            self.store.put(self.stage, saving, len(one.segments), one.waiting[0].versions)
            one.segments.append(one.waiting.pop(0).lines)

    def _seal(self, confirmed: Confirmed) -> None:
        saved, savings = confirmed.saved, self._open[confirmed.saved.part]
        one = next((one for one in savings if one.number == saved.number and one.is_whole), None)
        if one is None:  # sealed before the last crash, or answered together with a later one
            return
        saving = Saving(saved.instance, saved.part, saved.number, confirmed.at_us, saved.reached)
        if saved.number >= self._since:
            self._put(one, saving, 0)
            self.store.seal(self.stage, saving, one.segments)
            self._sealed(saved)
        del savings[: savings.index(one) + 1]
