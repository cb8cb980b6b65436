"""Names from a wire never become paths: over real HTTP against a real site, and at the last guard before the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import whimbrel as wb
from tests.rest.house import Count, Standing
from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Refused
from whimbrel.core.keys import Selection
from whimbrel.core.names import check_name
from whimbrel.core.options import RestoreOptions
from whimbrel.core.record import Move
from whimbrel.core.router import Begin
from whimbrel.deploy.deployment import Deployment
from whimbrel.deploy.orchestrator import OrchestratorProcess
from whimbrel.log.folder import Logs
from whimbrel.log.private import below
from whimbrel.orchestrator.ports import GatewayPort, OrchestratorPort, SiteBeat, SitePort, check_names
from whimbrel.rpc.remote import bare, methods, offer, remote
from whimbrel.rpc.server import Server
from whimbrel.site.links import Links, SpoolFolder
from whimbrel.site.site import Site
from whimbrel.site.status import SiteStatus
from whimbrel.spark.checkpoint import Checkpoint

ESCAPES = ["../../victim", "..", ".", "", "a/b", "/tmp/x", "a\\b", "a\0b", "a\nb", "a\n", "-rf", ".hidden", "x" * 101]


class Place:
    """A site's folder, another site's checkpoint, and a directory that is none of its business."""

    def __init__(self, folder: Path) -> None:
        self.data, self.victim = folder / "data", folder / "victim"
        for path in (self.victim, self.data / "sites" / "edge-1" / "s-1", self.data / "sites" / "cloud"):
            path.mkdir(parents=True)
            (path / "kept").write_text("kept")
        self.logs = Logs(self.data / "logs")
        links = Links(
            ["cloud", "edge-1"], "ideal", SpoolFolder(self.data / "logs"), lambda name: "cloud", self.logs.inbox
        )
        make: Any = lambda instance, checkpoint: Standing()  # noqa: E731
        self.site = Site("cloud", self.data / "sites" / "cloud", make, Checkpoint, links)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def port(place: Place) -> Iterator[SitePort]:
    api = bare("site")
    offer(api, SitePort, place.site, "secret")
    with Server(api) as server:
        server.start()
        yield remote(SitePort, lambda: server.url, "secret")


def test_a_name_that_climbs_out_deletes_nothing(place: Place, port: SitePort) -> None:
    for instance, origin in [("../../../victim", "edge-1"), ("s-1", "../../.."), ("../../../victim", "..")]:
        with pytest.raises(Refused, match="take"):
            port.take(instance, origin)
    assert (place.victim / "kept").read_text() == "kept"
    assert port.take("s-1", "edge-1") == len("kept") + len('{"batch": -1}')


def test_a_site_does_not_delete_the_checkpoint_that_it_is_to_copy(place: Place, port: SitePort) -> None:
    port.take("s-1", "edge-1")
    with pytest.raises(Refused, match="cloud"):
        port.take("s-1", "cloud")
    assert (place.data / "sites" / "cloud" / "s-1" / "kept").read_text() == "kept"


@pytest.mark.parametrize("name", ESCAPES)
def test_every_port_refuses_such_a_name_wherever_it_stands(port: SitePort, name: str) -> None:
    calls: list[tuple[type, str, dict[str, Any]]] = [
        (SitePort, "start", {"instance": name}),
        (SitePort, "stop", {"instance": name}),
        (SitePort, "take", {"instance": name, "origin": "cloud"}),
        (SitePort, "take", {"instance": "s-1", "origin": name}),
        (SitePort, "place", {"places": {name: "cloud"}}),
        (SitePort, "place", {"places": {"s-1": name}}),
        (SitePort, "cut", {"other": name}),
        (SitePort, "carry", {"to": name, "size": 1}),
        (GatewayPort, "place", {"stage": "s", "instances": [name]}),
        (GatewayPort, "place", {"stage": name, "instances": []}),
        (OrchestratorPort, "beat", {"beat": SiteBeat(name, "life", "http://127.0.0.1:1", SiteStatus())}),
    ]
    for kind, method, arguments in calls:
        with pytest.raises(Corrupt):
            wire.unpack(wire.pack(arguments), methods(kind)[method].call)
    with pytest.raises(Refused):
        port.start(name)


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("field", ["stage", "source", "destination", "parties"])
def test_a_move_with_such_a_name_does_not_reach_the_gateway(name: str, field: str) -> None:
    good = Move(
        "m1", "s", "live", "s-1", "s-2", Selection(), 1, frozenset({"g"}), RestoreOptions(parties=frozenset({"s-3"}))
    )
    parties = RestoreOptions(parties=frozenset({name}))
    bad = msgspec.structs.replace(good, **({"options": parties} if field == "parties" else {field: name}))
    calls = methods(GatewayPort)
    for move in (good, bad):
        for call in (
            calls["command"].call(stage="s", command=Begin(move)),
            calls["fence"].call(stage="s", move=move),
            calls["load"].call(stage="s", move=move, checkpoint=None),
        ):
            if move is good:
                check_names("", call)
            else:
                with pytest.raises(Refused, match="is not allowed"):
                    check_names("", call)


@pytest.mark.parametrize("url", ["", "ftp://127.0.0.1", "http://a/b", "http://a b", "http://", "file:///etc/passwd"])
def test_an_address_in_a_heartbeat_is_one(url: str) -> None:
    beat = SiteBeat("cloud", "life", url, SiteStatus())
    with pytest.raises(Corrupt):
        wire.unpack(wire.pack({"beat": beat}), methods(OrchestratorPort)["beat"].call)


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "a\0b"])
def test_the_last_guard_before_the_disk(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused):
        below(tmp_path, name)
    logs = Logs(tmp_path / "logs")
    for make in (logs.inbox, logs.outbox, logs.increments, logs.remove):
        if name not in ("", ".", ".."):  # inside a longer file name these are harmless
            with pytest.raises(Refused):
                make(name)
    assert below(tmp_path, "a", "b.c") == tmp_path / "a" / "b.c"


@pytest.mark.parametrize("name", ["cloud", "edge-1", "s_2", "a", "v1.2", "größe-1", "x" * 64])
def test_a_proper_name_is_taken(name: str) -> None:
    assert check_name("site", name) == name


def test_a_site_with_a_name_that_is_none_cannot_be_made(tmp_path: Path) -> None:
    pipeline = wb.Pipeline("p", source=[{"k": "a"}], key="k").stage("count", Count())
    with pytest.raises(Refused, match=r"site name '\.\./x'"):
        wb.run(pipeline, sites=["cloud", "../x"], data=tmp_path / "data")
    with pytest.raises(Refused, match=r"site name '\.\.'"):
        OrchestratorProcess(pipeline, tmp_path / "data", Deployment(["cloud", ".."]))
    assert not (tmp_path / "x").exists()
