"""A port between two processes: what is asked here is done there, and an error there is the same error here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import httpx
import msgspec
import pytest

from whimbrel.core import errors, wire
from whimbrel.core.errors import Bug, Conflict, Corrupt, Retry, Unavailable, UnknownName
from whimbrel.core.keys import Selection
from whimbrel.core.record import Left, Move, Ready
from whimbrel.core.router import Abort, Begin, Cutover
from whimbrel.orchestrator.ports import GatewayPort, OrchestratorPort, SitePort
from whimbrel.rpc.remote import LIMIT, bare, methods, offer, remote
from whimbrel.rpc.server import Server

MOVE = Move("m1", "s", "live", "s-1", "s-2", Selection(keys=frozenset({"a"})), 1, frozenset({"g"}))


class Nested(msgspec.Struct, frozen=True):
    words: dict[str, list[int]]
    blob: bytes = b""


class Port(Protocol):
    def echo(self, nested: Nested, times: int = 1) -> list[Nested]: ...

    def hear(self, command: Begin | Cutover | Abort, notice: Ready | Left) -> str: ...

    def fail(self, kind: str) -> None: ...

    def hang(self) -> None: ...


class Target:
    """What is called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.go_on = threading.Event()

    def echo(self, nested: Nested, times: int = 1) -> list[Nested]:
        self.calls.append((nested, times))
        return [nested] * times

    def hear(self, command: Any, notice: Any) -> str:
        self.calls.append((command, notice))
        return f"{type(command).__name__} {type(notice).__name__}"

    def fail(self, kind: str) -> None:
        if kind == "UnknownName":
            raise UnknownName("site", "moon", ["cloud"])
        raise {"OSError": OSError}.get(kind, getattr(errors, kind, ValueError))("because")

    def hang(self) -> None:
        self.calls.append("hang")
        self.go_on.wait(20)

    def hidden(self) -> None:
        raise AssertionError("not in the port")


@pytest.fixture
def target() -> Iterator[Target]:
    target = Target()
    yield target
    target.go_on.set()


@pytest.fixture
def server(target: Target) -> Iterator[Server]:
    api = bare("test")
    offer(api, Port, target, "secret")
    server = Server(api)
    server.start()
    yield server
    target.go_on.set()
    server.stop()


@pytest.fixture
def port(server: Server) -> Port:
    return remote(Port, lambda: server.url, "secret", {"hang": 0.3})


def test_arguments_arrive_and_answers_come_back(port: Port, target: Target) -> None:
    nested = Nested({"a": [1, 2], "é": []}, b"\x00\xff")
    assert port.echo(nested) == [nested]
    assert port.echo(nested, times=2) == port.echo(times=2, nested=nested) == [nested, nested]
    assert target.calls == [(nested, 1), (nested, 2), (nested, 2)]


@pytest.mark.parametrize("command", [Begin(MOVE), Cutover(MOVE), Abort(MOVE)])
@pytest.mark.parametrize("notice", [Ready("m1", "s-2", 0, 1), Left("m1", "s-1", 0, 1, 2, 3, 4)])
def test_what_is_one_of_several_is_the_same_there(port: Port, target: Target, command: Any, notice: Any) -> None:
    assert port.hear(command, notice) == f"{type(command).__name__} {type(notice).__name__}"
    assert target.calls == [(command, notice)]


@pytest.mark.parametrize("kind", ["Refused", "Conflict", "Unavailable", "Retry", "Corrupt", "NewerFormat", "Bug"])
def test_an_error_there_is_the_same_error_here(port: Port, kind: str) -> None:
    with pytest.raises(getattr(errors, kind), match=r"^because$") as raised:
        port.fail(kind)
    assert type(raised.value).__name__ == kind


def test_an_error_with_attributes_keeps_what_it_says(port: Port) -> None:
    with pytest.raises(UnknownName, match="unknown site 'moon'; there is: cloud"):
        port.fail("UnknownName")


def test_an_error_that_nobody_foresaw_is_told(port: Port) -> None:
    with pytest.raises(Bug, match="ValueError: because"):
        port.fail("nothing of ours")


