"""The embedded log among real processes: killed writers, many at once, full disks, damaged files.

Children are separate interpreters, as sites and gateways are. They say what was acknowledged on their standard output.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import whimbrel.log
from whimbrel.core.errors import Corrupt, NewerFormat, Unavailable
from whimbrel.log import EmbeddedLog, Lane
from whimbrel.log.embedded import FORMAT

OPEN = """
import hashlib, os, random, resource, sys
from whimbrel.core.errors import Unavailable
from whimbrel.log import EmbeddedLog

def blob(seed, writer, counter):
    body = random.Random(f"{seed}{writer}{counter}").randbytes(20_000)[: 1 + (counter * 7919) % 20_000]
    return f"{writer} {counter} ".encode() + hashlib.sha256(body).digest() + body

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # unbuffered: said means acknowledged

def append(log, writer, counter):
    return log.append(blob("s", writer, counter), count=1, writer=writer, counter=counter)

path, writer, *rest = sys.argv[1:]
"""

WRITE_FOR_EVER = (
    OPEN
    + """
log = EmbeddedLog(path, durable=rest == ["durable"])
counter = log.counter(writer)
while True:
    counter += 1
    position = append(log, writer, counter)
    say("appended", position)
    if counter % 20 == 0:
        log.trim(position - 30)
        say("trimmed", position - 30)
"""
)

READ_FOR_EVER = (
    OPEN
    + """
from whimbrel.log import Lane
log = EmbeddedLog(path, durable=rest == ["durable"])
counter = log.counter(writer)
while True:
    counter += 1
    log.append(b"", count=1, writer=writer, counter=counter, lane=Lane.CONTROL)  # a life before may have done it
    append(log, writer, counter)
    log.commit("r", {Lane.DATA: counter + 1, Lane.CONTROL: counter + 1})
    say("committed", counter + 1)
"""
)

WRITE_SOME = (
    OPEN
    + """
say("here")
sys.stdin.readline()
log = EmbeddedLog(path)
for counter in range(int(rest[0])):
    append(log, writer, counter)
"""
)

FILL_THE_DISK = (
    OPEN
    + """
log, counter = EmbeddedLog(path), 0
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # no file may grow beyond: the nearest thing to a full disk
try:
    while counter < 1_000:
        append(log, writer, counter)
        counter += 1
except Unavailable:
    say("full", counter)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
