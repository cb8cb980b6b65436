"""Safeguards switched off, one at a time: the simulator must detect each. One that it misses is not tested by it.

Not included: dropping the records that a router sent before it knew of a restoration (`Eviction.drops`). That takes two
routers, and a world with a central store has one, as a stage has; tests/unit/test_restoration.py has two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from whimbrel.checkpoints.uploader import Uploader
from whimbrel.checkpoints.version import Increment
from whimbrel.core import wire
from whimbrel.core.arrival import Arrival, Receiver
from whimbrel.core.errors import Unavailable
from whimbrel.core.gate import Gate
from whimbrel.core.instance import Instance
from whimbrel.core.protocols.machine import Command, CopyCheckpoint, Event, Failed, StartInstance
from whimbrel.core.record import (
    Checkpointed,
    Closed,
    Emissions,
    Kind,
    Move,
    Notice,
    OutboxEntry,
    Outgoing,
    Report,
    Result,
)
from whimbrel.core.restoration import Restoration
from whimbrel.core.serving import Serving
from whimbrel.core.switch import SwitchIn, SwitchOut
from whimbrel.egress import outlet
from whimbrel.egress.dispatch import Dispatcher
from whimbrel.egress.outlet import Outlet
from whimbrel.egress.reports import REPORTER, Reporter
from whimbrel.gateway.entrance import Door
from whimbrel.gateway.gateway import Gateway
from whimbrel.host.checkpoint import Batch, Checkpoint
from whimbrel.host.inline import InlineHost
from whimbrel.lab.sim.egress import OutletActor
from whimbrel.log import carrier
from whimbrel.log.carrier import View, batches, cut
from whimbrel.log.chunks import chunk
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Entry, Lane, Log
from whimbrel.log.memory import MemoryLog
from whimbrel.log.readers import Offset, next_of
from whimbrel.log.spool import Confirmed
from whimbrel.orchestrator.decisions import Decisions
from whimbrel.orchestrator.deeds import Deeds
from whimbrel.site.forwarder import Forwarder, LinkSpool, Piece, Sending
from whimbrel.site.links import Links, Pair
from whimbrel.transport.connection import Connection
from whimbrel.transport.sender import Sender


def _release(self: Gate, result: Result, released: list[Result]) -> None:
    released.append(result)


def _release_early(self: Gate, results: list[Result]) -> list[Result]:
    """Later epochs do not wait for earlier ones; the gate refuses only results of closed epochs."""
    return [result for result in results if result.epoch >= self.epochs[result.key]]


def _markers_beside(self: Gateway) -> None:
    """Markers go through the control lane: none is lost, but they lose their position between the records."""
    while self._unsent:
        name, blob, _, number = self._unsent[0]
        records: Any = blob
        marks: Any = tuple(one for one in records if one.kind in (Kind.BEGIN, Kind.CUTOVER, Kind.ABORT))
        data: Any = tuple(one for one in records if one not in marks)
        append = partial(self._inbox_of(name).append, count=1, writer=self.name, counter=number, replays=True)
        append(data)
        if marks:
            append(marks, lane=Lane.CONTROL)
        self._unsent.popleft()


def _acknowledge_first(self: Gateway, events: Any, writer: str, counter: int) -> bool:
    """Acknowledge records, and append them only when the next ones arrive."""
    late = vars(self).setdefault("late", [])
    late.append((events, writer, counter))
    if len(late) > 1:
        _ingest(self, *late.pop(0))
    return True


def _ship_before_closing(self: SwitchOut, instance: Instance, out: Emissions) -> None:
    """The source reports that it has stopped, but goes on: it serves records of its keys and does not forward them."""
    _ship(self, instance, out)
    for key in [key for key in instance.table.waiting if self.takes(key)]:
        for record in instance.table.unbuffer(key):
            instance.serving.serve(record, out)
    for key in [key for key in instance.table.entries if self.takes(key) and not self.left]:
        self.forget(instance, key)


def _fence_without_wall(self: Gate, move: Move) -> None:
    """The gate accepts the next epoch, and still accepts earlier ones."""
    _fence(self, move)
    self.refuse = lambda result, released: released.append(result)  # type: ignore[method-assign]


def _trim_what_is_routed(self: Gateway) -> int:
    """The gateway trims the log as if there were no store."""
    return self._routed * ROWS


def _trust(self: Uploader) -> None:
    """Commit an increment as soon as it is complete, without the gate's confirmation."""
    self._confirmed = self.spool.log.tail(Lane.CONTROL)
    while (messages := self.spool.messages(self._read)) is not None:
        self._take(messages)
        saved = [wire.unpack(body, Checkpointed) for kind, _, body in messages if kind == Kind.CHECKPOINTED]
        self._due += [Confirmed(one, 0) for one in saved]
    while self._due:
        self._commit(self._due[0])
        del self._due[0]


