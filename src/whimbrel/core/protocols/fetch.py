"""`fetch`: the destination gets the keys' records at once, and asks the source for the states it needs (Meces).

::

    router ──BEGIN──────────────CUTOVER──▶ source       stops | CLOSED | sends what is asked for, and its backlog
           ──BEGIN──records─────CUTOVER──▶ destination  waits unit by unit, emits
      coordinator ──SWITCH──▶ both, ahead of all that waits in their inboxes
             destination ──FETCH──▶ source ──parcels with backlog, PASSED, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ fetching ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The hierarchy: a bin is cut into `split` units. What a record needs is fetched as one unit, through the control lane,
which is served first. Beside that the rest follows, `step` bins at a time, each step after the last has come. A key
with a backlog at the source goes unasked. One holder at any time: the source forgets what it ships.

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        a key gives no result from the switch until it has been asked for and has come: three batches. Hot keys
             come first by themselves. Small units make short waits, and more messages.
No return    at once: the destination may have answered. Who wants a way back takes `live`.
If one dies  as for `push`: questions and parcels lie in the inboxes until their readers are back.
"""

from __future__ import annotations

from whimbrel.core.protocols.switching import switching
from whimbrel.core.record import FetchOptions

FETCH = switching("fetch", moving="fetching", settling="settling", options=FetchOptions())
