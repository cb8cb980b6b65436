"""Which faults are injected, and when: a pure function of the seed, so that the same run can be repeated.

Only the plan is the same, not its effect: how far a move is at the planned time depends on the machine.

Kinds, the targets of each kind, and protocols with their phases are drawn without replacement: none comes twice before
all have come once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TypeVar

import msgspec

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.core.protocols.machine import ABORTED, DONE, ORDERED

SOURCE, DESTINATION, BYSTANDER = "source", "destination", "bystander"
GATEWAY, ORCHESTRATOR, LINK, STORE = "gateway", "orchestrator", "link", "store"
SITES = (SOURCE, DESTINATION, BYSTANDER)
"""Of a move: where its keys were, where they go, and a site that takes no part in it."""
PROCESSES = (*SITES, GATEWAY, ORCHESTRATOR)
PER_MINUTE = 6
"""Faults per minute."""
UNDOING = frozenset({"aborting", "resuming", "ceasing", "returning"})
"""Phases that a move enters only if it is aborted."""

T = TypeVar("T")


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault: its possible targets, and the range of its duration in seconds (0: it is over at once)."""

    meaning: str
    targets: tuple[str, ...]
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL of a process only: its children must detect that", PROCESSES),
    "crash": Kind("SIGKILL of a process and all its children", PROCESSES),
    "jvm": Kind("SIGKILL of a site's JVM", SITES),
    "workers": Kind("SIGKILL of a site's Python workers", SITES),
    "stop": Kind("SIGSTOP of a process and all its children, then SIGCONT", PROCESSES, (1.0, 6.0)),
    "away": Kind("the same for longer than the timeout for dead", PROCESSES, (13.0, 18.0)),
    "memory": Kind("a site's Python workers get no more memory", SITES, (2.0, 5.0)),
    "no-files": Kind("a process can open no more files or sockets", PROCESSES, (2.0, 6.0)),
    "cut": Kind("the link between source and destination lets nothing through", (LINK,), (1.0, 8.0)),
    "calls": Kind("calls of a process to others are lost, or their responses", PROCESSES, (2.0, 14.0)),
    "clock": Kind("the wall clock of a process is an hour off, then right again", PROCESSES, (2.0, 8.0)),
    "replay": Kind("an order is sent three times at once, and once more later", (ORCHESTRATOR,), (2.0, 8.0)),
    "lock": Kind("the write lock of an ingress log or an inbox is held", (GATEWAY, SOURCE, DESTINATION), (12.0, 20.0)),
    "slow-disk": Kind("each write of a site to its logs is delayed by 1 s", SITES, (3.0, 8.0)),
    "full-disk": Kind("no file that a site writes may grow", SITES, (3.0, 8.0)),
    "bad-disk": Kind("every write of a process to its logs fails with EIO", PROCESSES, (1.0, 4.0)),
    "store-away": Kind("the directory of the central store is missing", (STORE,), (5.0, 15.0)),
    "store-damaged": Kind("the newest segments of the central store are cut in half", (STORE,), (5.0, 15.0)),
    "checkpoint-gone": Kind("a site crashes, and one of its checkpoints is removed", (SOURCE, BYSTANDER)),
}

MIGRATE, STANDBY, SCALE, DRAIN = "migrate", "standby", "scale", "drain"
DEEDS = (STANDBY, SCALE, DRAIN)
"""Orders other than plain moves."""


class Move(msgspec.Struct, frozen=True):
    """The order that precedes a fault."""

    protocol: str
    share: float
    """Of the keys at its source."""
    pick: float
    """From 0 to 1: selects one of the moves that are possible then."""
    stage: str = "ledger"
    deed: str = MIGRATE


class Fault(msgspec.Struct, frozen=True):
    """A planned fault."""

    at_s: float
    """When its move is ordered, in seconds."""
    kind: str
    target: str
    seconds: float
    """Its duration."""
    move: Move
    phase: str | None
    """Of the move, in which it is injected; None: `wait_s` seconds after the order, in any phase."""
    wait_s: float
    sign: int
    """1 or -1: selects one of two variants, if the kind has two."""


def phases(protocol: str) -> list[str]:
    """The phases between the order and the end, in the order of the protocol's table."""
    return list(dict.fromkeys(phase for phase, _ in PROTOCOLS[protocol].table if phase not in (ORDERED, DONE, ABORTED)))


def moments() -> list[tuple[str, str, str | None]]:
    """What may be under way when a fault is injected: order, protocol, phase. Without a phase the fault comes at any
    time, or misses the move."""
    moves = [
        (STANDBY if phase == "standby" else MIGRATE, name, phase)
        for name in PROTOCOLS
        for phase in (*phases(name), None)
    ]
    return [*moves, (SCALE, "live", None), (SCALE, "push", None), (DRAIN, "live", None), (STANDBY, "replicate", None)]


def plan(seed: int, seconds: float, kinds: Sequence[str] = tuple(KINDS)) -> list[Fault]:
    """The faults of a run."""
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("kind of fault", kind, list(KINDS))
    if not kinds:
        raise Refused(f"without faults there is no chaos; there are: {', '.join(KINDS)}")
    random = Random(f"chaos {seed}")
    named = _dealt(list(kinds), random)
    targets = {kind: _dealt(KINDS[kind].targets, random) for kind in kinds}
    cards = _dealt(moments(), random)
    stages = _dealt(["ledger", "shops"], random)
    count = max(1, round(seconds / 60 * PER_MINUTE))
    found = []
    for number in range(count):
        kind = next(named)
        target = next(targets[kind])
        deed, protocol, phase = next(cards)
        found.append(
            Fault(
                at_s=round((number + random.uniform(0.0, 0.6)) * seconds / count, 3),
                kind=kind,
                target=target,
                seconds=round(random.uniform(*KINDS[kind].seconds), 3),
                move=Move(protocol, round(random.uniform(0.2, 0.7), 3), random.random(), next(stages), deed),
                phase=phase,
                wait_s=round(random.uniform(0.0, 4.0), 3),
                sign=random.choice((1, -1)),
            )
        )
    return found


def _dealt(cards: Sequence[T], random: Random) -> Iterator[T]:
    """Draw without replacement, repeatedly."""
    while True:
        yield from random.sample(cards, len(cards))
