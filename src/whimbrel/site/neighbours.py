"""The messages of the instances at a place, if every site owns its disk: into the inbox, if the destination is here,
else through the spool to its place.

An instance stays at its place for its whole life. So all messages from one to another take the same way, in order, and
nothing must be looked up when a link is cut or mended.
"""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.core.errors import Refused
from whimbrel.log.contract import Appendable, Lane, Log
from whimbrel.site.status import LinkStatus
from whimbrel.transport.routes import Routes


class Neighbours:
    """A `Network` of a place: instances here and at other places."""

    def __init__(self, routes: Routes, place_of: Callable[[str], str], inbox_of: Callable[[str], Log]) -> None:
        """`place_of`: an instance's place; raises `Unavailable` if it is not known yet. `inbox_of`: the inbox of an
        instance here."""
        self._routes, self._place_of, self._inbox_of = routes, place_of, inbox_of

    def start(self) -> None:
        self._routes.start()

    def stop(self) -> None:
        self._routes.stop()

    def inbox(self, source: str, destination: str) -> Appendable:
        """The control lane of an instance's inbox, for writes of another instance."""
        return _Inbox(self, destination)

    def way_to(self, destination: str) -> Appendable:
        """The inbox of an instance, or the way to it."""
        place = self._place_of(destination)
        if place == self._routes.here:
            return self._inbox_of(destination)
        return self._routes.log_at(place, f"inbox-{destination}")

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> int | None:
        """Append messages to an instance's inbox, behind all that `source`, an instance here, has sent to it."""
        return self.way_to(destination).append(
            blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL, replays=True
        )

    def look(self, instance: str) -> None:
        """An instance starts here: nothing of it is on another way."""

    def carry(self, origin: str, target: str, size: int) -> float:
        """A checkpoint does not move between places."""
        raise Refused(f"{origin} and {target} do not share a disk: move the keys, not the checkpoint")

    def cut(self, one: str, other: str, *, is_cut: bool = True) -> None:
        """Cut the emulated link to another place, or mend it."""
        self._routes.cut(other if one == self._routes.here else one, is_cut)

    def is_idle(self, origin: str | None = None) -> bool:
        """Whether no message is in transit."""
        return self._routes.is_idle

    @property
    def error(self) -> Exception | None:
        """The error that has stopped a way for good."""
        return self._routes.error()

    def status(self, origin: str | None = None) -> dict[str, LinkStatus]:
        """The links that begin here, with what messages have cost."""
        return links_of(self._routes)


class _Inbox:
    """An inbox for messages: its place is looked up at each append, as it may not be known at the start."""

    def __init__(self, neighbours: Neighbours, destination: str) -> None:
        self._neighbours, self._destination = neighbours, destination

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.CONTROL, replays: bool = False
    ) -> int | None:
        way = self._neighbours.way_to(self._destination)
        return way.append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL, replays=replays)


def links_of(routes: Routes) -> dict[str, LinkStatus]:
    """The links that begin at a place, by direction."""
    return {
        link.name: LinkStatus(link=str(link.link), cut=link.is_cut, sent_bytes=sent, under_way_bytes=waiting)
        for link, sent, waiting in routes.status().values()
    }
