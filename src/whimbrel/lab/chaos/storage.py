"""Faults of disks, logs, checkpoints and the central store."""

from __future__ import annotations

import resource
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from whimbrel.core.errors import Conflict, Refused, Unavailable
from whimbrel.lab.chaos.deployed import Deployed, Heal
from whimbrel.lab.chaos.load import STAGES

ROOM = 32 << 10
"""The maximum bytes of a file on a full disk: less than most logs have, and more than a line of errors."""
HELD, FREE = 1.0, 0.15
"""Of a slow disk: seconds that a write waits, and seconds in which writes succeed."""
DAMAGED = 3
"""The number of segments of the store that are damaged, per stage: the newest."""
GATEWAY, ORCHESTRATOR = "gateway", "orchestrator"


@dataclass(frozen=True)
class Aim:
    """The target of a fault."""

    name: str
    """The name of the process, or of the link: `cloud->edge-1`."""
    pair: tuple[str, str]
    """Source and destination of the move, or any two sites."""
    sign: int
    """1 or -1: selects one of two variants, if a fault has two."""


def instances_at(deployed: Deployed, site: str) -> list[str]:
    """The instances at a site, those with the most keys first; none if the orchestrator is unreachable."""
    status = deployed.ask(deployed.client.status) or {"stages": {}}
    found = [
        (one["keys"], name)
        for stage in status["stages"].values()
        for name, one in stage["instances"].items()
        if one["site"] == site
    ]
    return [name for _, name in sorted(found, reverse=True)]


def written_by(deployed: Deployed, name: str) -> list[Path]:
    """The logs that a process writes."""
    logs = deployed.data / "logs"
    if name == ORCHESTRATOR:
        return [deployed.data / "journal.db"]
    if name == GATEWAY:
        return [*logs.glob("ingress-*.db"), *logs.glob("inbox-*.db")]
    found = [logs / f"outbox-{instance}.db" for instance in instances_at(deployed, name)]
    found += [logs / f"link-{name}-{other}.db" for other in deployed.sites if other != name]
    return [file for file in found if file.exists()]


# ── Locks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lock(deployed: Deployed, aim: Aim) -> Heal:
    """Hold the write lock of a log, as a process stopped inside a write does: other writers wait all the time.

    For the gateway it is an ingress log, for a site the inbox of an instance there.
    """
    logs = deployed.data / "logs"
    stage = STAGES[0] if aim.sign > 0 else STAGES[1]
    files = [logs / f"ingress-{stage}.db"]
    if aim.name != GATEWAY:
        files = [logs / f"inbox-{instance}.db" for instance in instances_at(deployed, aim.name)[:1]]
    return _held(files, float("inf"))


def slow_disk(deployed: Deployed, aim: Aim) -> Heal:
    """Delay the writes of a site to its outboxes and spools by 1 s, again and again."""
    return _held(written_by(deployed, aim.name), HELD)


def _held(files: Sequence[Path], seconds: float) -> Heal:
    ended = threading.Event()
    holder = threading.Thread(target=_hold, args=(files, seconds, ended), name="held locks", daemon=True)
    holder.start()

    def heal() -> None:
        ended.set()
        holder.join()

    return heal


def _hold(files: Sequence[Path], seconds: float, ended: threading.Event) -> None:
    while not ended.is_set():
        held = []
        for file in files:
            db = sqlite3.connect(file, isolation_level=None, timeout=0.5)
            while not ended.is_set():
                try:
                    db.execute("BEGIN IMMEDIATE")
                    break
                except sqlite3.OperationalError:  # another process is writing; a slow disk can do without this log
                    if seconds < float("inf"):
                        break
            held.append(db)
        ended.wait(None if seconds == float("inf") else seconds)
        for db in held:
            db.close()  # rolls back
        ended.wait(FREE)


# ── Disks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def full_disk(deployed: Deployed, aim: Aim) -> Heal:
    """Let no file of the site grow beyond a few pages: a full disk, for the processes of one site only."""
    _limit_all(deployed, aim.name, ROOM)
    return lambda: _limit_all(deployed, aim.name, resource.RLIM_INFINITY)


