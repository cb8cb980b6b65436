"""A running stream with a central store: what lies there is what the keys' states are, and the log is trimmed."""

from __future__ import annotations

from pathlib import Path

import msgspec
from typer.testing import CliRunner

from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, Chain, read, running
from whimbrel.checkpoints.central import CentralStore
from whimbrel.cli.main import make_app
from whimbrel.host.contract import INLINE


def test_the_store_has_the_states_of_all_keys_wherever_they_are(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with running(tmp_path, host=INLINE, keep=False, store=url, save_every=0.5) as job:
        gateway = job.app.first.gateway
        until(lambda: (job.app.status()["stages"]["chain"]["store"]["checkpoint"] or 0) >= 2, "two checkpoints", 60)
        assert job.app.migrate("chain", keys=["k00", "k03"], to="edge-1").wait(60).outcome == "done"
        assert job.finish() == EXACT
        until(lambda: gateway.has_saved, "everything to be saved", 60)
        until(lambda: gateway.ingress.head() > 0, "the log to be trimmed", 60)
        assert job.app.status()["stages"]["chain"]["store"]["error"] is None

    shown = CliRunner().invoke(make_app(), ["checkpoints", url], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.output.splitlines()[1:]] == ["chain"] * 3
    last = {result["key"]: (result["count"], result["digest"]) for result in read(job.out)}
    stored = {version.key: version.unpacked().state for version in CentralStore(url).load("chain")}
    states = {key: msgspec.msgpack.decode(state, type=Chain.State) for key, state in stored.items()}
    assert {key: (state.count, state.digest) for key, state in states.items()} == last
    assert {len(state.ballast) for state in states.values()} == {20_000}