def _manifest_first(self: Uploader, confirmed: Confirmed) -> None:
    """Write the manifest of an increment before the segments it lists."""
    saved, increments = confirmed.saved, self._open[confirmed.saved.part]
    for one in [one for one in increments if one.number == saved.number and one.is_whole]:
        increment = Increment(saved.instance, saved.part, saved.number, confirmed.at_us, saved.reached)
        self.store.commit(self.stage, increment, one.segments)
        self._put(one, increment, 0)
        self._committed(saved)
        del increments[: increments.index(one) + 1]


def _positions_first(self: Outlet) -> bool:
    """Commit the ends of the outboxes as read, and deliver the results afterwards."""
    read = self.positions
    for name, outbox in list(self.outboxes.items()):
        ends = [end for end, _ in batches(outbox, read.get(name, outbox.head()))]
        self.positions = {**self.positions, name: max([read.get(name, 0), *ends])}
    self._commit()
    self.positions = read
    return _pass(self)


def _fence_in_memory(self: Outlet) -> None:
    """Raise the fence in memory only: it is lost when the outlet dies."""
    for move, raised in self._fences:
        self.gate.fence(move)
        raised()
    self._fences = []


def _send_first(self: Outlet) -> None:
    """Send notices that are not committed."""
    self._send_pending()
    _commit(self)


def _report_late(self: Reporter) -> bool:
    """Commit the position behind a report, and send it afterwards."""
    entries = chunk(self._log, next_of(self._log, REPORTER))
    for entry in entries:
        self._log.commit(REPORTER, {Lane.DATA: entry.position + 1})
        for report in wire.unpack(entry.blob, list[Report]):
            self._send(report)
    return bool(entries)


def _close_here_only(self: Dispatcher, notice: Notice, place: str) -> bool:
    """Send CLOSED to one receiver only."""
    return _concerns(self, notice, place) and (not isinstance(notice, Closed) or place == self._ways.receivers[0])


def _close_for_all(self: OutletActor, name: str, position: int, parts: list[Outgoing]) -> list[Outgoing]:
    """Let all gates share their epochs: what one receiver has closed is closed for the others."""
    for closed in (notice for one in parts for notice in one.notices if isinstance(notice, Closed)):
        for receiver in self.world.outlets.values():
            receiver.gate.close(closed)
    return _dispatch(self, name, position, parts)


def _number_anew(self: Door, blob: bytes, *, count: int, writer: str, counter: int, **more: Any) -> int | None:
    """Take in a record that was passed on under a number of its home, not of its producer."""
    last = self._gateway.counter(writer)
    events: Any = [(one.key, one.body, None) for one in self._codec.records(Entry(0, count, blob))]
    self._gateway.ingest(events, writer, last + len(events), lambda place: last + 1 + place)
    return 0


def _trim_what_is_sent(self: Sender, connection: Connection) -> None:
    """Trim the spool up to what has been sent, before it is acknowledged."""
    _fill(self, connection)
    self.spool.trim(self._next)


def _stay_torn(self: Outlet) -> None:
    """Continue after an error without a reset to the last commit."""


def _position_before_effect(self: InlineHost, batch: Batch) -> None:
    """Commit state and position of a batch before its output is in the logs."""
    out = self._apply(batch)
    self._commit(batch, out)
    self._carry(batch, out)


def _plan_in_memory(self: Checkpoint, end: Offset) -> Batch:
    """Apply a batch whose end is not durable: after a crash it may be another."""
    self.last = Batch(self.id, self.parts, self.last.number + 1, self.at, end)
    return self.last


def _remember(self: InlineHost, *parts: int) -> None:
    """Keep the parts in memory that have applied a failed batch."""


def _journal_late(self: Decisions, stage: str, id: str, event: Event) -> None:
    """Act on a decision, and journal it only with the next one."""
    coordinator, now_us = self.stages[stage], self.now_us()
    draft, commands = coordinator.decide(id, event, now_us)
    late = vars(self).setdefault("late", [])
    self.journal.write(*late)
    coordinator.accept(draft, now_us)
    late[:] = [draft]
    self._queue(draft, commands)


def _start_anywhere(self: Deeds, stage: str, id: str, command: Command) -> None:
    """Assume that an unreachable site has not started the instance."""
    try:
        self._carry_out(stage, id, command)
    except Unavailable as error:
        if not isinstance(command, StartInstance | CopyCheckpoint):
            raise
        self._answer(stage, id, Failed(str(error)))


def _position_first(self: Uploader) -> None:
    """Trim the entries read from a spool, and upload them afterwards."""
    self.spool.trim(self.spool.log.tail(), self._confirmed)
    _carry(self)


def _tick_once(self: Gateway, counter: int) -> None:
    """Assume that a tick in the ingress log is in every inbox."""
    if self._wall_clock:
        self._latest_us = max(self._latest_us, self._clock.look(self._clock_us(), self._uptime()))
    if self._sent_us < self._latest_us:
        self._control(Kind.TICK, b"", self._latest_us, "ticks", counter)


