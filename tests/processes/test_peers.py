"""Those in other processes, as the orchestrator knows them."""

from __future__ import annotations

import socket

import pytest

from whimbrel.core.errors import Retry, Unavailable
from whimbrel.orchestrator.ports import GatewayBeat, GatewayStatus, SiteBeat
from whimbrel.rpc.peers import START, Peer, RemoteGateway, RemoteSite
from whimbrel.site.status import InstanceStatus, SiteStatus


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_makes_suspect_then_dead_and_a_beat_alive_again() -> None:
    clock = Clock()
    peer = Peer("edge-1", 3, 10, clock)
    with pytest.raises(Unavailable, match="edge-1 has not sent a heartbeat yet"):
        peer.url()
    states = [peer.state]
    for moment, beats in [(5, False), (6, True), (8.9, False), (9, False), (15.9, False), (16, False), (17, True)]:
        clock.now = 100 + moment
        if beats:
            peer.note_beat("life", "http://there")
        states.append(peer.state)
    assert states == ["unheard", "unheard", "alive", "alive", "suspect", "suspect", "dead", "alive"]
    assert peer.url() == "http://there"


def test_who_was_never_heard_is_dead_in_the_end() -> None:
    clock = Clock()
    peer = Peer("edge-1", 3, 10, clock)
    clock.now += 10
    assert peer.state == "dead"


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def beat(url: str) -> SiteBeat:
    return SiteBeat(
        "edge-1", "life", url, SiteStatus({"s-1": InstanceStatus(True, 5, 500, 7, 10)}, failed={"s-2": "x"})
    )


def test_a_site_is_as_it_last_said() -> None:
    site = RemoteSite("edge-1", "secret")
    assert (site.status(), site.failed()) == (SiteStatus(), {})
    site.note_beat(beat(nobody()))
    assert site.status().instances["s-1"].period_ms == 500
    assert site.failed() == {"s-2": "x"}


def test_nothing_runs_at_a_site_that_is_gone_and_has_been_for_long() -> None:
    site = RemoteSite("edge-1", "secret", suspect=50, dead=100)
    site.note_beat(beat(nobody()))
    with pytest.raises(Unavailable):
        site.stop("s-1")
    dead = RemoteSite("edge-1", "secret", suspect=0, dead=0)
    dead.note_beat(beat(nobody()))
    dead.stop("s-1")
    with pytest.raises(Unavailable):
        dead.start("s-1")
    assert dead.status() == SiteStatus(error="site edge-1 is dead")


def test_the_gateway_is_as_it_last_said() -> None:
    gateway = RemoteGateway("secret")
    assert gateway.status() == GatewayStatus()
    gateway.note_beat(GatewayBeat("life", nobody(), GatewayStatus(sent=5)))
    assert gateway.status().sent == 5
    with pytest.raises(Unavailable):
        gateway.save("s")


def test_who_was_never_heard_has_more_time_until_it_is_gone_and_who_was_away_forgives() -> None:
    clock = Clock()
    peer = Peer("edge-1", 3, 10, clock)
    clock.now += 11
    assert (peer.state, peer.is_gone) == ("dead", False)
    clock.now += START
    assert peer.is_gone
    peer.note_beat("life", "http://there")
    clock.now += 11
    assert (peer.state, peer.is_gone) == ("dead", True)
    peer.forgive()
    assert (peer.state, peer.is_gone) == ("alive", False)


def test_a_call_to_a_site_that_dies_meanwhile_is_given_up_and_it_is_not_asked_again() -> None:
    """A stopped process takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        site = RemoteSite("edge-1", "secret", suspect=0.1, dead=0.5)
        site.note_beat(beat(url))
        with pytest.raises(Retry, match="is dead: it has not answered") as raised:
            site.start("s-1")
        assert not isinstance(raised.value, Unavailable), "it may have happened"
        with pytest.raises(Unavailable, match="is dead"):
            site.place({})
        with pytest.raises(Retry) as raised:  # whether something still runs there, only an answer could tell
            site.stop("s-1")
        assert not isinstance(raised.value, Unavailable)
