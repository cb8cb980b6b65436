"""Users' tokens: roles, names, rotation without a restart, and who is told to have ordered what."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import whimbrel as wb
from tests.app.stories import timeless
from tests.rest.house import House, served
from tests.rest.test_api import problem
from whimbrel.api.tokens import Tokens
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Conflict, Corrupt, NewerFormat, Refused, UnknownName
from whimbrel.gateway.clock import wall_us
from whimbrel.orchestrator.policy import Policy
from whimbrel.rpc.access import Secret

MOVE = {"stage": "count", "to": "edge-1", "keys": ["k00"]}
ORDERS = [
    "/migrations",
    "/migrations/m1/abort",
    "/migrations/m1/take_over",
    "/stages/count/scale",
    "/sites/cloud/drain",
    "/links/cut",
    "/links/mend",
    "/instances/count-1/pause",
    "/instances/count-1/resume",
    "/instances/count-1/checkpoint",
    "/instances/count-1/invoke",
    "/instances/count-1/detach",
]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with served(tmp_path / "data") as house:
        yield house


def cli(house: House, *arguments: str) -> str:
    result = CliRunner().invoke(
        make_app(), ["token", *arguments, "--data", str(house.app.data)], env={"COLUMNS": "200"}
    )
    if result.exception is not None:
        raise result.exception
    return result.output.strip()


def call(house: House, token: str, method: str = "GET", path: str = "/sites") -> httpx.Response:
    body = MOVE if method == "POST" else None
    return httpx.request(method, house.server.url + path, json=body, headers={"Authorization": f"Bearer {token}"})


def test_a_token_to_read_looks_at_everything_and_orders_nothing(house: House) -> None:
    reader = Secret(house.app.data / "token-read")()
    for path in ("/status", "/sites", "/stages", "/stages/count/routes", "/migrations", "/instances/count-1/state"):
        assert call(house, reader, path=path).status_code == 200
    described = house.http.get("/openapi.json").json()["paths"]
    assert len(ORDERS) == sum("post" in methods for methods in described.values()), "every order is tried"
    for path in ORDERS:
        answer = call(house, reader, "POST", path)
        assert problem(answer)[:2] == (403, "Refused")
        assert answer.json()["message"] == f"the token of reader may only read, and POST {path} is an order"
        assert "token add" in answer.json()["what_to_do"]
    for method in ("PUT", "DELETE", "PATCH"):
        assert call(house, reader, method).status_code == 403
    assert house.count() == 0
    with wb.connect(house.server.url, token=reader) as client, pytest.raises(Refused, match="may only read"):
        client.migrate("count", to="edge-1")


def test_a_named_token_works_until_it_is_revoked(house: House) -> None:
    looks, orders = cli(house, "add", "grafana"), cli(house, "add", "ci.bot", "--role", "operate")
    assert call(house, looks).status_code == 200
    assert call(house, looks, "POST", "/migrations").status_code == 403
    assert call(house, orders, "POST", "/migrations").status_code == 200
    listed = cli(house, "list").splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [
        ["operator", "operate"],
        ["reader", "read"],
        ["grafana", "read"],
        ["ci.bot", "operate"],
    ]
    kept = house.app.data / "tokens.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert looks not in kept.read_text(), "only digests are kept"
    cli(house, "revoke", "ci.bot")
    assert call(house, orders).status_code == 401
    assert call(house, looks).status_code == 200


@pytest.mark.parametrize("name", ["operator", "reader", "grafana"])
def test_rotation_takes_effect_at_once(house: House, name: str) -> None:
    old = cli(house, "add", "grafana")
    file = {"operator": "token", "reader": "token-read"}.get(name)
    old = Secret(house.app.data / file)() if file else old
    assert call(house, old).status_code == 200
    told = cli(house, "rotate", *([] if name == "operator" else [name]))
    new = Secret(house.app.data / file)() if file else told
    assert (new in told) == (file is None), "a token that lies in a file is not shown"
    assert [call(house, old).status_code, call(house, new).status_code] == [401, 200]


def test_a_client_of_the_directory_goes_on_with_the_new_token(house: House) -> None:
    with wb.connect(data=house.app.data) as client:
        assert len(client.sites()) == 3
        cli(house, "rotate")
        assert len(client.sites()) == 3
    with wb.connect(house.server.url, token=house.server.token) as stale, pytest.raises(Refused, match="a wrong one"):
        stale.sites()


def test_a_token_that_others_may_read_or_that_is_gone_opens_nothing(house: House) -> None:
    path = house.app.data / "token"
    path.chmod(0o644)
    assert call(house, house.server.token).status_code == 401
    path.chmod(0o600)
    assert call(house, house.server.token).status_code == 200
    path.unlink()
    assert call(house, house.server.token).status_code == 401


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    tokens.add("a", "read")
    for name in ("a", "operator", "reader"):
        with pytest.raises(Conflict, match="already"):
            tokens.add(name, "read")
    for name in ("../x", "\x1b[2J", "", "a b", "x" * 65):
        with pytest.raises(Refused, match="is not allowed"):
            tokens.add(name, "read")
    with pytest.raises(UnknownName, match="there is: operate, read"):
        tokens.add("b", "root")
    with pytest.raises(Refused, match="rotate it instead"):
        tokens.revoke("operator")
    for act in (tokens.revoke, tokens.rotate):
        with pytest.raises(UnknownName, match="there is: a, operator, reader"):
            act("b")
    with pytest.raises(Refused, match="not a data directory"):
        raise_from(["token", "list", "--data", str(tmp_path / "nothing")])


def raise_from(arguments: list[str]) -> None:
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exception is not None
    raise result.exception


def test_a_file_of_tokens_that_is_damaged_or_newer_lets_nobody_in(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    token = tokens.add("a", "read")
    assert tokens.who(token) == ("a", "read")
    whole = (tmp_path / "tokens.json").read_text()
    for text, kind in [(whole[:-9], Corrupt), (whole.replace('"version":1', '"version":2'), NewerFormat)]:
        (tmp_path / "tokens.json").write_text(text)
        assert tokens.who(token) is None
        with pytest.raises(kind):
            Tokens(tmp_path).named()


# ── Who ordered what ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_story_begins_with_who_ordered_it_also_after_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as house:
        bot = cli(house, "add", "ci.bot", "--role", "operate")
        assert call(house, bot, "POST", "/migrations").json()["ids"] == ["m1"]
        house.app.migrate("count", to="edge-2", keys=["k01"])
        house.post("/migrations", {**MOVE, "keys": ["k02"]}, "named")
    with served(tmp_path) as house:
        told = {id: house.http.get(f"/migrations/{id}/story").json()[:1] for id in ("m1", "m2", "m3")}
        assert {id: timeless(story)[0] for id, story in told.items()} == {
            "m1": "m1 ordered: ordered by ci.bot over REST",
            "m2": "m2 ordered: ordered by the process itself",
            "m3": "m3 ordered: ordered by operator over REST",
        }
        assert house.http.get("/migrations/m1").json()["ordered_by"] == "ci.bot over REST"
        by = house.app.status()["stages"]["count"]["ordered_by"]
        assert by == {"m1": "ci.bot over REST", "m2": "the process itself", "m3": "operator over REST"}
        shown = CliRunner().invoke(make_app(), ["status", "--data", str(tmp_path)], env={"COLUMNS": "200"}).output
        assert "m1 copying (ordered by ci.bot over REST)" in shown


def test_a_story_says_who_called_it_off(house: House) -> None:
    bot = cli(house, "add", "ci.bot", "--role", "operate")
    house.post("/migrations", MOVE)
    headers = {"Authorization": f"Bearer {bot}"}
    httpx.post(house.server.url + "/migrations/m1/abort", json={"reason": "too \x1b[2J late"}, headers=headers)
    assert timeless(house.app.story("m1"))[-1] == r"m1 copying: Abandoned by ci.bot over REST: too \x1b[2J late"


def test_what_the_policy_orders_says_so(tmp_path: Path) -> None:
    with served(tmp_path / "data", store=str(tmp_path / "store")) as house:
        house.app.control.is_dead = lambda site: site == "cloud"  # type: ignore[method-assign]
        policy = Policy(house.app.control, None, wall_us)
        policy.look(["cloud"], ["edge-1"])
        assert policy.waiting == {}
        assert timeless(house.app.story("m1"))[0] == "m1 ordered: ordered by the policy"
