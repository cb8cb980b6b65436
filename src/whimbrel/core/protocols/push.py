"""`push`: the destination gets the keys' records at once; the source sends the states after them, in the order in which
they are needed, each with what waited for it (PAM).

::

    router ──BEGIN──hints───────CUTOVER──▶ source       stops | CLOSED | ships key by key, sends its backlog on
           ──BEGIN──records─────CUTOVER──▶ destination  waits key by key, emits
      coordinator ──SWITCH──▶ both, ahead of all that waits in their inboxes
                  source ──parcels with backlog, PASSED, SHIPPED──▶ destination ──READY──▶ coordinator

    ordered ─Ordered─▶ pushing ─Ready (all parts)─▶ settling ─Left and Opened (all parts)─▶ done

The source decides the order alone, nobody asks: keys with a backlog first, in the order of arrival and the heaviest of
those that came together; then keys of which a router says that a record has gone to the destination (hints: names, no
records); then those seen last. `order="key"` takes them by name instead, to be compared with.

Guarantees   exactly once, per-key order, results equal to those of a run without the move.
Price        a key gives no result from the switch until its own state is there: two batches for the keys in use, the
             whole transfer only for those that nobody uses. Its records wait at the destination.
             Meant for a source that has fallen behind: what waits there is not applied there any more.
No return    at once: the destination may have answered. Who wants a way back takes `live`.
If one dies  its inbox keeps everything, and it goes on where its checkpoint stands; the keys that have not arrived
             stand still until then. A router replays its log. The coordinator repeats what its journal says.
"""

from __future__ import annotations

from whimbrel.core.protocols.switching import switching
from whimbrel.core.record import PushOptions

PUSH = switching("push", moving="pushing", settling="settling", options=PushOptions())
