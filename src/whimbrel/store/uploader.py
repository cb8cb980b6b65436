"""An uploader: carries a site's savings to the central store.

    append ──▶ spool ──▶ a segment for each piece, a seal when the last has come ──▶ central store

What is appended lies in the spool, a log, until its saving is sealed. So processing never waits for the store: it may
be slow, or away, and all that grows is the spool. An uploader that died begins again at the first piece of the first
saving that has no seal yet; what it writes again is the same.

A saving may come in pieces, over several batches. One that is never finished is given up when the same part's next one
begins: an instance that was started anew began it anew.
"""

from __future__ import annotations

import threading

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Retry
from whimbrel.log import Log
from whimbrel.store.central import CentralStore
from whimbrel.store.version import Line, Saving

PATIENCE = 0.2
"""Seconds until the store is tried again; twice as long after each failure."""
LONGEST = 10.0
"""Seconds between two tries at most."""
GRACE = 5.0
"""Seconds that `stop` waits for what is being carried."""


class Piece(msgspec.Struct, frozen=True):
    """Some versions of a saving. `saving` has those of this piece; when and how far counts only in the last one."""

    stage: str
    saving: Saving
    piece: int = 0
    is_last: bool = True


class _Open(msgspec.Struct):
    """A saving of which pieces have been put: its number, where its first entry lies, what its seal will list."""

    number: int
    position: int
    segments: list[list[Line]] = []


class Uploader:
    """One spool's way to the store. `step` carries what there is; `start` lets a thread do so all the time."""

    def __init__(self, name: str, spool: Log, store: CentralStore) -> None:
        self.name, self.spool, self.store = name, spool, store
        self.error: Exception | None = None
        """Why it has stopped for good."""
        self.away: str = ""
        """Why the store could not be used at the last try."""
        self.done = spool.head()
        """The first position that has not been carried."""
        self._open: dict[tuple[str, str, int], _Open] = {}
        self._reached: dict[tuple[str, str, int], int] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to carry, first of all what an earlier run left."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, without waiting long for a store that does not answer; the next start carries what is left."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(GRACE)
        self.spool.close()

    def append(self, pieces: list[Piece], writer: str, counter: int) -> int | None:
        """Take pieces over, those of one batch as one entry: never waits for the store."""
        size = sum(len(version.luggage) for piece in pieces for version in piece.saving.versions)
        position = self.spool.append(wire.pack(pieces), count=size, writer=writer, counter=counter)
        self._wake.set()
        return position

    @property
    def under_way(self) -> int:
        """Bytes of luggage that have been taken over and not carried."""
        return self.spool.backlog(self.done)

    @property
    def is_idle(self) -> bool:
        """Whether everything has been carried."""
        return self.done >= self.spool.tail()

    def reached(self, stage: str, instance: str, part: int) -> int:
        """Up to which seq the store has what a part was given, as far as this run knows; -1: nothing."""
        return self._reached.get((stage, instance, part), -1)

    # ── Carrying ─────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Carry the next entry; return whether there was one. If it raises `Retry`, the same entry comes again."""
        entries = self.spool.read(self.done, self.done + 1)
        for entry in entries:
            for piece in wire.unpack(entry.blob, list[Piece]):
                self._carry(piece, entry.position)
            self.done = entry.position + 1
            self.spool.trim(min([self.done, *(one.position for one in self._open.values())]))
        return bool(entries)

    def _carry(self, piece: Piece, position: int) -> None:
        saving, whose = piece.saving, (piece.stage, piece.saving.instance, piece.saving.part)
        one = self._open.get(whose)
        if one is None or one.number != saving.number:
            one = self._open[whose] = _Open(saving.number, position)
        if piece.piece > len(one.segments):
            raise Corrupt(
                f"{self.name}: piece {piece.piece} of saving {saving.number} of part {saving.part} of "
                f"{saving.instance} came where {len(one.segments)} was due"
            )
        lines = self.store.put(piece.stage, saving, piece.piece, saving.versions) if saving.versions else []
        one.segments[piece.piece :] = [lines]
        if piece.is_last:
            self.store.seal(piece.stage, saving, one.segments)
            self._reached[whose] = saving.reached
            del self._open[whose]

    def _run(self) -> None:
        pause = PATIENCE
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                found = self.step()
            except Retry as error:
                self.away = str(error)
                self._stopping.wait(pause)
                pause = min(2 * pause, LONGEST)
            except Exception as error:  # told by whoever waits
                self.error = error
                return
            else:
                self.away, pause = "", PATIENCE
                if not found:
                    self._wake.wait()
