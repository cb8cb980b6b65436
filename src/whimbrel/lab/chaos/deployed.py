"""A deployment of real processes as chaos sees it: `whimbrel up`, its processes by name, its API, what it delivers.

Every process inherits a mark in its environment, by which what is left over in the end is found: Spark's Python workers
put themselves into process groups of their own.
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
"""For JVMs that are killed soon: compiling them well takes longer than they live."""
Heal = Callable[[], None]
"""Ends a fault. May raise `Retry`: then it is done again a little later."""
LEFT = 20.0
"""Seconds that what the processes had started has to end behind them."""


class Deployed:
    """A running deployment. Used as a context: behind it nothing runs any more."""

    def __init__(
        self, folder: Path, load: Load, sites: Sequence[str], links: str, dead: float, options: Sequence[str] = ()
    ) -> None:
        self.folder, self.data, self.load, self.sites = folder, folder / "data", load, list(sites)
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        """What `up` has said."""
        self.complaints: list[str] = []
        """What a fault has found to be wrong."""
        self.heals: list[Heal] = []
        """What ends the faults that are not over."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        settings = ["--links", links, "--dead", f"{dead:g}", "--port", str(port), *options]
        command = [sys.executable, "-m", "whimbrel", "up", str(write_job(folder, load)), "--data", str(self.data)]
        with (folder / "errors.txt").open("wb") as errors:
            self.up = subprocess.Popen(
                [*command, "--sites", ",".join(sites), *settings],
                cwd=folder,
                env={
                    **os.environ,
                    "JAVA_TOOL_OPTIONS": SHORT_LIFE,
                    "TMPDIR": str(folder / "tmp"),  # what is killed cannot clean up behind itself
                    MARK: self.mark,
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends them in its own way
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
        """The process ids that one has had: `gateway`, `orchestrator`, or a site."""
        start = f"{f'site {name}' if name in self.sites else name} runs as "
        return [int(line.removeprefix(start)) for line in list(self.lines) if line.startswith(start)]

    def is_up(self, name: str) -> bool:
        """Whether its process runs, or is stopped, but is not dead."""
        lives = self.lives(name)
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{lives[-1]}/stat").read_text(encoding="utf-8", errors="replace")
            return stat.rpartition(")")[2].split()[0] not in "ZX"
        return False

    def tree(self, name: str) -> list[int]:
        """A process, and everything it started."""
        pid = self.lives(name)[-1]
        return [pid, *_session(pid)]

    def children(self, name: str, word: str) -> list[int]:
        """What a process has started, as far as its command line has this word."""
        return [pid for pid in self.tree(name)[1:] if word in _command(pid)]

    def send(self, pids: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to processes, if they are still there."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def left(self) -> list[int]:
        """All processes of this deployment that live."""
        return marked(MARK, self.mark)

    # ── How it is ────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, question: Callable[[], Any]) -> Any:
        """An answer; None while the orchestrator is not there."""
        try:
            return question()
        except Retry:
            return None

    def silences(self) -> dict[str, float]:
        """By process: for how many seconds the orchestrator has not heard it; nothing if it cannot be asked."""
        status = self.ask(self.client.status)
        return {name: one["silent_s"] for name, one in status["processes"].items()} if status else {}

    def places(self) -> dict[str, str]:
        """By instance: its site."""
        return {name: site for stage in self.client.stages() for name, site in stage.instances.items()}

    def post(self, path: str, body: dict[str, Any], name: str) -> httpx.Response:
        """A call to the API that may be repeated under its name: the client never does that of its own will."""
        return self._http.post(path, json=body, headers={"Idempotency-Key": name})

    def keys_at(self, sites: Sequence[str]) -> frozenset[str] | None:
        """The keys, of both stages, that lie at these sites now; None if nobody can be asked."""
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
        """Bytes of results that are out."""
        out = self.folder / "out.jsonl"
        return out.stat().st_size if out.exists() else 0

    def has_finished(self) -> bool:
        """Whether the source has ended, and everything is delivered."""
        return bool(self.ask(self._settled.has_finished))

    # ── The end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end_source(self) -> None:
        """Let no more records come."""
        (self.folder / ENDING).touch()

    def end(self) -> list[int]:
        """Let everything end in its own way; which processes are left over then."""
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
            with suppress(Exception):  # whoever has to hear it may be gone; the others are healed all the same
                heal()
        self.send(self.left(), signal.SIGCONT)  # what was stopped could not end
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

    def told(self) -> str:
        """What it has said lately, for whoever wants to know why it does not run."""
        errors = (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace")
        return "\n".join([*self.lines[-20:], errors[-3_000:]])

    def stuck(self) -> str:
        """What may keep it from coming to rest, as far as status says."""
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
        return "; ".join([*found, str(status["error"])] if status["error"] else found) or "nothing that status shows"

    def check(self) -> None:
        """Raise if `up` has ended, which nobody wanted."""
        if self.up.poll() is not None:
            raise Unavailable(f"whimbrel up has ended with status {self.up.returncode}:\n{self.told()}")


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
    """All processes that live with this mark in their environment."""
    wanted = f"{name}={mark}".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in _environment(path)]


def _environment(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # it ended just now, or is no more than an entry in its parent's table
        return []
