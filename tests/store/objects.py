"""Objects for the tests of the store: in a dictionary, behind a fuse, and at an S3 server of the test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from botocore.exceptions import BotoCoreError

from tests.app.failing import Fuse
from tests.app.waiting import until
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.place import Objects, Place
from whimbrel.checkpoints.version import Checkpoint, Increment, Retention
from whimbrel.core.errors import Retry
from whimbrel.core.increments import Version
from whimbrel.core.keys import bin_of

WEED = Path(sys.executable).with_name("weed")
ALL = Retention(checkpoints=10**6)
KEYS = {"s-1": 1, "s-2": 1}


class FailingObjects:
    """Objects behind a fuse, which counts puts, and each object that is deleted."""

    def __init__(self, objects: Objects, fuse: Fuse) -> None:
        self.objects, self.fuse = objects, fuse

    def put(self, name: str, blob: bytes) -> None:
        fails = self.fuse.burn()
        if fails and not self.fuse.after:
            raise self.fuse.error()
        self.objects.put(name, blob)
        if fails:
            raise self.fuse.error()

    def get(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        return self.objects.get_all(names)

    def names(self, folder: str) -> list[str]:
        return self.objects.names(folder)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            fails = self.fuse.burn()
            if not fails or self.fuse.after:
                self.objects.delete([name])
            if fails:
                raise self.fuse.error()


class Memory:
    """Objects in a dictionary: many stores a second."""

    def __init__(self, blobs: dict[str, bytes] | None = None) -> None:
        self.blobs: dict[str, bytes] = {} if blobs is None else blobs

    def put(self, name: str, blob: bytes) -> None:
        self.blobs[name] = blob

    def get(self, name: str) -> bytes | None:
        return self.blobs.get(name)

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.get(name) for name in names]

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self.blobs if not folder or name.startswith(f"{folder}/"))

    def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            self.blobs.pop(name, None)


def version(key: str, seq: int, text: str = "", *, epoch: int = 0) -> Version:
    """A version whose key state says what it is."""
    return Version(key, bin_of(key), epoch, seq, f"{key}@{epoch}.{seq}{text}".encode())


def increment(number: int, *versions: Version, reached: int = 0, instance: str = "s-1", part: int = 0) -> Increment:
    """An increment made at a moment that its number tells."""
    return Increment(instance, part, number, number * 1_000_000, reached, list(versions))


def loaded(store: CentralStore, at: int | None = None, stage: str = "s") -> dict[str, bytes]:
    """All that the store has: key state by key, each key once."""
    versions = list(store.load(stage, at=at))
    found = {one.key: one.key_state for one in versions}
    assert len(found) == len(versions)
    return found


def numbers(store: CentralStore, stage: str = "s") -> list[int]:
    """The checkpoints that can be loaded."""
    return [one.number for one in store.checkpoints(stage) if not one.damage]


def one(checkpoints: list[Checkpoint], number: int) -> Checkpoint:
    """The checkpoint of a number."""
    return next(found for found in checkpoints if found.number == number)


# ── S3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

BUCKET = "bucket"
_PLACES = count()


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """A SeaweedFS of this machine only; gives what s3fs must be told to find it."""
    roles = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(roles))
    options = [f"-{role}.port={ports[2 * n]}" for n, role in enumerate(roles)]
    options += [f"-{role}.port.grpc={ports[2 * n + 1]}" for n, role in enumerate(roles)]
    data = folder / "data"
    data.mkdir()
    command = [
        str(WEED),
        "server",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
    ]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8", *options]
    with (folder / "weed.log").open("w") as log:
        home = {**os.environ, "HOME": str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=home)
    try:
        settings = {"endpoint_url": f"http://127.0.0.1:{ports[-2]}", "key": "any", "secret": "any"}
        until(lambda: process.poll() is not None or _is_up(settings), "the S3 server to take an object", 60)
        assert process.poll() is None, (folder / "weed.log").read_text()
        yield settings
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(data)
        for socket_of in (f"seaweedfs-*{port}.sock" for port in ports):
            for left in Path(tempfile.gettempdir()).glob(socket_of):
                left.unlink()


def at_s3(settings: dict[str, str]) -> Place:
    """An empty place at an S3 server."""
    return Place(f"s3://{BUCKET}/whimbrel-{next(_PLACES)}", **settings)


def _is_up(settings: dict[str, str]) -> bool:
    """Whether a port is open says nothing about whether anything can be stored yet."""
    place = at_s3(settings)
    try:
        socket.create_connection(("127.0.0.1", int(settings["endpoint_url"].rpartition(":")[2])), 1).close()
        if not place._fs.exists(BUCKET):
            place._fs.mkdir(BUCKET)
        place.put("s/x", b"x")
    except (Retry, OSError, BotoCoreError):
        return False
    return True


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
