"""The deployment file: the places of a deployment, their addresses, links, homes, store and certificates, in TOML.

    job = "traffic.py"                          # the pipeline; each place imports it

    [orchestrator]
    address = "10.0.0.1:7700"

    [places.cloud]                              # the first place: default home, default place of sinks
    address = "10.0.0.1:7701"

    [places.edge-1]
    address = "10.0.0.2:7701"
    data = "/var/lib/whimbrel"                  # its own directory, on its own disk

    [homes.count]                               # of a stage's keys; all others are at home at the first place
    edge-1 = { bins = "0-511", keys = ["bus-7"] }

    [links]                                     # emulated, for a deployment on one machine
    default = "delay=20ms,rate=20mbit"

Everything is checked when the file is read. An error names the file and the line.
"""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from whimbrel.core.errors import Refused, UnknownName, WhimbrelError
from whimbrel.core.keys import BINS, KeyMap, Selection
from whimbrel.core.link import IDEAL, Link
from whimbrel.core.names import SUPERVISOR, check_name
from whimbrel.log.private import replace_text
from whimbrel.pipeline import Pipeline

T = TypeVar("T")
Keys = tuple[str, ...]
"""The way to a value: the names of its tables, then its own."""
PORTS = 3
"""Consecutive ports of a place: for the other places, for the orchestrator's calls of its gateway, and of its site."""
ADDRESS = r"^(?P<host>\[[0-9A-Fa-f:]+\]|[\w.-]+):(?P<port>\d{1,5})\Z"


class PlaceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[places.<name>]`."""

    address: str = "127.0.0.1:0"
    """Where other places reach it; port 0: any free port, for a deployment on one machine."""
    data: str | None = None
    """Its directory; if not given, one of its name below the deployment's."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        return _endpoint(self.address)


class OrchestratorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[orchestrator]`."""

    address: str = "127.0.0.1:0"
    data: str | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        return _endpoint(self.address)


class TlsEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[tls]`."""

    folder: str
    """Made by `whimbrel certificates`: the authority, and a certificate and key for each place."""


class StoreEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[store]`."""

    url: str
    every: float = 5.0
    """Seconds between increments."""


class HomeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`<place> = {...}` in `[homes.<stage>]`."""

    bins: str | list[int] = ""
    """As a list, or as text: `0-511, 700`."""
    keys: list[str] = []


class Layout(msgspec.Struct, frozen=True):
    """A checked deployment file."""

    job: str
    places: dict[str, PlaceEntry]
    orchestrator: OrchestratorEntry = OrchestratorEntry()
    links: dict[tuple[str, str], str] = {}
    """By pair of places; the same in both directions."""
    homes: dict[str, KeyMap[str]] = {}
    """By stage, as far as given: the place that is each key's home."""
    store: StoreEntry | None = None
    tls: TlsEntry | None = None
    host: str = "micro-batch"
    trigger: str | None = None
    durability: str = "process"

    def link(self, one: str, other: str) -> str:
        """The emulated link between two places."""
        return self.links.get((one, other), "ideal")

    @property
    def first(self) -> str:
        """The first place: the default home of keys, and the default place of sources and sinks."""
        return next(iter(self.places))


PLAIN = {"job": str, "host": str, "trigger": str, "durability": str}
TABLES: dict[str, Any] = {"orchestrator": OrchestratorEntry, "store": StoreEntry, "tls": TlsEntry}


def read_layout(path: Path, addresses: Path | None = None) -> Layout:
    """Read and check a deployment file. Raises `Refused`, with the file and the line. `addresses`: the file with the
    addresses that were chosen in place of port 0 (`choose_addresses`)."""
    found = _read(path)
    chosen = msgspec.json.decode(addresses.read_bytes(), type=dict[str, str]) if addresses is not None else {}
    places = {
        name: msgspec.structs.replace(entry, address=chosen.get(name, entry.address))
        for name, entry in found.places.items()
    }
    orchestrator = msgspec.structs.replace(
        found.orchestrator, address=chosen.get(SUPERVISOR, found.orchestrator.address)
    )
    return msgspec.structs.replace(found, places=places, orchestrator=orchestrator)


def homes_of(pipeline: Pipeline, layout: Layout) -> dict[str, KeyMap[str]]:
    """By stage: the place that is each key's home."""
    for stage in layout.homes:
        if stage not in {one.name for one in pipeline.stages}:
            raise UnknownName("stage", stage, [one.name for one in pipeline.stages])
    if pipeline.home is not None and pipeline.home not in layout.places:
        raise UnknownName("place", pipeline.home, list(layout.places))
    first = pipeline.stages[0].name
    found = {one.name: layout.homes.get(one.name) or KeyMap(layout.first) for one in pipeline.stages}
    if pipeline.home is not None and first not in layout.homes:
        found[first] = KeyMap(pipeline.home)
    return found


def choose_addresses(layout: Layout, file: Path) -> None:
    """Choose ports of this machine where the layout leaves them open, once for all starts of a deployment."""
    chosen = msgspec.json.decode(file.read_bytes(), type=dict[str, str]) if file.exists() else {}
    wanted = {SUPERVISOR: layout.orchestrator.address, **{name: one.address for name, one in layout.places.items()}}
    taken = {int(address.rpartition(":")[2]) for address in chosen.values()}
    for name, address in wanted.items():
        if name not in chosen and address.endswith(":0"):
            host = address.rpartition(":")[0]
            while (port := _free_ports(host)) in taken:
                pass
            taken |= {*range(port - PORTS + 1, port + PORTS)}
            chosen[name] = f"{host}:{port}"
    replace_text(file, msgspec.json.encode(chosen).decode())


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _free_ports(host: str) -> int:
    """The first of some consecutive free ports."""
    while True:
        with ExitStack() as open_ones:
            first = 0
            try:
                for number in range(PORTS):
                    found = open_ones.enter_context(socket.socket())
                    found.bind((host, first + number if number else 0))
                    first = first or found.getsockname()[1]
            except (OSError, OverflowError):
                continue
            return first


def _read(path: Path) -> Layout:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refused(f"cannot read the deployment file {path}: {error.strerror}") from error
    return _Reader(path, text).layout()


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        try:
            self._content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Refused(f"{path}: {error}") from error

    def layout(self) -> Layout:
        known = [*PLAIN, *TABLES, "places", "links", "homes"]
        for name in self._content:
            if name not in known:
                self._refuse((name,), str(UnknownName("entry", name, known)))
        if "job" not in self._content:
            self._refuse((), 'it lacks the pipeline: job = "job.py"')
        plain: dict[str, Any] = {
            name: self._converted((name,), kind) for name, kind in PLAIN.items() if name in self._content
        }
        tables: dict[str, Any] = {
            name: self._converted((name,), kind) for name, kind in TABLES.items() if name in self._content
        }
        places = self._places()
        self._check_addresses(places, tables.get("orchestrator", OrchestratorEntry()))
        return Layout(
            places=places, links=self._links(list(places)), homes=self._homes(list(places)), **plain, **tables
        )

    def _places(self) -> dict[str, PlaceEntry]:
        given = self._table(("places",))
        if not given:
            self._refuse((), "it has no places; add at least one: [places.cloud]")
        for name in given:
            self._checked(("places", name), lambda name=name: check_name("place", name))
        return {name: self._converted(("places", name), PlaceEntry) for name in given}

    def _check_addresses(self, places: Mapping[str, PlaceEntry], orchestrator: OrchestratorEntry) -> None:
        entries: dict[Keys, PlaceEntry | OrchestratorEntry] = {("places", name): one for name, one in places.items()}
        entries["orchestrator",] = orchestrator
        for keys, entry in entries.items():
            match = re.search(ADDRESS, entry.address)
            if match is None or int(match["port"]) > 65535:
                self._refuse((*keys, "address"), f'address must be "host:port", got {entry.address!r}')
        for (keys, one), (others, other) in combinations(entries.items(), 2):
            if one.address == other.address and not one.address.endswith(":0"):
                self._refuse((*others, "address"), f"{_named(others)} has the address of {_named(keys)}: {one.address}")
            if one.data is not None and one.data == other.data:
                self._refuse((*others, "data"), f"{_named(others)} has the directory of {_named(keys)}: {one.data}")
        for (keys, one), (others, other) in combinations(entries.items(), 2):
            (host, port), (there, next_to) = one.endpoint, other.endpoint
            first, second = sorted([(port, PORTS if len(keys) > 1 else 1), (next_to, PORTS if len(others) > 1 else 1)])
            if host == there and port and next_to and second[0] < first[0] + first[1]:
                self._refuse(
                    (*others, "address"),
                    f"{_named(others)} and {_named(keys)} share ports: a place has {PORTS}, {one.address} and "
                    f"{other.address} lie too close",
                )

    def _links(self, places: list[str]) -> dict[tuple[str, str], str]:
        given = self._table(("links",))
        default = given.get("default", IDEAL)
        found = {pair: default for one, other in combinations(places, 2) for pair in ((one, other), (other, one))}
        for name, link in given.items():
            self._checked(("links", name), lambda link=link: Link.parse(link))
            if name == "default":
                continue
            pair = tuple(name.split(" "))
            if len(pair) != 2 or pair not in found:
                self._refuse(("links", name), f'a link is "default" or names two places, "cloud edge-1"; got {name!r}')
            found[pair[0], pair[1]] = found[pair[1], pair[0]] = link
        return found

    def _homes(self, places: list[str]) -> dict[str, KeyMap[str]]:
        found = {}
        for stage in self._table(("homes",)):
            homes, taken = KeyMap(places[0]), dict[str, Selection]()
            for place in self._table(("homes", stage)):
                keys = ("homes", stage, place)
                if place not in places:
                    self._refuse(keys, str(UnknownName("place", place, places)))
                entry = self._converted(keys, HomeEntry)
                bins = self._checked(keys, lambda entry=entry: _bins(entry.bins))
                selection = Selection(bins, frozenset(entry.keys))
                for other, theirs in taken.items():
                    if selection.bins & theirs.bins or selection.keys & theirs.keys:
                        self._refuse(keys, f"{place} and {other} are both given as the home of some bins or keys")
                taken[place] = selection
            for place, selection in taken.items():
                homes.put(Selection(bins=selection.bins), place)
            for place, selection in taken.items():
                homes.put(Selection(keys=selection.keys), place)
            found[stage] = homes
        return found

    # ── Values and their lines ───────────────────────────────────────────────────────────────────────────────────

    def _value(self, keys: Keys) -> Any:
        value: Any = self._content
        for key in keys:
            value = value.get(key, {})
        return value

    def _table(self, keys: Keys) -> dict[str, Any]:
        value = self._value(keys)
        if not isinstance(value, dict):
            self._refuse(keys, f"{_named(keys)} must be a table: [{'.'.join(keys)}]")
        return dict(value)

    def _converted(self, keys: Keys, kind: type[T]) -> T:
        try:
            return msgspec.convert(self._value(keys), kind)
        except msgspec.ValidationError as error:
            field = re.search(r"(?:field |at )`(?:\$\.)?(\w+)", str(error))
            self._refuse((*keys, field[1]) if field else keys, f"{_named(keys)}: {error}")

    def _checked(self, keys: Keys, check: Any) -> Any:
        try:
            return check()
        except (WhimbrelError, AttributeError) as error:
            self._refuse(keys, str(error))

    def _refuse(self, keys: Keys, why: str) -> NoReturn:
        line = self._line(keys)
        raise Refused(f"{self._path}{f':{line}' if line else ''}: {why}")

    def _line(self, keys: Keys) -> int | None:
        """The line of a value, or of the innermost table around it that has a line of its own."""
        places = dict(self._lines())
        while keys and keys not in places:
            keys = keys[:-1]
        return places.get(keys)

    def _lines(self) -> Iterator[tuple[Keys, int]]:
        """Each table header and each key at the beginning of a line, with the number of the line."""
        table: Keys = ()
        for number, line in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*\[([^\[\]]+)\]", line):
                table = _split(header[1])
                yield table, number
            elif entry := re.match(
                r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""", line
            ):
                yield (*table, *_split(entry[1])), number


def _split(dotted: str) -> Keys:
    parts = re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)
    return tuple(part.strip("\"'") for part in parts)


def _named(keys: Keys) -> str:
    return "the orchestrator" if keys == ("orchestrator",) else f"place {keys[1]}" if keys[0] == "places" else keys[-1]


def _bins(given: str | list[int]) -> frozenset[int]:
    """Bins as a list, or as text of numbers and ranges: `0-511, 700`."""
    if isinstance(given, str):
        ranges = [part.strip() for part in given.split(",") if part.strip()]
        if not all(re.fullmatch(r"\d+(\s*-\s*\d+)?", part) for part in ranges):
            raise Refused(f'bins must be numbers and ranges, "0-511, 700"; got {given!r}')
        ends = [tuple(map(int, part.split("-"))) for part in ranges]
        found = frozenset(bin for end in ends for bin in range(end[0], end[-1] + 1))
    else:
        found = frozenset(given)
    if not all(0 <= bin < BINS for bin in found):
        raise Refused(f"bins are numbers from 0 to {BINS - 1}, got {min(found)} to {max(found)}")
    return found
