"""The embedded log and fork(): Spark and multiprocessing fork Python while its threads are at work on logs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from whimbrel.log import EmbeddedLog, Log
from whimbrel.log.forks import ForkGate


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(20)  # a child that hangs dies, and fails the test
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def write(log: Log, writer: str, counters: range) -> None:
    for counter in counters:
        assert log.append(f"{writer}{counter}".encode(), count=1, writer=writer, counter=counter) is not None


def test_a_child_may_use_the_log_it_inherited_while_the_parents_threads_go_on(tmp_path: Path) -> None:
    log, stop, written = EmbeddedLog(tmp_path / "log"), threading.Event(), dict[str, int]()

    def go_on(writer: str) -> None:
        counter = 0
        while not stop.is_set():
            write(log, writer, range(counter, counter + 1))
            counter += 1
        written[writer] = counter

    threads = [threading.Thread(target=go_on, args=(f"thread-{n}-",)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        children = [forked(partial(write, log, f"child-{n}-", range(20))) for n in range(12)]
        assert [ended_well(pid) for pid in children] == [True] * 12
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    written |= {f"child-{n}-": 20 for n in range(12)}
    blobs = [entry.blob.decode() for entry in log.read(0)]
    assert len(blobs) == sum(written.values())
    for writer, count in written.items():
        assert [blob for blob in blobs if blob.startswith(writer)] == [f"{writer}{i}" for i in range(count)]


def test_a_child_loses_nothing_when_the_parent_closes_the_log(tmp_path: Path) -> None:
    """The case for closing before the fork: SQLite would believe the child's locks held, and they are not."""
    log = EmbeddedLog(tmp_path / "log")
    write(log, "parent", range(1))
    begun, closed = os.pipe(), os.pipe()

    def work() -> None:
        mine = EmbeddedLog(tmp_path / "log")
        write(mine, "child", range(1))
        os.write(begun[1], b"!")
        os.read(closed[0], 1)
        write(mine, "child", range(1, 2))

    pid = forked(work)
    os.read(begun[0], 1)
    assert log.tail() == 2
    log.close()
    os.write(closed[1], b"!")
    assert ended_well(pid)
    assert [entry.blob for entry in EmbeddedLog(tmp_path / "log").read(0)] == [b"parent0", b"child0", b"child1"]


def test_a_fork_waits_for_those_inside_the_gate() -> None:
    gate, inside, leave, closed = ForkGate(), threading.Event(), threading.Event(), threading.Event()

    class Connection:
        def close(self) -> None:
            closed.set()

    def operate() -> None:
        with gate:
            inside.set()
            leave.wait(timeout=10)

    def fork() -> None:
        gate._shut()
        gate._open()

    connection = Connection()
    gate.watch(connection)
    threads = [threading.Thread(target=operate), threading.Thread(target=fork)]
    threads[0].start()
    assert inside.wait(timeout=10)
    threads[1].start()
    assert not closed.wait(timeout=0.1)
    leave.set()
    assert closed.wait(timeout=10)
    for thread in threads:
        thread.join(timeout=10)
    with gate:
        pass


def test_no_descriptor_of_a_log_crosses_a_fork(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "log")
    assert log.tail() == 0

    def descriptors() -> list[str]:
        found = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [path for path in found if path.startswith(str(tmp_path))]

    def work() -> None:
        assert descriptors() == []

    assert descriptors() != []
    assert ended_well(forked(work))


def test_starting_a_program_as_pyspark_does_leaves_the_log_usable(tmp_path: Path) -> None:
    log = EmbeddedLog(tmp_path / "log")
    write(log, "a", range(1))
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)
    write(log, "a", range(1, 2))
    assert log.tail() == 2
