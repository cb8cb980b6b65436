"""The API over a real server on loopback: who is let in, what is refused, and that nothing happens twice."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rest.house import House, served, standing
from whimbrel.api.guard import BODY
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.record import Aborted
from whimbrel.rpc import access

MOVE = {"stage": "count", "to": "edge-1", "keys": ["k00"]}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with served(tmp_path_factory.mktemp("rest") / "data") as house:
        yield house


def problem(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, kind and message of an error, which always says what to do."""
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert told["what_to_do"]
    return answer.status_code, told["error"], told["message"]


# ── The token ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/status", "/openapi.json", "/no/such/path", "/migrations"])
@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", "Basic {token}", "{token}", "Bearer {token}x"])
def test_without_the_token_nobody_learns_anything(house: House, path: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.format(token=house.server.token)}
    answer = httpx.get(house.server.url + path, headers=headers)
    assert problem(answer)[:2] == (401, "Refused")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_an_order_without_the_token_has_no_effect(house: House) -> None:
    before = house.count()
    assert httpx.post(house.server.url + "/migrations", json=MOVE).status_code == 401
    assert house.count() == before


def test_the_token_is_for_its_owner_alone_and_stays_the_same(tmp_path: Path) -> None:
    token = access.make_token(tmp_path)
    assert len(token) == 43
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert access.make_token(tmp_path) == access.read_token(tmp_path) == token
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(Refused, match="others may read"):
        access.make_token(tmp_path)


def test_many_who_make_a_token_at_once_get_the_same(tmp_path: Path) -> None:
    tokens: list[str] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        tokens.append(access.make_token(tmp_path))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens) == 8
    assert len({*tokens}) == 1


def test_without_a_token_or_an_address_the_way_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nothing has been served"):
        access.read_token(tmp_path)
    with pytest.raises(Unavailable, match="not served"):
        access.find_url(tmp_path)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(Refused, match="is empty"):
        access.read_token(tmp_path)


# ── Bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD: dict[str, tuple[bytes, int]] = {
    "no JSON": (b"{", 400),
    "nothing": (b"", 422),
    "no object": (b"[]", 422),
    "no UTF-8": (b'{"stage": "\xff"}', 400),
    "half a character": (b'{"stage": "\\ud800", "to": "edge-1"}', 422),
    "very deep": (b"[" * 100_000, 400),
    "unknown field": (json.dumps({**MOVE, "colour": "red"}).encode(), 422),
    "missing field": (b'{"stage": "count"}', 422),
    "another type": (json.dumps({**MOVE, "keys": "k00"}).encode(), 422),
    "a number as text": (json.dumps({"stage": "count", "to": "edge-1", "share": "0.5"}).encode(), 422),
    "a truth as a number": (json.dumps({**MOVE, "budget": True}).encode(), 422),
    "no number": (b'{"stage": "count", "to": "edge-1", "share": NaN}', 422),
    "endless": (b'{"stage": "count", "to": "edge-1", "deadline": Infinity}', 422),
    "far too many": (b'{"stage": "count", "to": "edge-1", "budget": 1e400}', 422),
    "more than can be stored": (json.dumps({**MOVE, "budget": 2**70}).encode(), 422),
    "no bin": (json.dumps({"stage": "count", "to": "edge-1", "bins": [1024]}).encode(), 422),
    "a plan in a file of the server": (json.dumps({**MOVE, "protocol": "fluid", "plan": "/etc/passwd"}).encode(), 422),
    "an option of another protocol": (json.dumps({**MOVE, "split": 3}).encode(), 404),
    "unknown stage": (json.dumps({**MOVE, "stage": "cuont"}).encode(), 404),
    "unknown site": (json.dumps({**MOVE, "to": "moon"}).encode(), 404),
    "unknown key": (json.dumps({**MOVE, "keys": ["k99"]}).encode(), 404),
    "unknown protocol": (json.dumps({**MOVE, "protocol": "teleport"}).encode(), 404),
    "keys and bins": (json.dumps({**MOVE, "bins": [1]}).encode(), 422),
}


@pytest.mark.parametrize("name", BAD)
def test_a_body_that_makes_no_sense_is_refused_and_changes_nothing(house: House, name: str) -> None:
    body, status = BAD[name]
    before = house.count()
    answer = house.http.post("/migrations", content=body, headers={"Content-Type": "application/json"})
    assert problem(answer)[0] == status
    assert house.count() == before