say("again", append(log, writer, counter))
"""
)


def child(script: str, *args: object) -> subprocess.Popen[bytes]:
    source = str(Path(whimbrel.log.__file__).parents[2])
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": source}
    )


def whole(blob: bytes) -> tuple[str, int]:
    """The writer and counter of a blob that is exactly what was written."""
    writer, counter, rest = blob.split(b" ", 2)
    assert hashlib.sha256(rest[32:]).digest() == rest[:32]
    assert len(rest) == 33 + (int(counter) * 7919) % 20_000
    return writer.decode(), int(counter)


@pytest.mark.parametrize(("seed", "durability"), [(1, "durable"), *((seed, "usual") for seed in range(2, 10))])
def test_a_killed_writer_loses_nothing_it_was_told_is_there(tmp_path: Path, seed: int, durability: str) -> None:
    """Three lives on one log; each ends at a random point, mostly in the middle of an append or a trim."""
    chance, path, appended, trimmed = random.Random(seed), tmp_path / "log", 0, 0
    for _ in range(3):
        with child(WRITE_FOR_EVER, path, "w", durability) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(chance.randrange(1, 150))]
            for _ in range(chance.randrange(20_000)):
                pass  # so that it does not always die right after it has spoken
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        for line in lines:
            what, position = line.split()
            if what == b"appended":
                assert int(position) == appended
                appended += 1
            else:
                trimmed = max(trimmed, int(position))
        log = EmbeddedLog(path)
        assert appended <= log.tail() <= appended + 1
        assert trimmed <= log.head() <= max(trimmed, log.tail() - 31)
        entries = log.read(log.head())
        assert [entry.position for entry in entries] == list(range(log.head(), log.tail()))
        assert [whole(entry.blob) for entry in entries] == [("w", entry.position) for entry in entries]
        assert log.counter("w") == log.tail() - 1
        appended = log.tail()
        log.close()


@pytest.mark.parametrize("durability", ["durable", "usual"])
def test_a_killed_reader_finds_its_position_where_it_was_told_it_is(tmp_path: Path, durability: str) -> None:
    """Three lives on one log, each killed while it commits: no position is lost, and no lane is ahead of the other."""
    chance, path, last = random.Random(durability), tmp_path / "log", 0
    for _ in range(3):
        with child(READ_FOR_EVER, path, "w", durability) as reader:
            assert reader.stdout is not None
            lines = [reader.stdout.readline() for _ in range(chance.randrange(1, 100))]
            reader.send_signal(signal.SIGKILL)
            lines += reader.stdout.readlines()
        said, log = [int(line.split()[1]) for line in lines], EmbeddedLog(path)
        position = log.committed("r")
        assert position is not None
        assert position == log.committed("r", Lane.CONTROL)
        assert last < said[0] <= said[-1] <= position <= min(said[-1] + 1, log.tail())
        last = position
        log.close()


def test_many_processes_create_and_write_one_log_while_another_reads(tmp_path: Path) -> None:
    """All open a log that is not there yet at the same moment: one creates it, and nobody's appends are lost."""
    path, each, names = tmp_path / "deep" / "er" / "log", 60, "abcd"
    writers = [child(WRITE_SOME, path, name, each) for name in names]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"here\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"\n")
        writer.stdin.close()
    deadline, seen, log = time.monotonic() + 20, list[tuple[str, int]](), None
    while len(seen) < each * len(names):
        assert time.monotonic() < deadline, f"only {len(seen)} entries arrived"
        try:
            log = log or EmbeddedLog(path, create=False)
        except Unavailable:
            continue
        entries = log.read(len(seen))
        assert [entry.position for entry in entries] == list(range(len(seen), len(seen) + len(entries)))
        seen += [whole(entry.blob) for entry in entries]
    for writer in writers:
        assert writer.wait(timeout=10) == 0
        assert writer.stdout is not None
        writer.stdout.close()
    for name in names:
        assert [counter for writer_name, counter in seen if writer_name == name] == list(range(each))
    assert {file.name for file in path.parent.iterdir()} <= {"log", "log-wal", "log-shm"}, "no draft is left behind"


def test_a_full_disk_is_unavailable_and_the_append_may_be_repeated(tmp_path: Path) -> None:
    with child(FILL_THE_DISK, tmp_path / "log", "w") as writer:
        said = writer.communicate(timeout=20)[0].split()
    full = int(said[1])
    assert said == [b"full", b"%d" % full, b"again", b"%d" % full]
    entries = EmbeddedLog(tmp_path / "log").read(0)
    assert [whole(entry.blob) for entry in entries] == [("w", counter) for counter in range(full + 1)]


def test_a_log_without_room_is_unavailable_and_the_append_may_be_repeated(tmp_path: Path) -> None:
    """The same as SQLite itself reports it; it asks the disk for room page by page."""
    log = EmbeddedLog(tmp_path / "log")
    assert log._db is not None
    log._db.execute("PRAGMA max_page_count = 1")  # never below what it has: no page more
    with pytest.raises(Unavailable):
        log.append(bytes(10_000), count=1, writer="a", counter=0)
    assert log.append(bytes(10_000), count=1, writer="a", counter=0) == 0


def test_a_locked_log_is_unavailable_until_it_is_not(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "log", timeout=0.01)
    other = sqlite3.connect(tmp_path / "log", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable):
        log.append(b"x", count=1, writer="a", counter=0)
    with pytest.raises(Unavailable):
        log.commit("r", {Lane.DATA: 0})
    assert (log.read(0), log.committed("r")) == ([], None), "readers do not wait for writers"
    other.close()
    assert log.append(b"x", count=1, writer="a", counter=0) == 0


