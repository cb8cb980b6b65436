"""A run that stopped in the middle goes on from its data directory, and one directory is for one pipeline and run."""

from __future__ import annotations

from pathlib import Path

import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, SCHEMA, Chain, compare, read, rows, sequential
from whimbrel.core.errors import Conflict
from whimbrel.host.contract import INLINE
from whimbrel.log import EmbeddedLog


class Stopped(Exception):
    """The user's own code fails."""


def job(out: Path, count: int = 10**9, name: str = "again", stage: str = "chain") -> wb.Pipeline:
    pipeline = wb.Pipeline(name, source=wb.Items(rows(count), schema=SCHEMA, rate=400), key="key")
    return pipeline.stage(stage, Chain()).sink(wb.JsonLines(out))


def test_a_run_that_stops_in_the_middle_goes_on_from_its_directory(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out.jsonl"

    def stop_in_the_middle() -> None:
        with wb.run(job(out), data=data, host=INLINE) as app:
            until(lambda: app.status()["records"]["delivered"] > 100, "some results")
            assert app.migrate("chain", to="edge-1", keys=["k00", "k05"]).wait(60).outcome == "done"
            with pytest.raises(Conflict, match="another run uses"):
                wb.run(job(out), data=data, host=INLINE)
            raise Stopped

    with pytest.raises(Stopped):
        stop_in_the_middle()
    first = read(out)
    assert len(first) > 100

    # What cannot go on here is refused, and harms nothing.
    for refused, sites in ((job(out, name="other"), None), (job(out, stage="other"), None), (job(out), ["cloud"])):
        with pytest.raises(wb.Refused):
            wb.run(refused, sites=sites or ["cloud", "edge-1"], data=data, host=INLINE)
    assert read(out) == first

    count = EmbeddedLog(data / "logs" / "ingress-chain.db").counter("source") + 500
    with wb.run(job(out, count), data=data, host=INLINE) as app:
        assert app.status()["stages"]["chain"]["migrations"] == {"m1": "done"}
        assert app.migrate("chain", to="edge-1", keys=["k00", "k05"]).is_noop, "routes outlive a run"
        app.wait(120)
        assert app.status()["records"] == {"sent": count, "delivered": count, "refused": 0, "dead_lettered": 0}
    results = read(out)
    assert results[: len(first)] == first, "what was delivered stays as it is"
    assert compare(sequential(rows(count)()), results) == EXACT

    with wb.run(job(out, count), sites=["cloud", "edge-1", "edge-2"], data=data, host=INLINE) as app:
        assert app.migrate("chain", to="edge-2", keys=["k00", "k01"]).wait(60).outcome == "done", "a new site"
        app.wait(60)
    assert read(out) == results, "a third run finds nothing to do"
