"""A move that switches at once: routers send the keys' records to the destination from BEGIN on, and state follows.

At the source (`SwitchOut`) the keys stop with the batch that reads SWITCH, ahead of the inbox's backlog: the source
sends CLOSED, and only the destination emits from then on. Records that still come before BEGIN are the keys' backlog:
the source forwards them instead of applying them. A key leaves with its backlog, as soon as the byte budget allows, in
the order of the move's schedule (schedules.py).

At the destination (`SwitchIn`) a key's records wait until the key opens: until its state has arrived, or is known not
to exist, and the source has sent PASSED, that is, has forwarded all older records. Then the key is served normally.

A key has one holder at any time: the source drops it in the batch that ships it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from whimbrel.core.arrival import Receiver
from whimbrel.core.departure import closings
from whimbrel.core.keys import BINS, EVERY_BIN, bin_of, part_of, unit_of
from whimbrel.core.parcels import OVERHEAD, Parcels, reaching
from whimbrel.core.record import (
    Buffered,
    Emissions,
    Fetch,
    KeyState,
    Kind,
    Left,
    Move,
    Parcel,
    Passed,
    Ready,
    Record,
    Shipped,
    Tick,
)
from whimbrel.core.schedules import Schedule, schedule_of, units_of

if TYPE_CHECKING:
    from whimbrel.core.instance import Instance
    from whimbrel.core.replica import Replication

ENTRY = 20
"""Offsets without these bits are positions of log entries: records of one entry arrived at the same moment."""


class SwitchOut(msgspec.Struct, kw_only=True):
    """The progress of a switch at one part of its source. Sets name the routers a marker has come from."""

    move: Move
    parcels: Parcels
    begun: dict[str, int] = {}
    """By router: the `seq` of its BEGIN."""
    cut: set[str] = set()
    closed: bool = False
    """The source no longer applies records of the keys."""
    reach: dict[str, int] = {}
    """By router: the `seq` of its stream that the keys' states include."""
    hinted: list[str] = []
    needed: list[str] = []
    """Keys that records wait for, in the order in which they are to leave."""
    rest: list[str] = []
    """The other keys that are to leave, the last one first."""
    asked: list[int] = []
    """Units that were requested and have not left completely."""
    questions: list[Fetch] = []
    """Requests received in this batch."""
    absent: list[str] = []
    """Keys that were named in a HINT and that the source does not have."""
    ticks: list[Tick] = []
    """Ticks that came before BEGIN: part of every key's backlog."""
    stale: list[str] = []
    """Keys of which the standby had no up-to-date copy."""
    keys: int = 0
    left: int = 0
    """Number of keys that have not been shipped."""
    passed: bool = False
    shipped: bool = False

    @classmethod
    def of(cls, move: Move) -> SwitchOut:
        """The switch of a move that begins."""
        return cls(move=move, parcels=Parcels.of(move))

    @property
    def schedule(self) -> Schedule:
        """The order in which the keys leave."""
        return schedule_of(self.move)

    @property
    def is_urgent(self) -> bool:
        """Whether keys are blocked at the destination until this part has handled requests for them."""
        return self.schedule.asks and not self.shipped

    def takes(self, key: str) -> bool:
        """Whether a record of this key belongs to its backlog."""
        return self.closed and key in self.move.selection

    def is_frozen(self, src: str) -> bool:
        """Whether the event time of keys of this router is frozen here."""
        return self.closed or src in self.begun

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker. There is no ABORT: a switch cannot be undone."""
        if kind == Kind.BEGIN:
            self.begun[record.src] = record.seq
        elif kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == self.move.routers:
                instance.epochs.put(self.move.selection, self.move.epoch)
                del instance.moves.switches_out[self.move.id]
                part = (self.move.id, instance.name, instance.part, instance.parts)
                out.notices.append(Left(*part, self.keys, self.parcels.state_bytes, self.parcels.sent_bytes))

    def note_tick(self, record: Record) -> None:
        """Add a tick to the backlog if the keys have stopped and BEGIN has not come."""
        if self.closed and record.src not in self.begun:
            self.ticks.append(Tick.of(record))

    def hint(self, instance: Instance, keys: Iterable[str]) -> None:
        """Records of these keys have gone to the destination."""
        for key in keys:
            if part_of(bin_of(key), instance.parts) == instance.part:
                if key in instance.table.entries:
                    self.hinted.append(key)
                elif not self.shipped:
                    self.absent.append(key)

    def ask_for_all(self, instance: Instance) -> None:
        """A request of the destination is unreadable: send it all keys, one after the other."""
        if self.closed and self.schedule.asks:
            self.rest = instance.keys_in(self.move)[::-1]

    def ask(self, instance: Instance, fetch: Fetch) -> None:
        """The destination requests units; their keys are looked up at the end of the batch."""
        needed, step = (
            [unit for unit in units if part_of(unit % BINS, instance.parts) == instance.part]
            for units in (fetch.needed, fetch.step)
        )
        self.questions.append(Fetch(fetch.move, needed, step))

    # ── At the end of a batch ────────────────────────────────────────────────────────────────────────────────────

    def ship(self, instance: Instance, out: Emissions) -> None:
        """Close, if not done yet; then send what the budget allows."""
        if not self.closed:
            self._close(instance, out)
        elif self.schedule.looks_ahead:
            self._look_ahead(instance)
        if self.shipped:
            return
        self.needed += self.hinted
        self.hinted = []
        self._look_up(instance)
        loads = self._load(instance, out)
        left = sorted(key for key in instance.table.waiting if self.takes(key) and key not in instance.table.entries)
        backlog = {key: self._backlog(instance, key) for key in left}
        self.parcels.pack(instance, self.move, loads, out, backlog, self.ticks)
        self._report(instance, out)
        if self.needed or self.rest or self.parcels.cutter.key:
            out.messages.append(instance.message(instance.name, Kind.WAKE))

    def _close(self, instance: Instance, out: Emissions) -> None:
        self.closed = True
        self.reach = {**instance.positions, **self.begun}
        keys = instance.keys_in(self.move)
        self.keys = self.left = len(keys)
        self.schedule.begin(self, instance, keys)
        out.notices += closings(instance, self.move)

    def dirty(self, keys: list[str], replication: Replication | None) -> set[str]:
        """Keys of which the standby has no up-to-date copy."""
        return set(keys) if replication is None else {*replication.dirty, replication.parcels.cutter.key}

    def _look_ahead(self, instance: Instance) -> None:
        """Keys with a backlog are needed: in order of arrival; within one log entry, the largest backlog first."""
        waiting = [key for key in instance.table.waiting if key in instance.table.entries and self.takes(key)]
        known = {*self.needed, self.parcels.cutter.key}
        ranked = sorted(
            (instance.table.waiting[key][0].offset >> ENTRY, -len(instance.table.waiting[key]), key)
            for key in waiting
            if key not in known
        )
        self.needed += [key for *_, key in ranked]

    def _look_up(self, instance: Instance) -> None:
        """Find the keys of the requested units."""
        by_unit: dict[int, list[str]] = {unit: [] for question in self.questions for unit in question.needed}
        by_unit |= {unit: [] for question in self.questions for unit in question.step}
        if not by_unit:
            return
        split = units_of(self.move).split
        for key in instance.keys_in(self.move):
            unit = unit_of(key, split)
            if unit in by_unit:
                by_unit[unit].append(key)
        for question in self.questions:
            self.needed += [key for unit in question.needed for key in by_unit[unit]]
            self.rest = [key for unit in reversed(question.step) for key in by_unit[unit]] + self.rest
        self.asked += by_unit
        self.questions = []

    def _load(self, instance: Instance, out: Emissions) -> dict[str, KeyState]:
        """The keys that leave in this batch; pieces of large keys are sent here."""
        move, cutter = self.move, self.parcels.cutter
        loads: dict[str, KeyState] = {}
        room = move.budget
        while room > (reserve := self._reserve()) and (cutter.key or self.needed or self.rest):
            key = cutter.key or (self.needed.pop(0) if self.needed else self.rest.pop())
            if key not in instance.table.entries:
                continue
            key_state = reaching(instance, key, self.reach)
            if cutter.is_large(key_state):
                cutter.key = key
                reserve, waited = self._reserve(), partial(self._backlog, instance, key)
                pieces, left = cutter.cut(key_state, room - reserve)
                self.parcels.send_pieces(instance, move, key, pieces, out, waited=waited, ticks=self.ticks)
                room = left + reserve
            else:
                loads[key] = key_state
                room -= len(key_state.state) + OVERHEAD
            if not cutter.key:
                self.left -= 1
                self.forget(instance, key)
        return loads

    def _reserve(self) -> int:
        """Bytes of the budget that must stay unused. Needed keys may take twice the budget: they wait in the link no
        longer than they would here for the next batch. With requests (`fetch`), other keys may take a quarter of it:
        more requests will come, and a link full of other keys would delay them."""
        if self.needed:
            return -self.move.budget
        return self.move.budget * 3 // 4 if self.schedule.asks and not self.parcels.cutter.key else 0

    def _backlog(self, instance: Instance, key: str) -> list[Buffered]:
        """The backlog of a key, in the new epoch, because the destination will emit its results."""
        records = instance.table.unbuffer(key)
        return [instance.table.stored(record._replace(epoch=self.move.epoch)) for record in records]

    def forget(self, instance: Instance, key: str) -> None:
        """Drop a key that has been shipped."""
        instance.table.drop([key])

    def _report(self, instance: Instance, out: Emissions) -> None:
        """Report the units and keys of which no state will follow, and send PASSED and SHIPPED when due."""
        leaving = filter(None, (*self.needed, *self.rest, self.parcels.cutter.key)) if self.asked else ()
        under_way = {unit_of(key, units_of(self.move).split) for key in leaving}
        gone = [unit for unit in self.asked if unit not in under_way]
        self.asked = [unit for unit in self.asked if unit in under_way]
        if gone or self.absent:
            self._send(instance, Kind.PARCEL, Parcel(self.move.id, EVERY_BIN, {}, absent=self.absent, units=gone), out)
            self.absent = []
        part = (self.move.id, instance.part, instance.parts)
        if not self.passed and self.begun.keys() == self.move.routers:
            self.passed = True
            self._send(instance, Kind.PASSED, Passed(*part, self.ticks, self.stale), out)
        if self.passed and not self.left:
            self.shipped = True
            self.needed, self.rest, self.asked = [], [], []
            self._send(instance, Kind.SHIPPED, Shipped(*part), out)

    def _send(self, instance: Instance, kind: Kind, body: Any, out: Emissions) -> None:
        self.parcels.send(instance, self.move, kind, body, out)


class SwitchIn(Receiver, kw_only=True):
    """The progress of a switch at one part of its destination. Sets name the routers a marker has come from."""

    move: Move
    begun: set[str] = set()
    cut: set[str] = set()
    passed: set[int] = set()
    """The parts of the source that have forwarded all records older than the switch."""
    shipped: set[int] = set()
    """The parts of the source that have sent all their keys."""
    parts: int = 0
    absent: set[str] = set()
    units: set[int] = set()
    """Units that have arrived completely."""
    asked: set[int] = set()
    """Units that have been requested because a record needs them."""
    step: set[int] = set()
    """Units of the last step; one that is needed before it has arrived is requested again."""
    bins: list[int] | None = None
    """Bins that have not been requested, the last one first; None before the first request."""
    ticks: list[Tick] = []

    keeps: ClassVar[bool] = True
    """True, because the source has dropped what it sent."""

    @property
    def schedule(self) -> Schedule:
        """The order in which the keys arrive."""
        return schedule_of(self.move)

    @property
    def is_urgent(self) -> bool:
        """Whether keys are blocked until their parcels arrive."""
        return not self.ready

    def takes(self, key: str) -> bool:
        """Whether the key belongs to this move."""
        return key in self.move.selection

    def is_silent(self, src: str) -> bool:
        """Never: the source has closed, so the destination emits from the beginning."""
        return False

    def is_frozen(self, instance: Instance, key: str, src: str) -> bool:
        """Whether the key's event time is frozen, because it has not opened."""
        return not self.opens(key, instance)

    def opens(self, key: str, instance: Instance) -> bool:
        """Whether no older record of a key can arrive, and its state has arrived or does not exist."""
        return self.ready or (self.has_passed(key) and (key in instance.table.entries or self.is_new(key)))

    def has_passed(self, key: str) -> bool:
        """Whether the source has forwarded all records older than the switch."""
        return self._part(key) in self.passed

    def is_new(self, key: str) -> bool:
        """Whether a key without state here is known to have none at the source either."""
        return (
            self._part(key) in self.shipped
            or key in self.absent
            or (self.schedule.asks and unit_of(key, units_of(self.move).split) in self.units)
        )

    def _part(self, key: str) -> int:
        return part_of(bin_of(key), self.parts) if self.parts else -1

    def follow(self, instance: Instance, record: Record, out: Emissions) -> None:
        """Handle a record that a router sent directly to the destination."""
        if self.opens(record.key, instance):
            instance.serving.serve(record, out)
        else:
            instance.table.buffer(record)

    def note_tick(self, record: Record) -> None:
        """Keep a tick of a router for keys that have not opened."""
        if not self.ready:
            self.ticks.append(Tick.of(record))

    def mark(self, instance: Instance, kind: Kind, record: Record, out: Emissions) -> None:
        """Handle a marker."""
        if kind == Kind.BEGIN:
            self.begun.add(record.src)
            self._check_ready(instance, out)
        elif kind == Kind.CUTOVER:
            self.cut.add(record.src)
            if self.cut == self.move.routers:
                standby = instance.moves.standbys.pop(self.move.id, None)
                if standby is not None:
                    standby.clear(instance)
                del instance.moves.switches_in[self.move.id]
                self.own(instance, self.move, out)

    def install(self, instance: Instance, parcel: Parcel, out: Emissions) -> None:
        """Install a parcel: states, and their backlog from the source."""
        backlog = {key: instance.table.received(records) for key, records in parcel.backlog.items()}
        for key, key_state in self.joined(instance, parcel).items():
            instance.table.install(key, key_state)
        for key in dict.fromkeys((*parcel.keys, *parcel.backlog)):
            older = backlog.get(key, [])
            if older and self.schedule.copies:
                # The source has dropped it: its copy is up to date, or the key is new.
                instance.table.promote(self.move.id, key)
            if key in instance.table.entries or older:
                self.catch_up(instance, key, older, parcel.ticks, out)
                self._open([key], instance, out)
        self.absent.update(parcel.absent)
        self.units.update(parcel.units)
        if parcel.absent or parcel.units:
            self._open(sorted(instance.table.waiting), instance, out)

    def pass_on(self, instance: Instance, passed: Passed, out: Emissions) -> None:
        """A part of the source has forwarded all records older than the switch."""
        self.parts = passed.parts
        self.passed.add(passed.part)
        stale = set(passed.stale)
        for key in instance.table.replicated(self.move.id) if self.schedule.copies else ():
            if self.takes(key) and self._part(key) == passed.part and key not in stale:
                instance.table.promote(self.move.id, key)
        here = [key for key in sorted(instance.table.entries) if self.takes(key) and self._part(key) == passed.part]
        for key in here if passed.ticks or self.ticks else ():
            self.catch_up(instance, key, [], passed.ticks, out)
            self._open([key], instance, out)
        self._open(sorted(instance.table.waiting), instance, out)

    def complete(self, instance: Instance, shipped: Shipped, out: Emissions) -> None:
        """A part of the source has sent all its keys."""
        self.parts = shipped.parts
        self.shipped.add(shipped.part)
        self._open(sorted(instance.table.waiting), instance, out)
        self._check_ready(instance, out)

    def _open(self, keys: list[str], instance: Instance, out: Emissions) -> None:
        """Open those keys that can open: apply the records that waited for them."""
        for key in keys:
            if self.takes(key) and self.opens(key, instance):
                self.catch_up(instance, key, instance.table.unbuffer(key), self.ticks, out)

    def _check_ready(self, instance: Instance, out: Emissions) -> None:
        if self.ready or self.begun != self.move.routers or not self.parts or len(self.shipped) < self.parts:
            return
        self.ready = True
        self.ticks = []
        out.notices.append(Ready(self.move.id, instance.name, instance.part, instance.parts))

    # ── At the end of a batch ────────────────────────────────────────────────────────────────────────────────────

    def ask(self, instance: Instance, out: Emissions) -> None:
        """Request the units that records wait for, and, when the last step has arrived, the next step.

        Not before a BEGIN: after it the source, too, has received the move.
        """
        if not self.schedule.asks or not self.begun or (self.parts and len(self.shipped) == self.parts):
            return
        split = units_of(self.move).split
        waiting = sorted((held[0].offset, key) for key, held in instance.table.waiting.items() if self.takes(key))
        missing = (unit_of(key, split) for _, key in waiting if key not in instance.table.entries)
        needed = [unit for unit in dict.fromkeys(missing) if unit not in self.asked]
        self.asked.update(needed)
        step = self._next_step(instance) if all(map(self._has_come, self.step)) else []
        if needed or step:
            out.messages.append(instance.message(self.move.source, Kind.FETCH, Fetch(self.move.id, needed, step)))

    def _has_come(self, unit: int) -> bool:
        return unit in self.units or (bool(self.parts) and part_of(unit % BINS, self.parts) in self.shipped)

    def _next_step(self, instance: Instance) -> list[int]:
        if self.bins is None:
            chosen = {*self.move.selection.bins, *map(bin_of, self.move.selection.keys)}
            mine = (bin for bin in chosen if part_of(bin, instance.parts) == instance.part)
            self.bins = sorted(mine, reverse=True)
        units: list[int] = []
        step, split = units_of(self.move).step, units_of(self.move).split
        while self.bins and not units:
            bins, self.bins = self.bins[-step:], self.bins[:-step]
            every = (bin + BINS * cut for bin in reversed(bins) for cut in range(split))
            units = [unit for unit in every if unit not in self.asked and not self._has_come(unit)]
        self.step = set(units)
        return units
