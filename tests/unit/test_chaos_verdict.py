"""The verdict of chaos, on folders made by hand: what must be found is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whimbrel.bench.measure import Release, sequential
from whimbrel.chaos.engine import Struck
from whimbrel.chaos.load import HOUR_US, STAGE, Load
from whimbrel.chaos.plan import GATEWAY, ORCHESTRATOR, SOURCE
from whimbrel.chaos.verdict import broken, judge, phase_at, recovery, righted
from whimbrel.control.journal import Journal
from whimbrel.core.keys import Selection, bin_of
from whimbrel.core.protocols.machine import Line, Migration
from whimbrel.core.record import Move, Record, Result
from whimbrel.gateway.intake import parse_schema
from whimbrel.log import EmbeddedLog, codec

BEGUN = 1_000_000_000_000_000
SECOND = 1_000_000
LOAD = Load(keys=3, state_bytes=100)
ROWS = [(LOAD.names[number % 3], number) for number in range(30)]
Lines = list[dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run leaves behind in which all is well: a record each tenth of a second, results a second later."""
    log = EmbeddedLog(tmp_path / "data" / "logs" / f"ingress-{STAGE}.db")
    schema = codec.entry_schema(parse_schema("account string, amount long"))
    for number, (key, amount) in enumerate(ROWS):
        record = Record(0, 0, bin_of(key), key, 0, 0, "gateway", came(number), came(number), (key, amount))
        log.append(codec.encode([record], schema), count=1, writer="source", counter=number)
    expected, _ = sequential(log, LOAD.operator())
    log.close()
    found = sorted((seq, n, key, values) for key, results in expected.items() for seq, n, values in results)
    write(tmp_path, [line(number, *one) for number, one in enumerate(found)])
    Journal(tmp_path / "data" / "journal.db").close()
    return tmp_path


def came(number: int) -> int:
    return BEGUN + number * SECOND // 10


def line(number: int, seq: int, n: int, key: str, values: dict[str, Any]) -> dict[str, Any]:
    left = came(number) + SECOND
    identity = {"_key": key, "_epoch": 0, "_seq": seq, "_n": n, "_ingress_us": came(number), "_released_us": left}
    return {**values, **identity}


def write(folder: Path, lines: Lines) -> None:
    (folder / "out.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def change(folder: Path, deed: Callable[[Lines], object]) -> None:
    lines = [json.loads(one) for one in (folder / "out.jsonl").read_text().splitlines()]
    deed(lines)
    write(folder, lines)


def counts(folder: Path) -> dict[str, int]:
    found = judge(folder, LOAD, [], BEGUN, BEGUN)["records"]
    assert found.pop("sent") == 30
    return {name: count for name, count in found.items() if count}


def swap(lines: Lines) -> None:
    lines[3], lines[0] = lines[0], lines[3]


def test_a_calm_run_is_right(folder: Path) -> None:
    assert counts(folder) == {"delivered": 30}
    assert broken(judge(folder, LOAD, [], BEGUN, BEGUN)) == []


@pytest.mark.parametrize(
    ("deed", "found"),
    [
        (lambda lines: lines.pop(7), {"delivered": 29, "lost": 1}),
        (lambda lines: lines.append(lines[29]), {"delivered": 31, "duplicated": 1}),
        (lambda lines: lines[9].update(digest=1), {"delivered": 30, "wrong": 1}),
        (swap, {"delivered": 30, "out_of_order": 1}),
    ],
)
def test_what_is_wrong_is_counted(folder: Path, deed: Callable[[Lines], object], found: dict[str, int]) -> None:
    change(folder, deed)
    assert counts(folder) == found
    assert len(broken(judge(folder, LOAD, [], BEGUN, BEGUN))) == 1


def migration(phase: str, reason: str | None = None) -> Migration:
    move = Move("m1", STAGE, "live", "ledger-1", "ledger-2", Selection(bins=frozenset({1})), 1, frozenset({"g"}))
    story = [Line("ordered", "Ordered", BEGUN), Line("copying", "Ready", BEGUN + 2 * SECOND + HOUR_US)]
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
    assert broken(judge(folder, LOAD, [], BEGUN, BEGUN)) == found


def test_the_journal_says_in_which_phase_a_fault_struck(folder: Path) -> None:
    journal = Journal(folder / "data" / "journal.db")
    journal.write(migration("cutting"))
    journal.close()
    early, late = (struck(SOURCE, BEGUN + seconds * SECOND, migration="m1") for seconds in (1, 3))
    told = judge(folder, LOAD, [early, late], BEGUN, BEGUN)["faults"]
    assert [fault["phase"] for fault in told] == ["live copying", "live cutting"], "though the journal's clock jumped"
    assert [fault["at_ms"] for fault in told] == [1000, 3000]
    assert phase_at(migration("done"), BEGUN + HOUR_US * 2) == "done"


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


def test_results_flow_again_when_one_comes_out_of_a_record_that_came_in_behind_the_fault() -> None:
    at = BEGUN + 10 * SECOND

    def release(key: str, came_s: float, left_s: float) -> Release:
        came_us = BEGUN + round(came_s * SECOND)
        return Release(BEGUN + round(left_s * SECOND), Result(key, 0, 1, 0, came_us, came_us, {}))

    releases = [release("a", 9, 11), release("b", 10.5, 12), release("a", 10.5, 16), release("a", 17, 18)]
    assert recovery(struck(SOURCE, at, frozenset("a")), releases)["ms"] == 6_000
    assert recovery(struck(GATEWAY, at, frozenset("b")), releases)["ms"] == 2_000
    assert recovery(struck(GATEWAY, at, frozenset("ab")), releases)["ms"] == 4_000, "the median"
    assert recovery(struck(SOURCE, at), releases) == {"ms": 9_000, "flow_ms": None, "back_ms": 9_000}
    assert recovery(struck(ORCHESTRATOR, at, frozenset("ab")), releases)["ms"] == 9_000, "it holds no result up"
