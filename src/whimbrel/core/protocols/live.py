"""`live`: keys change their owner while both instances run, and neither waits for the other (Falcon).

::

    router ──BEGIN─────────────────────────CUTOVER──▶ source       applies and emits ................. | CLOSED
           ──BEGIN─────────────────────────CUTOVER──▶ destination  buffers, installs, follows silently | emits
                  source ──parcels, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ copying ─Ready (all parts)─▶ cutting ─Left and Opened (all parts)─▶ done
                          └────Abandoned─▶ aborting ─Aborted (source)─▶ aborted

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        records of the moving keys travel and are applied twice between BEGIN and CUTOVER.
No return    when CUTOVER is ordered. Before it, an abort costs nothing: the source never stopped.
On failure   source or destination: its inbox retains all records, and it continues from its checkpoint; before CUTOVER
             a deadline may abort the move. A router: it replays its ingress log and repeats its appends, which the
             inboxes deduplicate. The coordinator: it reads the phase from its journal and repeats its commands.
"""

from __future__ import annotations

from whimbrel.core.protocols.handover import handover

LIVE = handover("live", preparing="copying", committing="cutting", undoing="aborting", hold=False)
