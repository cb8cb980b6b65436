"""Everything is killed at once while a move is under way, and started again: the results are those of a calm run.

A chain of lives on one data directory. A life goes on where the directory stands, orders a move under load and is
killed, with its JVM and its workers, in a chosen phase; the next one must finish that move, orders another, and so on.
The last one runs to the end of the source. What the sink holds then is compared with a sequential run in plain Python.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.faults.children import ROOT, Child
from tests.spark_app.jobs import EXACT, compare, read, rows, sequential
from whimbrel.core import wire
from whimbrel.host.contract import INLINE, MICRO_BATCH
from whimbrel.log import EmbeddedLog
from whimbrel.orchestrator.journal import Journal

JOB = ROOT / "tests" / "faults" / "job.py"
FOR_EVER = 10**9


KILLS = [
    # What is ordered, in which phase of it everything dies, and how many seconds later at most.
    ("live", "copying", 1.0),
    ("live", "cutting", 0.0),
    ("pause", "releasing", 0.0),
]


@pytest.mark.timeout(900)  # each life of Spark starts a JVM: half a minute or ten for all, as busy as the machine is
@pytest.mark.parametrize(
    ("host", "kills"), [(INLINE, KILLS), pytest.param(MICRO_BATCH, KILLS[:1], marks=pytest.mark.spark)]
)
def test_a_run_that_is_killed_amid_its_moves_ends_as_if_nothing_had_happened(
    tmp_path: Path, host: str, kills: list[tuple[str, str, float]]
) -> None:
    chance = random.Random(os.environ.get("WHIMBREL_SEED", "1"))
    data, out, sites = tmp_path / "data", tmp_path / "results.jsonl", ["edge-1", "cloud"]
    for life, (protocol, phase, slack) in enumerate(kills):
        child = Child(JOB, host, data, out, FOR_EVER, protocol, sites[life % 2], cwd=tmp_path)
        child.wait_for(f"phase m{life + 1} {phase}")
        threading.Event().wait(chance.uniform(0, slack))  # waits for nothing: it dies at an arbitrary moment
        child.kill()
        assert "ended" not in child.lines
    count = EmbeddedLog(data / "logs" / "ingress-chain.db").counter("source") + (400 if host == INLINE else 4_000)
    last = Child(JOB, host, data, out, count, cwd=tmp_path)
    assert last.end() == 0, last.told()
    assert "ended" in last.lines

    results = read(out)
    assert compare(sequential(rows(count)()), results) == EXACT
    identities = {(line["_key"], line["_epoch"], line["_seq"], line["_n"]) for line in results}
    assert len(identities) == len(results) == count
    migrations = Journal(data / "journal.db").migrations()
    assert [migration.phase for migration in migrations] == ["done"] * len(kills)
    assert {line["_epoch"] for line in results} == set(range(len(kills) + 1)), "each move was made under load"


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_while_instances_come_and_go_has_the_old_ones_or_the_new(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "results.jsonl"
    for life, (wanted, phase) in enumerate([(2, "copying"), (1, "cutting")], 1):
        child = Child(JOB, INLINE, data, out, FOR_EVER, "live", wanted, cwd=tmp_path)
        child.wait_for(f"phase m{life} {phase}")
        child.kill()
    journal = Journal(data / "journal.db")
    instances = {"chain-1": "cloud", "chain-2": "edge-1", "chain-3": "cloud"}
    assert wire.unpack(journal.load("instances/chain") or b"", dict[str, str]) == instances
    assert wire.unpack(journal.load("gone/chain") or b"", list[str]) == ["chain-3"]
    # What a death leaves behind between the start of an instance and the order for it.
    journal.save("gone/chain", wire.pack(["chain-3", "chain-4"]))
    journal.save("instances/chain", wire.pack({**instances, "chain-4": "cloud"}))
    journal.close()

    for rest in (400, 800):
        count = EmbeddedLog(data / "logs" / "ingress-chain.db").counter("source") + rest
        last = Child(JOB, INLINE, data, out, count, cwd=tmp_path)
        assert last.end() == 0, last.told()
        assert compare(sequential(rows(count)()), read(out)) == EXACT
        journal = Journal(data / "journal.db")
        assert [migration.phase for migration in journal.migrations()] == ["done", "done"]
        left = wire.unpack(journal.load("instances/chain") or b"", dict[str, str])
        assert left == {"chain-1": "cloud", "chain-2": "edge-1"}
        journal.close()
    names = {file.name for file in data.rglob("*chain-*")}
    assert {name for name in names if "chain-3" in name or "chain-4" in name} == set(), "the next start clears up"
    assert {line["_epoch"] for line in read(out)} == {0, 1, 2}