NUMBERS = {
    "budget": "live",
    "chunk": "live",
    "interval": "replicate",
    "split": "fetch",
    "step": "fluid",
    "deadline": "live",
    "max_bytes": "auto",
    "max_duration_ms": "auto",
    "max_stoppage_ms": "auto",
}


@pytest.mark.parametrize("value", ["0", "-1", "1" + "0" * 30, "1e300", "NaN", "-Infinity", "true", '"1"', "[]"])
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_its_bounds(house: House, name: str, value: str) -> None:
    """What is beyond could not be stored, would never end, or is no number at all."""
    before = house.count()
    body = json.dumps({**MOVE, "protocol": NUMBERS[name]})[:-1] + f', "{name}": {value}}}'
    answer = house.http.post("/migrations", content=body, headers={"Content-Type": "application/json"})
    assert problem(answer)[:2] == (422, "Refused")
    assert answer.json()["message"].startswith(f"body.{name}: ")
    assert house.count() == before


@pytest.mark.parametrize("instances", [0, -1, 65, 10**30, 1.5, True])
def test_so_many_instances_are_refused(house: House, instances: Any) -> None:
    answer = house.post("/stages/count/scale", {"instances": instances, "at": "cloud"})
    assert problem(answer)[0] == 422
    assert len(house.app.control.stages["count"].coordinator.sites) == 3


def test_what_is_unknown_is_told_with_what_there_is(house: House) -> None:
    told = house.post("/migrations", {**MOVE, "to": "moon"}).json()
    assert told["message"] == "unknown site 'moon'; there is: cloud, edge-1, edge-2"
    assert told["details"] == {"kind": "site", "name": "moon", "known": ["cloud", "edge-1", "edge-2"]}


@pytest.mark.parametrize("size", [BODY + 1, 4 * BODY, 20 * BODY])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_not_taken(house: House, size: int, chunked: bool) -> None:
    whole = b'{"stage": "' + b"x" * size + b'"}'
    pieces = (whole[at : at + 65536] for at in range(0, len(whole), 65536))
    try:
        answer = house.http.post("/migrations", content=pieces if chunked else whole)
    except httpx.TransportError:
        assert size > 8 * BODY, "who sends far too much may find the connection closed"
    else:
        assert problem(answer)[:2] == (413, "Refused")
    assert house.http.get("/sites").status_code == 200


def test_a_body_of_just_the_limit_is_read(house: House) -> None:
    body = b'{"stage": "nobody", "to": "edge-1"}'
    whole = body + b" " * (BODY - len(body))
    answer = house.http.post("/migrations", content=whole, headers={"Content-Type": "application/json"})
    assert problem(answer)[:2] == (404, "UnknownName")


@pytest.mark.parametrize(
    "path",
    [
        "/instances/..%2F..%2Fetc%2Fpasswd/checkpoint",
        "/instances/../../etc/passwd/checkpoint",
        "/instances/%00/checkpoint",
        "/instances/count-1%2F..%2Fcount-2/checkpoint",
        "/stages/..%2Fcount/routes",
        "/stages/%ff%fe/routes",
        "/migrations/..%2Fm1/story",
        "/no/such/path",
    ],
)
def test_a_name_never_becomes_a_path(house: House, path: str) -> None:
    request = httpx.Request("GET", house.server.url + "/", headers={"Authorization": f"Bearer {house.server.token}"})
    request.url = request.url.copy_with(raw_path=path.encode())
    assert problem(house.http.send(request))[:2] == (404, "UnknownName")


def test_a_method_that_is_not_there_is_refused(house: House) -> None:
    assert problem(house.http.delete("/migrations"))[:2] == (405, "Refused")


@pytest.mark.parametrize("name", ["", "a b", "x" * 201])
def test_a_request_needs_a_proper_name(house: House, name: str) -> None:
    assert problem(house.post("/migrations", MOVE, name))[0] == 422


