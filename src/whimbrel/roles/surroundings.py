"""Where a gateway stands among the places of its deployment: what is here, what is elsewhere, and how to get there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from whimbrel.core.errors import UnknownName
from whimbrel.core.keys import KeyMap
from whimbrel.log.backoff import HeldUp
from whimbrel.log.contract import Writable
from whimbrel.site.status import LinkStatus


class Surroundings(Protocol):
    """A place, as its own gateway sees it."""

    @property
    def here(self) -> str:
        """This place."""

    @property
    def places(self) -> Sequence[str]:
        """All places of the deployment, this one among them."""

    def homes(self, stage: str) -> KeyMap[str]:
        """The home of each key of a stage."""

    def place_of(self, site: str) -> str:
        """The place of a site."""

    def first_instance(self, stage: str) -> str:
        """The instance that owns the keys at home here, until they are moved."""

    def log_at(self, place: str, name: str) -> Writable:
        """A log of another place."""

    def messages_at(self, place: str, name: str) -> Writable:
        """A log of another place, as the instances here send messages to it; to be asked what they have sent."""

    @property
    def is_idle(self) -> bool:
        """Whether the other places have everything that was appended to their logs from here."""

    def cut(self, other: str, is_cut: bool) -> None:
        """Cut the emulated link to another place, or mend it."""

    def links(self) -> Mapping[str, LinkStatus]:
        """The links that begin here, by direction: `edge-1->cloud`."""

    def held_up(self) -> Mapping[str, HeldUp]:
        """The places to which nothing can be sent at the moment, and why."""

    def error(self) -> Exception | None:
        """Why nothing more is sent to a place, for good."""


class Alone:
    """The only place of a deployment, which has no name: all sites share its disk, and no log is elsewhere."""

    here = ""
    places = ("",)
    is_idle = True

    def homes(self, stage: str) -> KeyMap[str]:
        return KeyMap("")

    def place_of(self, site: str) -> str:
        return ""

    def first_instance(self, stage: str) -> str:
        return f"{stage}-1"

    def log_at(self, place: str, name: str) -> Writable:
        raise UnknownName("place", place, [])

    messages_at = log_at

    def cut(self, other: str, is_cut: bool) -> None:
        raise UnknownName("place", other, [])

    def links(self) -> Mapping[str, LinkStatus]:
        return {}

    def held_up(self) -> Mapping[str, HeldUp]:
        return {}

    def error(self) -> Exception | None:
        return None


ALONE = Alone()
