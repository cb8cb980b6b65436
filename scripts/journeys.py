"""Print what the two journeys in docs/ show: real records, markers, parcels and stories, from the real objects.

    python scripts/journeys.py            print everything
    python scripts/journeys.py --write    put it into the pages

No Spark is started: gateway, router, logs, source, instances, coordinator, gate and outlet are the ones that run in
production, hosted by this script one step at a time. Its clock is simulated, so its output is always the same.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core import operator, wire
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import BadRecord
from whimbrel.core.gate import Gate
from whimbrel.core.instance import Instance
from whimbrel.core.keys import KeyMap, Selection, bin_of
from whimbrel.core.operator import Emit
from whimbrel.core.protocols import machine
from whimbrel.core.protocols.machine import Abandoned, Copied, Failed, Migration, Started, Stopped
from whimbrel.core.record import (
    Aborted,
    Closed,
    Kind,
    Left,
    Move,
    Opened,
    OutboxEntry,
    Outgoing,
    Parcel,
    Ready,
    Record,
    Result,
    Shipped,
)
from whimbrel.core.router import Abort, Begin, Cutover, Router, RouteTable
from whimbrel.egress.outlet import Outlet
from whimbrel.egress.sinks import CsvSink
from whimbrel.gateway.gateway import Gateway
from whimbrel.gateway.intake import Intake, parse_schema
from whimbrel.log import EmbeddedLog, Lane, MemoryLog, codec
from whimbrel.log.carrier import join_outgoing
from whimbrel.log.contract import Log
from whimbrel.orchestrator.orders import story_of
from whimbrel.spark.bundle import unbundle
from whimbrel.spark.groups import group_ids
from whimbrel.spark.source import InboxReader, Reading

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("journey-of-a-record.md", "journey-of-a-migration.md")
NEW_YEAR = 1_767_225_600_000_000
"""The first microsecond of 2026: when the clock of these journeys starts."""
GROUPS = 4
SCHEMA = parse_schema("sensor string, value double")


class Average(operator.Operator):
    """The average of the last ten values of each sensor."""

    class State(operator.State):
        """The state of one sensor."""

        values: tuple[float, ...] = ()

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """Process one value."""
        state.values = (*state.values, event.value)[-10:]
        emit(sensor=key, average=sum(state.values) / len(state.values))


class Event(msgspec.Struct):
    """The input of `Average`."""

    sensor: str
    value: float


# ── A record ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def record_journey(folder: Path) -> Iterator[tuple[str, str]]:
    """One record from a CSV row to a CSV line. Yields the name and the content of each step."""
    clock = count(NEW_YEAR, 1_000)
    intake = Intake(SCHEMA, key="sensor", lenient=True)
    good, empty = intake.take([{"sensor": "s1", "value": "21.5"}, {"sensor": None, "value": "3"}])
    assert isinstance(good, tuple)
    assert isinstance(empty, BadRecord)
    yield "intake", f"{good}\nBadRecord: {empty.reason}: {empty}"

    inbox = EmbeddedLog(folder / "inbox-average-1.db")
    ingress = MemoryLog()
    gateway = Gateway(
        Router("gateway-average", RouteTable("average-1")),
        ingress,
        MemoryLog(),
        {"average-1": inbox}.__getitem__,
        codec.ArrowCodec(SCHEMA),
        clock.__next__,
        uptime=lambda: 0,
    )
    gateway.ingest([("s7", ("s7", 3.0), None)], writer="source", counter=0)
    gateway.ingest([good, ("s2", ("s2", 19.0), None)], writer="source", counter=2)
    entry = ingress.read(1)[0]
    record = next(codec.records(entry))._replace(offset=0)
    yield "ingress", f"position {entry.position}, {entry.records} records\n{shown(record)}"
    row = codec.decode(entry.blob).to_pylist()[0]
    yield "codec", "\n".join(f"{name:12} {value!r}" for name, value in row.items())

    entry = inbox.read(1)[0]
    yield "inbox", f"average-1, position {entry.position}\n{shown(next(codec.records(entry)))}"

    reader = InboxReader(Reading(str(inbox.path), SCHEMA, GROUPS, max_records=20_000))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    (part,) = reader.partitions(start, end)
    (batch,) = reader.read(part)
    rows = batch.to_pylist()
    lines = [f"offset {start} -> {end}"]
    for bundle in rows:
        number = group_ids(GROUPS).index(bundle["_group"])
        inside = [record.key for record in unbundle([(0, bundle["_bundle"])])[0]]
        lines.append(f"_group {bundle['_group']} (part {number}), _order {bundle['_order']}, _bundle: {inside}")
    yield "bundles", "\n".join(lines)

    mine = next(row for row in rows if group_ids(GROUPS).index(row["_group"]) == bin_of("s1") % GROUPS)
    records, event_type = unbundle([(mine["_order"], mine["_bundle"])])
    instance = Instance("average-1", Average(), event_type, part=bin_of("s1") % GROUPS, parts=GROUPS)
    out = instance.apply(records)
    yield "result", shown(next(result for result in out.results if result.key == "s1"))
    delta = msgspec.msgpack.decode(wire.unpack(instance.deltas()[0], msgspec.Raw))
    lines = [f"{name}: {value}" for name, value in delta.items() if value]
    yield "delta", "\n".join(lines)

    outbox: Log = MemoryLog()
    encoded = [wire.encode(Outgoing(out.results, out.notices))]
    outbox.append(join_outgoing(encoded, {}, {}), count=len(out.results), writer="average-1@7c1e", counter=0)
    averages = folder / "averages.csv"
    outlet = Outlet(
        "average", {"average-1": outbox}, [CsvSink(averages)], lambda *notice: None, lambda blob: None, clock.__next__
    )
    outlet.recover(None)
    outlet.step(closing=True)
    outlet.close()
    yield "file", averages.read_text(encoding="utf-8").rstrip()
    inbox.close()


def shown(value: Record | Result) -> str:
    """A named tuple, one field per line."""
    return "\n".join(f"{name:12} {item!r}" for name, item in value._asdict().items())


# ── A migration ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Place:
    """An instance with one part, its inbox and its outbox, as a query hosts it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox, self.outbox = MemoryLog(), MemoryLog()
        self.instance = Instance(name, Average(), Event)
        self.at = dict.fromkeys(Lane, 0)
        self.batch = count()

    def run(self, inbox_of: Callable[[str], Log]) -> list[str]:
        """Run one micro-batch; return its output."""
        records = []
        for lane in (Lane.CONTROL, Lane.DATA):
            for entry in self.inbox.read(self.at[lane], lane=lane):
                records += [r._replace(body=Event(*r.body)) if r.kind == Kind.DATA else r for r in codec.records(entry)]
                self.at[lane] = entry.position + 1
        out = self.instance.apply(records)
        self.instance.deltas()
        number = next(self.batch)
        for to in sorted({message.to for message in out.messages}):
            messages = [(p.kind, p.bin, p.body) for p in out.messages if p.to == to]
            blob = codec.encode_messages(messages)
            inbox_of(to).append(blob, count=len(messages), writer=self.name, counter=number, lane=Lane.CONTROL)
        blob = join_outgoing([wire.encode(Outgoing(out.results, out.notices))], {}, {})
        self.outbox.append(blob, count=len(out.results), writer=self.name, counter=number)
        lines = [f"message to {message.to}: {described(message.kind, message.body)}" for message in out.messages]
        lines += [f"result {result_told(result)}" for result in out.results]
        return lines + [f"notice {notice_described(notice)}" for notice in out.notices]


