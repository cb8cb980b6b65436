"""The client, over a real server: the same methods, handles and errors as in the application's own process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import whimbrel as wb
from tests.app.stories import timeless
from tests.app.waiting import until
from tests.rest.house import House, served, standing
from whimbrel.api.problems import error_of, problem_of
from whimbrel.core import errors
from whimbrel.core.errors import Bug, Conflict, Corrupt, Trimmed, Unavailable, UnknownEvent
from whimbrel.core.record import Aborted, Left, Opened, Ready, Warm

HERE = Path(__file__).parent
"""Here are a certificate and its key, made for these tests and used for nothing else."""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with served(tmp_path / "data") as house:
        yield house


@pytest.fixture
def client(house: House) -> Iterator[wb.Client]:
    with wb.connect(data=house.app.data) as client:
        yield client


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests that leave it as it is."""
    with served(tmp_path_factory.mktemp("client") / "data") as house:
        yield house


@pytest.fixture(scope="module")
def asking(calm: House) -> Iterator[wb.Client]:
    with wb.connect(data=calm.app.data) as client:
        yield client


def finish(house: House, id: str) -> None:
    """Let a live move come to its end, as its instances would."""
    move = house.app.control.orchestrator.migration("count", id).move
    for notice in (Ready(id, move.destination, 0, 1), Left(id, move.source, 0, 1), Opened(id, move.destination, 0, 1)):
        house.app.control.orchestrator.receive("count", notice)


# ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_there_is(calm: House, asking: wb.Client) -> None:
    assert asking.status()["pipeline"] == "p"
    assert [(site.name, site.instances, site.keys, site.running) for site in asking.sites()] == [
        ("cloud", ["count-1"], 12, True),
        ("edge-1", ["count-2"], 0, True),
        ("edge-2", ["count-3"], 0, True),
    ]
    (stage,) = asking.stages()
    assert stage.instances == {"count-1": "cloud", "count-2": "edge-1", "count-3": "edge-2"}
    assert (stage.name, stage.keys, stage.groups, stage.partitions, stage.migrations) == ("count", 12, 4, 1, [])


def test_routes_follow_a_move(house: House, client: wb.Client) -> None:
    assert [(route.bins, route.keys) for route in client.routes("count")] == [([(0, 1023)], 12), ([], 0), ([], 0)]
    finish(house, client.migrate("count", to="edge-1", keys=["k01", "k00"]).ids[0])
    finish(house, client.migrate("count", to="edge-2", bins=[0, 1, 2, 9]).ids[0])
    cloud, one, two = client.routes("count", apart=1)
    assert cloud.bins == [(3, 8), (10, 1023)]
    assert (one.bins, one.keys, one.apart, one.apart_count) == ([], 2, ["k00"], 2)
    assert two.bins == [(0, 2), (9, 9)]
    assert sum(route.keys for route in (cloud, one, two)) == 12


# ── Moving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_move_that_is_waited_for_and_told(house: House, client: wb.Client) -> None:
    handle = client.migrate("count", to="edge-1", keys="k00")
    assert (handle.ids, handle.is_noop, handle.outcome) == (["m1"], False, "copying")
    with pytest.raises(Unavailable, match=r"m1 is still copying after 0\.1 s"):
        handle.wait(0.1)
    ending = threading.Timer(0.3, finish, (house, "m1"))
    ending.start()
    assert handle.wait(30).outcome == "done"
    ending.join()
    assert handle.progress == client.story("m1") == house.app.story("m1")
    assert [migration.destination for migration in handle.migrations] == ["count-2"]
    assert repr(handle) == "<migration m1: done>"
    assert client.migrate("count", to="edge-1", keys=["k00"]).is_noop
    assert client.migrate("count", to="edge-1", keys=["k00"]).wait().outcome == "already there"


def test_a_move_that_is_called_off(house: House, client: wb.Client) -> None:
    handle = client.migrate("count", to="edge-1", share=0.5, deadline=60.0, budget=1000)
    assert handle.abort("changed my mind") is handle
    house.app.control.orchestrator.receive("count", Aborted("m1", "count-1", 0, 1))
    assert handle.wait(10).outcome == "aborted"
    assert [migration.reason for migration in client.migrations()] == ["changed my mind"]
    assert client.handle("m1").abort("once more").outcome == "aborted"


