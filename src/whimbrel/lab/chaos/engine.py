"""The engine: orders the moves of a plan on a running deployment, injects faults in their phases, detects recovery.

While it waits, it continues to check which targets have recovered (`_tick`). Each fault is ended by its own thread,
because the engine itself may be waiting for a response from the target.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from whimbrel.api.client import RemoteHandle
from whimbrel.core.errors import Retry, Unavailable
from whimbrel.lab.chaos.deployed import Deployed, Heal
from whimbrel.lab.chaos.faults import STRIKES
from whimbrel.lab.chaos.orders import Ordered, Orders
from whimbrel.lab.chaos.plan import (
    BYSTANDER,
    DESTINATION,
    GATEWAY,
    LINK,
    ORCHESTRATOR,
    SOURCE,
    STORE,
    UNDOING,
    Fault,
)
from whimbrel.lab.chaos.storage import Aim
from whimbrel.orchestrator.orders import MigrationStatus

PERIOD = 0.02
LOOK = 0.3
"""Seconds between two checks for recovery."""
PHASE_TIMEOUT = 8.0
"""Seconds that a fault waits for its planned phase; then it is injected in the current phase."""
START, REST = 600.0, 300.0
"""Seconds that the deployment has to start, and to become idle."""
KILLS = ("kill", "crash", "jvm", "checkpoint-gone")
"""Faults after which a process must have restarted."""

Show = Callable[[str], None]
"""Receives a line for each event."""


class Struck(msgspec.Struct, kw_only=True):
    """A fault that was injected."""

    at_us: int
    kind: str
    role: str
    target: str
    seconds: float
    migration: str | None
    protocol: str | None
    phase: str
    """As last seen; the journal is more exact (`verdict.py`)."""
    keys: frozenset[str]
    """The keys whose results it may delay."""
    back_ms: float | None = None
    """Milliseconds until the process was back, the link mended, the clock right."""


class Sick(NamedTuple):
    """A fault that is not over."""

    struck: Struck
    ended: threading.Event
    """Set when the fault has been undone."""
    life: int
    """How often the process had been started before."""


class Target(NamedTuple):
    """The target of a fault."""

    role: str
    name: str
    keys: frozenset[str]
    """The keys whose results it may delay."""


class Engine:
    """Injects faults into one deployment."""

    def __init__(self, deployed: Deployed, show: Show) -> None:
        self.deployed, self._show = deployed, show
        self.orders = Orders(deployed)
        self.struck: list[Struck] = []
        self._sick: list[Sick] = []
        self._next_look = 0.0
        self._born: dict[int, float] = {}
        """By process id: when it was first seen."""

    def warm_up(self) -> None:
        """Wait until all processes are alive and results flow."""
        self.until(
            lambda: len(self.deployed.silences()) == len(self.deployed.sites) + 1, START, "all processes are alive"
        )
        running = lambda: all(site.running for site in self.deployed.client.sites())  # noqa: E731
        self.until(lambda: self.deployed.ask(running), START, "all instances run")
        self.until(lambda: self.deployed.delivered() > 50_000, START, "results flow")

    def play(self, plan: Sequence[Fault]) -> None:
        """Execute a plan."""
        start = time.monotonic()
        for fault in plan:
            self.pause(start + fault.at_s - time.monotonic())
            self.orders.finish()  # standbys of earlier faults
            move = self.orders.order(fault.move)
            target = self.aim(fault.target, move)
            if fault.phase is None:
                self.pause(fault.wait_s)
            seen = self.reach(move, fault.phase)
            self.strike(fault.kind, target, fault.seconds, move, seen, sign=fault.sign)

    # ── Moves ────────────────────────────────────────────────────────────────────────────────────────────────────

    def reach(self, move: Ordered, phase: str | None, timeout: float = PHASE_TIMEOUT) -> MigrationStatus | None:
        """Wait until a migration of a move is in a phase, the move is over, or `timeout` seconds have passed; None:
        any phase. Returns the migration last seen in the phase, or else one under way."""
        seen, called_off = None, False
        for found in self._watch(move.handle, timeout):
            under_way = [one for one in found if not one.is_over]
            here = [one for one in under_way if one.phase == phase]
            seen = next(iter(here or under_way), None)
            if here or seen is None or phase is None:
                break
            if phase in UNDOING and not called_off and seen.phase != "ordered":
                called_off = True
                self.deployed.ask(lambda: move.handle and move.handle.abort("chaos tests the abort"))
        return seen

    def _watch(self, handle: RemoteHandle | None, timeout: float) -> Iterator[list[MigrationStatus]]:
        """Poll the migrations of a move."""
        end = time.monotonic() + timeout
        while handle is not None and time.monotonic() < end:
            found = self.deployed.ask(lambda: handle.migrations)
            if found:
                yield found
            self._tick()

    # ── Faults ───────────────────────────────────────────────────────────────────────────────────────────────────

    def aim(self, role: str, move: Ordered, *, with_keys: bool = True) -> Target:
        """The target for a role in a move; waits until it is up. Whatever takes time is done here, such as the query
        for the keys there."""
        others = [site for site in self.deployed.sites if site not in (move.source, move.destination)]
        places = {SOURCE: move.source, DESTINATION: move.destination, BYSTANDER: (others or [move.destination])[0]}
        name = f"{move.source}->{move.destination}" if role == LINK else places.get(role, role)
        sites = (move.source, move.destination) if role == LINK else (name,)
        if role not in (LINK, STORE):
            self.until(lambda: self.deployed.is_up(name), START, f"{name} is up")
        if role == GATEWAY:
            return Target(role, name, frozenset([*self.deployed.load.names, *self.deployed.load.shop_names]))
        is_asked = with_keys and role not in (ORCHESTRATOR, STORE)
        there = self.deployed.keys_at(sites) if is_asked else None
        return Target(role, name, there or frozenset())

    def strike(
        self, kind: str, target: Target, seconds: float, move: Ordered, seen: MigrationStatus | None, *, sign: int = 1
    ) -> Struck:
        """Inject a fault. `seen`: the migration that it is to hit."""
        life = len(self.deployed.lives(target.name))
        struck = Struck(
            at_us=time.time_ns() // 1000,
            kind=kind,
            role=target.role,
            target=target.name,
            seconds=seconds,
            migration=seen.id if seen else None,
            protocol=move.protocol,
            phase=seen.phase if seen else "",
            keys=target.keys,
        )
        heal = STRIKES[kind](self.deployed, Aim(target.name, (move.source, move.destination), sign))
        self.struck.append(struck)
        self._sick.append(Sick(struck, _end_after(seconds, heal, self.deployed.heals), life))
        when = f"{move.protocol} {struck.phase}" if seen else "nothing moves"
        lasting = f" for {seconds:.1f} s" if seconds else ""
        whom = target.role if target.role == target.name else f"{target.role} {target.name}"
        self._show(f"{kind}: {whom}{lasting}; {when}")
        return struck

    # ── Waiting ──────────────────────────────────────────────────────────────────────────────────────────────────

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Wait for a condition; raises `Unavailable` after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                raise Unavailable(
                    f"timeout: waited {timeout:.0f} s until {what}: {self.deployed.stuck()}\n{self.deployed.output()}"
                )
            self._tick()

    def pause(self, seconds: float) -> None:
        """Wait for some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._tick()

    def _tick(self) -> None:
        self.deployed.check()
        if self._sick and time.monotonic() >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + LOOK
        time.sleep(PERIOD)

    def _look(self) -> None:
        """Record which targets have recovered."""
        silences = self.deployed.silences()
        for sick in [sick for sick in self._sick if sick.ended.is_set() and self._is_back(sick, silences)]:
            self._sick.remove(sick)
            struck = sick.struck
            struck.back_ms = round(time.time_ns() / 1e6 - struck.at_us / 1e3, 1)
            self._show(f"{struck.target} is back, {struck.back_ms / 1000:.1f} s after the {struck.kind}")

    def _is_back(self, sick: Sick, silences: dict[str, float]) -> bool:
        """Whether a fault that was undone is over: a killed process has restarted and sent a heartbeat."""
        target, now = sick.struck.target, time.monotonic()
        if not silences:  # the orchestrator itself is unreachable
            return False
        if sick.struck.kind not in KILLS:
            return target not in silences or silences[target] < 2
        lives = self.deployed.lives(target)
        if len(lives) <= sick.life:
            return False
        born = self._born.setdefault(lives[-1], now)
        return target not in silences or silences[target] < now - born

    # ── End of a run ─────────────────────────────────────────────────────────────────────────────────────────────

    def come_to_rest(self, timeout: float = REST) -> None:
        """Wait for the end of every fault and every move, end the source, and wait until everything is delivered."""
        self.until(lambda: not self._sick, timeout, "every target is back")
        self.until(self.orders.finish, timeout, "every move is over")
        self.deployed.end_source()
        self.until(self.deployed.has_finished, timeout, "everything is delivered")


def _end_after(seconds: float, heal: Heal | None, heals: list[Heal]) -> threading.Event:
    """End a fault when its time is over, with retries; the event is set when that is done."""
    ended = threading.Event()
    if heal is None:
        ended.set()
        return ended
    heals.append(heal)

    def end() -> None:
        time.sleep(seconds)
        while not ended.is_set():
            try:
                heal()
                heals.remove(heal)
                ended.set()
            except Retry:  # a process that it calls is unreachable
                time.sleep(1)

    threading.Thread(target=end, name="end of a fault", daemon=True).start()
    return ended
