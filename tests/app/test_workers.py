"""Commands are carried out in the order of their migration, and no migration waits for another one's."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.app.stories import timeless
from tests.app.test_orchestrator import House
from tests.app.waiting import until
from whimbrel.core.coordinator import Coordinator
from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.keys import EVERYTHING, KeyMap
from whimbrel.core.record import Left, Opened, Ready
from whimbrel.core.router import RouteTable
from whimbrel.orchestrator import workers
from whimbrel.orchestrator.decisions import Order
from whimbrel.orchestrator.handle import Handle
from whimbrel.orchestrator.workers import Workers


class Slow(House):
    """Two stages; the checkpoint of the first one's instance is being copied until somebody opens the gate."""

    def __init__(self, folder: Path) -> None:
        self.copying, self.gate = threading.Event(), threading.Event()
        self.said_to: list[tuple[str, str]] = []
        self.away: list[Exception] = []
        """What the next command to stage t raises."""
        self.carried_s = 0.0
        """How long a checkpoint takes over the link."""
        super().__init__(folder)

    def begin(self) -> None:
        super().begin()
        places = {"t-1": "cloud", "t-2": "edge"}
        self.other = Coordinator("t", RouteTable("t-1"), places, KeyMap("gateway"))
        self.orchestrator.stages["t"] = self.other

    def ports(self) -> Any:
        nothing = lambda *arguments, **named: None  # noqa: E731
        return SimpleNamespace(
            command=self.command, take=self.take, carry=self.carry, stop=nothing, start=nothing, failed=dict
        )

    def take(self, instance: str, origin: str) -> int:
        self.copying.set()
        assert self.gate.wait(60)
        return 7

    def carry(self, to: str, size: int) -> float:
        return self.carried_s

    def command(self, stage: str, command: Any) -> None:
        if self.away:
            raise self.away.pop(0)
        self.said_to.append((stage, type(command).__name__))

    def relocate(self) -> Handle:
        ids = self.orchestrator.order([Order("s", [(EVERYTHING, "s-1")], "edge", "restart", {})], 600.0)
        assert self.copying.wait(30)
        return Handle(self.orchestrator, "s", ids)

    def migrate_other(self) -> Handle:
        return Handle(
            self.orchestrator, "t", self.orchestrator.order([Order("t", [(EVERYTHING, "t-2")], "edge", "live", {})], 60)
        )


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr("whimbrel.orchestrator.orchestrator.PERIOD", 0.01)
    monkeypatch.setattr("whimbrel.orchestrator.deeds.PERIOD", 0.01)
    one = Slow(tmp_path)
    yield one
    one.gate.set()
    one.end()


def test_a_migration_runs_to_its_end_while_another_stages_checkpoint_is_copied(house: Slow) -> None:
    slow = house.relocate()
    quick = house.migrate_other()
    (id,) = quick.ids
    until(lambda: house.said_to == [("t", "Begin")], "the other stage's BEGIN")
    house.orchestrator.receive("t", Ready(id, "t-2", 0, 1))
    until(lambda: house.said_to[1:] == [("t", "Cutover")], "the other stage's CUTOVER")
    for notice in (Left(id, "t-1", 0, 1), Opened(id, "t-2", 0, 1)):
        house.orchestrator.receive("t", notice)
    assert quick.wait(0).outcome == "done"
    assert slow.outcome == "copying"
    house.gate.set()
    assert slow.wait(30).outcome == "done"


def test_a_migration_that_is_called_off_does_not_wait_until_its_checkpoint_is_over_the_link(house: Slow) -> None:
    house.carried_s = 3600.0
    slow = house.relocate()
    house.gate.set()
    time.sleep(0.1)
    assert slow.outcome == "copying"
    slow.abort("it takes too long")
    assert slow.wait(30).outcome == "aborted"


