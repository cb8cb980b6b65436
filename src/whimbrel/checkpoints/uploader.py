"""An uploader: copies an instance's increments from its spool to the central store.

    messages ──▶ chunks ──▶ segments ──▶ a manifest, when the gate has confirmed the increment

Messages stay in the spool (spool.py) until their increment is committed. So processing never waits for the store: while
it is slow or unavailable, only the spool grows. A restarted uploader begins at the first message of the first increment
that has no manifest yet; its repeated writes are identical.

An increment may arrive in pieces, over several batches. An unfinished one is dropped when the next one of its part
begins, an unconfirmed one when a later one is confirmed: its part has dropped keys since, and saves all others again.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.version import PIECE, Increment
from whimbrel.core.increments import Assembly, IndexEntry, VersionChunk
from whimbrel.core.keys import part_of
from whimbrel.core.record import Checkpointed
from whimbrel.log import Lane
from whimbrel.log.codec import Content
from whimbrel.log.spool import Confirmed, IncrementSpool


class _Open(msgspec.Struct):
    """An increment without a manifest: its number, the position of its first message, the chunks that are not in the
    store and the segments that are."""

    number: int
    position: int
    waiting: list[VersionChunk] = []
    segments: list[list[IndexEntry]] = []
    is_whole: bool = False


class Uploader:
    """Uploads one spool to the store, in calls of `step`."""

    def __init__(
        self,
        stage: str,
        instance: str,
        parts: int,
        spool: IncrementSpool,
        store: CentralStore,
        committed: Callable[[Checkpointed], None],
        since: int = 0,
    ) -> None:
        """`committed` is called when an increment is in the store, perhaps again after a crash. `since`: the first
        increment that belongs there; older ones, made for another store, are dropped."""
        self.stage, self.instance, self.parts = stage, instance, parts
        self.spool, self.store, self._committed, self._since = spool, store, committed, since
        self._read, self._confirmed = spool.head(), spool.head(Lane.CONTROL)
        self._assembly = Assembly()
        self._open: dict[int, list[_Open]] = {part: [] for part in range(parts)}
        """By part: its increments in order; only the last one may be incomplete."""
        self._due: list[Confirmed] = []
        """Confirmed increments that are not committed yet."""

    def step(self) -> None:
        """Upload everything in the spool. If it raises `Retry`, the next step continues from there."""
        # Before the messages: those of the confirmed increments are there by then.
        confirmed = self.spool.confirmed(self._confirmed)
        self._due += confirmed
        self._confirmed += len(confirmed)
        self._put_full()
        while (messages := self.spool.messages(self._read)) is not None:
            self._take(messages)
            self._put_full()
        while self._due:
            self._commit(self._due[0])
            del self._due[0]
        open_at = (one.position for increments in self._open.values() for one in increments)
        self.spool.trim(min([self._read, *open_at]), self._confirmed)

    # ── Input ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, messages: list[Content]) -> None:
        ended: dict[int, int] = {}
        for kind, bin, body in messages:
            taken = self._assembly.take(kind, body)
            if isinstance(taken, Checkpointed):
                # A part answers several BARRIERs together, and its versions are in the last increment.
                ended[taken.part] = max(taken.number, ended.get(taken.part, -1))
            else:
                one = self._increment(part_of(bin, self.parts), taken.increment[1], self._read)
                one.waiting += [taken] if taken.index else []
        for part, number in ended.items():
            self._increment(part, number, self._read).is_whole = True
        self._read += 1

    def _increment(self, part: int, number: int, position: int) -> _Open:
        increments = self._open[part]
        if not increments or increments[-1].number != number:
            increments[:] = [*(one for one in increments if one.is_whole), _Open(number, position)]
        return increments[-1]

    # ── Output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _put_full(self) -> None:
        """Upload increments that have grown large, so that none must fit into memory."""
        for part, increments in self._open.items():
            for one in (one for one in increments if one.waiting):
                self._put(one, Increment(self.instance, part, one.number, 0, -1), PIECE)

    def _put(self, one: _Open, increment: Increment, least: int) -> None:
        while one.waiting and sum(len(memoryview(chunk.versions)) for chunk in one.waiting) >= least:
            self.store.put(self.stage, increment, len(one.segments), one.waiting[0].versions)
            one.segments.append(one.waiting.pop(0).index)

    def _commit(self, confirmed: Confirmed) -> None:
        saved, increments = confirmed.saved, self._open[confirmed.saved.part]
        one = next((one for one in increments if one.number == saved.number and one.is_whole), None)
        if one is None:  # committed before the last crash, or answered together with a later one
            return
        increment = Increment(saved.instance, saved.part, saved.number, confirmed.at_us, saved.reached)
        if saved.number >= self._since:
            self._put(one, increment, 0)
            self.store.commit(self.stage, increment, one.segments)
            self._committed(saved)
        del increments[: increments.index(one) + 1]
