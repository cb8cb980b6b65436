"""The user's code: an operator, the state of one key, and the processing of one record.

An operator must be a deterministic function of state and record: Spark repeats a failed batch, and during a live move
two instances apply the same records. So time and randomness come from the context, which derives both from the record.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar, get_args, get_type_hints
from zlib import crc32

import msgspec

from whimbrel.core.errors import Refused

Emit = Callable[..., None]
RECORD, TIMER = "record", "timer"


class State(msgspec.Struct):
    """The state of one key: annotated fields, each with a default. Stored as MessagePack."""


class Context:
    """Time, randomness and timers, for an operator with a `ctx`: `process(self, key, event, state, emit, ctx)`."""

    __slots__ = ("_random", "chance", "key", "now_us", "seq", "timers")

    def __init__(self) -> None:
        self.key, self.now_us, self.seq = "", 0, 0
        self.timers: list[int] = []
        self.chance: random.Random | str = RECORD
        """The kind of call: `RECORD` or `TIMER`; from the first draw on, the Random of this call."""
        self._random: random.Random | None = None
        """Seeded anew for each call that draws: faster than a new one."""

    @property
    def now(self) -> datetime:
        """The event time of this record, or of this timer. Never the wall clock."""
        return datetime.fromtimestamp(self.now_us / 1e6, UTC)

    @property
    def random(self) -> random.Random:
        """One Random for this call, seeded with the key, the record's `seq` and a timer's event time: a replay draws
        the same numbers."""
        if isinstance(self.chance, str):
            moment = f"/{self.now_us}" if self.chance == TIMER else ""
            self._random = self._random or random.Random(0)
            self._random.seed(f"{self.key}/{self.seq}{moment}")
            self.chance = self._random
        return self.chance

    def timer(self, at: datetime | timedelta) -> None:
        """Call `on_timer` at an event time, or at a delay after now. Setting the same time twice fires once."""
        moment = self.now_us + at // timedelta(microseconds=1) if isinstance(at, timedelta) else _us(at)
        if moment not in self.timers:
            self.timers.append(moment)
            self.timers.sort()


class Operator:
    """One keyed stage's logic. Subclass it, give it a `State`, write `process`."""

    State: ClassVar[type] = State
    tries: ClassVar[int] = 3
    """Number of tries for a record on which `process` raises, before it becomes a dead letter."""

    def process(self, *args: Any, **kwargs: Any) -> None:
        """`process(self, key, event, state, emit)`: process one record of one key.

        Change `state` in place, call `emit(name=value, ...)` for each result. Add a fifth parameter, `ctx`, for time,
        randomness and timers. The effect is exactly-once for each record; the call may be repeated, so it must depend
        on its arguments only.
        """
        raise NotImplementedError

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        """Called when a timer set with `ctx.timer` is due; `ctx.now` is its event time."""


def takes_context(operator: Operator) -> bool:
    """Whether `process` has a context parameter. Refuses an invalid operator before anything runs."""
    if type(operator).process is Operator.process:
        raise Refused(f"{type(operator).__name__} has no process(key, event, state, emit)")
    try:
        operator.State()
    except TypeError as error:
        raise Refused(f"each field of {type(operator).__name__}.State needs a default: {error}") from error
    process = operator.process
    count = _parameters(process.__func__) - 1 if inspect.ismethod(process) else _parameters(process)
    if count not in (4, 5):
        raise Refused(f"process takes (key, event, state, emit) and maybe ctx, not {count} parameters")
    return count == 5


@lru_cache
def _parameters(function: Callable[..., None]) -> int:
    return len(inspect.signature(function).parameters)


def uses_timers(operator: Operator) -> bool:
    """Whether the operator uses timers: only then are ticks sent."""
    return type(operator).on_timer is not Operator.on_timer


@lru_cache
def shape_of(state: type) -> str:
    """A digest of a state's fields: the same at both ends of a move, unless they run different versions of a job.

    Also the same whether the job is run or imported: module names are ignored, and string annotations are resolved.
    """
    bases = [inspect.get_annotations(base) for base in reversed(state.__mro__)]
    names = dict.fromkeys(name for annotations in bases for name in annotations)
    try:
        kinds = get_type_hints(state)
    except Exception:  # an annotation that cannot be resolved here
        kinds = {name: kind for annotations in bases for name, kind in annotations.items()}
    fields = {name: _MODULES.sub("", _shown(kinds[name])) for name in names}
    return f"{crc32(repr(fields).encode()):08x}"


_MODULES = re.compile(r"(?:\w+\.)+(?=\w)")


def _shown(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _us(moment: datetime) -> int:
    # A datetime without a time zone is UTC, like `ctx.now`: as local time it would differ between sites.
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1e6)
