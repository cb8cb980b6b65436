"""The job the simulator runs: order-sensitive, with timers, so that any error changes every later result.

Like a user's stage it has a stateless part, which drops and multiplies rows (`prepare`), and an operator.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from whimbrel.core import operator
from whimbrel.core.operator import Context, Emit
from whimbrel.core.record import Kind, Record

ROWS = {0: 0, 1: 2, 2: 3}


def prepare(record: Record) -> list[Record]:
    """The rows of a record: none, one, or several that share its offset."""
    if record.kind != Kind.DATA:
        return [record]
    count = ROWS.get(record.body % 11, 1)
    if count == 1:
        return [record]
    return [Record(*record[:-1], body=record.body + row) if row else record for row in range(count)]


class Job(operator.Operator):
    """Counts, and chains a checksum over all records of a key; many records set timers; some of both raise."""

    tries = 2

    class State(operator.State):
        """The state of a key."""

        count: int = 0
        chain: int = 0

    def process(self, key: str, event: int, state: Any, emit: Emit, ctx: Context) -> None:
        """Process one record."""
        state.count += 1
        state.chain = (state.chain * 31 + event + 1) % 1_000_003
        if event % 3 == 0:  # soon, or much later
            ctx.timer(timedelta(microseconds=event * (10 if event % 2 else 200)))
        if event % 5 == 3:
            emit(half=state.chain // 2)
        if event in (13, 63):
            raise ValueError("this record is poison")
        emit(count=state.count, chain=state.chain, chance=0 if event % 4 else ctx.random.randint(0, 9))

    def on_timer(self, key: str, state: Any, emit: Emit, ctx: Context) -> None:
        """Process a due timer."""
        state.chain = (state.chain * 37 + ctx.now_us) % 1_000_003
        emit(timer=state.chain)
        if ctx.now_us % 13 == 0:
            raise ValueError("this timer is poison")