class Harness:
    """A gateway, two instances, a gate and a coordinator: everything a move needs, one step at a time."""

    def __init__(self, protocol: str) -> None:
        self.places = {name: Place(name) for name in ("average-1", "average-2")}
        self.ticks = count(NEW_YEAR, 1_000)

        self.gateway = Gateway(
            Router("gateway-average", RouteTable("average-1")),
            MemoryLog(),
            MemoryLog(),
            self.inbox_of,
            codec.ArrowCodec(SCHEMA),
            self.ticks.__next__,
            uptime=lambda: 0,
        )
        sites = {"average-1": "cloud", "average-2": "edge-1"}
        self.coordinator = Coordinator("average", RouteTable("average-1"), sites, KeyMap(self.gateway.name))
        self.gate, self.read = Gate(), dict.fromkeys(self.places, 0)
        self.delivered: list[Result] = []
        self.numbers, self.protocol = count(), protocol

    def inbox_of(self, name: str) -> Log:
        return self.places[name].inbox

    def send(self, *events: tuple[str, float]) -> None:
        """Ingest records."""
        rows = [(sensor, (sensor, value), None) for sensor, value in events]
        self.gateway.ingest(rows, writer="source", counter=next(self.numbers))

    def order(self, *keys: str) -> Migration:
        """Plan and start a migration."""
        selection = Selection(keys=frozenset(keys))
        (migration,) = self.coordinator.plan([(selection, "average-2")], "edge-1", self.protocol, "m1")
        migration.ordered_us = next(self.ticks)
        self.obey(self.coordinator.start(migration, next(self.ticks)))
        return migration

    def obey(self, commands: Sequence[machine.Command]) -> None:
        """Carry out commands, as the orchestrator's thread does."""
        for command in commands:
            if isinstance(command, (Begin, Cutover, Abort)):
                self.gateway.command(command)

    def abandon(self, reason: str) -> None:
        """Ask for an abort."""
        self.obey(self.coordinator.handle("m1", Abandoned(reason), next(self.ticks)))

    def run(self, name: str) -> list[str]:
        """Run one micro-batch of an instance."""
        return self.places[name].run(self.inbox_of)

    def shadow(self, key: str) -> str:
        """The destination's state of a key before its results may be released."""
        instance = self.places["average-2"].instance
        saved = instance.table.entries[key].saved
        assert saved is not None
        state = msgspec.msgpack.decode(saved.state)
        return f"  state of {key}: {state}; records dropped because the parcel has them: {instance.serving.duplicates}"

    def collect(self) -> list[str]:
        """The outlet's pass over all outboxes: what the gate did with each result."""
        lines: list[str] = []
        for name, place in self.places.items():
            for entry in place.outbox.read(self.read[name]):
                self.read[name] = entry.position + 1
                for outgoing in wire.unpack(entry.blob, OutboxEntry).outgoing:
                    released = self.gate.offer(outgoing.results)
                    lines += [f"released {result_told(r)}" for r in released]
                    lines += [f"held     {result_told(r)}" for r in outgoing.results if r not in released]
                    for notice in outgoing.notices:
                        lines.append(f"heard    {notice_described(notice)}")
                        freed = self.gate.close(notice) if isinstance(notice, Closed) else []
                        lines += [f"released {result_told(r)}" for r in freed]
                        released = released + freed
                        if isinstance(notice, (Ready, Left, Opened, Aborted)):
                            self.obey(self.coordinator.handle("m1", notice, next(self.ticks)))
                    self.delivered += released
        return lines

    def inboxes(self) -> str:
        """All inboxes, one line per entry."""
        lines = []
        for name, place in self.places.items():
            lines.append(f"inbox of {name}")
            for lane in (Lane.CONTROL, Lane.DATA):
                for entry in place.inbox.read(0, lane=lane):
                    text = [described(r.kind, r.body, r) for r in codec.records(entry)]
                    lines.append(f"  {lane.name.lower():7} {entry.position}  {', '.join(text)}")
        return "\n".join(lines)

    def results(self) -> str:
        """The delivered results by key, in the order of their release."""
        keys = sorted({result.key for result in self.delivered})
        lines = [f"{key}: {', '.join(result_told(r, True) for r in self.delivered if r.key == key)}" for key in keys]
        return "\n".join(lines)