# ── Once ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_order_that_comes_again_has_no_second_effect_not_even_after_a_restart(tmp_path: Path) -> None:
    body = {"stage": "count", "to": "edge-1", "share": 0.25}
    with served(tmp_path) as house:
        first = house.post("/migrations", body, "mine")
        assert first.json()["ids"] == ["m1"]
        assert house.post("/migrations", body, "mine").content == first.content
        assert house.count() == 1
        assert problem(house.post("/migrations", {**body, "share": 0.5}, "mine"))[:2] == (422, "Refused")
        nothing = house.post("/migrations", {"stage": "count", "to": "cloud"}, "nothing")
        assert nothing.json() == {"ids": [], "why": []}
    with served(tmp_path) as house:
        assert house.post("/migrations", body, "mine").content == first.content
        assert house.post("/migrations", {"stage": "count", "to": "cloud"}, "nothing").json()["ids"] == []
        assert house.count() == 1
        assert problem(house.post("/migrations", {**body, "share": 0.5}, "mine"))[:2] == (422, "Refused")
        assert problem(house.post("/migrations", {"stage": "count", "to": "edge-1"}, "another"))[1] == "Conflict"


def test_an_order_that_was_refused_may_be_given_again_under_its_name(tmp_path: Path) -> None:
    with served(tmp_path) as house:
        house.post("/migrations", {"stage": "count", "to": "edge-1"})
        wanted = {"stage": "count", "to": "edge-2"}
        assert problem(house.post("/migrations", wanted, "mine"))[:2] == (409, "Conflict")
        aborted = house.post("/migrations/m1/abort", {"reason": "changed my mind"})
        assert aborted.json()["reason"] == "changed my mind"
        house.app.control.orchestrator.receive("count", Aborted("m1", "count-1", 0, 1))
        assert house.post("/migrations", wanted, "mine").json()["ids"] == ["m2"]


def test_the_same_order_many_times_at_once_is_taken_once(tmp_path: Path) -> None:
    answers: list[httpx.Response] = []
    start = threading.Barrier(6)
    with served(tmp_path) as house:

        def send() -> None:
            start.wait()
            answers.append(house.post("/migrations", {"stage": "count", "to": "edge-1"}, "mine"))

        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert house.count() == 1
    good = [answer for answer in answers if answer.status_code == 200]
    assert {answer.content for answer in good} == {good[0].content}
    assert {problem(answer)[:2] for answer in answers if answer not in good} <= {(503, "Retry")}


def test_a_pause_that_comes_again_does_not_pause_again(house: House) -> None:
    assert house.post("/instances/count-2/pause", name="p").json()["phase"] == "paused"
    assert house.post("/instances/count-2/resume").json()["phase"] == "running"
    assert house.post("/instances/count-2/pause", name="p").json()["phase"] == "running"
    assert house.post("/instances/count-2/pause", name="q").json()["phase"] == "paused"
    assert house.post("/instances/count-2/resume").json()["phase"] == "running"


# ── The server ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_binds_to_this_machine_alone_unless_told(house: House) -> None:
    assert house.server.url.startswith("http://127.0.0.1:")
    assert house.server._socket.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_told(house: House) -> None:
    with pytest.raises(Unavailable, match="choose another port"):
        house.app.serve(port=int(house.server.url.rpartition(":")[2]))
    with pytest.raises(Refused, match="0 to 65535"):
        house.app.serve(port=70000)
    with pytest.raises(Refused, match="not an address of this machine"):
        house.app.serve(host="no such host")


def test_a_certificate_that_is_none_is_refused(house: House, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("none")
    with pytest.raises(Refused, match="both"):
        house.app.serve(certificate=tmp_path / "none.pem")
    with pytest.raises(Refused, match="not a certificate"):
        house.app.serve(certificate=tmp_path / "none.pem", key=tmp_path / "none.pem")


def test_its_address_is_there_while_it_is_served(tmp_path: Path) -> None:
    with standing(tmp_path) as app:
        server = app.serve()
        assert access.find_url(tmp_path) == server.url
    with pytest.raises(Unavailable):
        access.find_url(tmp_path)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_who_waits_does_not_keep_it_from_stopping(tmp_path: Path) -> None:
    found: list[Any] = []
    with served(tmp_path) as house:
        house.post("/migrations", {"stage": "count", "to": "edge-1"})
        waiting = threading.Thread(target=lambda: found.append(house.http.get("/migrations/m1?wait=60", timeout=60)))
        waiting.start()
        assert house.http.get("/migrations/m1").json()["phase"] == "copying"
        house.server.stop()
        waiting.join(10)
        assert not waiting.is_alive()
    assert found[0].json()["phase"] == "copying"
