"""Reading a gateway's log again for a restoration: the destination gets the records that its versions lack.

Most of the log is read before RESTORE is appended, without blocking other calls; only the last piece is read while
records wait. Each replayed entry is appended under its own counter, so that an interrupted replay goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.core.errors import Stop
from whimbrel.core.router import Restore, Router
from whimbrel.gateway.ingress import stored, writer_of
from whimbrel.log.chunks import chunked, reach
from whimbrel.log.codec import ROWS, Codec
from whimbrel.log.contract import Log, Writable


class Replay:
    """The replays of one ingress log."""

    def __init__(self, name: str, ingress: Log, inbox_of: Callable[[str], Writable], encoding: Codec) -> None:
        self._name, self._ingress, self._inbox_of, self._codec = name, ingress, inbox_of, encoding

    def ahead(self, command: Restore, router: Callable[[], Router]) -> None:
        """Before RESTORE is appended: replay all but the last piece of the log. The replayed records are of keys that
        have no owner, so they may come between any other records. `router`: it may be rebuilt meanwhile."""
        start = self.first(command)
        while self.is_new(command, router()) and (end := reach(self._ingress, start)) < self._ingress.tail():
            self._send(command, router(), start, end)
            start = end

    def rest(self, command: Restore, router: Router, end: int) -> None:
        """Append the records that the destination of a restoration still lacks to its inbox. Raises a `Stop` if they
        cannot be read, or could not before: a refusal is final, even if the inbox has received records since."""
        if self._ingress.counter(writer_of(command)) > 0:
            raise Stop("an earlier attempt could not read them")
        given = self._inbox_of(command.move.destination).counter(self._name)
        if given // ROWS < end:  # otherwise the inbox has CUTOVER, after all of them
            self._send(command, router, self.first(command), end)

    def first(self, command: Restore) -> int:
        """The position from which a restoration reads on: after what its destination has received already."""
        given = self._inbox_of(command.move.destination).counter(f"{self._name}/{command.move.id}")
        return max(command.since.get(self._name, 0) // ROWS, given + 1)

    def is_new(self, command: Restore, router: Router) -> bool:
        """Whether a restoration must be replayed, and is not in the log yet."""
        return router.replays(command) and self._ingress.counter(writer_of(command)) < 0

    def _send(self, command: Restore, router: Router, start: int, end: int) -> None:
        inbox, writer = self._inbox_of(command.move.destination), f"{self._name}/{command.move.id}"
        for entry in chunked(self._ingress, start, end):
            records = router.replayed(command, stored(entry.position, self._codec.records(entry)))
            if records:
                blob = self._codec.encode(records)
                inbox.append(blob, count=len(records), writer=writer, counter=entry.position)
