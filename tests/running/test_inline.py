"""The whole application on inline hosts: no Spark is loaded, every protocol is exact, a killed run continues."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import whimbrel as wb
from tests.spark_app.jobs import EXACT, SCHEMA, Chain, Job, compare, read, rows, running, sequential
from whimbrel.host.contract import INLINE


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with running(tmp_path_factory.mktemp("inline"), trigger="50 milliseconds", host=INLINE) as job:
        yield job


PROTOCOLS = ["live", "push", "fetch", "pause", "replicate", "restart", "auto"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_moves_everything(job: Job, protocol: str) -> None:
    coordinator = job.app.control.stages["chain"].coordinator
    here = coordinator.sites[coordinator.table.owners["k00"]]
    to = next(site for site in job.app.sites if site != here)
    handle = job.app.migrate("chain", to=to, protocol=protocol).wait(60)
    assert handle.outcome == "done"
    assert coordinator.sites[coordinator.table.owners["k00"]] == to


def test_all_results_are_exact_after_all_of_this(job: Job) -> None:
    assert job.finish() == EXACT
    assert job.app.batches()


def test_a_run_that_was_stopped_continues(tmp_path: Path) -> None:
    out, data = tmp_path / "out.jsonl", tmp_path / "data"
    for count in (500, 900):
        pipeline = wb.Pipeline("orders", source=wb.Items(rows(count), schema=SCHEMA), key="key")
        pipeline.stage("chain", Chain()).sink(wb.JsonLines(out))
        with wb.run(pipeline, data=data, host=INLINE, trigger="20 milliseconds"):
            pass
    assert compare(sequential(rows(900)()), read(out)) == EXACT


def test_an_unknown_host_is_refused_before_anything_runs(tmp_path: Path) -> None:
    pipeline = wb.Pipeline("orders", source=rows(1)(), key="key").stage("chain", Chain())
    with pytest.raises(wb.UnknownName, match="unknown host 'flink'; there is: inline, micro-batch"):
        wb.run(pipeline, data=tmp_path / "data", host="flink")
    assert not (tmp_path / "data").exists()


def test_a_stage_that_needs_spark_is_refused_by_name_before_anything_runs(tmp_path: Path) -> None:
    pipeline = wb.Pipeline("orders", source=rows(1)(), key="key")
    pipeline.stage("chain", Chain(), prepare=lambda frame: frame)
    with pytest.raises(wb.Refused, match=r"stage chain has a prepare, .* use host='micro-batch'"):
        wb.run(pipeline, data=tmp_path / "data", host=INLINE)
    assert not (tmp_path / "data").exists()


def test_a_session_of_the_users_own_is_not_for_an_inline_host(tmp_path: Path) -> None:
    pipeline = wb.Pipeline("orders", source=rows(1)(), key="key").stage("chain", Chain())
    with pytest.raises(wb.Refused, match="runs without Spark: leave out spark="):
        wb.run(pipeline, data=tmp_path / "data", host=INLINE, spark=object())
    assert not (tmp_path / "data").exists()


SCRIPT = """
import sys
import whimbrel as wb

class Count(wb.Operator):
    class State(wb.State):
        count: int = 0

    def process(self, key, event, state, emit):
        state.count += 1
        emit(key=key, count=state.count)

results = []
job = wb.Pipeline("p", source=[{"key": "a"}, {"key": "b"}, {"key": "a"}], key="key")
job.stage("count", Count()).sink(results.append)
with wb.run(job, host="inline", trigger="10 milliseconds") as app:
    app.wait(30)
print(sorted((result["key"], result["count"]) for result in results))
print([name for name in sys.modules if name.split(".")[0] in ("pyspark", "py4j")])
"""


def test_no_pyspark_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["[('a', 1), ('a', 2), ('b', 1)]", "[]"], done.stderr
