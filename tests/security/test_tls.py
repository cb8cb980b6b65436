"""TLS between processes: both sides show a certificate and check the other's, and nobody falls back to plain text."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import whimbrel as wb
from tests.app.waiting import until
from tests.faults.children import ROOT, Child
from tests.processes.test_remote import Port, Target
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Conflict, Refused, Retry, Unavailable
from whimbrel.rpc.remote import bare, offer, remote
from whimbrel.rpc.server import Server
from whimbrel.rpc.tls import Tls, tls_of

HERE = Path(__file__).parent
MINE = HERE.parent / "rest"
"""Certificates made for these tests and used for nothing else: each is its own authority."""
GOOD = Tls(MINE / "certificate.pem", MINE / "key.pem", MINE / "certificate.pem")
OTHER = HERE / "other.pem"
OTHER_KEY = HERE / "other.key.pem"


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def server(target: Target) -> Iterator[Server]:
    api = bare("test")
    offer(api, Port, target, "secret")
    with Server.between(api, GOOD) as server:
        server.start()
        yield server


def test_two_who_trust_each_other_talk(server: Server) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with pytest.raises(Conflict, match="because"):
        remote(Port, lambda: server.url, "secret", tls=GOOD).fail("Conflict")


def test_a_client_with_a_certificate_of_another_authority_is_not_let_in(server: Server, target: Target) -> None:
    stranger = Tls(OTHER, OTHER_KEY, GOOD.ca)
    with pytest.raises(Retry):
        remote(Port, lambda: server.url, "secret", tls=stranger).hang()
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{server.url}/internal/hang", verify=ssl.create_default_context(cafile=GOOD.ca))
    assert target.calls == []


def test_a_server_of_another_authority_is_not_told_anything(server: Server, target: Target) -> None:
    with pytest.raises(Unavailable, match="cannot be trusted"):
        remote(Port, lambda: server.url, "secret", tls=Tls(GOOD.certificate, GOOD.key, OTHER)).hang()
    assert target.calls == []


def test_a_certificate_for_another_host_is_not_trusted(target: Target) -> None:
    elsewhere = Tls(HERE / "elsewhere.pem", HERE / "elsewhere.key.pem", HERE / "elsewhere.pem")
    api = bare("test")
    offer(api, Port, target, "secret")
    with Server.between(api, elsewhere) as server:
        server.start()
        with pytest.raises(Unavailable, match=r"cannot be trusted.*127\.0\.0\.1"):
            remote(Port, lambda: server.url, "secret", tls=elsewhere).hang()
    assert target.calls == []


def test_a_plain_client_fails_and_is_told_what_to_do(server: Server, target: Target) -> None:
    with pytest.raises(Unavailable, match="uses TLS: start this process with --certificate, --key and --ca"):
        remote(Port, lambda: server.url, "secret").hang()
    with pytest.raises(httpx.TransportError):
        httpx.post(server.url.replace("https", "http") + "/internal/hang", headers={"Authorization": "Bearer secret"})
    assert target.calls == []


def test_nothing_is_sent_in_the_clear_by_who_speaks_tls() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)

        def listen() -> None:
            with suppress(TimeoutError):
                heard.append(listener.accept()[0].recv(1000))

        thread = threading.Thread(target=listen)
        thread.start()
        plain = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not use TLS, and this process sends nothing unencrypted"):
            remote(Port, lambda: plain, "secret", tls=GOOD).hang()
        thread.join()
    assert heard == []


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    none.write_text("none")
    for tls, told in [
        (Tls(GOOD.certificate, GOOD.key, none), "of an authority"),
        (Tls(none, none, GOOD.ca), "its key"),
    ]:
        with pytest.raises(Refused, match=told):
            tls.client()
        with pytest.raises(Refused, match="not a certificate"):
            Server.between(bare("test"), tls)
    with pytest.raises(Refused, match="all three, or none"):
        tls_of(GOOD.certificate, GOOD.key, None)
    assert tls_of(None, None, None) is None
    job = str(ROOT / "tests" / "processes" / "job.py")
    refused = CliRunner().invoke(make_app(), ["up", job, "--data", str(tmp_path / "data"), "--ca", str(none)])
    assert isinstance(refused.exception, Refused)


def test_processes_that_speak_tls_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIMBREL_TEST_FOLDER", str(tmp_path))
    data, job = tmp_path / "data", ROOT / "tests" / "processes" / "job.py"
    files = ["--certificate", GOOD.certificate, "--key", GOOD.key, "--ca", GOOD.ca]
    start = ["--job", job, "--data", data]
    children = [Child("-m", "whimbrel", "orchestrator", *start, *files, cwd=tmp_path)]
    try:
        until(lambda: (data / "url").exists(), f"it serves; {children[0].told()}", 100)
        assert (data / "orchestrator.url").read_text().startswith("https://")
        plain = Child("-m", "whimbrel", "gateway", *start, cwd=tmp_path)
        children.append(plain)
        until(lambda: "uses TLS: start this process with" in plain.told(), "a plain one says what is wrong", 100)
        with wb.connect(data=data, certificate=GOOD.ca) as client:
            assert client.status()["processes"]["gateway"]["state"] == "unheard"
            plain.kill()
            children.append(Child("-m", "whimbrel", "gateway", *start, *files, cwd=tmp_path))
            alive = lambda: client.status()["processes"]["gateway"]["state"] == "alive"  # noqa: E731
            until(alive, f"the gateway is heard; {children[-1].told()}", 100)
        with wb.connect(data=data) as stranger, pytest.raises(Unavailable, match="certificate"):
            stranger.status()
        url = (data / "url").read_text().strip().replace("https", "http")
        with wb.connect(url, token="x") as stranger, pytest.raises(Unavailable, match="does not answer"):
            stranger.status()
    finally:
        for child in children:
            child.kill()
