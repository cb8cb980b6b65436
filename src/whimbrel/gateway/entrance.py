"""The entrance of a place: the rows of a source here go to the homes of their keys.

    rows ──▶ entrance ──▶ gateway here            keys whose home is here
                    └───▶ log of another place ──▶ door ──▶ gateway there

A key's home is the place whose ingress log gives the key its order. The entrance appends what it passes on under its
own name and the number of the row, so a repetition changes nothing, here or there: at the home the door hands it to
the gateway under the same writer and number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from whimbrel.core.keys import KeyMap, bin_of
from whimbrel.core.record import Kind, Record
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.ingress import Event, entries
from whimbrel.log.codec import Codec
from whimbrel.log.contract import Entry, Lane, Writable

UNTIMED = -(1 << 63)
"""In place of the event time of a record that has none: its home gives it one."""


class Entrance:
    """Sorts the rows of the sources at one place by the homes of their keys."""

    def __init__(
        self,
        here: str,
        homes: KeyMap[str],
        gateway: Gateway,
        way_to: Callable[[str], Writable],
        codec: Codec,
        load: Callable[[str], int],
        save: Callable[[str, int], None],
    ) -> None:
        """`gateway`: of the sources' stage, here. `way_to`: by place, the log there that its door reads. `load` and
        `save`: by writer, the number of the last row that is in the logs of all homes; -1 if there is none."""
        self._here, self._homes, self._gateway, self._way_to, self._codec = here, homes, gateway, way_to, codec
        self._load, self._save = load, save

    @property
    def _is_local(self) -> bool:
        return self._homes.values() == {self._here}

    def counter(self, writer: str) -> int:
        """The number of the last row that need not come again."""
        return self._gateway.counter(writer) if self._is_local else self._load(writer)

    def latest_allowed_us(self) -> int | None:
        """The event time after which an event is refused as from the future; None: there is no bound."""
        return self._gateway.latest_allowed_us()

    def ingest(
        self, events: Sequence[Event], writer: str, counter: int, number: Callable[[int], int] | None = None
    ) -> bool:
        """Make events durable, each on the way to its home. `number`: maps the index of an event to its row. Returns
        whether any of them is new."""
        if self._is_local:
            return self._gateway.ingest(events, writer, counter, number)
        assert number is not None, "rows have numbers"
        numbered = [(number(place), event) for place, event in enumerate(events)]
        is_new = False
        for home, some in _by_home(numbered, self._homes).items():
            if home == self._here:
                rows = [row for row, _ in some]
                is_new |= self._gateway.ingest([event for _, event in some], writer, rows[-1], rows.__getitem__)
            else:
                is_new |= self._pass_on(home, some, f"{writer}@{self._here}")
        self._save(writer, counter)
        return is_new

    def _pass_on(self, home: str, numbered: list[tuple[int, Event]], writer: str) -> bool:
        """Append to another place's log what is not there yet: after a restart, rows come in other batches."""
        way, now_us = self._way_to(home), self._gateway.now_us()
        last = way.counter(writer)
        records = [
            Record(0, Kind.DATA, bin_of(key), key, row, 0, writer, UNTIMED if us is None else us, now_us, columns)
            for row, (key, columns, us) in numbered
            if row > last
        ]
        for some, blob in entries(records, self._codec) if records else ():
            way.append(blob, count=len(some), writer=writer, counter=some[-1].seq)
        return bool(records)


class Door:
    """The way of passed-on records into a gateway: a log to its writers, which are the entrances of other places."""

    def __init__(self, gateway: Gateway, codec: Codec) -> None:
        self._gateway, self._codec = gateway, codec

    def append(
        self, blob: bytes, *, count: int, writer: str, counter: int, lane: Lane = Lane.DATA, replays: bool = False
    ) -> int | None:
        """Ingest an entry that an entrance has passed on. None: it was here before."""
        records = list(self._codec.records(Entry(0, count, blob)))
        events = [(one.key, one.body, None if one.event_us == UNTIMED else one.event_us) for one in records]
        since, rows = [record.ingress_us for record in records], [record.seq for record in records]
        return 0 if self._gateway.ingest(events, writer, counter, rows.__getitem__, since) else None

    def counter(self, writer: str, lane: Lane = Lane.DATA) -> int:
        """The last row of a writer that is here."""
        return self._gateway.counter(writer)

    def writers(self, lane: Lane = Lane.DATA) -> dict[str, int]:
        """The last row of each writer."""
        return self._gateway.ingress.writers(lane)


def _by_home(numbered: Iterable[tuple[int, Event]], homes: KeyMap[str]) -> dict[str, list[tuple[int, Event]]]:
    """Sort by home; within one, the order stays."""
    found: dict[str, list[tuple[int, Event]]] = {}
    for row, event in numbered:
        found.setdefault(homes[event[0]], []).append((row, event))
    return found