def _limit_all(deployed: Deployed, name: str, size: int) -> None:
    """Repeats until all have the limit: a process started meanwhile inherits its parent's."""
    while True:
        others = [pid for pid in deployed.tree(name) if limit(pid, resource.RLIMIT_FSIZE) not in (size, None)]
        if not others:
            return
        for pid in others:
            limit(pid, resource.RLIMIT_FSIZE, size)


def limit(pid: int, what: int, wanted: int | None = None) -> int | None:
    """Return a limit of a process, or set it to `wanted`; None if the process has ended."""
    with suppress(ProcessLookupError):
        old, most = resource.prlimit(pid, what)
        if wanted is None:
            return old
        resource.prlimit(pid, what, (wanted, most))
        return wanted
    return None


def has_strace() -> bool:
    """Whether this machine can make the writes of a running process fail."""
    if shutil.which("strace") is None:
        return False
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text(encoding="ascii").strip() in ("0", "1")


def bad_disk(deployed: Deployed, aim: Aim) -> Heal:
    """Make each write of a process to its logs fail with `EIO`, injected by strace."""
    pid = deployed.lives(aim.name)[-1]
    files = [Path(f"{file}{more}") for file in written_by(deployed, aim.name) for more in ("", "-wal", "-journal")]
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(pid)]
    command += [part for file in files for part in ("-P", str(file))]
    calls = "pwrite64,write,fsync,fdatasync"
    command += ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO"]
    # If chaos itself is killed, the tracer ends by its timeout.
    tracer = subprocess.Popen(["timeout", "-s", "INT", "30", *command], stderr=subprocess.DEVNULL)

    def heal() -> None:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(10)

    return heal


# ── The central store ────────────────────────────────────────────────────────────────────────────────────────────────


def store_away(deployed: Deployed, aim: Aim) -> Heal:
    """Replace the directory of the store by a file: nothing can be read or written there."""
    store, aside = deployed.folder / "store", deployed.folder / "store.away"
    if aside.exists():  # another fault has moved it
        return lambda: None
    store.rename(aside)
    store.touch()

    def heal() -> None:
        if aside.exists():
            store.unlink(missing_ok=True)
            aside.rename(store)

    return heal


def store_damaged(deployed: Deployed, aim: Aim) -> Heal:
    """Cut the newest segments in half."""
    whole = {file: file.read_bytes() for file in _segments(deployed.folder / "store")}
    for file, blob in whole.items():
        file.write_bytes(blob[: len(blob) // 2])

    def heal() -> None:
        for file, blob in whole.items():
            if file.exists():  # else it was deleted meanwhile
                file.write_bytes(blob)

    return heal


def _segments(store: Path) -> Iterator[Path]:
    for stage in STAGES:
        found = []
        for file in (store / stage / "segments").glob("*/*"):
            with suppress(OSError):  # it was deleted just now
                found.append((file.stat().st_mtime, file))
        yield from (file for _, file in sorted(found)[-DAMAGED:])


# ── Checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def checkpoint_gone(deployed: Deployed, aim: Aim) -> Heal:
    """Crash a site, and remove the checkpoint of one of its instances. Once the site refuses to start the instance, it
    is restored from the central store, at another site."""
    instance = next(iter(instances_at(deployed, aim.name)), None)
    deployed.send(deployed.tree(aim.name), signal.SIGKILL)
    if instance is None:
        return lambda: None
    folder = deployed.data / "sites" / aim.name / instance
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f"{instance}.gone"))
    others = [site for site in deployed.sites if site != aim.name]

    def heal() -> None:
        if deployed.places().get(instance) != aim.name:
            return  # restored automatically
        state = deployed.client.state(instance)
        if state.phase == "failed":
            with suppress(Conflict, Refused):
                deployed.client.invoke(instance, others[0])
            raise Unavailable(f"{instance} is to be restored at {others[0]}")
        if state.phase != "running" or len(deployed.lives(aim.name)) < 2:
            raise Unavailable(f"{instance} is {state.phase}")

    return heal
