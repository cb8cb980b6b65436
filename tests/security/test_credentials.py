"""Who may call what between processes: real servers, each process with its own credential and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.app.waiting import until
from tests.processes.test_roles import House
from whimbrel.cli.main import make_app
from whimbrel.core import wire
from whimbrel.core.errors import Refused, Retry, Unavailable
from whimbrel.core.keys import Selection
from whimbrel.core.names import GATEWAY, SUPERVISOR, site_role
from whimbrel.core.record import Move, Ready
from whimbrel.core.router import Begin
from whimbrel.deploy.life import address_in, orchestrator_at
from whimbrel.deploy.orchestrator import settled_in
from whimbrel.orchestrator.ports import GatewayBeat, GatewayPort, GatewayStatus, OrchestratorPort, SiteBeat, SitePort
from whimbrel.rpc.access import Secret, credential, read_token
from whimbrel.rpc.remote import remote
from whimbrel.site.status import SiteStatus

NOTICE = Ready("m1", "count-2", 0, 1)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("credentials") / "data")
    try:
        house.begin()
        house.open()
        until(lambda: house.orchestrator and house.orchestrator.control.gateways[""].peer.life, "the gateway is heard")
        yield house
    finally:
        house.close()


def orchestrator_as(house: House, role: str) -> OrchestratorPort:
    return orchestrator_at(house.data, credential(house.data, role), None)


def beat(house: House, site: str) -> SiteBeat:
    return SiteBeat(site, "life", house.site(site).server.url, SiteStatus())


def test_every_process_has_a_secret_of_its_own(house: House) -> None:
    roles = [GATEWAY, SUPERVISOR, site_role("cloud"), site_role("edge-1")]
    assert sorted(path.name for path in (house.data / "credentials").iterdir()) == sorted(roles)
    values = [credential(house.data, role)() for role in roles]
    assert len({*values, read_token(house.data)}) == 5
    assert all(len(value) == 43 for value in values)


def test_a_process_speaks_in_its_own_name_alone(house: House) -> None:
    cloud, gateway = orchestrator_as(house, "site-cloud"), orchestrator_as(house, GATEWAY)
    cloud.beat(beat(house, "cloud"))
    refused: list[Callable[[], None]] = [
        lambda: cloud.beat(beat(house, "edge-1")),
        lambda: cloud.beat(GatewayBeat("life", "http://127.0.0.1:1", GatewayStatus())),
        lambda: cloud.receive("count", NOTICE),
        lambda: gateway.beat(beat(house, "cloud")),
    ]
    for call in refused:
        with pytest.raises(Refused, match="only, not by"):
            call()
    assert house.orchestrator is not None
    assert house.orchestrator.control.sites["edge-1"].peer.life is None
    assert house.orchestrator.control.gateways[""].peer.life != "life"


def test_what_opens_one_door_opens_no_other(house: House) -> None:
    assert house.gateway is not None
    assert house.orchestrator is not None
    assert house.orchestrator.api is not None
    gateway, api = house.gateway.server.url, house.orchestrator.api
    site = house.site("cloud").server.url
    allowed = {
        (gateway, "is_drained", GATEWAY),
        (site, "is_idle", "site-cloud"),
        (address_in(house.data), "has_finished", SUPERVISOR),
    }
    secrets = {role: credential(house.data, role)() for role in (GATEWAY, SUPERVISOR, "site-cloud", "site-edge-1")}
    secrets |= {name: (house.data / name).read_text().strip() for name in ("token", "token-read")}
    for url, method in {(url, method) for url, method, _ in allowed}:
        for role, secret in secrets.items():
            body = wire.pack({"stage": "count"} if method == "is_drained" else {})
            answer = httpx.post(f"{url}/internal/{method}", content=body, headers={"Authorization": f"Bearer {secret}"})
            assert (answer.status_code != 401) == ((url, method, role) in allowed), (method, role)
    for role, secret in secrets.items():
        answer = httpx.get(api.url + "/sites", headers={"Authorization": f"Bearer {secret}"})
        assert answer.status_code == (200 if role.startswith("token") else 401), role


def test_a_command_with_a_name_that_climbs_out_is_refused_by_the_gateway(house: House) -> None:
    assert house.gateway is not None
    gateway = remote(
        GatewayPort, lambda: str(house.gateway and house.gateway.server.url), credential(house.data, GATEWAY)
    )
    move = Move("m1", "count", "live", "count-1", "../../x", Selection(), 1, frozenset({"g"}))
    with pytest.raises(Refused, match="instance name"):
        gateway.command("count", Begin(move))
    assert not list(house.data.parent.glob("*x*"))


def test_credentials_are_rotated_while_everything_runs(house: House) -> None:
    assert house.orchestrator is not None
    assert house.gateway is not None
    control, gateway = house.orchestrator.control, house.gateway
    old = {path.name: path.read_text().strip() for path in (house.data / "credentials").iterdir()}
    stale = remote(OrchestratorPort, lambda: address_in(house.data), old["site-cloud"])
    stale.beat(beat(house, "cloud"))
    told = CliRunner().invoke(make_app(), ["token", "rotate", "--roles", "--data", str(house.data)])
    assert told.output.strip() == "rotated: gateway, orchestrator, site-cloud, site-edge-1"
    with pytest.raises(Unavailable, match="does not accept the credential"):
        stale.beat(beat(house, "cloud"))
    orchestrator_as(house, "site-cloud").beat(beat(house, "cloud"))
    control.gateway.is_drained("count")
    heard = control.gateways[""].peer._since
    until(lambda: control.gateways[""].peer._since > heard, "the gateway beats on")
    assert gateway.error is None
    with suppress(Retry):  # whatever the answer is, it is one
        settled_in(house.data).has_finished()
    assert control.sites["cloud"].is_idle()


def test_a_call_whose_credential_was_rotated_meanwhile_is_made_again(house: House) -> None:
    """The caller has read the old one just before: it looks again, and nobody notices."""
    values = iter(["an old one", credential(house.data, "site-cloud")()])
    there = remote(OrchestratorPort, lambda: address_in(house.data), lambda: next(values))
    there.beat(beat(house, "cloud"))
    assert list(values) == [], "both were tried"


def test_nothing_is_called_without_a_credential_that_is_there(tmp_path: Path) -> None:
    missing = Secret(tmp_path / "credentials" / "gateway")
    with pytest.raises(Unavailable, match="does not exist"):
        remote(GatewayPort, lambda: "http://127.0.0.1:1", missing).status()
    with pytest.raises(Refused, match="is not a file name"):
        credential(tmp_path, "../token")
    with pytest.raises(Retry):
        remote(SitePort, lambda: "http://127.0.0.1:1", "x").status()
