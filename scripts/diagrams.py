"""Draw each protocol's table as a Mermaid state diagram, inside its page in docs/protocols.

    python scripts/diagrams.py            print the diagrams
    python scripts/diagrams.py --write    put them into the pages

A table gives the rule for an event in a phase; the next phase is known only by running the rule. So the script applies
every event to a small migration, one part at either end, in every state it can reach, and draws the result. Events that
change nothing are left out: there are many, and they show only that an event may be duplicated or late.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whimbrel.core import wire
from whimbrel.core.errors import UnknownEvent
from whimbrel.core.keys import Selection
from whimbrel.core.protocols import PROTOCOLS, machine
from whimbrel.core.protocols.machine import (
    ABORTED,
    DONE,
    ORDERED,
    Abandoned,
    Copied,
    Event,
    Failed,
    Fenced,
    Loaded,
    Migration,
    Ordered,
    Protocol,
    Started,
    Stopped,
    Takeover,
)
from whimbrel.core.record import Aborted, Evicted, Left, Move, Opened, Ready, Rejected, Unreadable, Warm

PAGES = Path(__file__).parent.parent / "docs" / "protocols"
BEGIN, END = "<!-- drawn by scripts/diagrams.py -->", "<!-- end -->"

KEYS = Selection(keys=frozenset({"k"}))
EVENTS: dict[str, Event] = {
    "Ordered": Ordered(),
    "Fenced": Fenced(),
    "Loaded": Loaded(),
    "Ready": Ready("m1", "destination", 0, 1),
    "Warm": Warm("m1", "destination", 0, 1),
    "Takeover": Takeover(),
    "Left": Left("m1", "source", 0, 1),
    "Opened": Opened("m1", "destination", 0, 1),
    "Stopped": Stopped(),
    "Copied": Copied(),
    "Started (there)": Started("there"),
    "Abandoned": Abandoned(""),
    "Rejected": Rejected("m1", "destination", 0, 1, ""),
    "Unreadable": Unreadable("m1", "router", ""),
    "Failed": Failed(""),
    "Aborted (source)": Aborted("m1", "source", 0, 1),
    "Aborted (destination)": Aborted("m1", "destination", 0, 1),
    "Started (here)": Started("here"),
    "Evicted": Evicted("m1", "source", 0, 1),
}


class Arrow(NamedTuple):
    """From one phase to another, on an event."""

    start: str
    end: str
    event: str


def fresh(protocol: Protocol) -> Migration:
    """A migration before its first event."""
    move = Move(
        "m1", "stage", protocol.name, "source", "destination", KEYS, 1, frozenset({"gateway"}), protocol.options
    )
    return Migration(move, "here", "there")


def explore(protocol: Protocol) -> Iterator[tuple[Arrow, tuple[str, ...]]]:
    """Every step the protocol can take, and the commands it returns."""
    todo, seen = [wire.pack(fresh(protocol))], set[bytes]()
    while todo:
        blob = todo.pop(0)
        if blob in seen:
            continue
        seen.add(blob)
        for name, event in EVENTS.items():
            migration = wire.unpack(blob, Migration)
            start = migration.phase
            try:
                commands = machine.handle(protocol, migration, event)
            except UnknownEvent:
                continue
            yield Arrow(start, migration.phase, name), tuple(type(command).__name__ for command in commands)
            migration.story, migration.reason = [], None
            todo.append(wire.pack(migration))


def diagram(protocol: Protocol) -> str:
    """The protocol as Mermaid text."""
    answers: dict[Arrow, set[tuple[str, ...]]] = {}
    for arrow, commands in explore(protocol):
        answers.setdefault(arrow, set()).add(commands)
    labels: dict[tuple[str, str, str], list[str]] = {}
    for arrow, given in answers.items():
        text = label(given)
        if arrow.start != arrow.end or text:
            labels.setdefault((arrow.start, arrow.end, text), []).append(arrow.event)
    phases = [phase for phase, _ in protocol.table]
    lines = ["stateDiagram-v2", f"    [*] --> {ORDERED}"]
    for (start, end, text), events in sorted(labels.items(), key=lambda item: phases.index(item[0][0])):
        lines.append(f"    {start} --> {end}: {' or '.join(events)}{text}")
    lines += [f"    {DONE} --> [*]", f"    {ABORTED} --> [*]"]
    return "\n".join(lines)


def label(given: set[tuple[str, ...]]) -> str:
    """The commands of a step; in brackets those that are returned only after certain earlier events."""
    always = set.intersection(*map(set, given))
    names = sorted({name for commands in given for name in commands})
    text = ", ".join(name if name in always else f"[{name}]" for name in names)
    return f" / {text}" if text else ""


def again(protocol: Protocol) -> str:
    """The commands that a restarted orchestrator repeats in each phase, as a table."""
    lines = ["| phase | repeated after an orchestrator restart |", "|---|---|"]
    for phase in dict.fromkeys(phase for phase, _ in protocol.table):
        migration = fresh(protocol)
        migration.phase = phase
        migration.receive(Aborted("m1", "source", 0, 1))
        migration.receive(Aborted("m1", "destination", 0, 1))
        commands = [type(command).__name__ for command in machine.resume(protocol, migration)]
        lines.append(f"| {phase} | {', '.join(commands) or 'nothing'} |")
    return "\n".join(lines)


def section(protocol: Protocol) -> str:
    """The text between the two marks of a protocol's page."""
    return f"{BEGIN}\n```mermaid\n{diagram(protocol)}\n```\n\n{again(protocol)}\n{END}"


def page(protocol: Protocol) -> str:
    """The protocol's page with its section updated."""
    text = (PAGES / f"{protocol.name}.md").read_text(encoding="utf-8")
    return f"{text.split(BEGIN)[0]}{section(protocol)}{text.split(END)[-1]}"


def main() -> None:
    for protocol in PROTOCOLS.values():
        if "--write" in sys.argv[1:]:
            (PAGES / f"{protocol.name}.md").write_text(page(protocol), encoding="utf-8")
        else:
            print(f"{protocol.name}\n\n{section(protocol)}\n")


if __name__ == "__main__":
    main()