def test_an_end_does_not_wait_for_a_call_for_ever_and_hears_its_answer_no_more(
    house: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GRACE", 0.05)
    slow = house.relocate()
    ending = threading.Thread(target=house.orchestrator.stop, daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive(), "a copy that takes an hour holds up nobody's end"
    house.gate.set()
    until(lambda: not house.orchestrator._workers._running, "the copy to end")
    assert (slow.outcome, house.orchestrator.error) == ("copying", None)
    assert [m.phase for m in house.journal.migrations()] == ["copying"], "a successor may have the journal by now"


def test_what_a_command_waits_for_is_told_until_it_is_done(house: Slow) -> None:
    house.away = [Unavailable("the gateway is away")] * 3
    failed = len(house.away)
    handle = house.migrate_other()
    line = f"{handle.ids[0]} copying: waiting: the gateway is away"
    until(lambda: timeless(handle.progress)[-1] == line, "the reason in its story")
    assert house.orchestrator.waiting_of("s") == {}
    until(lambda: house.said_to == [("t", "Begin")], f"BEGIN after {failed} failures")
    until(lambda: "waiting" not in handle.progress[-1], "nothing more to wait for")


# ── Workers by themselves ────────────────────────────────────────────────────────────────────────────────────────────


class Recorder:
    """Carries out what it is given, behind a gate if there is one; fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.gate, self.failures = threading.Event(), failures
        self.done: list[tuple[str, Any]] = []
        self.tried: list[float] = []
        self.at_once = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, stage: str, id: str, command: Any) -> None:
        with self._lock:
            self.tried.append(time.monotonic())
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.gate.wait(60)
        with self._lock:
            self.at_once -= 1
            if self.failures:
                self.failures -= 1
                raise Retry("not now")
            self.done.append((id, command))


@pytest.fixture
def started() -> Iterator[Any]:
    made: list[Workers] = []

    def make(recorder: Recorder) -> Workers:
        made.append(Workers(recorder))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_commands_of_one_migration_keep_their_order_whatever_the_others_do(started: Any) -> None:
    recorder = Recorder(failures=20)
    pool = started(recorder)
    ids = [f"m{n}" for n in range(10)]
    for number in range(5):
        for id in ids:
            pool.add(("s", id), [number])
    recorder.gate.set()
    until(lambda: pool.is_idle, "all to be done")
    assert {id: [number for one, number in recorder.done if one == id] for id in ids} == {id: [*range(5)] for id in ids}


def test_there_are_only_so_many_workers_and_they_end_with_their_work(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MOST", 3)
    recorder = Recorder()
    pool = started(recorder)
    for number in range(8):
        pool.add(("s", f"m{number}"), ["one", "two"])
    until(lambda: recorder.at_once == 3, "three at once")
    recorder.gate.set()
    until(lambda: pool.is_idle, "all to be done")
    assert (recorder.most, Counter(command for _, command in recorder.done)) == (3, {"one": 8, "two": 8})
    until(lambda: not pool._running, "the workers to end")


def test_a_command_that_fails_is_repeated_less_and_less_often(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "FIRST", 0.01)
    monkeypatch.setattr(workers, "LONGEST", 0.04)
    recorder = Recorder(failures=4)
    recorder.gate.set()
    pool = started(recorder)
    pool.add(("s", "m1"), ["command"])
    until(lambda: pool.is_idle, "it to be done")
    pauses = [later - sooner for sooner, later in zip(recorder.tried, recorder.tried[1:], strict=False)]
    assert len(pauses) == 4
    assert all(pause >= least for pause, least in zip(pauses, [0.01, 0.02, 0.04, 0.04], strict=True))


def test_what_has_not_begun_when_the_end_comes_is_not_begun() -> None:
    recorder = Recorder()
    pool: Any = Workers(recorder)
    pool.start()
    pool.add(("s", "m1"), ["one", "two"])
    until(lambda: recorder.tried, "the first command to begin")
    ending = threading.Thread(target=pool.stop)
    ending.start()
    until(lambda: pool._stopping, "the end to be known")
    recorder.gate.set()
    ending.join()
    pool.add(("s", "m2"), ["three"])
    assert recorder.done == [("m1", "one")]
    assert not pool.is_idle
