"""What each kind of fault does to the processes of a deployment, and how it is undone. Disks and files: storage.py.

A fault is a function of the deployment and of what it is aimed at. It returns the deed that ends it, or None if there
is nothing to end. That deed may raise `Retry`: then it is done again a little later; and it may be done twice. A new
kind is a line in `KINDS` (plan.py) and one in `STRIKES`.

Nothing is changed beyond the processes and the folder of the run: no rule of a packet filter, no mount. So there is
nothing to be undone elsewhere if chaos itself is killed.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from whimbrel.core.errors import Unavailable
from whimbrel.lab.chaos import storage
from whimbrel.lab.chaos.deployed import Deployed, Heal
from whimbrel.lab.chaos.disturbance import ANSWERS, CALLS, CLOCK, REQUESTS, disturb
from whimbrel.lab.chaos.oracle import LEDGER
from whimbrel.lab.chaos.storage import Aim, limit

Strike = Callable[[Deployed, Aim], Heal | None]

HOUR_US = 3_600_000_000
"""Clocks are off by whole hours, so that what they say is known but for hours (`verdict.py`)."""
WORKERS = "whimbrel.spark.daemon"
"""In the command line of Spark's Python workers, and of the process they are forked from."""


# ── Dead, or as good as ──────────────────────────────────────────────────────────────────────────────────────────────


def kill(deployed: Deployed, aim: Aim) -> None:
    """The process alone."""
    deployed.send(deployed.lives(aim.name)[-1:], signal.SIGKILL)


def crash(deployed: Deployed, aim: Aim) -> None:
    """The process and its children, at once."""
    deployed.send(deployed.tree(aim.name), signal.SIGKILL)


def jvm(deployed: Deployed, aim: Aim) -> None:
    """The JVM of a site: the site must notice, and end."""
    deployed.send(deployed.children(aim.name, "java"), signal.SIGKILL)


def workers(deployed: Deployed, aim: Aim) -> None:
    """The Python workers of a site: batches under way fail."""
    deployed.send(_workers(deployed, aim.name), signal.SIGKILL)


def _workers(deployed: Deployed, name: str) -> list[int]:
    """Those that were forked from the daemon; the daemon itself if there are none just now."""
    found = deployed.children(name, WORKERS)
    return [pid for pid in found if _parent(pid) in found] or found


def _parent(pid: int) -> int | None:
    with suppress(OSError, IndexError):  # it ended just now
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return None


def stop(deployed: Deployed, aim: Aim) -> Heal:
    """Neither dead nor alive. Who is killed meanwhile has another life than the one that was stopped."""
    pids = deployed.tree(aim.name)
    deployed.send(pids, signal.SIGSTOP)
    return lambda: deployed.send(pids, signal.SIGCONT)


# ── Short of something ───────────────────────────────────────────────────────────────────────────────────────────────


def memory(deployed: Deployed, aim: Aim) -> Heal:
    """The Python workers of a site get no more memory than they have."""
    pids = _workers(deployed, aim.name)
    page = os.sysconf("SC_PAGE_SIZE")
    for pid in pids:
        with suppress(OSError):
            limit(pid, resource.RLIMIT_AS, int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * page)

    def heal() -> None:
        for pid in pids:
            limit(pid, resource.RLIMIT_AS, resource.RLIM_INFINITY)

    return heal


def no_files(deployed: Deployed, aim: Aim) -> Heal:
    """A process can open no file and no socket beyond those it has: `EMFILE`, as with any limit that is reached."""
    pid = deployed.lives(aim.name)[-1]
    before, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with suppress(OSError):
        limit(pid, resource.RLIMIT_NOFILE, max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1)

    def heal() -> None:
        limit(pid, resource.RLIMIT_NOFILE, before)

    return heal


# ── Cut off, or confused ─────────────────────────────────────────────────────────────────────────────────────────────


def cut(deployed: Deployed, aim: Aim) -> Heal:
    """Until it is mended. A site that dies meanwhile comes back with a link that is whole, at its end."""
    deployed.ask(lambda: deployed.client.cut(*aim.pair))
    return lambda: deployed.client.mend(*aim.pair)


def calls(deployed: Deployed, aim: Aim) -> Heal:
    """One way: what a process asks of the others does not arrive, or is done and the answer does not come back. What
    the others ask of it arrives."""
    disturb(deployed.folder, CALLS, aim.name, REQUESTS if aim.sign > 0 else ANSWERS)
    return lambda: disturb(deployed.folder, CALLS, aim.name, "")


def clock(deployed: Deployed, aim: Aim) -> Heal:
    """An hour ahead, or back."""
    disturb(deployed.folder, CLOCK, aim.name, str(aim.sign * HOUR_US))
    return lambda: disturb(deployed.folder, CLOCK, aim.name, "")


def replay(deployed: Deployed, aim: Aim) -> Heal:
    """One order, by its name, three times at once; the fourth, later, must be answered as they were."""
    name, body = f"chaos-{time.monotonic_ns()}", {"stage": LEDGER, "at": aim.pair[0], "to": aim.pair[1], "share": 0.3}
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
    "jvm": jvm,
    "workers": workers,
    "stop": stop,
    "away": stop,
    "memory": memory,
    "no-files": no_files,
    "cut": cut,
    "calls": calls,
    "clock": clock,
    "replay": replay,
    "lock": storage.lock,
    "slow-disk": storage.slow_disk,
    "full-disk": storage.full_disk,
    "bad-disk": storage.bad_disk,
    "store-away": storage.store_away,
    "store-damaged": storage.store_damaged,
    "checkpoint-gone": storage.checkpoint_gone,
}
