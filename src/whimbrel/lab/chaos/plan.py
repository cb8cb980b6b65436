"""Which faults strike, and when: a pure function of the seed, so that the same run can be ordered again.

Only the plan is the same, not what it meets: how far a move is when its moment comes is up to the machine.

Kinds, the targets of each kind, and protocols with their phases are dealt like cards: nothing comes twice before
everything has come once.
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
"""Of a move: where its keys were, where they go, and a site that has nothing to do with it."""
PROCESSES = (*SITES, GATEWAY, ORCHESTRATOR)
PER_MINUTE = 6
"""Faults, unless told otherwise."""
UNDOING = frozenset({"aborting", "resuming", "ceasing", "returning"})
"""Phases that a move comes to only if it is called off."""

T = TypeVar("T")


class Kind(msgspec.Struct, frozen=True):
    """A kind of fault: whom it may strike, and between how many seconds it lasts (0: it is over at once)."""

    says: str
    targets: tuple[str, ...]
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL of a process alone: what it started must notice", PROCESSES),
    "crash": Kind("SIGKILL of a process and of everything it started", PROCESSES),
    "jvm": Kind("SIGKILL of a site's JVM", SITES),
    "workers": Kind("SIGKILL of a site's Python workers", SITES),
    "stop": Kind("SIGSTOP of a process and of everything it started, then SIGCONT", PROCESSES, (1.0, 6.0)),
    "away": Kind("the same for longer than it takes to be given up", PROCESSES, (13.0, 18.0)),
    "memory": Kind("a site's Python workers get no more memory", SITES, (2.0, 5.0)),
    "no-files": Kind("a process can open no more files or sockets", PROCESSES, (2.0, 6.0)),
    "cut": Kind("the link between source and destination lets nothing through", (LINK,), (1.0, 8.0)),
    "calls": Kind("calls of a process to others are lost, or the answers to them", PROCESSES, (2.0, 14.0)),
    "clock": Kind("the wall clock of a process is an hour off, then right again", PROCESSES, (2.0, 8.0)),
    "replay": Kind("an order comes three times at once, and once more later", (ORCHESTRATOR,), (2.0, 8.0)),
    "lock": Kind("an ingress log or an inbox is locked", (GATEWAY, SOURCE, DESTINATION), (12.0, 20.0)),
    "slow-disk": Kind("whatever a site writes to its logs waits for a second", SITES, (3.0, 8.0)),
    "full-disk": Kind("no file that a site writes may grow", SITES, (3.0, 8.0)),
    "bad-disk": Kind("what a process writes to its logs fails with EIO", PROCESSES, (1.0, 4.0)),
    "store-away": Kind("the central store is not there", (STORE,), (5.0, 15.0)),
    "store-damaged": Kind("the newest segments of the central store are cut in half", (STORE,), (5.0, 15.0)),
    "checkpoint-gone": Kind("a site crashes, and a checkpoint of it is gone", (SOURCE, BYSTANDER)),
}

MIGRATE, STANDBY, SCALE, DRAIN = "migrate", "standby", "scale", "drain"
DEEDS = (STANDBY, SCALE, DRAIN)
"""Orders beside plain moves."""


class Move(msgspec.Struct, frozen=True):
    """What is ordered before a fault strikes."""

    protocol: str
    share: float
    """Of the keys at its source."""
    pick: float
    """From 0 to 1: which of the moves that are possible then."""
    stage: str = "ledger"
    deed: str = MIGRATE


class Fault(msgspec.Struct, frozen=True):
    """A fault that is planned."""

    at_s: float
    """When its move is ordered, in seconds."""
    kind: str
    target: str
    seconds: float
    """How long it lasts."""
    move: Move
    phase: str | None
    """Of the move, in which it strikes; None: `wait_s` after the order, wherever it is then."""
    wait_s: float
    sign: int
    """1 or -1: which of two ways, if the kind has two."""


def phases(protocol: str) -> list[str]:
    """The phases between the order and the end, in the order of the protocol's table."""
    return list(dict.fromkeys(phase for phase, _ in PROTOCOLS[protocol].table if phase not in (ORDERED, DONE, ABORTED)))


def moments() -> list[tuple[str, str, str | None]]:
    """What may be under way when a fault strikes: order, protocol, phase. Without a phase it is struck at any moment,
    or has its way."""
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
    """Like cards, again and again."""
    while True:
        yield from random.sample(cards, len(cards))
