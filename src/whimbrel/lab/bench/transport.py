"""The transport between two processes on this machine, under TLS: bytes a second, and the time of one small append.

Throughput counts from the first append to the spool until the last one is acknowledged; the time of a small append,
from the append to the spool until the acknowledgement that it is durable at the other place. Measured with embedded
logs, so that both processes write to their disks, and with logs in memory: the difference is the price of the logs.
CPU seconds of both processes are measured with the incompressible appends: on a busy machine the steadier figure.
The sender's include the producer, which waits for room in the spool.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from whimbrel.core.errors import SpoolFull, Unavailable
from whimbrel.log import Append, EmbeddedLog, Log, MemoryLog, append_all
from whimbrel.log.large import LargeEntries
from whimbrel.transport import OutgoingSpool, Receiver, RemoteLog
from whimbrel.transport.certificates import Authority
from whimbrel.transport.identity import Identity
from whimbrel.transport.server import ReceiverServer
from whimbrel.transport.sockets import Dialer, EventLoop
from whimbrel.transport.spool import Owner
from whimbrel.transport.threaded import ThreadedSender

DEPLOYMENT, NAME, LIMIT = "bench", "inbox", 64 << 20
KEPT = 32
"""The receiver trims its log to about so many entries, as a reader would."""


def transport(megabytes: int, entry: int, small: int, seed: int, embedded: bool = True) -> dict[str, Any]:
    """Measure; `entry`: the bytes of a large append; `small`: the number of small ones."""
    draw = random.Random(seed)
    number = megabytes * 10**6 // entry
    with tempfile.TemporaryDirectory() as name, _receiving(Path(name), embedded) as receiving, _looping() as loop:
        folder = Path(name)
        large = LargeEntries(folder / "large") if embedded else None
        spool = OutgoingSpool(_log(folder, "spool", embedded), Owner(DEPLOYMENT, "edge-1", "cloud"), LIMIT, large)
        dialer = Dialer(loop, Identity.of(folder / "keys" / "edge-1"), "cloud", "127.0.0.1", receiving.port)
        sending = ThreadedSender(spool, dialer.connect)
        sending.start()
        remote = RemoteLog(spool, NAME)
        try:
            times = [_small(remote, spool, counter) for counter in range(small)]
            blobs = [draw.randbytes(entry) for _ in range(8)]
            cpu = time.process_time(), receiving.cpu()
            noise = _stream(remote, spool, "noise", blobs, number)
            cpu = time.process_time() - cpu[0], receiving.cpu() - cpu[1]
            records = _stream(remote, spool, "records", [_records(draw, entry) for _ in range(8)], number)
        finally:
            sending.stop()
        if sending.error is not None:
            raise sending.error
    return {
        "logs": "embedded" if embedded else "memory",
        "entry_bytes": entry,
        "small_ms": {"median": round(median(times), 3), "p99": round(sorted(times)[len(times) * 99 // 100], 3)},
        "cpu_s_per_gb": {
            "sender": round(cpu[0] * 1e9 / entry / number, 2),
            "receiver": round(cpu[1] * 1e9 / entry / number, 2),
        },
        "mb_per_s": {"incompressible": round(noise, 1), "records": round(records, 1)},
    }


def _small(remote: RemoteLog, spool: OutgoingSpool, counter: int) -> float:
    """The milliseconds of one small append."""
    start = time.perf_counter()
    remote.append(b"x" * 200, count=1, writer="small", counter=counter)
    _wait(lambda: spool.is_empty)
    return (time.perf_counter() - start) * 1000


def _stream(remote: RemoteLog, spool: OutgoingSpool, writer: str, blobs: list[bytes], number: int) -> float:
    """The megabytes a second of so many large appends."""
    start = time.perf_counter()
    for counter in range(number):
        while True:
            try:
                remote.append(blobs[counter % len(blobs)], count=1, writer=writer, counter=counter)
                break
            except SpoolFull:
                time.sleep(0.002)
    _wait(lambda: spool.is_empty)
    return number * len(blobs[0]) / (time.perf_counter() - start) / 1e6


def _wait(is_done: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            raise Unavailable(f"the receiver has not acknowledged everything within {seconds:g} s")
        time.sleep(0.0001)


def _records(draw: random.Random, size: int) -> bytes:
    """Records as text: zstd halves them."""
    lines = [
        f"vehicle=v{draw.randrange(1000)},speed={draw.random() * 130:.1f},at={draw.random():.6f}/{draw.random():.6f};"
        for _ in range(size // 40)
    ]
    return "".join(lines).encode()[:size]


def _log(folder: Path, name: str, embedded: bool) -> Log:
    return EmbeddedLog(folder / f"{name}.db") if embedded else MemoryLog()


@contextmanager
def _looping() -> Iterator[EventLoop]:
    """An event loop that is closed in the end."""
    loop = EventLoop()
    try:
        yield loop
    finally:
        loop.close()


class _Receiving:
    """A receiver in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self.port = int(self._out.readline())

    def cpu(self) -> float:
        """The CPU seconds that it has used."""
        print(file=self._in, flush=True)
        return float(self._out.readline())


@contextmanager
def _receiving(folder: Path, embedded: bool) -> Iterator[_Receiving]:
    authority = Authority(folder / "keys")
    for place in ("cloud", "edge-1"):
        authority.issue(place)
    command = [sys.executable, "-m", "whimbrel.lab.bench.transport", str(folder), str(int(embedded))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Receiving(process)
        finally:
            process.communicate(timeout=30)  # closes its input: it ends


class _Consumed:
    """A log whose reader keeps up."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def append(self, blob: bytes, **given: Any) -> int | None:
        """Append one entry."""
        return self.append_all([Append(blob, **given)])[0]

    def append_all(self, appends: Sequence[Append]) -> list[int | None]:
        """Append, and trim what has been read."""
        positions = append_all(self._log, appends)
        if any(position is not None and position % KEPT == 0 for position in positions):
            self._log.trim(self._log.tail() - KEPT)
        return positions


def serve(folder: Path, embedded: bool) -> None:
    """The receiver's process: prints its port, then its CPU seconds for each line of its input, and ends with that."""
    log = _Consumed(_log(folder, NAME, embedded))
    receiver = Receiver("cloud", DEPLOYMENT, lambda name: log, lambda place, name, lane, writer: name == NAME)
    with _looping() as loop:
        server = ReceiverServer(loop, receiver, Identity.of(folder / "keys" / "cloud"))
        print(server.port, flush=True)
        for _ in sys.stdin:
            print(time.process_time(), flush=True)
        server.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2] == "1")
