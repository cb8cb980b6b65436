"""The ways from this place to all others, of one class: to each a spool, a sender, and the link it goes through.

A process of a place has one such object: the gateway's carries records, the site's carries messages with state. Nobody
else sends what its spools hold. Spools outlive the process: what one run has not sent, the next one sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from whimbrel.core.errors import UnknownName
from whimbrel.core.link import Link
from whimbrel.log.backoff import HeldUp
from whimbrel.log.embedded import EmbeddedLog
from whimbrel.log.large import LargeEntries
from whimbrel.log.private import below
from whimbrel.transport.connection import Connect
from whimbrel.transport.emulated import EmulatedLink
from whimbrel.transport.spool import OutgoingSpool, Owner, RemoteLog
from whimbrel.transport.threaded import ThreadedSender, now_us


class Routes:
    """The ways from one place to the others."""

    def __init__(
        self,
        deployment: str,
        here: str,
        kind: str,
        folder: Path,
        connect_to: Mapping[str, Connect],
        links: Mapping[str, Link],
        durable: bool = False,
    ) -> None:
        """`folder`: of the spools. `connect_to`: by other place, how to reach it. `links`: by other place, the link
        that is emulated on the way."""
        self.here = here
        self._spools: dict[str, OutgoingSpool] = {}
        self._links: dict[str, EmulatedLink] = {}
        self._senders: dict[str, ThreadedSender] = {}
        for there, connect in connect_to.items():
            spool = spool_to(Owner(deployment, here, there, kind), folder, durable)
            link = EmulatedLink(f"{here}->{there}", links[there], connect, now_us)
            self._spools[there], self._links[there] = spool, link
            self._senders[there] = ThreadedSender(spool, link.connect)

    def start(self) -> None:
        """Start sending, first what an earlier run has left."""
        for sender in self._senders.values():
            sender.start()

    def stop(self) -> None:
        """Stop; the rest is sent after the next start."""
        for sender in self._senders.values():
            sender.stop()
        for spool in self._spools.values():
            spool.close()

    def log_at(self, place: str, name: str) -> RemoteLog:
        """A log of another place."""
        if place not in self._spools:
            raise UnknownName("place", place, list(self._spools))
        return RemoteLog(self._spools[place], name)

    def cut(self, other: str, is_cut: bool) -> None:
        """Cut the emulated link to another place, or mend it."""
        if other not in self._links:
            raise UnknownName("place", other, list(self._links))
        self._links[other].cut(is_cut)

    # ── Monitoring ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_idle(self) -> bool:
        """Whether the other places have everything that was appended to their logs."""
        return all(spool.is_empty for spool in self._spools.values())

    def status(self) -> dict[str, tuple[EmulatedLink, int, int]]:
        """By other place: the link, bytes sent since the start, bytes that are not acknowledged."""
        return {
            there: (link, self._senders[there].sender.sent, self._spools[there].waiting)
            for there, link in self._links.items()
        }

    def held_up(self) -> dict[str, HeldUp]:
        """What cannot be sent now, and why."""
        found = {}
        for there, sender in self._senders.items():
            held = sender.sender.held_up()
            if held is not None:
                found[f"sending to {there}"] = held
        return found

    def error(self) -> Exception | None:
        """Why nothing more is sent to a place, for good."""
        return next((sender.error for sender in self._senders.values() if sender.error is not None), None)


def spool_to(owner: Owner, folder: Path, durable: bool = False) -> OutgoingSpool:
    """The spool of a class to a place, in the folder of all spools."""
    name = f"to-{owner.there}-{owner.kind}"
    log = EmbeddedLog(below(folder, f"{name}.db"), durable=durable)
    return OutgoingSpool(log, owner, large=LargeEntries(below(folder, name), durable))
