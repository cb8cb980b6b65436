"""A place among others, as its own gateway sees it (`Surroundings`): the layout says what is where, the routes how to
get there. And what others may append here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.keys import KeyMap
from whimbrel.core.names import place_of as place_of_router
from whimbrel.log.backoff import HeldUp
from whimbrel.log.contract import Appendable, Lane, Writable
from whimbrel.log.folder import Logs
from whimbrel.roles.flow import StageFlow
from whimbrel.site.neighbours import links_of
from whimbrel.site.status import LinkStatus
from whimbrel.transport.routes import Routes
from whimbrel.transport.spool import OutgoingSpool, RemoteLog

INBOX, ARRIVALS, DOOR = "inbox-", "arrivals-", "door-"
"""The logs that others append to, by the beginning of their names; the rest is an instance or a stage."""


class Neighbourhood:
    """A place of several."""

    def __init__(
        self,
        here: str,
        places: Sequence[str],
        homes: Mapping[str, KeyMap[str]],
        routes: Routes,
        messages: Mapping[str, OutgoingSpool],
    ) -> None:
        """`homes`: by stage, the place that is each key's home. `routes`: of records. `messages`: by other place, the
        spool of messages, which the site sends."""
        self.here, self.places, self._homes, self._routes, self._messages = here, places, homes, routes, messages

    def homes(self, stage: str) -> KeyMap[str]:
        return self._homes[stage]

    def place_of(self, site: str) -> str:
        return site  # a place has one site, of its name

    def first_instance(self, stage: str) -> str:
        return f"{stage}-{list(self.places).index(self.here) + 1}"

    def log_at(self, place: str, name: str) -> Writable:
        return self._routes.log_at(place, name)

    def messages_at(self, place: str, name: str) -> Writable:
        return RemoteLog(self._messages[place], name)

    @property
    def is_idle(self) -> bool:
        return self._routes.is_idle

    def cut(self, other: str, is_cut: bool) -> None:
        self._routes.cut(other, is_cut)

    def links(self) -> Mapping[str, LinkStatus]:
        return links_of(self._routes)

    def held_up(self) -> Mapping[str, HeldUp]:
        return self._routes.held_up()

    def error(self) -> Exception | None:
        return self._routes.error()


class Reception:
    """What other places append here: which log a name means, and who may append to it as whom."""

    def __init__(self, here: str, flows: Mapping[str, StageFlow], logs: Logs, is_full: Callable[[], bool]) -> None:
        self._here, self._flows, self._logs, self._is_full = here, flows, logs, is_full

    def log_of(self, name: str) -> Appendable:
        """The log with this name. Raises `Unavailable` if nothing can be appended to it now."""
        if name.startswith(DOOR):
            if self._is_full():
                raise Unavailable(f"{self._here} takes in nothing for now: an inbox or the disk is full")
            return self._flows[name.removeprefix(DOOR)].door
        if name.startswith(INBOX):
            return self._logs.inbox(name.removeprefix(INBOX))
        return self._logs.arrivals(name.removeprefix(ARRIVALS))

    def may_append(self, caller: str, log: str, lane: Lane, writer: str) -> bool:
        """Whether a place may append to a log here in a writer's name. Raises `Unavailable` if that is not known yet,
        `Refused` if there is no such log."""
        if log.startswith(DOOR):
            return log.removeprefix(DOOR) in self._flows and lane == Lane.DATA and writer.endswith(f"@{caller}")
        if log.startswith(ARRIVALS):
            instance = log.removeprefix(ARRIVALS)
            return lane == Lane.DATA and writer == instance and self._place_of(instance) == caller
        if not log.startswith(INBOX):
            raise Refused(f"{self._here} has no log {log!r} for others")
        instance = log.removeprefix(INBOX)
        if self._place_of(instance) != self._here:
            return False
        if lane == Lane.DATA:  # a router of the stage, or one that replays for a restoration
            return place_of_router(writer.partition("/")[0]) == caller
        source = writer.partition("@")[0]
        # What the orchestrator sends in an instance's name goes the way of that instance's messages.
        return writer.startswith("coordinator/") or self._place_of(source) == caller

    def _place_of(self, instance: str) -> str:
        stage = instance.rpartition("-")[0]
        if stage not in self._flows:
            raise Refused(f"{self._here} knows no instance {instance!r}: its pipeline has no stage {stage!r}")
        return self._flows[stage].place_of(instance)
