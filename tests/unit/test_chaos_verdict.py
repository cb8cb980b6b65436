"""The verdict of chaos, on folders made by hand: what must be found is found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from whimbrel.core.errors import BadRecord
from whimbrel.core.keys import Selection
from whimbrel.core.names import router_of
from whimbrel.core.protocols.machine import Migration, StoryLine
from whimbrel.core.record import Move, Parked
from whimbrel.gateway.dead_letters import DeadLetters
from whimbrel.lab.chaos.engine import Struck
from whimbrel.lab.chaos.faults import HOUR_US
from whimbrel.lab.chaos.load import EMITTED, MOMENT, TIMES
from whimbrel.lab.chaos.oracle import LEDGER, expect
from whimbrel.lab.chaos.phases import middle
from whimbrel.lab.chaos.plan import GATEWAY, ORCHESTRATOR, SOURCE
from whimbrel.lab.chaos.rows import Load
from whimbrel.lab.chaos.verdict import Run, broken, judge, phase_at, recovery, righted
from whimbrel.log import EmbeddedLog
from whimbrel.orchestrator.journal import Journal

BEGUN = 1_000_000_000_000_000
SECOND = 1_000_000
LOAD = Load(accounts=12, shops=5, state_bytes=50, large=1, large_bytes=500)
COUNT = 600
Lines = list[dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run leaves behind in which all is well: a row each tenth of a second, results a second later."""
    expected = expect(LOAD, COUNT)
    (tmp_path / EMITTED).write_text(str(COUNT))
    (tmp_path / TIMES).write_bytes(b"".join(MOMENT.pack(n, came(n)) for n in range(COUNT)))
    found: Any = [(name, pair, values) for pair, chain in expected.results.items() for name, values in chain]
    places: Counter[str] = Counter()
    lines: Lines = []
    for (kind, row, part), (shop, account), values in found:
        places[shop] += 1
        told = {"kind": kind, "row": row, "part": part, "shop": shop, "account": account, "place": places[shop]}
        lines.append({**told, **values, "_released_us": came(row) + SECOND})
    write(tmp_path, lines)
    Journal(tmp_path / "data" / "journal.db").close()
    log = EmbeddedLog(tmp_path / "data" / "logs" / "dead-letters.db")
    letters = DeadLetters(log)
    for place, letter in enumerate(sorted(expected.letters, key=lambda one: one.row)):
        if letter.where == "rows":
            row = {"row": letter.row}
            letters.put(
                BadRecord("no key", "it is empty"), "rows", letter.row, row, writer="source", counter=letter.row
            )
        else:
            event = json.dumps({"row": letter.row, "part": letter.part})
            letters.park(
                Parked("i", "k", 1, router_of(letter.where), "it raises", event, 0), writer="outlet", counter=place
            )
    log.close()
    return tmp_path


def came(number: int) -> int:
    return BEGUN + number * SECOND // 10


