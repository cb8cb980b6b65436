"""A deployment of real processes under chaos: `whimbrel up`, its processes by name, its API, its results.

Every process inherits a mark in its environment, which identifies processes that are left over at the end: Spark's
Python workers create process groups of their own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from whimbrel.api.client import Client, connect
from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.keys import bin_of
from whimbrel.deploy.orchestrator import settled_in
from whimbrel.lab.chaos.load import ENDING, STAGES, write_job
from whimbrel.lab.chaos.rows import Load
from whimbrel.rpc.access import make_token

MARK = "WHIMBREL_CHAOS"
SHORT_LIFE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that are killed soon: optimizing compilation would take longer than they run."""
Heal = Callable[[], None]
"""Ends a fault. May raise `Retry`: then it is called again a little later."""
LEFT = 20.0
"""Seconds that child processes have to end after their parents."""


class Deployed:
    """A running deployment. A context manager: all its processes have ended afterwards."""

    def __init__(
        self, folder: Path, load: Load, sites: Sequence[str], links: str, dead: float, options: Sequence[str] = ()
    ) -> None:
        self.folder, self.data, self.load, self.sites = folder, folder / "data", load, list(sites)
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        """The output of `up`."""
        self.complaints: list[str] = []
        """Violations that a fault has detected."""
        self.heals: list[Heal] = []
        """The functions that end the active faults."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        settings = ["--links", links, "--dead", f"{dead:g}", "--port", str(port), *options]
        command = [sys.executable, "-m", "whimbrel", "up", str(write_job(folder, load)), "--data", str(self.data)]
        with (folder / "errors.txt").open("wb") as errors:
            self.up = subprocess.Popen(
                [*command, "--sites", ",".join(sites), "--until-input-ends", *settings],
                cwd=folder,
                env={
                    **os.environ,
                    "JAVA_TOOL_OPTIONS": SHORT_LIFE,
                    "TMPDIR": str(folder / "tmp"),  # a killed process cannot clean up
                    MARK: self.mark,
                },
                stdin=subprocess.PIPE,  # it ends with this process, however that ends
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only this process, which ends the others itself
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        token = make_token(self.data)
        self.url = f"http://127.0.0.1:{port}"
        self.client: Client = connect(self.url, token=token, timeout=20)
        self._http = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=20, trust_env=False
        )
        self._settled = settled_in(self.data)

    def _read(self) -> None:
        assert self.up.stdout is not None
        for line in self.up.stdout:
            self.lines.append(line.rstrip("\n"))

    # ── Processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def lives(self, name: str) -> list[int]:
        """All process ids that `gateway`, `orchestrator` or a site has had."""
        start = f"{f'site {name}' if name in self.sites else name} runs as "
        return [int(line.removeprefix(start)) for line in list(self.lines) if line.startswith(start)]

    def is_up(self, name: str) -> bool:
        """Whether its process is running or stopped, and not dead."""
        lives = self.lives(name)
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{lives[-1]}/stat").read_text(encoding="utf-8", errors="replace")
            return stat.rpartition(")")[2].split()[0] not in "ZX"
        return False

    def tree(self, name: str) -> list[int]:
        """A process and all its children."""
        pid = self.lives(name)[-1]
        return [pid, *_session(pid)]

    def children(self, name: str, word: str) -> list[int]:
        """The children of a process whose command line contains this word."""
        return [pid for pid in self.tree(name)[1:] if word in _command(pid)]

    def send(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to those of the processes that still exist."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def left(self) -> list[int]:
        """All processes of this deployment that are alive."""
        return marked(MARK, self.mark)

    # ── Status ───────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, question: Callable[[], Any]) -> Any:
        """The result of a call; None while the orchestrator is unreachable."""
        try:
            return question()
        except Retry:
            return None

    def silences(self) -> dict[str, float]:
        """By process: seconds since its last heartbeat; empty if the orchestrator is unreachable."""
        status = self.ask(self.client.status)
        return {name: one["silent_s"] for name, one in status["processes"].items()} if status else {}

    def places(self) -> dict[str, str]:
        """By instance: its site."""
        return {name: site for stage in self.client.stages() for name, site in stage.instances.items()}

    def post(self, path: str, body: dict[str, Any], name: str) -> httpx.Response:
        """Call the API with `name` as idempotency key, so that it can be repeated: the client itself never repeats."""
        return self._http.post(path, json=body, headers={"Idempotency-Key": name})

    def keys_at(self, sites: Sequence[str]) -> frozenset[str] | None:
        """The keys, of both stages, that are at these sites now; None if the orchestrator is unreachable."""
        found: set[str] = set()
        for stage, names in zip(STAGES, (self.load.names, self.load.shop_names), strict=True):
            routes = self.ask(partial(self.client.routes, stage, apart=10_000))
            if routes is None:
                return None
            single = {key: route.site for route in routes for key in route.apart}
            by_bin = {bin: route.site for route in routes for low, high in route.bins for bin in range(low, high + 1)}
            found |= {key for key in names if single.get(key, by_bin.get(bin_of(key))) in sites}
        return frozenset(found)

    def delivered(self) -> int:
        """Bytes of results that are delivered."""
        out = self.folder / "out.jsonl"
        return out.stat().st_size if out.exists() else 0

    def has_finished(self) -> bool:
        """Whether the source has ended, and everything is delivered."""
        return bool(self.ask(self._settled.has_finished))

    # ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end_source(self) -> None:
        """End the source: no more records come."""
        (self.folder / ENDING).touch()

    def end(self) -> list[int]:
        """Shut everything down gracefully; return the processes that are left over."""
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.up.wait(60)
        deadline = time.monotonic() + LEFT
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def __enter__(self) -> Deployed:
        return self

    def __exit__(self, *error: object) -> None:
        for heal in list(self.heals):
            with suppress(Exception):  # a process that it calls may be gone; the other faults are ended nevertheless
                heal()
        self.send(self.left(), signal.SIGCONT)  # a stopped process could not end
        try:
            self.end()
        finally:
            deadline = time.monotonic() + LEFT
            while (left := self.left()) and time.monotonic() < deadline:
                self.send(left, signal.SIGKILL)
                time.sleep(0.05)
            self.up.wait()
            self._reader.join(10)
            self.client.close()
            self._http.close()

    def output(self) -> str:
        """Its latest output and errors, to find out why it does not run."""
        errors = (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace")
        return "\n".join([*self.lines[-20:], errors[-3_000:]])

    def stuck(self) -> str:
        """What may keep it from becoming idle, according to status."""
        status = self.ask(self.client.status)
        if status is None:
            return "the orchestrator does not answer"
        found = [f"{name} is {one['state']}" for name, one in status["processes"].items() if one["state"] != "alive"]
        for name, stage in status["stages"].items():
            places = stage["instances"].items()
            found += [f"{instance} does not run at {one['site']}" for instance, one in places if not one["running"]]
            found += [
                f"{id} is {phase}" for id, phase in stage["migrations"].items() if phase not in ("done", "aborted")
            ]
            found += [f"{instance} of {name} is lost" for instance in stage["lost"]]
            found += [f"{name}: {stage['error']}"] if stage["error"] else []
        source = status["source"]
        found += (
            [f"the source: {source['error'] or 'it has not ended'}"] if source["error"] or not source["ended"] else []
        )
        return "; ".join([*found, str(status["error"])] if status["error"] else found) or "status shows no cause"

    def check(self) -> None:
        """Raise if `up` has ended unexpectedly."""
        if self.up.poll() is not None:
            raise Unavailable(f"whimbrel up has ended with status {self.up.returncode}:\n{self.output()}")


def _session(leader: int) -> list[int]:
    """The processes of a session, without its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it ended just now
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader and int(path.parent.name) != leader:
                found.append(int(path.parent.name))
    return found


def _command(pid: int) -> str:
    with suppress(OSError):  # it ended just now
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def marked(name: str, mark: str) -> list[int]:
    """All live processes with this mark in their environment."""
    wanted = f"{name}={mark}".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in _environment(path)]


def _environment(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it ended just now, or only its entry in the process table is left
        return []
