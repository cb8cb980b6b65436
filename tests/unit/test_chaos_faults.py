"""Faults that can be tried on a small thing: each must strike, and leave nothing behind when it is healed."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from whimbrel.lab.chaos import faults, storage
from whimbrel.lab.chaos.deployed import Deployed
from whimbrel.lab.chaos.disturbance import ANSWERS, CALLS, CLOCK, REQUESTS, disturb
from whimbrel.lab.chaos.storage import Aim, has_strace

WRITER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=0.05)
db.execute("PRAGMA journal_mode=WAL"); db.execute("CREATE TABLE t (n)")
while True:
    try:
        db.execute("INSERT INTO t VALUES (1)"); open(sys.argv[1]).close(); print("written", flush=True)
    except Exception as error:
        print(error, flush=True)
    time.sleep(0.02)
"""
CALLER = """
import http.server, sys, threading, time
from pathlib import Path
import httpx
from whimbrel.lab.chaos import disturbance

class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("served", flush=True)
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *more): pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
threading.Thread(target=server.serve_forever, daemon=True).start()
disturbance.install(Path(sys.argv[1]), "cloud"); disturbance.install(Path(sys.argv[1]), "cloud")
client = httpx.Client(trust_env=False, timeout=0.3)
while True:
    print("hours", round((time.time() - disturbance.true_us() / 1e6) / 3600), flush=True)
    try:
        client.get(f"http://127.0.0.1:{server.server_port}/"); print("answered", flush=True)
    except httpx.TimeoutException as error:
        print(type(error).__name__, flush=True)
    time.sleep(0.05)
"""


class Small(Deployed):
    """As much of a deployment as these faults ask for: a folder, and one process that plays the orchestrator."""

    def __init__(self, folder: Path, pid: int = 0) -> None:
        self.folder, self.data, self.sites, self._pid = folder, folder / "data", ["cloud", "edge-1"], pid
        (self.data / "logs").mkdir(parents=True, exist_ok=True)

    def lives(self, name: str) -> list[int]:
        return [self._pid]


AIM = Aim("orchestrator", ("cloud", "edge-1"), 1)


class Speaking:
    """A process, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def until(self, wanted: str, but: str = "") -> list[str]:
        """What it says up to a line; none of it may be `but`."""
        assert self.process.stdout is not None
        said: list[str] = []
        deadline = time.monotonic() + 60
        while wanted not in said:
            assert time.monotonic() < deadline, (wanted, said[-5:])
            said.append(self.process.stdout.readline().strip())
        assert not but or but not in said
        return said


@contextmanager
def speaking(script: str, *arguments: Any) -> Iterator[Speaking]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Speaking(process)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("strike", "error"),
    [
        (faults.no_files, "Too many open files"),
        pytest.param(
            storage.bad_disk,
            "disk I/O error",
            marks=pytest.mark.skipif(not has_strace(), reason="strace is not there, or may not trace"),
        ),
    ],
)
def test_writes_fail_and_work_again(
    tmp_path: Path, strike: Callable[[Deployed, Aim], Callable[[], None]], error: str
) -> None:
    journal = tmp_path / "data" / "journal.db"
    journal.parent.mkdir()
    with speaking(WRITER, journal) as writer:
        writer.until("written")
        heal = strike(Small(tmp_path, writer.process.pid), AIM)
        deadline = time.monotonic() + 60
        assert writer.process.stdout is not None
        while error not in writer.process.stdout.readline():
            assert time.monotonic() < deadline
        heal()
        writer.until("written")


def test_a_lock_is_held_until_it_is_healed(tmp_path: Path) -> None:
    small = Small(tmp_path)
    log = small.data / "logs" / "ingress-ledger.db"
    sqlite3.connect(log).execute("CREATE TABLE t (n)").connection.close()
    heal = storage.lock(small, Aim("gateway", ("cloud", "edge-1"), 1))
    deadline = time.monotonic() + 30
    while not is_locked(log):
        assert time.monotonic() < deadline
    heal()
    assert not is_locked(log)


def is_locked(log: Path) -> bool:
    db = sqlite3.connect(log, isolation_level=None, timeout=0)
    try:
        db.execute("BEGIN IMMEDIATE")
        return False
    except sqlite3.OperationalError:
        return True
    finally:
        db.close()


def test_a_store_is_away_and_comes_back_as_it_was(tmp_path: Path) -> None:
    segment = tmp_path / "store" / "ledger" / "segments" / "ledger-1" / "0-1"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(b"whole")
    heal = storage.store_away(Small(tmp_path), AIM)
    with pytest.raises(NotADirectoryError):
        segment.read_bytes()
    second = storage.store_away(Small(tmp_path), AIM)
    heal()
    second()
    heal()
    assert segment.read_bytes() == b"whole"


def test_segments_are_damaged_and_healed_unless_they_were_given_up(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "shops" / "segments" / "shops-1"
    folder.mkdir(parents=True)
    files = [folder / f"0-{number}" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(b"0123456789")
        os.utime(file, (number, number))
    heal = storage.store_damaged(Small(tmp_path), AIM)
    assert [len(file.read_bytes()) for file in files] == [10, 5, 5, 5], "the newest"
    files[3].unlink()
    heal()
    assert [file.read_bytes() for file in files[:3]] == [b"0123456789"] * 3
    assert not files[3].exists()


def test_calls_are_lost_one_way_and_the_clock_is_off(tmp_path: Path) -> None:
    with speaking(CALLER, tmp_path) as caller:
        caller.until("answered")
        disturb(tmp_path, CALLS, "cloud", REQUESTS)
        caller.until("ConnectTimeout")
        caller.until("ConnectTimeout", but="served")
        disturb(tmp_path, CALLS, "cloud", ANSWERS)
        caller.until("ReadTimeout")
        assert "served" in caller.until("ReadTimeout"), "the other side has done it"
        disturb(tmp_path, CALLS, "cloud", "")
        caller.until("answered")
        faults.clock(Small(tmp_path), Aim("cloud", ("cloud", "edge-1"), -1))
        caller.until("hours -1")
        disturb(tmp_path, CLOCK, "cloud", "")
        caller.until("hours 0")
    assert not list(tmp_path.glob("c*-cloud"))


def test_a_limit_of_a_process_that_has_ended_is_none() -> None:
    done = subprocess.Popen(["true"])
    done.wait()
    assert storage.limit(done.pid, resource.RLIMIT_FSIZE, 5) is None
