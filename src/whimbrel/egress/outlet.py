"""The outlet: the exit of results. Reads the outboxes of a stage, passes results through the gate, delivers them.

    outboxes ──▶ dispatcher ──▶ gate ──▶ sinks, or the next stage's gateway
                     └─ what other places and the orchestrator get (dispatch.py)

Positions, gate, sinks and letters are committed atomically: a crash resets all of them to the same point. Letters are
what the gate releases besides results: dead letters, and confirmations of increments. They are sent after the commit.

The outlet has no thread: `step` does all pending work, and the caller decides when. In production that is a thread
(threaded.py), in the simulator the seed. A step that raises leaves the outlet inconsistent; the next one first goes
back to the last commit, as after a crash.

If there is a central store, the outlet also tracks the `seq` up to which the results of each key are delivered, and
commits that with the rest. A restoration reads it, after a fence (core/gate.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Protocol

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Retry
from whimbrel.core.gate import Gate
from whimbrel.core.keys import Selection
from whimbrel.core.record import Checkpointed, Closed, Evicted, Move, Notice, Opened, Outgoing, Parked, Result
from whimbrel.egress.sinks import Mark, Sink, Unfit
from whimbrel.log.backoff import Backoff
from whimbrel.log.carrier import batches
from whimbrel.log.contract import Log

LOGGER = logging.getLogger("whimbrel.egress")
Watch = Callable[[list[Result], int], None]
"""Receives released results and the time of their release, for metrics only."""

FIRST, MOST = 0.2, 1.0
"""Seconds until an unacknowledged letter is sent again: at first, and at most."""

Letter = Parked | Checkpointed | Unfit
"""What the outlet sends besides results: dead letters, confirmed increments, and results that sinks refuse."""
Numbered = tuple[Letter, int]
"""With its number: the outlet numbers them in the order in which it sends them."""
Dispatch = Callable[[str, int, list[Outgoing]], list[Outgoing]]
"""Receives each batch of an outbox, with its position, before it counts as read, and maybe again: sends what others get
of it, and returns what the gate gets (dispatch.py)."""


class Keep(Protocol):
    """Stores a commit atomically: the blob, and by key the delivered `seq`, of keys that changed since the last one."""

    def __call__(self, blob: bytes, reached: Mapping[str, int]) -> None: ...


class Commit(msgspec.Struct):
    """Everything that is committed together, except the delivered `seq` of each key."""

    positions: dict[str, int]
    gate: bytes
    marks: list[Mark]
    delivered: int
    pending: list[Numbered] = []
    number: int = 0
    """The number of the next letter."""


class Outlet:
    """The outlet of one stage, driven step by step."""

    def __init__(
        self,
        stage: str,
        outboxes: Mapping[str, Log],
        sinks: list[Sink],
        send: Callable[[Letter, int], None],
        save: Callable[[bytes], None],
        clock_us: Callable[[], int],
        watch: Watch = lambda results, now_us: None,
        keep: Keep | None = None,
        uptime: Callable[[], float] = time.monotonic,
        dispatch: Dispatch = lambda name, position, parts: parts,
    ) -> None:
        """`outboxes` may grow while it runs. `send` receives each letter with its number, after the commit of both:
        numbers only grow, and a letter that is repeated after a crash has the same number. It raises `Retry` if the
        receiver is unreachable. A `Checkpointed` is sent when the gate has confirmed it. `keep` replaces `save` if
        there is a central store. `uptime`: monotonic seconds. `dispatch`: by default everything is for this outlet."""
        self._keep = keep
        self.reached: dict[str, int] = {}
        """By key: the `seq` up to which its results are delivered. With a store only."""
        self._moved: dict[str, int] = {}
        """The entries of `reached` that are not committed."""
        self._before: dict[str, int | None] = {}
        """Their values at the last commit."""
        self._last: bytes | None = None
        """The last commit."""
        self._fences: list[tuple[Move, Callable[[], None]]] = []
        """Fences to raise, each with a callback for when it is durable."""
        self.stage, self.outboxes, self.sinks = stage, outboxes, sinks
        self._dispatch, self._send, self._save, self._clock_us, self._watch = dispatch, send, save, clock_us, watch
        self.gate = Gate()
        self.positions: dict[str, int] = {}
        self._looked: dict[str, int] = {}
        """By outbox: the position below which nothing is left but a batch that lacks its last piece; 0: unknown."""
        self.delivered = 0
        self.state_bytes: dict[tuple[str, int], int] = {}
        """By outbox and part of its instance: the bytes of state in the part's last output."""
        self._letter_backoff = Backoff(f"sending the letters of {stage}", LOGGER, first=FIRST, most=MOST, clock=uptime)
        self._commit_interval = max((sink.commit_interval for sink in sinks), default=0.0)
        self._uptime = uptime
        self._committed = uptime()
        self._has_begun = self._is_torn = False
        """`_has_begun`: whether the letters that the last commit left pending have been sent. `_is_torn`: whether the
        last step has failed half way."""
        self._dirty: dict[str, int] = {}
        self._pending: list[Numbered] = []
        self._number = 0
        self._has_sent = False
        """A letter was sent since the last commit, and would be sent again after a crash."""

    def recover(self, blob: bytes | None, reached: Mapping[str, int] | None = None) -> None:
        """Reset positions, gate and sinks to the last commit; `reached`: all that `keep` has stored."""
        self.reached = dict(reached or {})
        self._restore(blob)

    def check(self, blob: bytes | None) -> None:
        """Raise `Refused` if the sinks cannot start, or continue, from this commit. Changes nothing."""
        for sink, mark in zip(self.sinks, self._marks(blob), strict=True):
            sink.check(mark)

    def _marks(self, blob: bytes | None) -> Sequence[Mark | None]:
        if blob is None:
            return [None] * len(self.sinks)
        marks = wire.unpack(blob, Commit).marks
        if len(marks) != len(self.sinks):
            raise Refused(
                f"this run began with {len(marks)} sinks after stage {self.stage}, and the pipeline has "
                f"{len(self.sinks)}: use the same sinks, or start with another data directory"
            )
        return marks

    def _restore(self, blob: bytes | None) -> None:
        self._last = blob
        if blob is not None:
            saved = wire.unpack(blob, Commit)
            self.positions, self.delivered = saved.positions, saved.delivered
            self.gate.restore(saved.gate)
            self._pending, self._number = saved.pending, saved.number
        for sink, mark in zip(self.sinks, self._marks(blob), strict=True):
            sink.open(mark)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self.sinks:
            sink.close()

    def ask_fence(self, move: Move, raised: Callable[[], None]) -> None:
        """Refuse all results of a lost owner, from the next step on. `raised` is called when the fence is durable."""
        self._fences.append((move, raised))

    def delivered_of(self, selection: Selection) -> dict[str, int]:
        """By key: the `seq` up to which its results are delivered. Final for keys that are fenced."""
        return {key: seq for key, seq in list(self.reached.items()) if key in selection}

    @property
    def is_idle(self) -> bool:
        """Whether everything in the outboxes has been delivered."""
        return not self._pending and all(map(self.has_delivered, list(self.outboxes)))

    @property
    def is_committed(self) -> bool:
        """Whether everything that has been read is committed."""
        return not self._dirty

    def has_delivered(self, name: str) -> bool:
        """Whether every whole batch in an outbox has been delivered; true for an outbox that is removed."""
        box = self.outboxes.get(name)
        if box is None:
            return True
        return max(self.positions.get(name, 0), self._looked.get(name, 0)) >= box.tail() and name not in self._dirty

    def step(self, *, closing: bool = False) -> bool:
        """Deliver new results, commit if due, send committed letters; return whether there was anything new.

        `closing`: commit everything, because no later step will. Raises what outboxes, `dispatch`, sinks, `save` and
        `send` raise; then the next step begins at the last commit.
        """
        try:
            if self._is_torn:
                self._go_back()
                self._is_torn = False
            if not self._has_begun:
                self._begin()
            worked = self._pass()
            if self._fences:
                self._raise_fences()
            if self._dirty and (closing or self._pending or self._uptime() - self._committed >= self._commit_interval):
                self._commit()
            if not self._dirty:
                self._send_pending()
            if closing and not worked and self._has_sent:
                self._commit()
        except Exception:
            self._is_torn = True
            raise
        return worked

    def _begin(self) -> None:
        if self._last is None:
            self._commit()  # before any write: the files are this run's, even if it dies before the next commit
        self._send_pending()
        self._has_begun = True

    def _go_back(self) -> None:
        """Reset everything to the last commit, as after a crash."""
        for sink in self.sinks:
            with suppress(OSError):  # it will receive again what it still had to write
                sink.close()
        self.gate, self.positions, self.delivered, self._dirty, self._looked = Gate(), {}, 0, {}, {}
        self._pending, self._number = [], 0
        for key, seq in self._before.items():
            if seq is None:
                del self.reached[key]
            else:
                self.reached[key] = seq
        self._moved, self._before, self._has_begun = {}, {}, False
        self._restore(self._last)

    def _pass(self) -> bool:
        """Read the new entries of every outbox, at most a chunk of each, and deliver them."""
        released: list[Result] = []
        read: dict[str, int] = {}
        for name, outbox in list(self.outboxes.items()):
            tail, start = outbox.tail(), self.positions[name] if name in self.positions else outbox.head()
            for end, parts in batches(outbox, start):
                for outgoing in self._dispatch(name, end - 1, parts):
                    released += self.gate.offer(outgoing.results)  # before its notices: CLOSED follows its results
                    self.state_bytes[name, outgoing.part] = outgoing.state_bytes
                    for notice in outgoing.notices:
                        released += self._notice(notice)
                read[name] = end
            self._looked[name] = tail if name not in read else 0
        if not read:
            return False
        if released:
            now_us = self._clock_us()
            for sink in self.sinks:
                self._release(sink.write(released, now_us))
            self.delivered += len(released)
            self._watch(released, now_us)
            if self._keep is not None:
                self._note({result.key: result.seq for result in released})  # in order per key: the last wins
        self._dirty |= read  # before `positions`, or `has_delivered` would count uncommitted entries
        self.positions |= read
        return True

    def _notice(self, notice: Notice) -> list[Result]:
        if isinstance(notice, Closed):
            released = self.gate.close(notice)
            self._give_up(self.gate.let_go())
            self._release(self.gate.confirm())
            return released
        if isinstance(notice, Parked):
            self._give_up(self.gate.park(notice))
        elif isinstance(notice, Checkpointed):
            self._release(self.gate.confirm(notice))
        elif isinstance(notice, Opened | Evicted):
            self.gate.note(notice)
        return []

    def _give_up(self, letters: list[Parked]) -> None:
        self._release(letters)
        if self._keep is not None:
            self._note({parked.key: parked.seq for parked in letters})

    def _release(self, letters: Sequence[Letter]) -> None:
        """Queue letters for sending, and number them now: the gate may have held one back behind later ones."""
        self._pending += zip(letters, count(self._number), strict=False)
        self._number += len(letters)

    def _note(self, reached: dict[str, int]) -> None:
        known = self.reached.get
        moved = {key: seq for key, seq in reached.items() if seq > known(key, -1)}
        self._before |= {key: known(key) for key in moved.keys() - self._before.keys()}
        self._moved |= moved
        self.reached |= moved

    def _raise_fences(self) -> None:
        fences = list(self._fences)  # another thread may add one meanwhile
        for move, _ in fences:
            self.gate.fence(move)
        self._commit()
        self._send_pending()
        del self._fences[: len(fences)]
        for _, raised in fences:
            raised()

    def _send_pending(self) -> None:
        """Send the committed letters, until the receiver is unreachable."""
        while self._pending and self._letter_backoff.is_due:
            try:
                self._send(*self._pending[0])
            except Retry as error:
                self._letter_backoff.failed(error)
                return
            self._letter_backoff.succeeded()
            del self._pending[0]
            self._has_sent = True

    def _commit(self) -> None:
        marks: list[Mark] = [sink.commit() for sink in self.sinks]
        blob = wire.pack(
            Commit(self.positions, self.gate.snapshot(), marks, self.delivered, self._pending, self._number)
        )
        if self._keep is None:
            self._save(blob)
        else:
            self._keep(blob, self._moved)
        self._last, self._moved, self._before = blob, {}, {}
        for sink in self.sinks:
            sink.committed()
        for name, position in self._dirty.items():
            if name in self.outboxes:
                # The last piece of the last batch stays: its range is the instance's position in its inbox.
                self.outboxes[name].trim(position - 1)
        self._dirty, self._has_sent, self._committed = {}, False, self._uptime()
