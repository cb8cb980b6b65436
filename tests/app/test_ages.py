"""Logs and snapshots of different moments: a start refuses them and names what is missing. Nothing goes on in silence.

A data directory is filled by hand, as two stages would, and then one of its files at a time is put back to an earlier
moment, as after a power failure or with a restored backup.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import whimbrel as wb
from tests.app.waiting import until
from whimbrel.core import wire
from whimbrel.core.errors import Stale
from whimbrel.core.operator import Emit
from whimbrel.core.record import OutboxEntry, Outgoing, Result
from whimbrel.egress.outlet import Commit
from whimbrel.log import Lane, MemoryLog
from whimbrel.log.carrier import number
from whimbrel.log.codec import ROWS, encode_messages
from whimbrel.log.folder import Logs
from whimbrel.orchestrator.journal import GATEWAY_JOURNAL, JOURNAL, GatewayJournal, Journal, JournalReader
from whimbrel.roles.ages import check_way_in, check_way_out
from whimbrel.roles.gateway import GatewayRole


class Same(wb.Operator):
    """Hands on what it gets."""

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        emit(key=key)


class House:
    """A gateway's role over a data directory, and an instance of its first stage, by hand."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.rows = [{"key": f"k{n}"} for n in range(40)]
        job = wb.Pipeline("ages", wb.Items(self.rows, "key string", 20_000), key="key")
        self.job = job.stage("one", Same()).stage("two", Same(), key="key", schema="key string")
        self.job.sink(wb.Csv(folder / "out.csv"))
        journal = Journal(self.data / JOURNAL)
        journal.save("instances/one", wire.pack({"one-1": "cloud", "one-2": "edge-1"}))
        journal.save("instances/two", wire.pack({"two-1": "cloud"}))
        journal.close()

    def open(self) -> GatewayRole:
        """The role, from what lies there; it does not run yet."""
        self.logs, self.journal = Logs(self.data / "logs"), GatewayJournal(self.data / GATEWAY_JOURNAL)
        return GatewayRole(
            self.job,
            self.logs,
            self.journal,
            JournalReader(self.data / JOURNAL),
            lambda stage, notice: None,
            lambda: 1_000_000,
            keep=False,
            max_backlog=1000,
            watch=lambda results, now_us: None,
        )

    def close(self) -> None:
        self.logs.close()
        self.journal.close()

    def live(self, batch: int, *, feeds: bool = False) -> None:
        """One life: take rows in, let the instance of the first stage say something, deliver it, and stop."""
        role = self.open()
        role.start()
        if feeds:
            role.start_feeds()
            assert role.feeds[0].ended.wait(30)
        else:
            role.first.gateway.ingest([("late", ("late",), None)], "by hand", batch)
        results = [Result("k", 0, batch, n, 1, 1, {"key": f"r{n}"}) for n in range(5)]
        who: dict[str, Any] = {"writer": "one-1@x", "counter": number(batch)}
        messages = encode_messages([(5, 0, b"parcel %d" % batch)])
        self.logs.inbox("one-2").append(
            messages, count=1, writer="one-1@x", counter=number(batch, 0), lane=Lane.CONTROL
        )
        said = OutboxEntry([Outgoing(results, [])], {"data": batch}, {"data": batch + 1}, {"one-2": number(batch, 0)})
        self.logs.outbox("one-1").append(wire.pack(said), count=5, **who)
        role.first.outlet.wake()
        until(lambda: role.first.outlet.delivered == 5 * (batch + 1), "it is delivered")
        assert role.save("one")
        assert role.save("two")
        for end in [*role.ends(), *role.outlet_ends()]:
            end()
        self.close()


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A data directory at an earlier and at a later moment."""
    folder = tmp_path_factory.mktemp("ages")
    house = House(folder)
    house.live(0, feeds=True)
    shutil.copytree(house.data, folder / "earlier")
    house.live(1)
    house.data.rename(folder / "later")
    return folder / "earlier", folder / "later"


@pytest.fixture
def house(moments: tuple[Path, Path], tmp_path: Path) -> House:
    house = House(tmp_path)
    shutil.rmtree(house.data)
    shutil.copytree(moments[1], house.data)
    (tmp_path / "out.csv").write_text("")
    return house


def put_back(house: House, moments: tuple[Path, Path], name: str) -> None:
    """Let one file be as it was at the earlier moment."""
    for path in house.data.rglob(f"{name}*"):
        path.unlink()
    for path in moments[0].rglob(f"{name}*"):
        shutil.copy(path, house.data / path.relative_to(moments[0]))


def test_a_whole_directory_of_one_moment_starts(house: House, moments: tuple[Path, Path]) -> None:
    for moment in moments:
        shutil.rmtree(house.data)
        shutil.copytree(moment, house.data)
        house.open()
        house.close()


WHICH: list[tuple[str, str]] = [
    (
        "ingress-one.db",
        r"the ingress log of gateway-one lacks its last part: .* router is at position \d+, the log ends at",
    ),
    ("ingress-two.db", r"the ingress log of gateway-two lacks its last part"),
    ("inbox-one-1.db", r"the inbox of one-1 lacks its last part: gateway-one has routed position"),
    ("inbox-two-1.db", r"the inbox of two-1 lacks its last part"),
    ("outbox-one-1.db", r"the outbox of one-1 lacks its last part: the outlet has delivered up to 2, it ends at 1"),
    ("gateway.db", r"lacks its last part"),
]


@pytest.mark.parametrize(("name", "told"), WHICH, ids=[name for name, _ in WHICH])
def test_a_file_of_an_earlier_moment_is_refused(house: House, moments: tuple[Path, Path], name: str, told: str) -> None:
    put_back(house, moments, name)
    with pytest.raises(Stale, match=told):
        house.open()


def test_posts_that_are_missing_are_noticed(house: House) -> None:
    """Nothing was routed to the second instance: all it has was sent to it."""
    for path in (house.data / "logs").glob("inbox-one-2.db*"):
        path.unlink()
    with pytest.raises(Stale, match=r"the inbox of one-2 lacks its last part: one-1 has sent to it in batch 1"):
        house.open()


def test_an_outbox_that_lacks_what_was_reported_is_noticed(house: House) -> None:
    """Reports are always durable. New ones would get numbers that their log has seen, and no move would ever end."""
    logs = Logs(house.data / "logs")
    tail = logs.outbox("one-1").tail()
    reports = logs.log("reports-one", durable=True)
    reports.append(b"", count=1, writer="one-1", counter=tail - 1)
    logs.close()
    house.open()
    house.close()
    logs = Logs(house.data / "logs")
    logs.log("reports-one", durable=True).append(b"", count=1, writer="one-1", counter=tail)
    logs.close()
    with pytest.raises(Stale, match=rf"the outbox of one-1 lacks its last part: .* up to {tail}, it ends at {tail}"):
        house.open()


def test_an_ingress_log_that_lacks_what_an_inbox_has_is_noticed() -> None:
    """Also without a snapshot that knows better: new records would get numbers that the inbox has seen."""
    ingress, inbox = MemoryLog(), MemoryLog()
    ingress.append(b"x", count=1, writer="source", counter=0)
    inbox.append(b"x", count=1, writer="router", counter=0)
    check_way_in("router", None, ingress, {"one-1": inbox})
    inbox.append(b"y", count=1, writer="router", counter=ROWS)
    with pytest.raises(Stale, match="the inbox of one-1 has the entry of position 1, the log ends at 1"):
        check_way_in("router", None, ingress, {"one-1": inbox})


@pytest.mark.parametrize(("last", "lacks"), [(number(2), False), (number(2, 7), True), (number(1), True)])
def test_a_hand_on_of_which_the_next_stage_has_a_part_is_noticed(last: int, lacks: bool) -> None:
    mark = {"number": 3, "taken": 2, "pending": []}
    commit, following = wire.pack(Commit({}, b"", [mark], 0)), MemoryLog()
    following.append(b"", count=1, writer="stage before", counter=last)
    with pytest.raises(Stale, match="has handed on number 2, it ends with") if lacks else nullcontext():
        check_way_out("one", commit, {}, following)