def described(kind: int, body: Any, record: Record | None = None) -> str:
    """A record of an inbox in a few words."""
    name = Kind(kind).name
    if kind == Kind.DATA:
        assert record is not None
        return f"{body[0]}={body[1]:g} (epoch {record.epoch})"
    if kind == Kind.PARCEL:
        parcel = wire.unpack(body, Parcel)
        state = {key: msgspec.msgpack.decode(key_state.state) for key, key_state in parcel.keys.items()}
        reach = {key: place(key_state.seq) for key, key_state in parcel.keys.items()}
        return f"{name} {', '.join(f'{key}: {state[key]} up to {reach[key]}' for key in state)}"
    if kind == Kind.SHIPPED:
        shipped = wire.unpack(body, Shipped)
        return f"{name} part {shipped.part + 1}/{shipped.parts}"
    return f"{name} {wire.unpack(body, Move).id}"


def place(seq: int) -> str:
    """A `seq` as position and row."""
    return f"{seq // codec.ROWS}.{seq % codec.ROWS}"


def result_told(result: Result, short: bool = False) -> str:
    """A result in a few words."""
    average = f"{result.values['average']:g}"
    if short:
        return f"{average} (epoch {result.epoch}, seq {place(result.seq)})"
    return f"{result.key} average {average} (epoch {result.epoch}, seq {place(result.seq)})"


