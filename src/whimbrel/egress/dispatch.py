"""The dispatcher: sends the output of the instances at a place to the places that need it, and to no others.

    outbox ──▶ results     to the place of each sink, or to the home of the next stage's key: its arrivals
           ├─▶ CLOSED      to every place that may receive results of the stage: each has a gate of its own
           └─▶ reports     to the place's own log of reports, from where the orchestrator gets them

The outlet of the dispatcher's own place reads the outbox itself. So if all receivers are here, only reports are copied,
and results are not even decoded.

All appends have the instance as writer and the position in its outbox as counter: a dispatcher that died repeats them,
and they change nothing. It commits its position, as a reader of the outbox, after the appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, get_args

import msgspec

from whimbrel.core import wire
from whimbrel.core.record import (
    Checkpointed,
    Closed,
    Evicted,
    Notice,
    Opened,
    OutboxEntry,
    Outgoing,
    Parked,
    Report,
    Result,
)
from whimbrel.log.carrier import encoded_outgoing, join_outgoing
from whimbrel.log.chunks import chunk
from whimbrel.log.contract import Appendable, Entry, Lane, Log

DISPATCHER = "dispatcher"
"""The reader of an outbox that sends its results elsewhere."""
REPORTS = get_args(Report)


class Ways(Protocol):
    """Where the output of a stage goes, as seen from one place. The same input always gives the same answer."""

    receivers: Sequence[str]
    """All other places that may receive results of the stage."""

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        """By other place: the results that it gets, in their order."""

    def home_of(self, router: str) -> str:
        """The place of a router: it gets the dead letters of the router's keys."""


class _Notices(msgspec.Struct, frozen=True, array_like=True):
    """An `Outgoing` whose results are left encoded."""

    results: msgspec.Raw
    notices: list[Notice]


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """An outbox entry whose results are left encoded."""

    outgoing: list[_Notices]


class Dispatcher:
    """Dispatches the outboxes of one stage at one place. Driven step by step."""

    def __init__(
        self,
        outboxes: Mapping[str, Log],
        ways: Ways,
        arrivals_of: Callable[[str, str], Appendable],
        reports: Appendable,
        *,
        stores: bool = False,
    ) -> None:
        """`outboxes`: by instance here; may change while it runs. `arrivals_of`: by place and instance, the log there
        for the instance's output. `stores`: there is a central store, whose increments the gates confirm."""
        self.outboxes, self._ways, self._arrivals_of, self._reports = outboxes, ways, arrivals_of, reports
        self._everywhere = (Closed, Opened, Evicted, Checkpointed) if stores else (Closed,)

    def step(self) -> bool:
        """Dispatch the new entries of every outbox, at most a chunk of each; return whether there were any. If it
        raises, the next step begins with the entry that failed."""
        worked = False
        for name, outbox in list(self.outboxes.items()):
            for entry in chunk(outbox, self.position(name)):
                self._dispatch(name, entry)
                outbox.commit(DISPATCHER, {Lane.DATA: entry.position + 1})
                worked = True
        return worked

    def position(self, name: str) -> int:
        """The first entry of an outbox that is not dispatched."""
        outbox = self.outboxes[name]
        return max(outbox.committed(DISPATCHER) or 0, outbox.head())

    @property
    def is_idle(self) -> bool:
        """Whether everything is dispatched."""
        return all(self.position(name) >= outbox.tail() for name, outbox in list(self.outboxes.items()))

    def _dispatch(self, name: str, entry: Entry) -> None:
        if self._ways.receivers:
            whole = wire.unpack(entry.blob, OutboxEntry)
            for place, outgoing in self._sorted(whole.outgoing).items():
                count = sum(len(one.results) for one in outgoing)
                blob = join_outgoing([encoded_outgoing(one) for one in outgoing], {}, {})
                self._arrivals_of(place, name).append(blob, count=count, writer=name, counter=entry.position)
            notices = [notice for one in whole.outgoing for notice in one.notices]
        else:
            notices = [notice for one in wire.unpack(entry.blob, _Entry).outgoing for notice in one.notices]
        reports = [notice for notice in notices if isinstance(notice, REPORTS)]
        if reports:
            blob = wire.canonical(reports)
            self._reports.append(blob, count=len(reports), writer=name, counter=entry.position)

    def _sorted(self, outgoing: Sequence[Outgoing]) -> dict[str, list[Outgoing]]:
        """By other place: what it gets of an entry, part by part; a part's notices stay behind its results."""
        found: dict[str, list[Outgoing]] = {}
        for one in outgoing:
            results = self._ways.split(one.results)
            for place in self._ways.receivers:
                notices = [notice for notice in one.notices if self._concerns(notice, place)]
                if notices or results.get(place):
                    some = Outgoing(results.get(place, []), notices, one.part, one.state_bytes)
                    found.setdefault(place, []).append(some)
        return found

    def _concerns(self, notice: Notice, place: str) -> bool:
        if isinstance(notice, Parked):
            return self._ways.home_of(notice.src) == place
        return isinstance(notice, self._everywhere)