def _trim_first(self: Forwarder, piece: Piece) -> None:
    """Trim an entry from the spool, and deliver its last piece afterwards."""
    if piece.is_last:
        self.spool.trim(self._done + 1)
    _deliver(self, piece)


def _overtake(self: Links, source: str, destination: str, pair: Pair) -> LinkSpool | None:
    """Append directly while earlier messages are in a spool."""
    last, end = self._last.get((source, destination), (None, 0))
    return None if last is not None and last.done < end else _way(self, source, destination, pair)


def _start_over(self: Forwarder, sending: Sending) -> list[Piece]:
    """Assume that no piece of an entry has arrived before a restart, or a cut."""
    with patch.object(self, "_inbox_of", lambda name: MemoryLog()):
        return _pieces(self, sending)


def _take_pieces(outbox: Log, start: int) -> Iterator[tuple[int, list[Outgoing]]]:
    """Deliver the pieces of a batch one by one, also of a batch that will never be whole."""
    for entry in chunk(outbox, start):
        yield entry.position + 1, wire.unpack(entry.blob, OutboxEntry).outgoing


def _cut_anywhere(messages: Sequence[View], most: int) -> Iterator[list[View]]:
    """Spread the CHECKPOINTED messages of a batch over several entries."""
    return cut(messages, lambda message: len(message[2]), most)


_ship, _fence, _pass, _commit = SwitchOut.ship, Gate.fence, Outlet._pass, Outlet._commit
_ingest, _carry = Gateway.ingest, Uploader.step
_concerns, _dispatch, _fill = Dispatcher._concerns, OutletActor._dispatch, Sender._fill
_deliver, _pieces, _way = Forwarder._deliver, Forwarder._pieces, Links._way

SABOTAGES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "gate": (Gate, "offer", _release_early),
    "dedup": (Serving, "is_duplicate", lambda self, entry, record: False),
    "filter": (Arrival, "is_silent", lambda self, src: False),
    "buffering": (Arrival, "buffers", lambda self, key, instance: False),
    "fencing": (Gate, "refuse", _release),
    "markers": (Gateway, "_flush", _markers_beside),
    "stopping": (SwitchOut, "ship", _ship_before_closing),
    "passing": (SwitchIn, "has_passed", lambda self, key: True),
    "absence": (SwitchIn, "is_new", lambda self, key: True),
    "freshness": (SwitchOut, "dirty", lambda self, keys, replication: set()),
    "fence": (Gate, "fence", _fence_without_wall),
    "silent": (Restoration, "silences", lambda self, record: False),
    "trim-horizon": (Gateway, "horizon", _trim_what_is_routed),
    "confirming": (Uploader, "step", _trust),
    "data-first": (Uploader, "_commit", _manifest_first),
    "refusal": (Receiver, "turn_down", lambda self, instance, id, reason, out: None),
    "one-holder": (SwitchOut, "forget", lambda self, instance, key: None),
    "results-first": (Outlet, "_pass", _positions_first),
    "durable-fence": (Outlet, "_raise_fences", _fence_in_memory),
    "commit-before-telling": (Outlet, "_commit", _send_first),
    "closed-everywhere": (Dispatcher, "_concerns", _close_here_only),
    "own-epochs": (OutletActor, "_dispatch", _close_for_all),
    "producers-numbers": (Door, "append", _number_anew),
    "acknowledged-first": (Sender, "_fill", _trim_what_is_sent),
    "reports-first": (Reporter, "step", _report_late),
    "append-first": (Gateway, "ingest", _acknowledge_first),
    "going-back": (Outlet, "_go_back", _stay_torn),
    "journal-first": (Decisions, "_handle", _journal_late),
    "one-checkpoint": (Deeds, "do", _start_anywhere),
    "spool-position": (Uploader, "step", _position_first),
    "effect-first": (InlineHost, "_do", _position_before_effect),
    "durable-plan": (Checkpoint, "begin", _plan_in_memory),
    "fresh-parts": (InlineHost, "forget", _remember),
    "last-tick": (Gateway, "tick", _tick_once),
    "whole-batches": (outlet, "batches", _take_pieces),
    "ends-together": (carrier, "_entries", _cut_anywhere),
    "arrived-first": (Forwarder, "_deliver", _trim_first),
    "queueing-up": (Links, "_way", _overtake),
    "going-on": (Forwarder, "_pieces", _start_over),
}

SEEN_IN: dict[str, tuple[str, ...]] = {"confirming": ("restore",), "last-tick": ("fluid",)}
"""By sabotage: the protocols in which it is seen soonest, if it takes a rare coincidence."""


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Run with one safeguard switched off."""
    if name is None:
        yield
        return
    owner, attribute, broken = SABOTAGES[name]
    with patch.object(owner, attribute, broken):
        yield
