"""Places as real processes: each with a directory, a gateway and a site of its own; only appends cross."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import pytest

import whimbrel as wb
from whimbrel.core.errors import Refused, Retry
from whimbrel.core.keys import bin_of
from whimbrel.core.protocols import PROTOCOLS

KEYS, RATE = 40, 400
MOVES = ("live", "push", "fetch", "pause", "live")
JOB = """
from pathlib import Path

import whimbrel as wb


class Count(wb.Operator):
    class State(wb.State):
        n: int = 0
        total: int = 0

    def process(self, key, event, state, emit):
        state.n, state.total = state.n + 1, state.total + event.value
        emit(key=key, n=state.n, total=state.total)


def rows():
    # Row after row, until the file says how many there are.
    n, end = 0, Path({end!r})
    while not end.exists() or n < int(end.read_text()):
        yield {{"key": f"k{{n % {keys}}}", "value": n}}
        n += 1


pipeline = wb.Pipeline("counts", wb.Items(rows, schema="key string, value long", rate={rate}, at={at!r}), key="key")
pipeline.stage("count", Count())
pipeline.sink(wb.JsonLines({out!r}, overwrite=True), at={sink!r})
"""
DEPLOYMENT = """
job = "places_job.py"
host = "{host}"

[places.cloud]
[places.edge-1]

[homes.count]
edge-1 = {homes}
"""


class Deployed:
    """`whimbrel up --deployment` over a job in a folder."""

    def __init__(
        self, folder: Path, *, at: str, sink: str, homes: str = '{ bins = "0-511" }', host: str = "inline"
    ) -> None:
        self.folder, self.out, self._end = folder, folder / "out.jsonl", folder / "end"
        job = JOB.format(keys=KEYS, end=str(self._end), rate=RATE, at=at, sink=sink, out=str(self.out))
        (folder / "places_job.py").write_text(job)
        file = folder / "places.toml"
        file.write_text(DEPLOYMENT.format(homes=homes, host=host))
        self.data, self.log = folder / "data", (folder / "log").open("wb")
        with socket() as free:  # the same after a restart of the orchestrator
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "whimbrel", "up", "--deployment", str(file), "--data", str(self.data)]
        command += ["--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--until-done", "--until-input-ends"], stdin=subprocess.PIPE, stdout=self.log, stderr=self.log
        )
        self.until(self._is_served, "the API is served")
        self.client = wb.connect(data=self.data / "orchestrator")

    def _is_served(self) -> bool:
        return (self.data / "orchestrator" / "url").exists()

    def until(self, condition: Callable[[], Any], what: str, timeout: float = 90.0) -> None:
        """Wait for a condition."""
        end = time.monotonic() + timeout
        while True:
            with suppress(Retry):
                if condition():
                    return
            assert time.monotonic() < end, f"{what}: not within {timeout:.0f} s\n{self.output()}"
            assert self.process.poll() is None, f"{what}: it has ended\n{self.output()}"
            time.sleep(0.1)

    def output(self) -> str:
        return (self.folder / "log").read_text()[-8000:]

    def delivered(self) -> int:
        return int(self.client.status()["records"]["delivered"])

    def has_delivered(self, count: int) -> bool:
        return self.delivered() >= count

    def finish(self) -> None:
        """End the source, wait until everything is delivered, and check it."""
        rows = int(self.client.status()["records"]["sent"]) + 5 * RATE
        draft = self._end.with_suffix(".draft")
        draft.write_text(str(rows))
        draft.rename(self._end)
        assert self.process.wait(180) == 0, self.output()
        check([json.loads(line) for line in self.out.read_text().splitlines()], rows)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()
        self.log.close()

    def process_of(self, role: str) -> int:
        """The process id of a role: `gateway cloud`, `orchestrator`."""
        for pid, words in commands(self.data):
            name = f"{words[words.index('--role') + 1]} {words[words.index('place') + 1]}" if "--role" in words else ""
            if role == name or (role == "orchestrator" and words[3:4] == ["orchestrator"]):
                return pid
        raise AssertionError(f"{role} does not run")

    def opened(self) -> dict[str, set[str]]:
        """By role and place: the places whose files its process has open."""
        found = defaultdict(set)
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                words = (folder / "cmdline").read_text().split("\0")
                if str(self.data) not in " ".join(words) or "--role" not in words:
                    continue
                who = f"{words[words.index('--role') + 1]} {words[words.index('place') + 1]}"
                for file in (folder / "fd").iterdir():
                    with suppress(OSError, ValueError):
                        found[who].add(file.readlink().relative_to(self.data).parts[0])
        return found


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployed]]:
    made = []

    def make(**where: Any) -> Deployed:
        made.append(Deployed(tmp_path, **where))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def ended(handle: Any) -> bool:
    """Whether all migrations of an order are over."""
    return bool(handle.migrations) and all(one.is_over for one in handle.migrations)


def check(results: list[dict[str, Any]], rows: int) -> None:
    """Every result once, in its key's order, as a sequential run gives them."""
    expected = defaultdict(list)
    n, total = Counter[str](), Counter[str]()
    for row in range(rows):
        key = f"k{row % KEYS}"
        n[key] += 1
        total[key] += row
        expected[key].append((n[key], total[key]))
    got = defaultdict(list)
    for result in results:
        got[result["key"]].append((result["n"], result["total"]))
    assert got == expected