def test_an_error_of_the_operating_system_there_may_pass(port: Port) -> None:
    """Found by chaos, seed 4: a site without file handles answered `start` with a Bug; the status kept it for ever."""
    with pytest.raises(Retry, match="fail failed there: because") as raised:
        port.fail("OSError")
    assert type(raised.value) is Retry, "not Unavailable: the call may have had an effect"


def test_if_nobody_is_there_nothing_has_happened(port: Port, server: Server) -> None:
    server.stop()
    with pytest.raises(Unavailable, match="does not answer"):
        port.fail("Conflict")


def test_if_nobody_knows_where_nothing_has_happened() -> None:
    def nowhere() -> str:
        raise Unavailable("not heard yet")

    with pytest.raises(Unavailable, match="not heard yet"):
        remote(Port, nowhere, "secret").fail("Conflict")


def test_without_an_answer_it_may_have_happened(port: Port, target: Target) -> None:
    with pytest.raises(Retry, match="no answer") as raised:
        port.hang()
    assert not isinstance(raised.value, Unavailable)
    assert target.calls == ["hang"]


def test_a_connection_that_ends_amid_the_answer_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(10)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Retry) as raised:
            remote(Port, lambda: url, "secret").fail("Conflict")
        thread.join()
    assert not isinstance(raised.value, Unavailable)


# ── Who must not get in ──────────────────────────────────────────────────────────────────────────────────────────────

CALL = wire.pack({"kind": "Conflict"})
HTTP = httpx.Client(trust_env=False, verify=False)


def post(server: Server, body: bytes, name: str = "fail", authorization: str = "Bearer secret") -> httpx.Response:
    headers = {"Authorization": authorization} if authorization else {}
    return HTTP.post(f"{server.url}/internal/{name}", content=body, headers=headers)


def test_the_right_call_gets_in(server: Server) -> None:
    answer = post(server, CALL)
    assert answer.status_code == 500
    assert wire.unpack(answer.content, dict[str, str])["kind"] == "Conflict"


@pytest.mark.parametrize("authorization", ["", "Bearer x", "Bearer secre", "Bearer secret2", "secret", "Basic secret"])
def test_without_the_token_nothing_is_called(server: Server, target: Target, authorization: str) -> None:
    assert post(server, wire.pack(None), "hang", authorization).status_code == 401
    assert target.calls == []


@pytest.mark.parametrize(
    "body", [b"", b"{}", CALL[:-1], CALL[:4] + b"x" + CALL[5:], wire.pack({"kind": 1}), wire.pack({}), wire.pack([1])]
)
def test_what_is_no_call_is_refused(server: Server, body: bytes) -> None:
    assert post(server, body).status_code == 400


def test_a_message_that_is_too_large_is_not_read_to_its_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMIT >= 1 << 20
    monkeypatch.setattr("whimbrel.rpc.remote.LIMIT", 1000)
    assert post(server, bytes(1001)).status_code == 413


@pytest.mark.parametrize("name", ["hidden", "calls", "__init__", "", "echo/more"])
def test_what_is_not_in_the_port_cannot_be_called(server: Server, name: str) -> None:
    assert post(server, CALL, name).status_code == 404


def test_nothing_tells_a_stranger_what_there_is(server: Server) -> None:
    for path in ("/docs", "/openapi.json", "/redoc", "/"):
        assert HTTP.get(f"{server.url}{path}").status_code == 404


@pytest.mark.parametrize("port", [SitePort, GatewayPort, OrchestratorPort])
def test_every_call_between_the_roles_can_travel(port: type) -> None:
    found = methods(port)
    assert found
    for name, method in found.items():
        with pytest.raises(Corrupt):
            wire.unpack(wire.pack("no call"), method.call)
        assert method.answer is not None, name


def test_a_port_that_is_taken_is_said(server: Server) -> None:
    number = int(server.url.rpartition(":")[2])
    with pytest.raises(Unavailable, match=f"127.0.0.1:{number}"):
        Server(bare("second"), port=number)
    with pytest.raises(Conflict):
        remote(Port, lambda: server.url, "secret").fail("Conflict")
