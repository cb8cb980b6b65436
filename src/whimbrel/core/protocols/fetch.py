"""`fetch`: the destination gets the keys' records at once, and requests the states it needs from the source (Meces).

::

    router ──BEGIN──────────────CUTOVER──▶ source       stops | CLOSED | sends requested units, and its backlog
           ──BEGIN──records─────CUTOVER──▶ destination  waits unit by unit, emits
      coordinator ──SWITCH──▶ both, ahead of their inboxes' backlog
             destination ──FETCH──▶ source ──parcels with backlog, PASSED, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ fetching ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The hierarchy: a bin is split into `split` units. A record's key is fetched as one unit, through the control lane, which
is read first. In addition the other bins follow, `step` at a time, each step after the last has arrived. A key with a
backlog at the source is sent without a request. A key has one holder at any time: the source drops what it ships.

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        a key produces no results from the switch until it has been requested and has arrived: three batches. Hot
             keys are requested first. Small units mean short waits, and more messages.
No return    at once: the destination may have emitted results. Use `live` if an abort must be possible.
On failure   as for `push`: requests and parcels stay in the inboxes until their readers are back.
"""

from __future__ import annotations

from whimbrel.core.options import FetchOptions
from whimbrel.core.protocols.switching import switching

FETCH = switching("fetch", moving="fetching", settling="settling", options=FetchOptions())
