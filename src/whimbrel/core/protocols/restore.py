"""`restore`: an instance is lost; its keys come back elsewhere, out of the central store and the ingress logs.

::

    router ──DISCARD────────────────────────────────▶ the lost one, and the other ends of moves it took part in
           ──records from the log again, CUTOVER────▶ destination  drops what it has, silent up to delivered, emits
    gate   refuses all that the lost one says, knows what is delivered
    store ──versions, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ fencing ─Fenced─▶ loading ─Loaded and Ready (all parts)─▶ replaying ─Opened (all parts)─▶ done
                          └───────Abandoned─▶ aborted ◀──┘ ◀────────Unreadable─────────┘

Why it is right: a key's state as of a `seq` follows from its records up to there, whoever applied them. The newest
version of a key reaches at least as far as its router's log has been trimmed, because routers trim no further than all
owners have saved (increments.py). Nothing is trimmed after the fence: nobody owns the keys. What follows the version is
in the log, and is applied again; what of it has been delivered is known to the gate, which from the fence on lets
nothing older out.

It does not ask in which phase of which move the lost one was: it takes all keys that the lost one had, was sending, or
was to have, out of whatever they are in. Moves to it that can still be undone are aborted, and their keys stay where
they are. All others end here.

Guarantees   exactly once, per-key order, results equal to those of a run without the loss.
Price        the keys give no result from the loss until the destination has caught up: the records since their last
             increment are applied once more. Before that, increments: what changes, every few seconds.
No return    when the routers are told to replay. Before it an abort leaves the keys with nobody, until they are
             restored with another order: to another site, or from an older checkpoint. That is why each attempt has
             an epoch of its own. A router that cannot read its log again says so (Unreadable) in place of replaying,
             and the same holds.
If one dies  the lost one comes back: what it says is refused, and it drops the keys when it meets DISCARD. The
             destination: its inbox keeps everything; if it is lost for good, its own restoration takes these keys as
             well. A router replays its log, and repeats its appends. A gate is fenced before it answers. The
             coordinator repeats what its journal says; a destination that has everything takes no second load.
"""

from __future__ import annotations

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
from whimbrel.core.record import Aborted, Evicted, Kind, Opened, Ready, Rejected, RestoreOptions, Unreadable
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
    is_clear = not migration.has_begun or migration.has_heard(Aborted, migration.move.destination)
    return [] if is_clear else _call_off(migration)


def fence(migration: Migration, event: Ordered) -> Answer:
    """Ordered: whatever the lost one still says must not count."""
    return FENCING, _fence(migration)


def load(migration: Migration, event: Fenced) -> Answer:
    """It does not: what is delivered of the keys changes no more, and their logs are not trimmed."""
    return LOADING, _load(migration)


def loaded(migration: Migration, event: Loaded) -> Answer:
    """All versions are on their way. The first such answer counts: the destination may have taken that load."""
    if migration.since is None:
        migration.since, migration.keys = event.since, event.keys
        migration.state_bytes = migration.sent_bytes = event.size
    return _go_on(migration)


def ready(migration: Migration, event: Ready) -> Answer:
    """A part of the destination has its versions."""
    migration.hear(event)
    return _go_on(migration)


def _go_on(migration: Migration) -> Answer:
    if migration.since is not None and migration.has_heard(Ready, migration.move.destination):
        return REPLAYING, _replay(migration)
    return LOADING, []


def opened(migration: Migration, event: Opened) -> Answer:
    """A part of the destination has applied all that was replayed."""
    if not migration.has_heard_part(event):
        migration.replayed += event.replayed
        migration.silent += event.silent
    return (DONE if migration.hear(event) else REPLAYING), []


def evicted(migration: Migration, event: Evicted) -> Answer:
    """Somebody has dropped what it had of the keys; nobody waits for that."""
    migration.hear(event)
    return migration.phase, []


def abandon(migration: Migration, event: Abandoned | Rejected | Unreadable) -> Answer:
    """Out: the keys stay with nobody."""
    migration.reason = event.reason
    return ABORTED, _call_off(migration)


def cleared(migration: Migration, event: Aborted) -> Answer:
    """The destination has dropped what it had been sent."""
    migration.hear(event)
    return ABORTED, []


TABLE: Table = {
    (ORDERED, Ordered): fence,
    (FENCING, Fenced): load,
    (LOADING, Loaded): loaded,
    (LOADING, Ready): ready,
    (REPLAYING, Opened): opened,
    # the lost one is back
    **{(phase, Evicted): evicted for phase in (FENCING, LOADING, REPLAYING, DONE, ABORTED)},
    # out
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
