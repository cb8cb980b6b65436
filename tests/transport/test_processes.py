"""Two processes on this machine: what the benchmark measures is also true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.app.waiting import until
from tests.faults.children import ROOT, Child
from tests.transport.places import OWNER
from whimbrel.cli.main import make_app
from whimbrel.log import EmbeddedLog
from whimbrel.transport import OutgoingSpool, RemoteLog
from whimbrel.transport.certificates import Authority
from whimbrel.transport.identity import Identity
from whimbrel.transport.sockets import Dialer, EventLoop
from whimbrel.transport.threaded import ThreadedSender

RECEIVER = """
import sys
import threading
from pathlib import Path
from tests.transport.places import anything
from whimbrel.log import EmbeddedLog
from whimbrel.transport import Receiver
from whimbrel.transport.identity import Identity
from whimbrel.transport.server import ReceiverServer
from whimbrel.transport.sockets import EventLoop

folder, port = Path(sys.argv[1]), int(sys.argv[2])
log = EmbeddedLog(folder / "inbox.db")
receiver = Receiver("cloud", "d1", lambda name: log, anything)
server = ReceiverServer(EventLoop(), receiver, Identity.of(folder / "keys" / "cloud"), port=port)
print("port", server.port, flush=True)
threading.Event().wait()
"""


def receiving(folder: Path, port: int = 0) -> tuple[Child, int]:
    """A receiver in a process of its own, and its port."""
    child = Child("-c", RECEIVER, folder, port, cwd=folder)
    until(lambda: child.lines or child.process.poll() is not None, f"it listens; {child.told()}")
    assert child.lines, child.told()
    return child, int(child.lines[0].split()[1])


def test_a_receiver_killed_under_load_loses_and_repeats_nothing(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "keys")
    authority.issue("cloud")
    authority.issue("edge-1")
    loop, spool = EventLoop(), OutgoingSpool(EmbeddedLog(tmp_path / "spool.db"), OWNER)
    child, port = receiving(tmp_path)
    dialer = Dialer(loop, Identity.of(tmp_path / "keys" / "edge-1"), "cloud", "127.0.0.1", port)
    sending, remote, number = ThreadedSender(spool, dialer.connect), RemoteLog(spool, "inbox"), 0
    try:
        sending.start()
        for _ in range(3):
            for _ in range(200):
                remote.append(b"%d" % number + b" " * 3000, count=1, writer="w", counter=number)
                number += 1
            some = number - 100
            until(lambda: spool.head() > some, "half of them are acknowledged")  # noqa: B023
            child.kill()
            child, _ = receiving(tmp_path, port)
        until(lambda: spool.is_empty, "everything is acknowledged", 60)
    finally:
        sending.stop()
        child.kill()
        loop.close()
    assert sending.error is None
    log = EmbeddedLog(tmp_path / "inbox.db", create=False)
    assert [int(entry.blob) for entry in log.read(0)] == list(range(number))


@pytest.mark.parametrize("entry", [1000, 300_000])
def test_the_benchmark_runs_and_reports(tmp_path: Path, entry: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    path = tmp_path / "report.json"
    arguments = ["bench", "transport", "--megabytes", "1", "--entry", str(entry), "--small", "10", "--json", str(path)]
    done = CliRunner().invoke(make_app("bench"), arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    runs = json.loads(path.read_text())["runs"]
    assert [run["logs"] for run in runs] == ["embedded", "memory"]
    for run in runs:
        assert min(run["mb_per_s"].values()) > 0
        assert 0 < run["small_ms"]["median"] <= run["small_ms"]["p99"]
