"""What every host does around a start: compare ages, reset the reader's position, wake itself up, wait.

An instance resumes from its checkpoint, so the checkpoint must be of the same age as the logs that its batches are
written to. After a power failure, with a restored backup or with an empty volume it is not; and a host would start from
nothing, or plan the same batches again over other records. `check_age` detects that before a start.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from whimbrel.core import wire
from whimbrel.core.errors import Overloaded, Stale, Unavailable
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Kind, OutboxEntry
from whimbrel.host.contract import Host, Saved
from whimbrel.log import Lane, Log
from whimbrel.log.carrier import View, last_entry
from whimbrel.log.codec import ROWS, encode_messages
from whimbrel.log.readers import INSTANCE, LANES, Offset

GLANCE = 0.05
"""Seconds between two looks at an instance that is waited for."""


def check_age(saved: Saved, instance: str, inbox: Log, outbox: Log) -> None:
    """Raise `Stale` unless checkpoint, inbox and outbox of an instance are of the same age."""
    said, planned, id = last_entry(outbox), saved.planned, saved.id
    reached = said.end
    if planned < 0 or id is None:
        if said.renewed:
            return
        # If no batch wrote an outbox entry, and the inbox was not trimmed, it can be replayed from its start.
        if outbox.tail() or any(inbox.head(lane) for lane in LANES.values()):
            raise Stale(
                f"the checkpoint of {instance} is gone: {saved.folder} has none, but the instance has run: its "
                f"outbox has {outbox.tail()} entries, up to {reached or 'an unknown position'} of its inbox. "
                + _way_out(instance)
            )
        return
    counter = outbox.counter(f"{instance}@{id}")
    begun, spoken = counter // ROWS, (counter + 1) // ROWS - 1  # the last batch, and the last that is whole
    if begun > planned:
        raise Stale(
            f"the checkpoint of {instance} at {saved.folder} is old: it knows batches up to {planned}, the outbox "
            f"has batch {begun} of it. " + _way_out(instance)
        )
    if spoken < saved.committed:
        raise Stale(
            f"the outbox of {instance} lacks its last entries: its checkpoint at {saved.folder} has done batch "
            f"{saved.committed}, the outbox ends with batch {spoken}. " + _way_out(instance)
        )
    end, done = saved.end(planned), saved.end(saved.committed)
    for name, lane in LANES.items():
        if end.get(name, 0) > inbox.tail(lane):
            raise Stale(
                f"the inbox of {instance} lacks its last entries: its checkpoint at {saved.folder} has read up to "
                f"{name} position {end[name]}, the log ends at {inbox.tail(lane)}. " + _way_out(instance)
            )
        if done and done[name] < inbox.head(lane):
            raise Stale(
                f"the checkpoint of {instance} at {saved.folder} is old: it has read up to {name} position "
                f"{done[name]}, later entries were applied and trimmed, up to {inbox.head(lane)}. " + _way_out(instance)
            )
        if end.get(name, 0) < reached.get(name, 0):
            raise Stale(
                f"the checkpoint of {instance} at {saved.folder} is old: it has read up to {name} position "
                f"{end.get(name, 0)}, the outbox has results up to {reached[name]}. " + _way_out(instance)
            )


def _way_out(instance: str) -> str:
    return (
        "Put the right folder back; or restore its keys from the central store (protocol='restore'); or continue "
        f"without the state of its keys: accept_loss=[{instance!r}], whimbrel up --accept-loss {instance}"
    )


def renew(inbox: Log, outbox: Log) -> None:
    """Note in the outbox that an instance starts from an empty checkpoint, after the records whose results are there.
    The caller removes the checkpoint afterwards."""
    end = last_entry(outbox).end
    blob = wire.pack(OutboxEntry([], end, end, renewed=True))
    outbox.append(blob, count=0, writer="renewal", counter=outbox.counter("renewal") + 1)
    for name, lane in LANES.items() if end else ():
        inbox.trim(end[name], lane)


def reset(inbox: Log, done: Offset) -> None:
    """Commit a checkpoint's position for the inbox's reader, whatever an earlier incarnation committed: after a power
    failure the log may be ahead of the checkpoint, and after `renew` there is none."""
    inbox.commit(INSTANCE, {lane: done.get(name, inbox.head(lane)) for name, lane in LANES.items()}, resets=True)


def wake_up(inbox: Log, encode: Callable[[list[View]], bytes] = encode_messages) -> int:
    """Append a WAKE, which makes a batch, and tells the instance of a start; return the control lane's tail."""
    blob = encode([(Kind.WAKE, EVERY_BIN, memoryview(b""))])
    counter = inbox.counter("wait", Lane.CONTROL) + 1
    inbox.append(blob, count=1, writer="wait", counter=counter, lane=Lane.CONTROL)
    return inbox.tail(Lane.CONTROL)


def await_batch(host: Host, inbox: Log, wanted: int, timeout: float, overloaded: tuple[str, ...] = ()) -> None:
    """Wait until a host has applied the control lane up to `wanted`. `overloaded`: parts of the messages with which it
    ends on an overloaded machine."""
    name, deadline = host.spec.name, time.monotonic() + timeout
    while (inbox.committed(INSTANCE, Lane.CONTROL) or 0) < wanted:
        if not host.is_active:
            why = f"instance {name} has ended: {host.exception or 'it was stopped'}"
            raise (Overloaded if any(sign in why for sign in overloaded) else Unavailable)(why)
        if time.monotonic() > deadline:
            raise Unavailable(f"instance {name} did no batch within {timeout:.0f} s")
        time.sleep(GLANCE)