def test_a_reader_does_not_make_a_log(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        EmbeddedLog(tmp_path / "log", create=False)
    with pytest.raises(Unavailable):
        EmbeddedLog(Path(__file__) / "log")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_vanishes_is_not_made_anew_behind_its_users_back(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "log")
    log.append(b"x", count=1, writer="a", counter=0)
    log.close()
    (tmp_path / "log").unlink()
    with pytest.raises(Unavailable):
        log.append(b"y", count=1, writer="a", counter=1)


def filled(path: Path) -> bytes:
    log, chance = EmbeddedLog(path), random.Random(1)
    for counter in range(100):
        log.append(chance.randbytes(5_000), count=1, writer="a", counter=counter)
    log.close()
    return path.read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 100, 4_096, 5_000, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_log_is_corrupt(tmp_path: Path, kept: float) -> None:
    content = filled(tmp_path / "log")
    cut = content[: int(kept * len(content)) if isinstance(kept, float) else kept]
    (tmp_path / "log").write_bytes(cut)
    with pytest.raises(Corrupt):
        EmbeddedLog(tmp_path / "log").read(0)
    assert (tmp_path / "log").read_bytes() == cut, "what is to be looked at is left as it was"


def test_a_damaged_blob_is_corrupt(tmp_path: Path) -> None:
    """One bit in the middle of a blob, where SQLite itself sees nothing."""
    content = bytearray(filled(tmp_path / "log"))
    blob = EmbeddedLog(tmp_path / "log").read(70, 71)[0].blob
    content[content.index(blob[2_000:2_100]) + 50] ^= 1
    (tmp_path / "log").write_bytes(content)
    log = EmbeddedLog(tmp_path / "log")
    assert (len(log.read(0, 70)), len(log.read(71))) == (70, 29)
    with pytest.raises(Corrupt):
        log.read(60)


def test_what_is_not_a_log_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "garbage").write_bytes(random.Random(1).randbytes(10_000))
    other = sqlite3.connect(tmp_path / "other")
    other.executescript("CREATE TABLE entries (lane, position)")
    other.close()
    for name in ("garbage", "other"):
        with pytest.raises(Corrupt):
            EmbeddedLog(tmp_path / name)


def test_a_missing_entry_is_corrupt_not_skipped(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    vandal = sqlite3.connect(tmp_path / "log", isolation_level=None)
    vandal.execute("DELETE FROM entries WHERE position = 50")
    vandal.close()
    log = EmbeddedLog(tmp_path / "log")
    assert len(log.read(0, 50)) == 50
    for ask in (lambda: log.read(40, 60), lambda: log.backlog(50), lambda: log.advance(50, 1)):
        with pytest.raises(Corrupt):
            ask()


def test_a_newer_log_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    newer = sqlite3.connect(tmp_path / "log", isolation_level=None)
    newer.execute(f"PRAGMA user_version = {FORMAT + 1}")
    newer.close()
    with pytest.raises(NewerFormat):
        EmbeddedLog(tmp_path / "log")


def test_no_operation_scans(tmp_path: Path) -> None:
    """Each statement finds its rows through an index, so that cost follows what is read, not what is kept."""
    log = EmbeddedLog(tmp_path / "log")
    sent = set[str]()
    assert log._db is not None
    log._db.set_trace_callback(sent.add)
    for counter in range(4):
        log.append(b"x", count=1, writer="a", counter=counter)
        log.trim(counter)
        log.read(counter)
        log.advance(counter, 0)
        log.backlog(counter)
        log.commit("r", {Lane.DATA: counter})
        log.committed("r")
        log.readers()
        log.lag("r")
    plans = [
        detail
        for statement in sent
        if statement.split()[0] not in ("BEGIN", "COMMIT")
        for *_, detail in log._db.execute(f"EXPLAIN QUERY PLAN {statement}")
    ]
    assert any("reach" in detail for detail in plans), "advance goes by the running total"
    assert [detail for detail in plans if detail.startswith("SCAN") or "TEMP B-TREE" in detail] == []