def notice_described(notice: Any) -> str:
    """A notice in a few words."""
    return f"{type(notice).__name__} {notice.move} from {notice.instance}, part {notice.part + 1}/{notice.parts}"


def story(migration: Migration) -> str:
    """A migration's story, as `App.story` returns it."""
    return "\n".join(story_of([migration]))


def moved(migration: Migration) -> str:
    """The content of a marker."""
    move = migration.move
    named = {name: getattr(move, name) for name in move.__struct_fields__}
    named |= {"selection": {"keys": sorted(move.selection.keys)}, "routers": sorted(move.routers)}
    return "\n".join(f"{name:12} {value!r}" for name, value in named.items())


def handover_journey(protocol: str) -> Iterator[tuple[str, str]]:
    """A move of s1 from cloud to edge-1 while records arrive, without an abort."""
    world = Harness(protocol)
    world.send(("s1", 10), ("s2", 5))
    world.send(("s1", 20))
    world.run("average-1")
    world.collect()
    migration = world.order("s1")
    yield "order", moved(migration)
    world.send(("s1", 30), ("s2", 7))
    yield "begun", world.inboxes()
    yield "ship", "\n".join(["average-1", *(f"  {line}" for line in world.run("average-1"))])
    world.send(("s1", 40))
    world.collect()
    yield "install", "\n".join(["average-2", *(f"  {line}" for line in world.run("average-2")), world.shadow("s1")])
    world.collect()
    world.send(("s1", 50), ("s2", 9))
    yield "cut", world.inboxes()
    yield "early", "\n".join(["average-2", *(f"  {line}" for line in world.run("average-2"))])
    yield "gate", "\n".join(world.collect())
    yield "late", "\n".join(["average-1", *(f"  {line}" for line in world.run("average-1"))])
    yield "freed", "\n".join(world.collect())
    yield "story", story(migration)
    yield "results", world.results()


def abort_journey() -> Iterator[tuple[str, str]]:
    """The same, aborted before CUTOVER."""
    world = Harness("live")
    world.send(("s1", 10))
    migration = world.order("s1")
    world.send(("s1", 20))
    world.abandon("called off")
    world.send(("s1", 30))
    yield "inboxes", world.inboxes()
    for name in world.places:
        world.run(name)
    world.collect()
    yield "story", story(migration)
    yield "results", world.results()


def restart_journey() -> Iterator[tuple[str, str]]:
    """A whole instance moves; the answers of the sites are simulated."""
    events = (Stopped(), Copied(48_211), Started("edge-1"))
    failing = (Stopped(), Failed("the disk is full"), Started("cloud"))
    for name, answers in (("story", events), ("failed", failing)):
        world = Harness("restart")
        selection = world.coordinator.table.owners.select("average-1")
        (migration,) = world.coordinator.plan([(selection, "average-2")], "edge-1", "restart", "m1")
        lines = [f"command  {command!r}" for command in world.coordinator.start(migration)]
        for event in answers:
            lines.append(f"event    {event!r}")
            lines += [f"command  {command!r}" for command in world.coordinator.handle("m1", event)]
        yield name, "\n".join([*lines, f"phase    {migration.phase}"])


# ── The pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

MARKED = re.compile(r"(<!-- printed: ([\w-]+) -->\n```text\n)(.*?)(```\n<!-- end -->)", re.DOTALL)


def printed() -> dict[str, str]:
    """Everything the pages show, by name."""
    blocks: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        blocks |= {f"record-{name}": text for name, text in record_journey(Path(folder))}
    for protocol in ("live", "pause"):
        blocks |= {f"{protocol}-{name}": text for name, text in handover_journey(protocol)}
    blocks |= {f"abort-{name}": text for name, text in abort_journey()}
    return blocks | {f"restart-{name}": text for name, text in restart_journey()}


def page(text: str, blocks: dict[str, str]) -> str:
    """A page with its marked blocks updated."""
    return MARKED.sub(lambda found: f"{found[1]}{blocks[found[2]]}\n{found[4]}", text)


def main() -> None:
    blocks = printed()
    if "--write" not in sys.argv[1:]:
        print("\n\n".join(f"── {name} ──\n{text}" for name, text in blocks.items()))
        return
    for name in PAGES:
        path = DOCS / name
        path.write_text(page(path.read_text(encoding="utf-8"), blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
