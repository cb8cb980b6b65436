"""A running stream that is ordered about from outside, by client and command line: its results are exact."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import EXACT, running
from whimbrel.cli.main import make_app
from whimbrel.host.contract import INLINE


def test_a_stream_moves_pauses_and_leaves_a_site_by_orders_from_outside(tmp_path: Path) -> None:
    with running(tmp_path, host=INLINE) as job:
        job.app.serve()
        with wb.connect(data=job.data) as client:
            moved = client.migrate("chain", keys=["k00", "k03"], to="edge-1").wait(60)
            assert moved.outcome == "done"
            assert moved.progress[0].endswith("Z m1 ordered: ordered by operator over REST"), "behind its time, in UTC"
            assert [site.keys for site in client.sites()] == [10, 2]

            assert client.pause("chain-1").phase == "paused"
            before = client.checkpoint("chain-1").batch
            beyond = job.sent + 300
            until(lambda: job.sent > beyond, "records come in for an instance that stands still")
            assert client.checkpoint("chain-1").batch == before
            assert client.resume("chain-1").phase == "running"
            until(lambda: (client.checkpoint("chain-1").batch or 0) > (before or 0), "it does batches again")

            shown = CliRunner().invoke(make_app(), ["drain", "cloud", "--data", str(job.data)], env={"COLUMNS": "200"})
            assert shown.exit_code == 0, shown.output
            assert "done" in shown.output
            assert [site.keys for site in client.sites()] == [0, 12]
            assert [route.bins for route in client.routes("chain")] == [[], [(0, 1023)]]
        assert job.finish() == EXACT
