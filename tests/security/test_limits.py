"""Slow and many connections: real sockets against a real server, which closes them and serves the others meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest

import whimbrel as wb
from tests.app.waiting import until
from tests.processes.test_remote import Port, Target
from tests.rest.house import House, served
from tests.rest.test_api import problem
from tests.rest.test_client import finish
from whimbrel.core.errors import Conflict
from whimbrel.rpc.limits import Limited
from whimbrel.rpc.remote import bare, offer, remote
from whimbrel.rpc.server import Server

MOST = 8


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody has to wait long for what takes too long."""
    monkeypatch.setattr(Limited, "head", 0.5)
    monkeypatch.setattr(Limited, "body", 0.7)
    monkeypatch.setattr(Limited, "most", MOST)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with served(tmp_path / "data") as house:
        yield house


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    found = socket.create_connection((host, int(port)))
    found.settimeout(20)
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has hung up."""
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def trickle(connection: socket.socket, pieces: bytes) -> bool:
    """Send a byte now and then until the server hangs up; whether it has before all was sent."""
    for byte in pieces:
        try:
            connection.sendall(bytes([byte]))
        except OSError:
            return True
        if is_closed(connection):  # which waits a moment
            return True
    return False


@pytest.mark.parametrize("begins", ["nothing", "head", "body", "second head"])
def test_who_trickles_is_closed_and_the_others_are_served_meanwhile(house: House, begins: str) -> None:
    token = f"Authorization: Bearer {house.server.token}\r\n".encode()
    head = b"GET /sites HTTP/1.1\r\nHost: x\r\n" + token
    first = {
        "nothing": b"",
        "head": b"GET /sites HTTP/1.1\r\n",
        "body": b"POST /migrations HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n" + token + b"\r\n",
        "second head": head + b"\r\n",
    }[begins]
    ended: list[bool] = []
    with closing(connected(house.server.url)) as slow:
        slow.sendall(first)
        if begins == "second head":
            assert slow.recv(1 << 20).startswith(b"HTTP/1.1 200")
        endless = b"" if begins == "nothing" else b"X-Slow: " + b"x" * 5000
        thread = threading.Thread(target=lambda: ended.append(trickle(slow, endless)))
        thread.start()

        def is_over() -> bool:
            assert house.http.get("/sites").status_code == 200
            return not thread.is_alive() and is_closed(slow)

        until(is_over, "the server hangs up, and answers others all the while")
        thread.join()
        assert ended == [begins != "nothing"], "before all was sent"
    assert house.count() == 0


def test_a_request_in_pieces_that_come_in_time_is_answered(house: House) -> None:
    body = b'{"stage": "count", "to": "edge-1", "keys": ["k00"]}'
    head = f"POST /migrations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n"
    with closing(connected(house.server.url)) as slow:
        for piece in (
            head.encode(),
            f"Authorization: Bearer {house.server.token}\r\n\r\n".encode(),
            body[:9],
            body[9:],
        ):
            slow.sendall(piece)
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert house.count() == 1


def test_half_a_request_is_none_though_it_looks_whole(house: House) -> None:
    """The body is whole JSON, but the head has promised more of it."""
    body = b'{"stage": "count", "to": "edge-1", "keys": ["k00"]}'
    head = f"POST /migrations HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) + 9}\r\n"
    with closing(connected(house.server.url)) as slow:
        slow.sendall(f"{head}Authorization: Bearer {house.server.token}\r\n\r\n".encode() + body)
        slow.shutdown(socket.SHUT_WR)
        until(lambda: is_closed(slow), "the server hangs up")
    assert house.http.get("/sites").status_code == 200
    assert house.count() == 0


def test_a_call_between_processes_that_trickles_is_closed_too() -> None:
    target, api = Target(), bare("test")
    offer(api, Port, target, "secret")
    with Server(api) as server:
        server.start()
        with closing(connected(server.url)) as slow:
            slow.sendall(b"POST /internal/hang HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n")
            slow.sendall(b"Content-Length: 100000\r\n\r\n")
            assert trickle(slow, b"x" * 5000)
        assert target.calls == []
        with pytest.raises(Conflict):
            remote(Port, lambda: server.url, "secret").fail("Conflict")


def test_there_are_only_so_many_connections_and_those_that_are_there_are_served(house: House) -> None:
    assert house.http.get("/sites").status_code == 200  # stays open
    with ExitStack() as stack:
        many = [stack.enter_context(closing(connected(house.server.url))) for _ in range(30)]
        until(lambda: sum(map(is_closed, many)) >= 30 - MOST, "what is too much is closed")
        assert house.http.get("/sites").status_code == 200
    until(lambda: httpx.get(house.server.url + "/sites").status_code == 401, "then there is room again")


def test_a_head_of_any_size_is_not_taken(house: House) -> None:
    headers = {"X-Large": "x" * (1 << 20), "Authorization": f"Bearer {house.server.token}"}
    with suppress(httpx.TransportError):  # it may be closed while the rest is being sent
        assert httpx.get(house.server.url + "/sites", headers=headers).status_code == 400
    assert house.http.get("/sites").status_code == 200


def test_only_so_many_calls_wait_and_a_client_waits_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whimbrel.api.api.WAITING", 2)
    with served(tmp_path) as house:
        house.post("/migrations", {"stage": "count", "to": "edge-1"})
        answers: list[object] = []

        def ask() -> None:
            """Wait, as soon as there is a place: whoever looks whether there is one takes it for a moment."""
            while (answer := house.http.get("/migrations/m1?wait=60", timeout=60)).status_code == 503:
                pass
            answers.append(answer)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: house.http.get("/migrations/m1?wait=0.01").status_code == 503, "both wait")
        told = problem(house.http.get("/migrations/m1?wait=1"))
        assert told == (503, "Unavailable", "2 calls already wait for migrations; retry later, or without wait=")
        assert house.http.get("/migrations/m1").status_code == 200
        with wb.connect(data=tmp_path) as client:
            waiting = threading.Thread(target=lambda: answers.append(client.handle("m1").wait(60)))
            waiting.start()
            finish(house, "m1")
            for thread in [*threads, waiting]:
                thread.join(30)
        assert len(answers) == 3