def test_a_plan_in_a_file_is_read_here_and_its_pieces_have_names_with_a_dash(client: wb.Client, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[[1, 2], [3]]")
    handle = client.migrate("count", to="edge-1", protocol="fluid", plan=tmp_path / "plan.json", step=5)
    assert handle.ids == ["m1/1", "m1/2", "m1/3"]
    assert client.migration("m1/2").id == "m1/2"
    ordered = ["m1/1 ordered: ordered by operator over REST", "m1/1 ordered: Ordered"]
    assert timeless(client.story("m1/1")) == ordered
    assert timeless(client.story("m1/2")) == ["m1/2 ordered: ordered by operator over REST"]
    assert client.abort("m1/3").id == "m1/3"


def test_a_standby_takes_over_when_told(house: House, client: wb.Client) -> None:
    handle = client.migrate("count", to="edge-1", protocol="replicate", standby=True)
    with pytest.raises(wb.Refused, match="no standby is waiting here: it is"):
        handle.take_over()
    with pytest.raises(wb.Refused, match="no standby is waiting"):
        client.take_over("m1")
    house.app.control.orchestrator.receive("count", Warm("m1", "count-2", 0, 1))
    assert handle.wait_warm(10).outcome == "standby"
    assert handle.take_over().outcome not in ("standby", "aborted")
    assert client.take_over("m1").phase == handle.outcome, "told before: nothing happens"


def test_scale_lets_more_instances_share(house: House, client: wb.Client) -> None:
    handle = client.scale("count", instances=2, at="cloud")
    assert [migration.destination for migration in handle.migrations] == ["count-4"]
    assert house.app.control.stages["count"].coordinator.sites["count-4"] == "cloud"
    with pytest.raises(Conflict):
        client.scale("count", instances=1, at="cloud")


def test_a_link_is_cut_and_mended(asking: wb.Client) -> None:
    asking.cut("cloud", "edge-1")
    assert asking.status()["links"]["cloud->edge-1"]["cut"]
    asking.mend("cloud", "edge-1")
    assert not asking.status()["links"]["cloud->edge-1"]["cut"]


# ── Emptying a site ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_drain_spreads_everything_over_the_others(house: House, client: wb.Client) -> None:
    handle = client.drain("cloud")
    assert {migration.to_site for migration in handle.migrations} == {"edge-1", "edge-2"}
    with pytest.raises(Conflict):
        client.drain("cloud")
    for id in handle.ids:
        finish(house, id)
    assert handle.wait(10).outcome == "done"
    assert [site.keys for site in client.sites()] == [0, 6, 6]
    assert client.routes("count")[0].bins == []
    assert client.drain("cloud").is_noop


def test_drain_to_the_sites_that_are_named(house: House, client: wb.Client) -> None:
    handle = client.drain("cloud", to=["edge-2"])
    assert {migration.to_site for migration in handle.migrations} == {"edge-2"}
    with pytest.raises(Conflict, match=r"m1 \(copying\) brings keys to edge-2"):
        client.drain("edge-2")


def test_drain_gives_a_handle_for_each_stage_that_has_something_there(house: House) -> None:
    handles = house.app.drain("cloud")
    assert list(handles) == ["count"]
    for id in handles["count"].ids:
        finish(house, id)
    assert handles["count"].wait(10).outcome == "done"
    assert {migration.to_site for migration in handles["count"].migrations} == {"edge-1", "edge-2"}
    assert house.app.drain("cloud") == {}


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"to": ["cloud"]}, wb.Refused, "not cloud itself"),
        ({"to": ["moon"]}, wb.UnknownName, "there is: cloud, edge-1, edge-2"),
        ({"protocol": "restart"}, wb.Refused, "cannot distribute keys"),
        ({"protocol": "auto"}, wb.Refused, "cannot distribute keys"),
        ({"protocol": "teleport"}, wb.UnknownName, "there is: fetch"),
        ({"split": 3}, wb.UnknownName, "option of live"),
    ],
)
def test_a_drain_that_makes_no_sense_is_refused(
    calm: House, asking: wb.Client, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        asking.drain("cloud", **options)
    assert calm.count() == 0


def test_one_site_alone_cannot_be_drained(tmp_path: Path) -> None:
    with standing(tmp_path, ["cloud"]) as app, pytest.raises(wb.Refused, match="needs another site"):
        app.drain("cloud")


# ── One instance ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_instance_stands_still_and_goes_on(calm: House, asking: wb.Client) -> None:
    assert asking.state("count-1").phase == "running"
    assert asking.pause("count-1").phase == "paused"
    assert asking.pause("count-1").phase == "paused"
    assert not asking.sites()[0].running
    assert asking.resume("count-1").phase == "running"
    state = asking.state("count-1")
    assert (state.name, state.stage, state.site, state.keys, state.error) == ("count-1", "count", "cloud", 12, None)


def test_an_instance_says_where_its_checkpoint_is(calm: House, asking: wb.Client) -> None:
    found = asking.checkpoint("count-1")
    folder = calm.app.data / "sites" / "cloud" / "count-1"
    assert (found.instance, found.site, found.path, found.batch) == ("count-1", "cloud", str(folder), None)
    (folder / "commits").mkdir(parents=True)
    for name in ("0", "1", "10", "9", ".10.crc"):
        (folder / "commits" / name).touch()
    assert asking.checkpoint("count-1").batch == 10


def test_an_instance_saves_when_it_is_told_to(tmp_path: Path, asking: wb.Client) -> None:
    with pytest.raises(wb.Refused, match=r"no central store.*--store"):
        asking.save("count-1")
    assert asking.checkpoint("count-1").stored is None
    with served(tmp_path / "data", str(tmp_path / "store")) as house, wb.connect(data=house.app.data) as client:
        ingress = house.app.first.gateway.ingress
        assert client.save("count-1").stored is None
        until(lambda: ingress.counter("increments") == 0, "the order")
        assert client.status()["stages"]["count"]["store"]["checkpoint"] is None
        with pytest.raises(wb.UnknownName):
            client.save("count-9")


def test_nothing_is_restored_without_a_store(asking: wb.Client) -> None:
    for ask in (
        partial(asking.invoke, "count-1", "edge-1"),
        partial(asking.invoke, "count-1", "cloud", 4),
        partial(asking.migrate, "count", to="edge-1", protocol="restore"),
        partial(asking.migrate, "count", to="edge-1", protocol="restore", from_checkpoint=4),
        partial(asking.drain, "cloud", protocol="restore"),
    ):
        with pytest.raises(wb.Refused, match="there is no central store"):
            ask()
    with pytest.raises(wb.UnknownName, match="unknown instance 'count-9'"):
        asking.invoke("count-9", "edge-1")


def test_an_instance_that_is_detached_gives_its_keys_to_the_others_and_leaves(house: House, client: wb.Client) -> None:
    handle = client.detach("count-1")
    ends = {(move.source, move.destination, move.protocol) for move in handle.migrations}
    assert ends == {("count-1", "count-2", "live"), ("count-1", "count-3", "live")}
    with pytest.raises(Conflict, match="is leaving"):
        client.pause("count-1")
    with pytest.raises(wb.UnknownName, match="unknown instance 'count-9'"):
        client.detach("count-9")


def test_an_instance_that_is_relocated_cannot_be_paused(
    house: House, client: wb.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = threading.Event()
    monkeypatch.setattr(house.app.sites["edge-1"], "take", lambda instance, origin: there.wait(30) and 0)
    handle = client.migrate("count", to="edge-1", protocol="restart")
    until(lambda: client.state("count-1").phase == "relocating", "it has been stopped")
    for act in (client.pause, client.resume):
        with pytest.raises(Conflict, match="is being relocated"):
            act("count-1")
    there.set()
    assert handle.wait(30).outcome == "done"
    assert client.state("count-1").site == "edge-1"


# ── Errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────

REFUSALS: dict[str, tuple[Callable[[wb.Client], Any], str]] = {
    "stage": (lambda client: client.routes("cuont"), "stage"),
    "site": (lambda client: client.migrate("count", to="moon"), "site"),
    "drained": (lambda client: client.drain("moon"), "site"),
    "key": (lambda client: client.migrate("count", to="edge-1", keys=["k99"]), "key"),
    "instance": (lambda client: client.pause("count-9"), "instance"),
    "migration": (lambda client: client.story("m99"), "migration"),
    "waited": (lambda client: client.migration("m99", 5), "migration"),
    "aborted": (lambda client: client.abort("m99"), "migration"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_unknown_name_comes_back_as_the_same_error(asking: wb.Client, name: str) -> None:
    act, kind = REFUSALS[name]
    with pytest.raises(wb.UnknownName) as raised:
        act(asking)
    assert raised.value.kind == kind
    assert raised.value.known or kind == "migration"


EVERY: list[errors.WhimbrelError] = [
    errors.Refused("a"),
    errors.UnknownName("site", "moon", ["b", "a"]),
    errors.Conflict("c"),
    errors.BadRecord("no key", "there is none", "x"),
    errors.Retry("r"),
    errors.Unavailable("u"),
    errors.Full("f"),
    errors.Overloaded("v"),
    errors.SpoolFull("the spool to edge-1 holds 4 GiB"),
    errors.Unstarted("t"),
    errors.Stop("s"),
    Trimmed(1, 2),
    errors.Diverged("d"),
    errors.Stale("o"),
    Corrupt("k"),
    errors.NewerFormat("n"),
    Bug("b"),
    UnknownEvent("copying", "Left", ["one", "two"]),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_every_error_comes_through_as_it_was(error: errors.WhimbrelError) -> None:
    status, problem = problem_of(error)
    again = error_of(status, msgspec.json.encode(problem))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_there_is_no_error_that_was_forgotten() -> None:
    def kinds(root: type[Exception]) -> set[type[Exception]]:
        below = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
        return {root}.union(*map(kinds, below))

    assert {type(error) for error in EVERY} == kinds(errors.WhimbrelError) - {errors.WhimbrelError}


def test_an_error_that_nobody_expected_is_told_as_a_bug() -> None:
    status, problem = problem_of(ZeroDivisionError("by zero"))
    assert (status, problem.error, problem.message) == (500, "Bug", "ZeroDivisionError: by zero")


def test_what_keeps_the_orchestrator_is_raised_by_whoever_waits(house: House, client: wb.Client) -> None:
    handle = client.migrate("count", to="edge-1")
    house.app.control.orchestrator.error = Corrupt("a log is damaged")
    with pytest.raises(Corrupt, match="a log is damaged"):
        handle.wait(30)
    house.app.control.orchestrator.error = None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 3}'])
def test_an_answer_that_is_not_ours_is_told_as_such(body: bytes) -> None:
    assert isinstance(error_of(502, body), Unavailable)


# ── Connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_token_is_told(calm: House) -> None:
    with wb.connect(calm.server.url, token="wrong") as client, pytest.raises(wb.Refused, match="a wrong one"):
        client.status()
    with wb.connect(calm.server.url, token=calm.server.token) as client:
        assert client.status()["pipeline"] == "p"


def test_nobody_there_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with wb.connect(url, token="t") as client, pytest.raises(Unavailable, match="does not answer"):
            client.status()


@pytest.mark.parametrize("url", ["ftp://somewhere", "somewhere", "http://", "http://here:port", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(wb.Refused, match="is not an address"):
        wb.connect(url, token="t")


def test_one_must_say_whom_to_ask(tmp_path: Path) -> None:
    with pytest.raises(wb.Refused, match="give the url and the token"):
        wb.connect("http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="is not served"):
        wb.connect(data=tmp_path)


def test_it_speaks_tls_with_a_certificate_that_is_trusted(calm: House) -> None:
    with calm.app.serve(certificate=HERE / "certificate.pem", key=HERE / "key.pem") as server:
        assert server.url.startswith("https://127.0.0.1:")
        with wb.connect(server.url, token=server.token, certificate=HERE / "certificate.pem") as client:
            assert client.status()["pipeline"] == "p"
        with wb.connect(server.url, token=server.token) as client, pytest.raises(Unavailable, match="certificate"):
            client.status()
    with pytest.raises(wb.Refused, match="is not a certificate"):
        wb.connect(server.url, token="t", certificate=HERE / "test_client.py")


def test_an_answer_that_was_lost_is_asked_for_again_and_the_order_given_once(house: House) -> None:
    """A way in between that lets the first order through and then breaks, before it is answered."""
    target = ("127.0.0.1", int(house.server.url.rpartition(":")[2]))
    with socket.create_server(("127.0.0.1", 0)) as way:
        broken: list[bytes] = []

        def whole(end: socket.socket) -> bytes:
            said = b""
            while not said.endswith(b"}"):
                said += end.recv(65536)
            return said

        def carry() -> None:
            near, _ = way.accept()
            with near, socket.create_connection(target) as far:
                broken.append(whole(near))
                far.sendall(broken[0])
                until(lambda: house.count() == 1, "the order is taken")
            near, _ = way.accept()
            with near, socket.create_connection(target) as far:
                far.sendall(whole(near))
                near.sendall(whole(far))

        carrier = threading.Thread(target=carry)
        carrier.start()
        with wb.connect(f"http://127.0.0.1:{way.getsockname()[1]}", token=house.server.token) as client:
            handle = client.migrate("count", to="edge-1", share=0.25)
        carrier.join()
    assert broken
    assert handle.ids == ["m1"]
    assert house.count() == 1


def test_everything_the_application_offers_has_its_twin(calm: House) -> None:
    for name in ("status", "migrate", "scale", "drain", "story", "cut", "mend"):
        assert callable(getattr(wb.Client, name))
        assert callable(getattr(calm.app, name))
    public = {name for name in vars(wb.Handle) if not name.startswith("_")}
    assert public <= set(vars(wb.RemoteHandle))
