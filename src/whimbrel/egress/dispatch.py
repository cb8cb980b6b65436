"""The dispatcher: sends the output of the instances at a place to the places that need it, and to no others.

    outbox ──▶ results     to the place of each sink, or to the home of the next stage's key: its arrivals
           ├─▶ CLOSED      to every place that may receive results of the stage: each has a gate of its own
           └─▶ reports     to the place's own log of reports, from where the orchestrator gets them

The outlet of the dispatcher's own place reads the outbox itself. So if all receivers are here, only reports are copied.

All appends have the instance as writer, and the position of a batch in its outbox as counter: a dispatcher that died
repeats them, and they change nothing. It commits its position, as a reader of the outbox, after the appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, get_args

from whimbrel.core import wire
from whimbrel.core.record import (
    Checkpointed,
    Closed,
    Evicted,
    Notice,
    Opened,
    Outgoing,
    Parked,
    Report,
    Result,
)
from whimbrel.log.carrier import batches, encoded_outgoing, outbox_entries
from whimbrel.log.contract import Appendable, Lane, Log
from whimbrel.log.readers import next_of

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
            for end, parts in batches(outbox, next_of(outbox, DISPATCHER)):
                self._dispatch(name, end - 1, parts)
                outbox.commit(DISPATCHER, {Lane.DATA: end})
                worked = True
        return worked

    @property
    def is_idle(self) -> bool:
        """Whether everything is dispatched."""
        return all(next_of(outbox, DISPATCHER) >= outbox.tail() for outbox in list(self.outboxes.values()))

    def _dispatch(self, name: str, position: int, parts: Sequence[Outgoing]) -> None:
        """Send the output of one batch, whose last piece is at this position."""
        for place, outgoing in self._sorted(parts).items() if self._ways.receivers else ():
            append = partial(self._arrivals_of(place, name).append, writer=name)
            every, encoded = sum(len(one.results) for one in outgoing), list(map(encoded_outgoing, outgoing))
            for counter, blob, count in outbox_entries(position, encoded, every):
                append(blob, count=count, counter=counter)
        reports = [notice for one in parts for notice in one.notices if isinstance(notice, REPORTS)]
        if reports:
            blob = wire.canonical(reports)
            self._reports.append(blob, count=len(reports), writer=name, counter=position)

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
