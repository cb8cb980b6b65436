"""The effect of each kind of fault on the processes of a deployment, and how it is undone. Disks and files: storage.py.

A fault is a function of the deployment and of the target. It returns the function that ends it, or None if there is
nothing to end. That function may raise `Retry`: then it is called again a little later; and it may be called twice. A
new kind is a line in `KINDS` (plan.py) and one in `STRIKES`.

Faults change nothing outside the processes and the folder of the run: no rule of a packet filter, no mount. So there is
nothing to undo elsewhere if chaos itself is killed.
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
"""Clocks are wrong by whole hours, so that their times are known modulo hours (`verdict.py`)."""
WORKERS = "whimbrel.spark.daemon"
"""In the command line of Spark's Python workers, and of the process they are forked from."""


# ── Killed or stopped ────────────────────────────────────────────────────────────────────────────────────────────────


def kill(deployed: Deployed, aim: Aim) -> None:
    """Kill the process only."""
    deployed.send(deployed.lives(aim.name)[-1:], signal.SIGKILL)


def crash(deployed: Deployed, aim: Aim) -> None:
    """Kill the process and its children, at once."""
    deployed.send(deployed.tree(aim.name), signal.SIGKILL)


def jvm(deployed: Deployed, aim: Aim) -> None:
    """Kill the JVM of a site: the site must detect that, and end."""
    deployed.send(deployed.children(aim.name, "java"), signal.SIGKILL)


def workers(deployed: Deployed, aim: Aim) -> None:
    """Kill the Python workers of a site: batches under way fail."""
    deployed.send(_workers(deployed, aim.name), signal.SIGKILL)


def _workers(deployed: Deployed, name: str) -> list[int]:
    """The workers forked from the daemon; the daemon itself if there are none at present."""
    found = deployed.children(name, WORKERS)
    return [pid for pid in found if _parent(pid) in found] or found


def _parent(pid: int) -> int | None:
    with suppress(OSError, IndexError):  # it ended just now
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return None


def stop(deployed: Deployed, aim: Aim) -> Heal:
    """Stop processes, and continue the same ids: a process killed meanwhile has restarted under another id."""
    pids = deployed.tree(aim.name)
    deployed.send(pids, signal.SIGSTOP)
    return lambda: deployed.send(pids, signal.SIGCONT)


# ── Resource limits ──────────────────────────────────────────────────────────────────────────────────────────────────


def memory(deployed: Deployed, aim: Aim) -> Heal:
    """Limit the Python workers of a site to the memory they have."""
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
    """Let a process open no files or sockets beyond those it has: `EMFILE`, as at any limit that is reached."""
    pid = deployed.lives(aim.name)[-1]
    before, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with suppress(OSError):
        limit(pid, resource.RLIMIT_NOFILE, max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1)

    def heal() -> None:
        limit(pid, resource.RLIMIT_NOFILE, before)

    return heal


# ── Network, clock and orders ────────────────────────────────────────────────────────────────────────────────────────


def cut(deployed: Deployed, aim: Aim) -> Heal:
    """Cut a link until it is mended. A site that dies meanwhile restarts with its end of the link mended."""
    deployed.ask(lambda: deployed.client.cut(*aim.pair))
    return lambda: deployed.client.mend(*aim.pair)


def calls(deployed: Deployed, aim: Aim) -> Heal:
    """One-way: calls of a process to the others do not arrive, or are carried out and their responses are lost. Calls
    of the others to it arrive."""
    disturb(deployed.folder, CALLS, aim.name, REQUESTS if aim.sign > 0 else ANSWERS)
    return lambda: disturb(deployed.folder, CALLS, aim.name, "")


def clock(deployed: Deployed, aim: Aim) -> Heal:
    """Set a wall clock an hour ahead, or back."""
    disturb(deployed.folder, CLOCK, aim.name, str(aim.sign * HOUR_US))
    return lambda: disturb(deployed.folder, CLOCK, aim.name, "")


def replay(deployed: Deployed, aim: Aim) -> Heal:
    """Send an order three times at once under one idempotency key; a fourth, later, must get the same response."""
    name, body = f"chaos-{time.monotonic_ns()}", {"stage": LEDGER, "at": aim.pair[0], "to": aim.pair[1], "share": 0.3}
    receipts: list[Any] = []
    threads = [threading.Thread(target=_send, args=(deployed, name, body, receipts)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def heal() -> None:
        if receipts and not _send(deployed, name, body, receipts):
            raise Unavailable("the orchestrator has not answered")
        if any(receipt != receipts[0] for receipt in receipts):
            deployed.complaints.append(f"the order {name} was accepted more than once: {receipts}")

    return heal


def _send(deployed: Deployed, name: str, body: dict[str, Any], receipts: list[Any]) -> bool:
    """Send an order; return whether there was a response. A refused order has no effect, now or later."""
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
