"""The links between sites: the path of messages, their delay and bytes, and cut links.

    same site, or an ideal link     directly into the inbox
    any other link, or a cut one    through the spool of a forwarder, one for each direction

Messages of one instance to another stay in order: as long as some are in a spool, later ones go through the same spool,
even if one of the two runs at another site by now, or the link is mended. If each site is a process, that spool's
forwarder may run in another one; it reads what is appended here.
The gateway has no site: its appends use no link.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Protocol

from whimbrel.core.errors import Refused, Unavailable, UnknownName
from whimbrel.core.link import Line, Link
from whimbrel.log import EmbeddedLog, Lane, Log
from whimbrel.log.codec import messages
from whimbrel.log.contract import Appendable
from whimbrel.site.forwarder import Forwarder, LinkSpool, Sending, size_of
from whimbrel.site.status import LinkStatus

Pair = tuple[str, str]
"""From one site to another."""
Given = Mapping[Pair, Link | str] | Link | str
"""The links as a user specifies them: one for all, or by pairs of sites."""


def links_of(sites: Sequence[str], given: Given) -> dict[Pair, Link]:
    """The link of each two sites, in both directions; ideal where none is given. Raises `Refused` if invalid."""
    pairs = list(permutations(sites, 2))
    if len({_name(pair) for pair in pairs}) < len(pairs):
        raise Refused(
            f"the sites {', '.join(sites)} have names that become ambiguous when joined by a dash; rename one"
        )
    if isinstance(given, (Link, str)):
        return dict.fromkeys(pairs, _link(given))
    links: dict[Pair, Link] = {}
    for pair, link in given.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise Refused(f"a link is between two sites: give pairs like ('cloud', 'edge-1'), not {pair!r}")
        check_pair(sites, *pair)
        if pair in links:
            raise Refused(f"the link between {pair[0]} and {pair[1]} is given twice; it is the same in both directions")
        links[pair] = links[pair[::-1]] = _link(link)
    return {pair: links.get(pair, Link()) for pair in pairs}


def _name(pair: Pair) -> str:
    return "-".join(pair)


def _link(given: Link | str) -> Link:
    return given if isinstance(given, Link) else Link.parse(given)


def check_pair(sites: Sequence[str], one: str, other: str) -> None:
    """Raise unless these are two different known sites."""
    for site in (one, other):
        if site not in sites:
            raise UnknownName("site", site, list(sites))
    if one == other:
        raise Refused(f"a link is between two sites, not between {one} and itself")


class Network(Protocol):
    """What a site needs of the links that begin there: `Links`, or `Neighbours` (neighbours.py) if each site owns its
    disk."""

    def inbox(self, source: str, destination: str) -> Appendable:
        """The control lane of an instance's inbox, for writes of another instance, here."""

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> int | None:
        """Append messages to an instance's inbox, behind all that `source` has sent to it."""

    def look(self, instance: str) -> None:
        """An instance starts here."""

    def carry(self, origin: str, target: str, size: int) -> float:
        """The seconds that a checkpoint of `size` bytes takes between two sites."""

    def cut(self, one: str, other: str, *, is_cut: bool = True) -> None:
        """Cut the link between two sites, or mend it."""

    def is_idle(self, origin: str | None = None) -> bool:
        """Whether no message is in transit."""

    @property
    def error(self) -> Exception | None:
        """The error that has stopped a link for good."""

    def status(self, origin: str | None = None) -> dict[str, LinkStatus]:
        """The status of each direction that begins here."""


class Spools(Protocol):
    """The spools of the links, by pair: the one from the first site to the second."""

    def has(self, pair: Pair) -> bool:
        """Whether there is a spool."""

    def open(self, pair: Pair) -> Log:
        """The spool, which is created if there is none."""


class SpoolFolder:
    """The spools as files of a folder. `durable`: they survive a power failure."""

    def __init__(self, folder: Path, durable: bool = False) -> None:
        self._folder, self._durable = folder, durable

    def has(self, pair: Pair) -> bool:
        return self._path(pair).exists()

    def open(self, pair: Pair) -> Log:
        return EmbeddedLog(self._path(pair), durable=self._durable)

    def _path(self, pair: Pair) -> Path:
        return self._folder / f"link-{_name(pair)}.db"


