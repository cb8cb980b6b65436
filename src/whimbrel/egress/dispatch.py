"""The dispatcher: sends the output of the instances at a place to the places that need it, and to no others.

    batch ──▶ results     to the place of each sink, or to the home of the next stage's key: its arrivals
          ├─▶ CLOSED      to every place that may receive results of the stage: each has a gate of its own
          ├─▶ reports     to the place's own log of reports, from where the orchestrator gets them
          └─▶ the rest    to the outlet here, which has read the batch

All appends have the instance as writer, and the position of a batch in its outbox as counter: an outlet that died reads
batches again, and the repeated appends change nothing. The outlet commits its position after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, get_args

from whimbrel.core import wire
from whimbrel.core.record import Checkpointed, Closed, Evicted, Notice, Opened, Outgoing, Parked, Report, Result
from whimbrel.log.carrier import encoded_outgoing, outbox_entries
from whimbrel.log.contract import Appendable

REPORTS = get_args(Report)


class Ways(Protocol):
    """Where the output of a stage goes, as seen from one place. The same input always gives the same answer."""

    here: str
    """This place."""
    receivers: Sequence[str]
    """All places that may receive results of the stage, or dead letters; maybe this one as well."""

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        """By place: the results that it gets, in their order."""

    def home_of(self, router: str) -> str:
        """The place of a router: it gets the dead letters of the router's keys."""


class Dispatcher:
    """Dispatches the output of one stage at one place."""

    def __init__(
        self,
        ways: Ways,
        arrivals_of: Callable[[str, str], Appendable],
        reports: Appendable,
        *,
        stores: bool = False,
    ) -> None:
        """`arrivals_of`: by place and instance, the log there for the instance's output. `stores`: there is a central
        store, whose increments the gates confirm."""
        self._ways, self._arrivals_of, self._reports = ways, arrivals_of, reports
        self._everywhere = (Closed, Opened, Evicted, Checkpointed) if stores else (Closed,)

    def dispatch(self, name: str, position: int, parts: list[Outgoing]) -> list[Outgoing]:
        """Send the output of one batch of an instance here, whose last piece is at this position of its outbox. Returns
        what the outlet here gets of it. If it raises, it is to be repeated."""
        reports = [notice for one in parts for notice in one.notices if isinstance(notice, REPORTS)]
        if reports:
            blob = wire.canonical(reports)
            self._reports.append(blob, count=len(reports), writer=name, counter=position, replays=True)
        here = self._ways.here
        if {*self._ways.receivers} == {here}:
            return parts
        by_place = self._sorted(parts)
        for place in sorted(by_place.keys() - {here}):
            append = partial(self._arrivals_of(place, name).append, writer=name, replays=True)
            outgoing = by_place[place]
            every, encoded = sum(len(one.results) for one in outgoing), list(map(encoded_outgoing, outgoing))
            for counter, blob, count in outbox_entries(position, encoded, every):
                append(blob, count=count, counter=counter)
        return by_place.get(here, [])

    def _sorted(self, outgoing: Sequence[Outgoing]) -> dict[str, list[Outgoing]]:
        """By place: what it gets of a batch, part by part; a part's notices stay behind its results."""
        found: dict[str, list[Outgoing]] = {}
        for one in outgoing:
            results = self._ways.split(one.results)
            for place in self._ways.receivers if one.notices else results:  # most have none, and places may be many
                notices = [notice for notice in one.notices if self._concerns(notice, place)]
                if notices or results.get(place):
                    some = Outgoing(results.get(place, []), notices, one.part, one.state_bytes)
                    found.setdefault(place, []).append(some)
        return found

    def _concerns(self, notice: Notice, place: str) -> bool:
        if isinstance(notice, Parked):
            return self._ways.home_of(notice.src) == place
        return isinstance(notice, self._everywhere)
