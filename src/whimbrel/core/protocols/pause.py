"""`pause`: the routers hold the keys' records while the state travels; if the destination fails, the source continues
(Gomm's migration of processing elements with rollback; SEEP, Flux, StreamCloud).

::

    router ──BEGIN (hold)─────────CUTOVER──────────────▶ source       drains, ships | CLOSED
           ──BEGIN (hold)─────────CUTOVER, held records─▶ destination  installs      | emits
                  source ──parcels, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ holding ─Ready (all parts)─▶ releasing ─Left and Opened (all parts)─▶ done
                          └────Abandoned─▶ resuming ─Aborted (source)─▶ aborted

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        the moving keys produce no results from BEGIN until their state is installed: the stoppage grows with the
             state size and the link delay. No record travels twice.
No return    when CUTOVER is ordered. Before it an abort costs the pause so far: the held records go to the source,
             which has dropped nothing.
On failure   as for `live`; but while source or destination is down the keys are blocked, until it is back or a
             deadline aborts the move.
"""

from __future__ import annotations

from whimbrel.core.protocols.handover import handover

PAUSE = handover("pause", preparing="holding", committing="releasing", undoing="resuming", hold=True)