class Links:
    """The links of an application: all, or those that begin `here`."""

    def __init__(
        self,
        sites: Sequence[str],
        given: Given,
        spools: Spools,
        site_of: Callable[[str], str],
        inbox_of: Callable[[str], Log],
        here: Collection[str] | None = None,
    ) -> None:
        self._sites, self._links, self._spools = sites, links_of(sites, given), spools
        self._here = sites if here is None else here
        self._site_of, self._inbox_of = site_of, inbox_of
        self._forwarders: dict[Pair, Forwarder] = {}
        self._direct: Counter[Pair] = Counter()
        self._last: dict[Pair, tuple[LinkSpool, float]] = {}
        """By source and destination instance: the spool of their last messages, and the position after them."""
        self._seen: set[str] = set()
        """Instances whose messages in transit are known."""
        self._lock = threading.Lock()
        self._running = False
        for pair, link in self._links.items():
            if pair[0] in self._here and (not link.is_ideal or self._spools.has(pair)):
                self._forwarder(pair)

    def start(self) -> None:
        """Start delivering, first the messages that an earlier run left in the spools."""
        self._running = True
        for forwarder in self._forwarders.values():
            forwarder.start()

    def stop(self) -> None:
        """Stop; messages in transit are delivered after the next start."""
        for forwarder in self._forwarders.values():
            forwarder.stop()

    def step(self, now_us: int) -> None:
        """Deliver what is due at this moment, in place of the threads that `start` runs. Raises `Retry` if a log is
        unavailable; the other links then wait for the next call."""
        for forwarder in self._forwarders.values():
            forwarder.step(now_us)

    def link(self, origin: str, target: str) -> Link:
        """The link between two sites, which may be the same."""
        return self._links.get((origin, target), Link())

    # ── Paths of messages ───────────────────────────────────────────────────────────────────────────────────────────

    def inbox(self, source: str, destination: str) -> LinkedInbox:
        """The control lane of an instance's inbox, for writes of another instance."""
        return LinkedInbox(self, source, destination)

    def send(
        self,
        source: str,
        destination: str,
        blob: bytes,
        count: int,
        writer: str,
        counter: int,
        replays: bool = False,
    ) -> int | None:
        """Append messages of an instance to another one's inbox, at once or through the link's spool. `counter`: the
        number of the last one. `replays`: see log/contract.py."""
        if source not in self._seen:
            self.look(source)
        pair = (self._site_of(source), self._site_of(destination))
        way = self._way(source, destination, pair)
        if way is None:
            inbox = self._inbox_of(destination)
            if self._spools.has(pair) and inbox.counter(writer, Lane.CONTROL) >= counter:
                return None  # it came through the spool, maybe in pieces: not comparable with the whole
            at = inbox.append(blob, count=count, writer=writer, counter=counter, lane=Lane.CONTROL, replays=replays)
            if at is not None and pair[0] != pair[1]:
                with self._lock:
                    self._direct[pair] += size_of(messages(blob))
            return at
        # An append that raises may have succeeded nevertheless.
        self._last[source, destination] = way, math.inf
        at = way.append(Sending(source, destination, writer, counter, blob), replays)
        self._last[source, destination] = way, way.tail()
        return at

    def _way(self, source: str, destination: str, pair: Pair) -> LinkSpool | None:
        last, end = self._last.get((source, destination), (None, 0))
        if last is not None and last.done < end:
            return last
        forwarder = self._forwarders.get(pair)
        return forwarder if forwarder and (forwarder.is_cut or not forwarder.link.is_ideal) else None

    def look(self, instance: str) -> None:
        """An instance starts here, or messages are sent in its name: find its messages in transit on links that begin
        elsewhere."""
        self._seen.add(instance)
        for pair in self._links:
            if pair[0] not in self._here and self._spools.has(pair):
                self._note(LinkSpool(self._spools.open(pair)), instance)

    def _note(self, spool: LinkSpool, source: str | None = None) -> None:
        for position, sending in spool.sendings():
            if source in (None, sending.source):
                self._last[sending.source, sending.destination] = spool, position + 1

    def _forwarder(self, pair: Pair) -> Forwarder:
        if pair not in self._forwarders:
            forwarder = Forwarder(_name(pair), self._links[pair], self._spools.open(pair), self._inbox_of)
            self._note(forwarder)
            self._forwarders[pair] = forwarder
            if self._running:
                forwarder.start()
        return self._forwarders[pair]

    # ── Cuts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def cut(self, one: str, other: str, *, is_cut: bool = True) -> None:
        """Cut the link between two sites, in both directions, until it is mended (`is_cut=False`)."""
        check_pair(self._sites, one, other)
        for pair in ((one, other), (other, one)):
            if pair[0] in self._here and (is_cut or pair in self._forwarders):
                self._forwarder(pair).cut(is_cut)

    def carry(self, origin: str, target: str, size: int) -> float:
        """The seconds that a checkpoint of `size` bytes takes between two sites; it is counted as sent.

        The caller copies it on one disk at once, and waits for the time that a real link would take.
        """
        if origin == target:
            return 0.0
        if self.is_cut(origin, target):
            raise Unavailable(f"the link between {origin} and {target} is cut; mend it, or move later")
        with self._lock:
            self._direct[origin, target] += size
        return self.link(origin, target).send(size, 0, Line(), Random(size)).arrives_us / 1_000_000

    def is_cut(self, one: str, other: str) -> bool:
        """Whether the link between two sites is cut."""
        forwarder = self._forwarders.get((one, other))
        return forwarder is not None and forwarder.is_cut

    # ── Monitoring ───────────────────────────────────────────────────────────────────────────────────────────────

    def is_idle(self, origin: str | None = None) -> bool:
        """Whether no message is in transit, on all links or on those that begin at a site."""
        forwarders = list(self._forwarders.items())
        return all(forwarder.is_idle for pair, forwarder in forwarders if origin in (None, pair[0]))

    @property
    def error(self) -> Exception | None:
        """The error that has stopped a link permanently."""
        return next((one.error for one in list(self._forwarders.values()) if one.error), None)

    def status(self, origin: str | None = None) -> dict[str, LinkStatus]:
        """The status of each direction that has sent something or has a forwarder; or only of those from a site."""
        found = {}
        for pair, link in self._links.items():
            forwarder, direct = self._forwarders.get(pair), self._direct[pair]
            if (forwarder or direct) and origin in (None, pair[0]):
                found["->".join(pair)] = LinkStatus(
                    link=str(link),
                    cut=forwarder is not None and forwarder.is_cut,
                    sent_bytes=direct + (forwarder.sent if forwarder else 0),
                    under_way_bytes=forwarder.under_way if forwarder else 0,
                )
        return found


class LinkedInbox:
    """An inbox at the far end of a link, if there is one between: for messages, so only its control lane can be
    written."""

    def __init__(self, links: Links, source: str, destination: str) -> None:
        self._links, self._source, self._destination = links, source, destination

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.CONTROL, replays: bool = False
    ) -> int | None:
        return self._links.send(self._source, self._destination, blob, count, writer, counter, replays)
