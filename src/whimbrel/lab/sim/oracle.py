"""The expected results: the same job over the same records, one after the other, implemented without the core.

The oracle has no batches, parts, logs or moves, and shares no code with the code under test but the job itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from whimbrel.core.operator import RECORD, Context
from whimbrel.core.record import Kind
from whimbrel.lab.sim.job import Job, prepare
from whimbrel.log.codec import ROWS

if TYPE_CHECKING:
    from whimbrel.lab.sim.world import World

Letter = tuple[str, int, str, str]
"""A dead letter: key, seq, error, the event or timer."""


class Oracle:
    """One sequential run."""

    def __init__(self, *, remembers: bool) -> None:
        self.job, self._context = Job(), Context()
        self._remembers = remembers
        self.results: dict[str, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
        self.letters: Counter[Letter] = Counter()
        self.past: dict[str, list[tuple[int, Any, list[int]]]] = defaultdict(list)
        """By key: its state and timers after each record or timer applied to it. Only with `remembers`."""
        self._states: dict[str, Any] = defaultdict(self.job.State)
        self._timers: dict[str, list[int]] = defaultdict(list)

    def follow(self, world: World) -> None:
        """Process all entries of the gateways' ingress logs."""
        for gateway in world.gateways.values():
            for position, records in gateway.ingress.history:
                if records[0].kind == Kind.DATA:
                    for row in (row for record in records for row in prepare(record)):
                        self._expire(row.key, row.seq, row.event_us)
                        self._do(row.key, row.seq, row.event_us, self.job.process, row.body)
                elif records[0].kind == Kind.TICK:
                    for key in gateway.mine:
                        self._expire(key, position * ROWS, records[0].event_us)

    def _expire(self, key: str, seq: int, now_us: int) -> None:
        while self._timers[key] and self._timers[key][0] <= now_us:
            self._do(key, seq, self._timers[key].pop(0), self.job.on_timer)

    def _do(self, key: str, seq: int, now_us: int, act: Callable[..., None], *event: Any) -> None:
        """Process one record or one timer; if the job raises, it has no effect."""
        context = self._context
        context.key, context.seq, context.now_us, context.timers = key, seq, now_us, list(self._timers[key])
        context.chance = RECORD
        state = msgspec.structs.replace(self._states[key])
        emitted: list[dict[str, Any]] = []
        try:
            act(key, *event, state, lambda **values: emitted.append(values), context)
        except ValueError as error:
            event_json = msgspec.json.encode(event[0] if event else {"timer": now_us}).decode()
            self.letters[key, seq, f"ValueError: {error}", event_json] += 1
            self._note(key, seq)
            return
        self._states[key], self._timers[key] = state, context.timers
        self._note(key, seq)
        results = self.results[key]
        number = results[-1][1] + 1 if results and results[-1][0] == seq else 0
        results += [(seq, number + n, values) for n, values in enumerate(emitted)]

    def _note(self, key: str, seq: int) -> None:
        if self._remembers:
            self.past[key].append((seq, self._states[key], list(self._timers[key])))
