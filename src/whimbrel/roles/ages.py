"""Consistency of a stage's logs and snapshots, checked before anything starts: whether one lacks entries that another
relies on.

After a power failure without `durability="power"`, with a restored backup or a copied file, logs lack their last
entries, each to a different extent. Then new records would get numbers that other logs have already seen, and would be
dropped as duplicates. So the positions that each one records of the others must be valid:

    snapshot of the router     the ingress log reaches up to it, and has not been trimmed beyond it;
                               each inbox has the records routed to it until then
    inbox                      the ingress log has the records routed to the inbox
    commit of the outlet       each outbox reaches up to it, and has not been trimmed beyond it;
                               the next stage has the results handed on until then, and no more
    log of reports             each outbox has the batches that were reported
    outbox                     each inbox, spool and store spool has the messages sent until its last entry

The checkpoint of an instance is checked at the site (host/starting.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whimbrel.core import wire
from whimbrel.core.errors import Stale
from whimbrel.core.increments import STORE
from whimbrel.egress.outlet import Commit
from whimbrel.egress.sinks import StageSink
from whimbrel.gateway.gateway import Snapshot
from whimbrel.log.carrier import last_entry
from whimbrel.log.codec import ROWS
from whimbrel.log.contract import Lane, Log, Writable


def check_way_in(router: str, blob: bytes | None, ingress: Log, inboxes: Mapping[str, Writable]) -> None:
    """Raise `Stale` unless a router's snapshot, its ingress log and the inboxes after it are consistent."""
    saved = wire.unpack(blob, Snapshot) if blob is not None else None
    at, given = (saved.position, saved.given) if saved is not None else (0, {})
    head, tail = ingress.head(), ingress.tail()
    if at > tail:
        raise _stale(
            f"the ingress log of {router}", f"the snapshot of the router is at position {at}, the log ends at {tail}"
        )
    if at < head:
        raise _stale(f"the snapshot of {router}", f"it is at position {at}, the ingress log was trimmed up to {head}")
    for name, inbox in inboxes.items():
        last = inbox.counter(router)
        if last // ROWS >= tail:
            lacks = f"the inbox of {name} has the entry of position {last // ROWS}, the log ends at {tail}"
            raise _stale(f"the ingress log of {router}", lacks)
        if last < given.get(name, -1):
            lacks = f"{router} has routed position {given[name] // ROWS} to it, it ends with {last // ROWS}"
            raise _stale(f"the inbox of {name}", lacks)


def check_way_out(stage: str, blob: bytes | None, outboxes: Mapping[str, Log], following: Log | None) -> None:
    """Raise `Stale` unless an outlet's commit matches the outboxes before it and the ingress log of the next stage."""
    saved = wire.unpack(blob, Commit) if blob is not None else None
    for name, outbox in outboxes.items():
        at, head, tail = saved.positions.get(name, 0) if saved is not None else 0, outbox.head(), outbox.tail()
        if at > tail:
            raise _stale(f"the outbox of {name}", f"the outlet has delivered up to {at}, it ends at {tail}")
        if at < head:
            raise _stale(
                f"the commit of the outlet of {stage}", f"it is at position {at} of {name}, trimmed up to {head}"
            )
    if following is not None:
        mark: Mapping[str, Any] = saved.marks[0] if saved is not None else {"taken": -1, "number": 0, "pending": []}
        taken, last = mark["taken"], following.counter("stage before")
        if last < (taken + 1) * ROWS - 1:
            lacks = f"{stage} has handed on number {taken}, it ends with {last // ROWS}"
            raise _stale(f"the ingress log behind {stage}", lacks)
        if last // ROWS >= mark["number"] + -(-len(mark["pending"]) // StageSink.MOST):
            lacks = f"it has handed on up to number {mark['number']}, the next stage has {last // ROWS}"
            raise _stale(f"the commit of the outlet of {stage}", lacks)


def check_reports(instance: str, outbox: Log, reports: Log) -> None:
    """Raise `Stale` unless an instance's outbox has every batch whose reports are in their log, which is durable in any
    case: the reports of new batches would be taken for repetitions, and their migrations would never end."""
    last, tail = reports.counter(instance), outbox.tail()
    if last >= tail:
        raise _stale(f"the outbox of {instance}", f"it has reported up to {last}, it ends at {tail}")


def check_messages(
    instance: str, outbox: Log, inboxes: Mapping[str, Writable], spools: Sequence[Log], store: Log | None
) -> None:
    """Raise `Stale` unless an instance's messages are in their destination, or in a spool before it."""
    for to, last in last_entry(outbox).sent.items():
        if to == STORE:
            if store is not None and max(_counters(store, instance, ""), default=-1) < last:
                raise _stale(f"the increments of {instance}", f"it has sent some in batch {last // ROWS}")
        elif to in inboxes and not _has(inboxes[to], spools, instance, to, last):
            raise _stale(f"the inbox of {to}", f"{instance} has sent to it in batch {last // ROWS}")


def _has(inbox: Writable, spools: Sequence[Log], instance: str, to: str, last: int) -> bool:
    """Whether the messages up to a number are in the inbox they are addressed to, or wait in a spool before it."""
    if max(_counters(inbox, instance, "", Lane.CONTROL), default=-1) >= last:
        return True
    waiting = (spool for spool in spools if spool.head() < spool.tail())
    return any(counter >= last for spool in waiting for counter in _counters(spool, instance, f" to {to}"))


def _counters(log: Writable, instance: str, end: str, lane: Lane = Lane.DATA) -> Iterator[int]:
    """The last counters of all checkpoints that an instance has had."""
    for writer, counter in log.writers(lane).items():
        if writer.startswith(f"{instance}@") and writer.endswith(end):
            yield counter


def _stale(what: str, lacks: str) -> Stale:
    return Stale(
        f"{what} lacks its last part: {lacks}. After a power failure, or with files of different ages, restore a copy "
        "of the whole data directory from one point in time, or start with a new directory; with "
        'durability="power" this does not happen'
    )
