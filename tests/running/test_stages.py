"""Two stages: the first one's results are the second one's records, keyed anew; moves of either keep all exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, SCHEMA, Chain, compare, read, rows, sequential
from whimbrel.core.operator import Emit
from whimbrel.host.contract import INLINE

COUNT = 1_500


class Sort(wb.Operator):
    """Numbers the records of a key and sends each on, with the hand that will take it. Every 100th is unreadable."""

    class State(wb.State):
        """How many there were."""

        count: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One record."""
        state.count += 1
        emit(hand=f"hand-{event.n % 5}", parcel=key, n=event.n if event.n % 100 else "unreadable")


class Collect(Chain):
    """Chains what comes to a hand from one key: the order in which keys come to a hand is nobody's promise."""

    class State(wb.State):
        """By key, the chain so far."""

        chains: dict[str, list[int]] = msgspec.field(default_factory=dict)

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        """One parcel."""
        count, digest = state.chains.setdefault(event.parcel, [0, 0])
        one = Chain.State(count=count, digest=digest)

        def note(key: str, count: int, digest: int) -> None:
            state.chains[event.parcel] = [count, digest]
            emit(key=key, count=count, digest=digest)

        super().process(f"{key}/{event.parcel}", event, one, note)


def test_a_move_of_the_second_stage_keeps_the_results_exact(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    pipeline = wb.Pipeline("two", source=wb.Items(rows(COUNT), schema=SCHEMA, rate=300), key="key")
    pipeline.stage("sort", Sort(), groups=2)
    pipeline.stage("collect", Collect(), key="hand", schema="hand string, parcel string, n long", groups=2)
    pipeline.sink(wb.JsonLines(out))
    with wb.run(pipeline, host=INLINE) as app:
        until(lambda: len(app.control.stages["collect"].keys.now()) == 5, "all hands are busy")
        second = app.migrate("collect", to="edge-1", keys=["hand-1", "hand-3"])
        first = app.migrate("sort", to="edge-1", share=0.5)
        assert (second.wait(60).outcome, first.wait(60).outcome) == ("done", "done")
        app.wait(120)
        status, letters = app.status(), app.dead_letters()

    readable = [row for row in rows(COUNT)() if row["n"] % 100]
    chains = [{"key": f"hand-{row['n'] % 5}/{row['key']}", "n": row["n"]} for row in readable]
    assert compare(sequential(chains), read(out)) == EXACT
    assert status["records"]["sent"] == COUNT
    assert status["records"]["delivered"] == len(readable)
    assert {letter.source for letter in letters} == {"results for collect"}
    assert [letter.reason for letter in letters] == ["wrong type"] * 15
    assert status["dead_letters"] == {"wrong type": 15}
