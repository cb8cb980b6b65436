"""What each kind of fault does to a deployment, and how it is undone.

A fault is a function of the deployment and of what it is aimed at. It returns the deed that ends it, or None if there
is nothing to end. That deed may raise `Retry`: then it is done again a little later. A new kind is a line in `KINDS`
(plan.py) and one in `STRIKES`.
"""

from __future__ import annotations

import resource
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from whimbrel.chaos.deployed import Deployed
from whimbrel.chaos.load import HOUR_US, STAGE, clock_of
from whimbrel.core.errors import Unavailable

Heal = Callable[[], None]
ROOM = 32 << 10
"""Bytes that a file may have on a full disk: what is smaller than most logs, and more than a line of errors."""
HELD, FREE = 1.0, 0.15
"""Of a slow disk: seconds that a write waits, and seconds in which writes get through."""


@dataclass(frozen=True)
class Aim:
    """What a fault is aimed at."""

    name: str
    """Of the process; of a link, `cloud->edge-1`."""
    pair: tuple[str, str]
    """Source and destination of the move, or any two sites."""
    sign: int
    """1 or -1: which way a clock jumps."""


Strike = Callable[[Deployed, Aim], Heal | None]


def kill(deployed: Deployed, aim: Aim) -> None:
    """The process alone."""
    deployed.send(deployed.lives(aim.name)[-1:], signal.SIGKILL)


def crash(deployed: Deployed, aim: Aim) -> None:
    """The process and its children, at once."""
    deployed.send(deployed.tree(aim.name), signal.SIGKILL)


def stop(deployed: Deployed, aim: Aim) -> Heal:
    """Neither dead nor alive. Who is killed meanwhile has another life than the one that was stopped."""
    pids = deployed.tree(aim.name)
    deployed.send(pids, signal.SIGSTOP)
    return lambda: deployed.send(pids, signal.SIGCONT)


def cut(deployed: Deployed, aim: Aim) -> Heal:
    """Until it is mended. A site that dies meanwhile comes back with a link that is whole, at its end."""
    deployed.ask(lambda: deployed.client.cut(*aim.pair))
    return lambda: deployed.client.mend(*aim.pair)


def slow_disk(deployed: Deployed, aim: Aim) -> Heal:
    """Hold the locks of what the site writes, its outboxes and spools, again and again for a while."""
    logs = deployed.data / "logs"
    instances = [name for name, site in (deployed.ask(deployed.places) or {}).items() if site == aim.name]
    files = [logs / f"outbox-{name}.db" for name in instances]
    files += [logs / f"link-{aim.name}-{other}.db" for other in deployed.sites if other != aim.name]
    ended = threading.Event()
    slow = threading.Thread(target=_hold, args=([str(file) for file in files if file.exists()], ended), daemon=True)
    slow.start()

    def heal() -> None:
        ended.set()
        slow.join()

    return heal


def _hold(files: Sequence[str], ended: threading.Event) -> None:
    while not ended.is_set():
        held = []
        for file in files:
            db = sqlite3.connect(file, isolation_level=None, timeout=0.5)
            with suppress(sqlite3.OperationalError):  # somebody writes just now
                db.execute("BEGIN IMMEDIATE")
            held.append(db)
        ended.wait(HELD)
        for db in held:
            db.close()  # rolls back
        ended.wait(FREE)


def full_disk(deployed: Deployed, aim: Aim) -> Heal:
    """No file of the site may grow beyond a few pages: a disk without room, for the processes of one site alone."""
    _limit(deployed, aim.name, ROOM)
    return lambda: _limit(deployed, aim.name, resource.RLIM_INFINITY)


def _limit(deployed: Deployed, name: str, size: int) -> None:
    """Who is started meanwhile inherits the limit: so until all have it."""
    while True:
        others = [pid for pid in deployed.tree(name) if _size(pid, None) not in (size, None)]
        if not others:
            return
        for pid in others:
            _size(pid, size)


def _size(pid: int, limit: int | None) -> int | None:
    """The size that no file of a process may exceed, now or from now on; None if it has ended."""
    with suppress(ProcessLookupError):
        old, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        if limit is not None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, most))
        return old
    return limit


def clock(deployed: Deployed, aim: Aim) -> Heal:
    """An hour ahead, or back."""
    file = clock_of(deployed.folder, aim.name)

    def show(text: str) -> None:
        draft = file.with_suffix(".draft")
        draft.write_text(text, encoding="ascii")
        draft.replace(file)

    show(str(aim.sign * HOUR_US))
    return lambda: show("0")


def replay(deployed: Deployed, aim: Aim) -> Heal:
    """One order, by its name, three times at once; the fourth, later, must be answered as they were."""
    name, body = f"chaos-{time.monotonic_ns()}", {"stage": STAGE, "at": aim.pair[0], "to": aim.pair[1], "share": 0.3}
    receipts: list[Any] = []
    threads = [threading.Thread(target=_send, args=(deployed, name, body, receipts)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def heal() -> None:
        if receipts and not _send(deployed, name, body, receipts):
            raise Unavailable("nobody has answered")
        if any(receipt != receipts[0] for receipt in receipts):
            deployed.complaints.append(f"the order {name} was taken more than once: {receipts}")

    return heal


def _send(deployed: Deployed, name: str, body: dict[str, Any], receipts: list[Any]) -> bool:
    """Send an order; whether somebody has answered. It may be refused: then nothing has happened, nor will."""
    with suppress(httpx.HTTPError):
        answer = deployed.post("/migrations", body, name)
        if answer.status_code == 200:
            receipts.append(answer.json())
        return answer.status_code < 500
    return False


STRIKES: dict[str, Strike] = {
    "kill": kill,
    "crash": crash,
    "stop": stop,
    "away": stop,
    "cut": cut,
    "slow-disk": slow_disk,
    "full-disk": full_disk,
    "clock": clock,
    "replay": replay,
}
