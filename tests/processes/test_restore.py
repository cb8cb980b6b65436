"""A site stands still, is thought dead, and what it had goes on elsewhere by itself; then it comes back.

Real processes, real Spark. A whole process group is stopped, as if its machine were: no connection is closed, nothing
is lost on disk, and when it goes on it knows of nothing.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.faults.children import ROOT, Child
from tests.processes.test_kills import LONG, SITES, Deployed
from tests.spark_app.jobs import EXACT, compare, read, rows, sequential
from whimbrel.core.record import Kind
from whimbrel.deploy.orchestrator import settled_in
from whimbrel.log import EmbeddedLog
from whimbrel.log.codec import ROWS, records

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]
SUSPECT, DEAD = 3, 8


@pytest.fixture
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    monkeypatch.setenv("WHIMBREL_TEST_FOLDER", str(tmp_path))
    data, job = tmp_path / "data", ROOT / "tests" / "processes" / "job.py"
    options = ["--store", tmp_path / "store", "--save-every", 1, "--suspect", SUSPECT, "--dead", DEAD]
    up = Child("-m", "whimbrel", "up", job, "--data", data, "--sites", ",".join(SITES), *options, cwd=tmp_path)
    try:
        until(lambda: (data / "url").exists(), f"the orchestrator is there; {up.told()}", LONG)
        yield Deployed(up, tmp_path, wb.connect(data=data), settled_in(data))
    finally:
        up.kill()


def stops_amid_a_batch(group: int, data: Path) -> bool:
    """Stop a site while it serves records whose results it has not said yet; if it does not, let it go on."""
    os.killpg(group, signal.SIGSTOP)
    if serves(data):
        return True
    os.killpg(group, signal.SIGCONT)
    return False


def serves(data: Path) -> bool:
    """Whether a site that is stopped has begun a batch with records, and has not said what comes of them."""
    checkpoint, logs = data / "sites" / "cloud" / "chain-1", data / "logs"
    begun, ended = (
        max((int(file.name) for file in (checkpoint / kind).iterdir() if file.name.isdecimal()), default=-1)
        for kind in ("offsets", "commits")
    )
    writer = f"chain-1@{json.loads((checkpoint / 'metadata').read_text())['id']}"
    if begun <= max(0, ended, EmbeddedLog(logs / "outbox-chain-1.db").counter(writer) // ROWS):
        return False
    start, end = (
        json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])["data"]
        for batch in (begun - 1, begun)
    )
    batch = EmbeddedLog(logs / "inbox-chain-1.db").read(start, end)
    return any(record.kind == Kind.DATA for entry in batch for record in records(entry))


def test_a_site_that_stands_still_is_restored_elsewhere_and_may_have_keys_again(deployed: Deployed) -> None:
    client = deployed.client

    def stage() -> dict[str, object]:
        found: dict[str, object] = client.status()["stages"]["chain"]
        return found

    deployed.flow()
    deployed.wait(lambda: deployed.states() == {"alive"}, "all live")
    deployed.wait(lambda: client.status()["stages"]["chain"]["store"]["checkpoint"], "there is a checkpoint")
    group = deployed.pids("site cloud")[-1]
    try:
        deployed.wait(lambda: stops_amid_a_batch(group, deployed.folder / "data"), "it is stopped amid a batch")
        deployed.wait(lambda: [one.phase for one in client.migrations()] == ["done"], "its keys are restored")
        (restored,) = client.migrations()
        assert (restored.protocol, restored.from_site, restored.to_site) == ("restore", "cloud", "edge-1")
        assert restored.keys > 0
        assert restored.replayed >= restored.silent
        deployed.flow()
        assert stage()["lost"] == ["chain-1"]
        assert "chain-1 at cloud is gone" in "\n".join(client.story(restored.id))
    finally:
        os.killpg(group, signal.SIGCONT)
    deployed.wait(lambda: stage()["lost"] == [], "it is back, and has dropped its keys")
    deployed.wait(lambda: client.status()["records"]["refused"], "what it said meanwhile is refused")
    deployed.wait(lambda: deployed.states() == {"alive"}, "all live")
    deployed.at = "edge-1"
    deployed.finish(deployed.begin("live", "copying"))
    deployed.flow()
    (deployed.folder / "ending").touch()
    deployed.wait(deployed.settled.has_finished, "everything is delivered")
    sent = EmbeddedLog(deployed.folder / "data" / "logs" / "ingress-chain.db").counter("source") + 1
    results = read(deployed.folder / "out.jsonl")
    assert compare(sequential(rows(sent)()), results) == EXACT
    assert len(results) == sent
    assert {line["_epoch"] for line in results} == {0, 1, 2}
