"""`restore`: an instance is lost; its keys are restored elsewhere, from the central store and the ingress logs.

::

    router ──DISCARD────────────────────────────────▶ the lost instance, and the other ends of its moves
           ──records replayed from the log, CUTOVER─▶ destination  drops duplicates, silent up to delivered, emits
    gate   refuses all output of the lost instance, tracks what is delivered
    store ──versions, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ fencing ─Fenced─▶ loading ─Loaded and Ready (all parts)─▶ replaying ─Opened (all parts)─▶ done
                          └───────Abandoned─▶ aborted ◀──┘ ◀────────Unreadable─────────┘

Why it is correct: a key's state as of a `seq` is determined by its records up to it, independent of which instance
applied them. The newest version of a key includes at least all trimmed records of its router's log, because routers
trim no further than all owners have saved (increments.py). Nothing is trimmed after the fence, because the keys have no
owner. The records behind the version are in the log, and are applied again. The gate knows which of them have been
delivered, and from the fence on releases no result of an older epoch.

It does not depend on the phase of any move of the lost instance: it takes all keys that the lost instance had, was
sending, or was to receive, out of their moves. Moves to it that can still be undone are aborted, and their keys stay at
their source. All its other moves end here.

Guarantees   exactly once, per-key order, results equal to those of a run without the loss.
Price        the keys produce no results from the loss until the destination has caught up: it applies the records since
             their last increment again. Before the loss, the increments: the changed keys, every few seconds.
No return    when the routers are ordered to replay. Before it an abort leaves the keys without an owner, until another
             order restores them: to another site, or from an older checkpoint. That is why each attempt has an epoch of
             its own. The same holds for a router that cannot read its log and sends Unreadable instead of replaying.
On failure   The lost instance comes back: the gate refuses its output, and it drops the keys when it reads DISCARD. The
             destination: its inbox retains all records; if it is lost for good, its own restoration takes these keys as
             well. A router replays its log and repeats its appends. A gate is fenced before it answers. The coordinator
             repeats the commands of its journal; a destination that has all versions ignores a second load.
"""

from __future__ import annotations

from whimbrel.core.options import RestoreOptions
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Announce,
    Answer,
    Command,
    Fenced,
    Load,
    Loaded,
    Migration,
    Ordered,
    Protocol,
    Table,
    abandon_unbegun,
    late,
)
from whimbrel.core.record import Aborted, Evicted, Kind, Opened, Ready, Rejected, Unreadable
from whimbrel.core.router import Fence, Restore

FENCING, LOADING, REPLAYING = "fencing", "loading", "replaying"


def _fence(migration: Migration) -> list[Command]:
    return [Fence(migration.move)]


def _load(migration: Migration) -> list[Command]:
    return [Load(migration.move)]


def _replay(migration: Migration) -> list[Command]:
    return [Restore(migration.move, migration.since or {})]


def _call_off(migration: Migration) -> list[Command]:
    return [Announce(Kind.ABORT, migration.move, migration.move.destination)]


def _call_off_again(migration: Migration) -> list[Command]:
    is_clear = not migration.has_begun or migration.has_received(Aborted, migration.move.destination)
    return [] if is_clear else _call_off(migration)


def fence(migration: Migration, event: Ordered) -> Answer:
    """Ordered: fence the lost instance, so that its later output is refused."""
    return FENCING, _fence(migration)


def load(migration: Migration, event: Fenced) -> Answer:
    """Fenced: the delivered `seq` of the keys no longer changes, and their logs are not trimmed."""
    return LOADING, _load(migration)


def loaded(migration: Migration, event: Loaded) -> Answer:
    """All versions are in transit. The first such answer counts: the destination may have installed that load."""
    if migration.since is None:
        migration.since, migration.keys = event.since, event.keys
        migration.state_bytes = migration.sent_bytes = event.size
    return _go_on(migration)


def ready(migration: Migration, event: Ready) -> Answer:
    """A part of the destination has its versions."""
    migration.receive(event)
    return _go_on(migration)


def _go_on(migration: Migration) -> Answer:
    if migration.since is not None and migration.has_received(Ready, migration.move.destination):
        return REPLAYING, _replay(migration)
    return LOADING, []


def opened(migration: Migration, event: Opened) -> Answer:
    """A part of the destination has applied all replayed records."""
    if not migration.has_received_part(event):
        migration.replayed += event.replayed
        migration.silent += event.silent
    return (DONE if migration.receive(event) else REPLAYING), []


def evicted(migration: Migration, event: Evicted) -> Answer:
    """A part has dropped its state of the keys; the restoration does not wait for it."""
    migration.receive(event)
    return migration.phase, []


def abandon(migration: Migration, event: Abandoned | Rejected | Unreadable) -> Answer:
    """Abort: the keys stay without an owner."""
    migration.reason = event.reason
    return ABORTED, _call_off(migration)


def cleared(migration: Migration, event: Aborted) -> Answer:
    """The destination has dropped the versions it received."""
    migration.receive(event)
    return ABORTED, []


TABLE: Table = {
    (ORDERED, Ordered): fence,
    (FENCING, Fenced): load,
    (LOADING, Loaded): loaded,
    (LOADING, Ready): ready,
    (REPLAYING, Opened): opened,
    # the lost instance is back
    **{(phase, Evicted): evicted for phase in (FENCING, LOADING, REPLAYING, DONE, ABORTED)},
    # abort
    (ORDERED, Abandoned): abandon_unbegun,
    (FENCING, Abandoned): abandon,
    (LOADING, Abandoned): abandon,
    (LOADING, Rejected): abandon,
    (REPLAYING, Unreadable): abandon,
    (ABORTED, Aborted): cleared,
}
TABLE |= late(
    {
        FENCING: (Ordered,),
        LOADING: (Ordered, Fenced),
        REPLAYING: (Ordered, Fenced, Loaded, Ready, Abandoned),
        DONE: (Ordered, Fenced, Loaded, Ready, Opened, Abandoned, Rejected, Unreadable),
        ABORTED: (Ordered, Fenced, Loaded, Ready, Abandoned, Rejected, Unreadable),
    }
)

RESTORE = Protocol(
    name="restore",
    table=TABLE,
    resume={FENCING: _fence, LOADING: _load, REPLAYING: _replay, ABORTED: _call_off_again},
    options=RestoreOptions(),
)