def write(folder: Path, lines: Lines) -> None:
    (folder / "out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def change(folder: Path, deed: Callable[[Lines], object]) -> None:
    lines = [json.loads(one) for one in (folder / "out.jsonl").read_text().splitlines()]
    deed(lines)
    write(folder, lines)


def judged(folder: Path, acknowledged: int | None = None) -> dict[str, Any]:
    return judge(folder, LOAD, [], BEGUN, BEGUN, acknowledged)


def test_a_calm_run_is_right(folder: Path) -> None:
    records = judged(folder, expect(LOAD, COUNT).accepted)["records"]
    assert records["sent"] == COUNT
    assert records["delivered"] == records["expected"] > 500
    assert records["dead_lettered"] == records["dead_letters"]["expected"] > 3
    assert broken(judged(folder)) == []


@pytest.mark.parametrize(
    ("deed", "found"),
    [
        (lambda lines: lines.pop(7), "1 results lost"),
        (lambda lines: lines.append(lines[29]), "1 results duplicated"),
        (lambda lines: lines[9].update(digest=1), "1 results wrong"),
    ],
)
def test_what_is_wrong_is_counted(folder: Path, deed: Callable[[Lines], object], found: str) -> None:
    change(folder, deed)
    assert broken(judged(folder)) == [found]


def test_a_row_that_was_emitted_and_never_taken_in_is_lost(folder: Path) -> None:
    (folder / EMITTED).write_text(str(COUNT + 1))
    assert broken(judged(folder))[0] == "1 results lost"


def test_without_its_end_the_source_is_known_by_the_last_rows_that_were_seen(folder: Path) -> None:
    (folder / EMITTED).unlink()
    assert judged(folder)["records"]["sent"] == COUNT


def test_the_gateway_must_have_acknowledged_what_was_emitted(folder: Path) -> None:
    (line,) = broken(judged(folder, 5))
    assert line.startswith("the gateway says it has taken in 5 records")


def test_a_dead_letter_that_is_missing_or_is_there_twice_is_counted(folder: Path) -> None:
    log = EmbeddedLog(folder / "data" / "logs" / "dead-letters.db")
    DeadLetters(log).park(
        Parked("i", "k", 1, router_of(LEDGER), "e", '{"row": 1, "part": 0}', 0), writer="another", counter=0
    )
    log.close()
    assert broken(judged(folder)) == ["1 dead letters wrong"]
    (folder / "data" / "logs" / "dead-letters.db").unlink()
    missing = judged(folder)["records"]["dead_letters"]
    assert missing["lost"] == missing["expected"]


def migration(phase: str, reason: str | None = None) -> Migration:
    move = Move("m1", LEDGER, "live", "ledger-1", "ledger-2", Selection(bins=frozenset({1})), 1, frozenset({"g"}))
    story = [StoryLine("ordered", "Ordered", BEGUN), StoryLine("copying", "Ready", BEGUN + 2 * SECOND + HOUR_US)]
    return Migration(move, "cloud", "edge-1", phase, reason=reason, story=story)


@pytest.mark.parametrize(
    ("phase", "reason", "found"),
    [
        ("done", None, []),
        ("aborted", "its deadline has passed", []),
        ("aborted", None, ["m1 was aborted without a reason"]),
        ("cutting", None, ["m1 has not ended: it is cutting"]),
    ],
)
def test_a_migration_is_done_or_aborted_with_its_reason(
    folder: Path, phase: str, reason: str | None, found: list[str]
) -> None:
    journal = Journal(folder / "data" / "journal.db")
    journal.write(migration(phase, reason))
    journal.close()
    assert broken(judged(folder)) == found


def test_the_journal_says_in_which_phase_a_fault_struck(folder: Path) -> None:
    journal = Journal(folder / "data" / "journal.db")
    journal.write(migration("cutting"))
    journal.close()
    early, late = (struck(SOURCE, BEGUN + seconds * SECOND, migration="m1") for seconds in (1, 3))
    told = judge(folder, LOAD, [early, late], BEGUN, BEGUN)["faults"]
    assert [fault["phase"] for fault in told] == ["live copying", "live cutting"], "though the journal's clock jumped"
    assert [fault["at_ms"] for fault in told] == [1000, 3000]
    assert phase_at(migration("done"), BEGUN + HOUR_US * 2) == "done"


def test_a_phase_that_was_missed_is_struck_when_it_was_half_over_before() -> None:
    one = migration("cutting")
    one.story.append(StoryLine("cutting", "Opened", BEGUN + 6 * SECOND))
    one.story[1] = StoryLine("copying", "Ready", BEGUN + 2 * SECOND)
    assert middle(one, "copying") == 1
    assert middle(one, "cutting") == 4
    assert middle(one, "ordered") is None
    assert middle(one, "aborting") is None


def struck(role: str, at_us: int, keys: frozenset[str] = frozenset(), migration: str | None = None) -> Struck:
    return Struck(
        at_us=at_us,
        kind="kill",
        role=role,
        target="cloud",
        seconds=0,
        migration=migration,
        protocol="live",
        phase="copying",
        keys=keys,
        back_ms=9_000.0,
    )


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_clock_that_was_hours_off_is_put_right(hours: int) -> None:
    assert righted(BEGUN + 5 * SECOND + hours * HOUR_US, BEGUN) == BEGUN + 5 * SECOND


def test_results_flow_again_when_one_comes_of_a_row_that_was_emitted_behind_the_fault(tmp_path: Path) -> None:
    def line(row: int, account: str, left_s: float, kind: str = "entry") -> dict[str, Any]:
        left = BEGUN + round(left_s * SECOND)
        return {"kind": kind, "row": row, "account": account, "shop": "s", "part": 0, "_released_us": left}

    (tmp_path / TIMES).write_bytes(b"".join(MOMENT.pack(n, came(n)) for n in range(200)))
    lines = [
        line(90, "a", 11),
        line(105, "b", 11.5, "timer"),
        line(105, "b", 12),
        line(105, "a", 16),
        line(170, "a", 18),
    ]
    write(tmp_path, lines)
    run, at = Run(tmp_path, BEGUN), BEGUN + 10 * SECOND
    assert recovery(struck(SOURCE, at, frozenset("a")), run)["ms"] == 6_000
    assert recovery(struck(GATEWAY, at, frozenset("b")), run)["ms"] == 2_000
    assert recovery(struck(GATEWAY, at, frozenset("ab")), run)["ms"] == 4_000, "the median"
    assert recovery(struck(SOURCE, at), run) == {"ms": 9_000, "after_ms": 9_000, "flow_ms": None, "back_ms": 9_000}
    lasting = msgspec.structs.replace(struck(SOURCE, at, frozenset("a")), seconds=4.0)
    assert recovery(lasting, run)["after_ms"] == 2_000, "without the time that the fault itself lasted"
    assert recovery(struck(ORCHESTRATOR, at, frozenset("ab")), run)["ms"] == 9_000, "it holds no result up"
    assert [release.latency_us for release in run.releases(LEDGER)][:2] == [2 * SECOND, 3 * SECOND // 2]


def test_a_row_that_came_again_has_its_last_moment(tmp_path: Path) -> None:
    (tmp_path / TIMES).write_bytes(MOMENT.pack(0, 10) + MOMENT.pack(20, 20) + MOMENT.pack(0, 30) + b"half")
    run = Run(tmp_path, 0)
    assert [run.came_us(row) for row in (0, 19, 20, 99)] == [30, 30, 20, 20]
    assert run.row_at(25) == 20
