"""`push`: the destination gets the keys' records at once; the source sends the states after them, in the order in which
they are needed, each with its backlog (PAM).

::

    router ──BEGIN──hints───────CUTOVER──▶ source       stops | CLOSED | ships key by key, forwards its backlog
           ──BEGIN──records─────CUTOVER──▶ destination  waits key by key, emits
      coordinator ──SWITCH──▶ both, ahead of their inboxes' backlog
                  source ──parcels with backlog, PASSED, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ pushing ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The source alone decides the order, without requests: first keys with a backlog, in the order of arrival, and within one
log entry the largest backlog first; then keys for which a router sent a HINT that a record has gone to the destination
(only the key, not the record); then the last used first. `order="key"` sorts by key instead, as a baseline.

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        a key produces no results from the switch until its own state arrives: two batches for keys in use, the
             whole transfer only for unused keys. Its records wait at the destination.
             Intended for a source that has fallen behind: it no longer applies its backlog of these keys.
No return    at once: the destination may have emitted results. Use `live` if an abort must be possible.
On failure   source or destination: its inbox retains all records, and it continues from its checkpoint; keys that have
             not arrived are blocked until then. A router replays its log. The coordinator repeats journalled commands.
"""

from __future__ import annotations

from whimbrel.core.options import PushOptions
from whimbrel.core.protocols.switching import switching

PUSH = switching("push", moving="pushing", settling="settling", options=PushOptions())
