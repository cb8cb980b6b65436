"""A deployment of real processes, each of which is killed amid a move: the results are those of a calm run.

Without Spark; test_spark_kills.py has what a site with a JVM adds. One deployment serves all tests of this file, in
their order; its results are looked at in the last but one, its end in the last.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.faults.children import ROOT, Child
from tests.spark_app.jobs import EXACT, compare, read, rows, sequential
from whimbrel.core.errors import Retry
from whimbrel.deploy.orchestrator import Settled, settled_in
from whimbrel.host.contract import INLINE
from whimbrel.log import EmbeddedLog

pytestmark = pytest.mark.timeout(900)
LONG = 400.0
SITES = ["cloud", "edge-1"]
BUDGET = 20_000
"""A part ships its keys in several batches, so that there is something to kill."""
DEAD = 300
"""Whoever is killed here comes back before he is given up, however busy the machine is."""


@dataclass
class Deployed:
    """A running deployment."""

    up: Child
    folder: Path
    client: wb.Client
    settled: Settled
    at: str = "cloud"
    """Where the keys are."""

    @property
    def other(self) -> str:
        """Where they are not."""
        return next(site for site in SITES if site != self.at)

    def pids(self, name: str) -> list[int]:
        """The process ids that one has had."""
        start = f"{name} runs as "
        return [int(line.removeprefix(start)) for line in list(self.up.lines) if line.startswith(start)]

    def kill(self, name: str) -> None:
        """Kill a process, and nothing else; what it started must notice."""
        os.kill(self.pids(name)[-1], signal.SIGKILL)

    def delivered(self) -> int:
        """How many results have come out."""
        out = self.folder / "out.jsonl"
        return out.read_bytes().count(b"\n") if out.exists() else 0

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until something is so; whoever cannot be asked now is asked again."""

        def holds() -> bool:
            try:
                return bool(condition())
            except Retry:
                return False

        try:
            until(holds, what, LONG)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.up.told()}; {self.client.status()}") from None

    def flow(self, records: int = 100) -> None:
        """Until more results come out."""
        before = self.delivered()
        self.wait(lambda: self.delivered() >= before + records, "results come out")

    def begin(self, protocol: str, phase: str) -> str:
        """Order a move to where the keys are not, and wait until it is in a phase."""
        (id,) = self.client.migrate("chain", to=self.other, protocol=protocol, budget=BUDGET, deadline=LONG).ids
        self.wait(lambda: self.phase(id) in (phase, "done"), f"{protocol} is {phase}")
        assert self.phase(id) == phase
        return id

    def phase(self, id: str) -> str:
        """How far a move is."""
        return self.client.migration(id).phase

    def states(self) -> set[str]:
        """Who lives."""
        return {process["state"] for process in self.client.status()["processes"].values()}

    def finish(self, id: str) -> None:
        """Until a move is over."""
        self.wait(lambda: self.phase(id) in ("done", "aborted"), f"{id} is over")
        assert self.phase(id) == "done"
        self.at = self.other

    def check_end(self) -> None:
        """Let the source end, and compare the results with a sequential run."""
        (self.folder / "ending").touch()
        self.wait(self.settled.has_finished, "everything is delivered")
        sent = EmbeddedLog(self.folder / "data" / "logs" / "ingress-chain.db").counter("source") + 1
        results = read(self.folder / "out.jsonl")
        assert compare(sequential(rows(sent)()), results) == EXACT
        assert len(results) == sent
        moves = self.client.migrations()
        assert {line["_epoch"] for line in results} == set(range(len(moves) + 1)), "each move was made under load"
        assert {move.phase for move in moves} == {"done"}


@contextmanager
def deployment(folder: Path, host: str) -> Iterator[Deployed]:
    """A deployment of the job, with its data in a folder."""
    data = folder / "data"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = ROOT / "tests" / "processes" / "job.py"
    options = ["--links", "delay=50ms,rate=8mbit", "--keep", "--dead", DEAD, "--port", port, "--host", host]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHIMBREL_TEST_FOLDER", str(folder))
        up = Child("-m", "whimbrel", "up", job, "--data", data, "--sites", ",".join(SITES), *options, cwd=folder)
    try:
        until(lambda: (data / "url").exists(), f"the orchestrator is there; {up.told()}", LONG)
        client = wb.connect(data=data)
        yield Deployed(up, folder, client, settled_in(data))
    finally:
        up.kill()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployment(tmp_path_factory.mktemp("deployment"), INLINE) as deployed:
        yield deployed


def test_records_flow_and_a_live_move_goes_from_one_process_to_another(deployed: Deployed) -> None:
    deployed.flow()
    deployed.wait(lambda: deployed.states() == {"alive"}, "all live")
    deployed.finish(deployed.begin("live", "copying"))
    deployed.flow()


@pytest.mark.parametrize(
    ("victim", "protocol", "phase"),
    [
        ("the source", "live", "copying"),
        ("the destination", "pause", "holding"),
        ("gateway", "live", "copying"),
    ],
)
def test_whoever_is_killed_amid_a_move_comes_back_and_the_move_is_done(
    deployed: Deployed, victim: str, protocol: str, phase: str
) -> None:
    places = {"the source": deployed.at, "the destination": deployed.other}
    name = f"site {places[victim]}" if victim in places else victim
    lives = len(deployed.pids(name))
    id = deployed.begin(protocol, phase)
    deployed.kill(name)
    deployed.finish(id)
    deployed.flow()
    assert len(deployed.pids(name)) == lives + 1


def test_data_flows_without_an_orchestrator_and_the_next_one_ends_what_it_had_begun(deployed: Deployed) -> None:
    id = deployed.begin("live", "copying")
    os.kill(deployed.up.process.pid, signal.SIGSTOP)  # nobody starts it again
    try:
        deployed.kill("orchestrator")
        with pytest.raises(Retry):
            deployed.client.status()
        deployed.flow(300)
        with pytest.raises(Retry):
            deployed.client.status()
    finally:
        os.kill(deployed.up.process.pid, signal.SIGCONT)
    deployed.finish(id)
    deployed.wait(lambda: deployed.states() == {"alive"}, "all are heard again")


def test_all_results_are_exact_after_all_of_this(deployed: Deployed) -> None:
    deployed.check_end()


def test_when_the_one_that_started_them_is_killed_nothing_is_left(deployed: Deployed) -> None:
    os.kill(deployed.up.process.pid, signal.SIGKILL)
    deployed.up.end(60)