def test_keys_move_between_places_by_every_protocol(deploy: Callable[..., Deployed]) -> None:
    deployed = deploy(at="cloud", sink="cloud")
    deployed.until(lambda: deployed.delivered() > 200, "results flow")
    client = deployed.client
    for number, protocol in enumerate(name for name in PROTOCOLS if name not in ("restart", "restore")):
        to = ("cloud", "edge-1")[number % 2]
        handle = client.migrate("count", to=to, share=0.6, protocol=protocol)
        assert handle.wait(60).outcome == "done", handle.progress
    with pytest.raises(Refused, match="do not share a disk"):
        client.migrate("count", to="cloud", protocol="restart")
    opened = deployed.opened()
    assert opened == {
        "gateway cloud": {"cloud", "keys"} & opened["gateway cloud"],
        "site cloud": {"cloud", "keys"} & opened["site cloud"],
        "gateway edge-1": {"edge-1", "keys"} & opened["gateway edge-1"],
        "site edge-1": {"edge-1", "keys"} & opened["site edge-1"],
    }
    assert all(opened.values()), "each has files of its own place open"
    deployed.finish()


def test_what_needs_no_other_place_crosses_no_link_also_when_all_others_are_away(
    deploy: Callable[..., Deployed],
) -> None:
    """Device, state and sink at the edge. The orchestrator and the cloud are stopped, then go on, and keys move."""
    deployed = deploy(at="edge-1", sink="edge-1", homes='{ bins = "0-1023" }')
    deployed.until(lambda: deployed.delivered() > 200, "results flow")
    status = deployed.client.status()
    assert all(link["sent_bytes"] < 1_000 for link in status["links"].values()), "no more than greetings"
    others = [pid for pid, words in commands(deployed.data) if "edge-1" not in words and "up" not in words]
    assert len(others) == 3, "the orchestrator, and gateway and site of the cloud"
    before = len(deployed.out.read_text().splitlines())
    for pid in others:
        subprocess.run(["kill", "-STOP", str(pid)], check=True)
    try:
        goal = before + 4 * RATE
        deployed.until(lambda: len(deployed.out.read_text().splitlines()) > goal, "results flow without the others")
    finally:
        for pid in others:
            subprocess.run(["kill", "-CONT", str(pid)], check=True)
    links = {name: link["sent_bytes"] for name, link in deployed.client.status()["links"].items()}
    assert links["edge-1->cloud"] < 5_000, links
    handle = deployed.client.migrate("count", to="cloud", share=0.5)
    assert handle.wait(60).outcome == "done", handle.progress
    deployed.finish()


def commands(data: Path) -> list[tuple[int, list[str]]]:
    """The processes of a deployment with their arguments."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_text().split("\0")
            if any(word.startswith(str(data)) for word in words):
                found.append((int(folder.name), words))
    return found


def test_whichever_process_of_a_place_is_killed_amid_a_move_nothing_is_lost(deploy: Callable[..., Deployed]) -> None:
    deployed = deploy(at="edge-1", sink="cloud")
    deployed.until(lambda: deployed.delivered() > 200, "results flow")
    victims = ["gateway cloud", "site cloud", "gateway edge-1", "site edge-1", "orchestrator"]
    for number, victim in enumerate(victims):
        handle = deployed.client.migrate("count", to=("cloud", "edge-1")[number % 2], share=0.7, protocol=MOVES[number])
        os.kill(deployed.process_of(victim), signal.SIGKILL)
        deployed.until(partial(ended, handle), f"{victim} is back")
        deployed.until(partial(deployed.has_delivered, deployed.delivered() + RATE), f"results flow after {victim}")
    deployed.finish()


def test_what_is_cut_off_is_reconciled_when_the_link_is_mended(deploy: Callable[..., Deployed]) -> None:
    """The link is cut amid a move, in both directions; records that must cross it wait."""
    deployed = deploy(at="edge-1", sink="cloud")
    deployed.until(lambda: deployed.delivered() > 200, "results flow")
    handle = deployed.client.migrate("count", to="edge-1", share=0.5)
    deployed.client.cut("cloud", "edge-1")
    deployed.until(lambda: deployed.client.status()["links"]["edge-1->cloud"]["cut"], "the status shows it")
    waits = lambda: deployed.client.status()["links"]["edge-1->cloud"]["under_way_bytes"] > 10_000  # noqa: E731
    deployed.until(waits, "results wait in the spool of the edge")
    before = len(deployed.out.read_text().splitlines())
    deployed.until(waits, "and go on to wait")
    assert len(deployed.out.read_text().splitlines()) <= before + RATE, "what had crossed before"
    deployed.client.mend("cloud", "edge-1")
    assert handle.wait(60).outcome == "done", handle.progress
    deployed.finish()


def test_every_key_begins_at_its_home(deploy: Callable[..., Deployed]) -> None:
    deployed = deploy(at="edge-1", sink="cloud")
    deployed.until(lambda: deployed.delivered() > 400, "results flow")
    stage = deployed.client.status()["stages"]["count"]["instances"]
    at_edge = sum(bin_of(f"k{number}") < 512 for number in range(KEYS))
    assert {one["site"]: one["keys"] for one in stage.values()} == {"cloud": KEYS - at_edge, "edge-1": at_edge}
    deployed.finish()


@pytest.mark.spark
def test_keys_move_between_the_sparks_of_two_places(deploy: Callable[..., Deployed]) -> None:
    deployed = deploy(at="edge-1", sink="cloud", host="micro-batch")
    deployed.until(lambda: deployed.delivered() > 200, "results flow", timeout=180)
    for protocol, to in (("live", "edge-1"), ("push", "cloud")):
        handle = deployed.client.migrate("count", to=to, share=0.5, protocol=protocol)
        assert handle.wait(90).outcome == "done", handle.progress
    deployed.finish()
