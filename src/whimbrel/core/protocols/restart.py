"""`restart`: stop the query, copy its checkpoint, start it at the other site: the baseline of today's systems
(Spark, Flink, Storm, Heron).

::

    coordinator ──stop──▶ site A ──copy──▶ site B ──start──▶ the same instance, at B

    ordered ─Ordered─▶ stopping ─Stopped─▶ copying ─Copied─▶ starting ─Started (there)─▶ done
                           └──────Abandoned─────┴──────Failed──┴─▶ returning ─Started (here)─▶ aborted

A whole instance moves, with its inbox: routes and epochs do not change, and none of its keys is served meanwhile.

Guarantees   exactly once, per-key order: the instance continues from its checkpoint, in the same inbox.
Price        no key of the instance is served from the stop until the query has started again.
No return    when the start is ordered: from then on the instance may have run there, and the old checkpoint is stale.
             Before it, an abort starts the instance at the origin again; after it, only if the target itself reports,
             from its disk, that no batch has run there. An unreachable target proves nothing.
On failure   the origin: its checkpoint is copied from its disk all the same. The target: before the start is ordered,
             back to the origin; after that, the start is retried until it is back. The coordinator: it reads the phase
             from its journal and repeats its command; stopping, copying and starting are idempotent.
"""

from __future__ import annotations

from whimbrel.core.options import RestartOptions
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Answer,
    Command,
    Copied,
    CopyCheckpoint,
    Failed,
    Migration,
    Ordered,
    Protocol,
    Started,
    StartInstance,
    StopInstance,
    Stopped,
    Table,
    abandon_unbegun,
    late,
)

STOPPING, COPYING, STARTING, RETURNING = "stopping", "copying", "starting", "returning"


def _stop(migration: Migration) -> list[Command]:
    return [StopInstance(migration.move.source)]


def _copy(migration: Migration) -> list[Command]:
    return [CopyCheckpoint(migration.move.source, migration.to_site)]


def _start_there(migration: Migration) -> list[Command]:
    return [StartInstance(migration.move.source, migration.to_site)]


def _start_here(migration: Migration) -> list[Command]:
    return [StartInstance(migration.move.source, migration.from_site)]


def stop(migration: Migration, event: Ordered) -> Answer:
    """Ordered: the query must stop first."""
    return STOPPING, _stop(migration)


def copy(migration: Migration, event: Stopped) -> Answer:
    """The query has stopped: its checkpoint no longer changes."""
    return COPYING, _copy(migration)


def start(migration: Migration, event: Copied) -> Answer:
    """The checkpoint is at the target."""
    migration.state_bytes = migration.sent_bytes = event.size
    return STARTING, _start_there(migration)


def started(migration: Migration, event: Started) -> Answer:
    """The instance runs at the target."""
    return (DONE, []) if event.site == migration.to_site else (STARTING, [])


def go_back(migration: Migration, event: Abandoned | Failed) -> Answer:
    """Abort: start the instance at the origin."""
    migration.reason = event.reason
    return RETURNING, _start_here(migration)


def go_back_again(migration: Migration, event: Failed) -> Answer:
    """The start at the origin failed: retry, because there is no other site."""
    return RETURNING, _start_here(migration)


def returned(migration: Migration, event: Started) -> Answer:
    """The instance runs at the origin."""
    return (ABORTED, []) if event.site == migration.from_site else (RETURNING, [])


TABLE: Table = {
    (ORDERED, Ordered): stop,
    (STOPPING, Stopped): copy,
    (COPYING, Copied): start,
    (STARTING, Started): started,
    # abort
    (ORDERED, Abandoned): abandon_unbegun,
    (STOPPING, Abandoned): go_back,
    (COPYING, Abandoned): go_back,
    (COPYING, Failed): go_back,
    (STARTING, Failed): go_back,
    (RETURNING, Started): returned,
    (RETURNING, Failed): go_back_again,
}
TABLE |= late(
    {
        STOPPING: (Ordered,),
        COPYING: (Ordered, Stopped),
        STARTING: (Ordered, Stopped, Copied, Abandoned),
        RETURNING: (Ordered, Stopped, Copied, Abandoned),
        DONE: (Ordered, Stopped, Copied, Started, Abandoned),
        ABORTED: (Ordered, Stopped, Copied, Started, Abandoned, Failed),
    }
)

RESTART = Protocol(
    name="restart",
    table=TABLE,
    resume={STOPPING: _stop, COPYING: _copy, STARTING: _start_there, RETURNING: _start_here},
    options=RestartOptions(),
)
