"""The outgoing spool: durable, in order, idempotent, bounded, and of one deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transport.places import OWNER, Places, blobs
from whimbrel.core.errors import Corrupt, Diverged, Refused, Retry, SpoolFull
from whimbrel.log import EmbeddedLog, Lane
from whimbrel.log.large import LargeEntries
from whimbrel.transport.spool import ENTRY, Owner


def test_an_append_survives_its_process_and_is_made_once(tmp_path: Path) -> None:
    places = Places(make=lambda name: EmbeddedLog(tmp_path / name))
    assert places.remote().append(b"x", count=1, writer="w", counter=4) == 0
    assert places.remote().append(b"x", count=1, writer="w", counter=4) is None
    places.spooled.close()
    again = Places(make=lambda name: EmbeddedLog(tmp_path / name))
    assert again.remote().append(b"x", count=1, writer="w", counter=4) is None
    again.drain(again.sender())
    assert blobs(again.logs["inbox"]) == [b"x"]
    assert again.remote().append(b"x", count=1, writer="w", counter=4) is None, "also when it has arrived"
    again.drain(again.sender())
    assert blobs(again.logs["inbox"]) == [b"x"]


def test_writers_lanes_and_logs_count_apart() -> None:
    places = Places("inbox", "outbox")
    for log in ("inbox", "outbox"):
        for lane in Lane:
            for writer in ("a", "b"):
                blob = f"{log} {lane.name} {writer}".encode()
                assert places.remote(log).append(blob, count=1, writer=writer, counter=0, lane=lane) is not None
    places.remote("inbox").append(b"later", count=1, writer="c", counter=7)
    assert places.remote("inbox").counter("c") == 7
    assert [places.remote("outbox").counter("c"), places.remote("inbox").counter("c", Lane.CONTROL)] == [-1, -1]
    places.drain(places.sender())
    assert places.remote("inbox").counter("c") == 7, "also when it has arrived"
    assert blobs(places.logs["inbox"])[-1] == b"later"
    for log in ("inbox", "outbox"):
        for lane in Lane:
            assert blobs(places.logs[log], lane)[:2] == [f"{log} {lane.name} {writer}".encode() for writer in "ab"]


def test_other_content_under_a_number_is_found_here_if_it_can_be() -> None:
    places = Places()
    for counter in range(2):
        places.remote().append(b"x", count=1, writer="w", counter=counter)
    for counter, replays in ((1, False), (1, True), (0, True)):
        with pytest.raises(Diverged):
            places.remote().append(b"y", count=1, writer="w", counter=counter, replays=replays)
    places.drain(places.sender())
    with pytest.raises(Diverged):
        places.remote().append(b"y", count=1, writer="w", counter=1)


def test_an_earlier_append_is_compared_at_the_other_place() -> None:
    places = Places()
    for counter in range(3):
        places.remote().append(b"x", count=1, writer="w", counter=counter)
    sender = places.sender()
    places.drain(sender)
    assert places.remote().append(b"x", count=1, writer="w", counter=0) is None
    assert not sender.spool.is_empty
    places.drain(sender)
    assert len(blobs(places.logs["inbox"])) == 3
    assert places.remote().append(b"y", count=1, writer="w", counter=0) is None, "nobody here knows better"
    with pytest.raises(Diverged, match=r"cloud answers.*w repeats its append 0"):
        places.drain(sender)
    assert isinstance(sender.error, Diverged)
    with pytest.raises(Diverged):
        sender.step(places.now_us)
    assert not sender.spool.is_empty, "it stays for whoever looks into it"


def test_what_replays_does_not_cross_the_link_again() -> None:
    places = Places()
    for counter in range(3):
        places.remote().append(b"x", count=1, writer="w", counter=counter)
    places.drain(places.sender())
    assert places.remote().append(b"x", count=1, writer="w", counter=0, replays=True) is None
    assert places.spool().is_empty


def test_the_limit_is_back_pressure_and_passes() -> None:
    places = Places(limit=3000)
    remote, sender = places.remote(), places.sender()
    for counter in range(2):
        remote.append(b"x" * 1000, count=1, writer="w", counter=counter)
    with pytest.raises(SpoolFull, match=r"the spool to cloud holds") as caught:
        remote.append(b"x" * 1000, count=1, writer="w", counter=2)
    assert isinstance(caught.value, Retry)
    assert remote.append(b"x" * 1000, count=1, writer="w", counter=1) is None, "a repetition needs no room"
    places.drain(sender)
    assert remote.append(b"x" * 1000, count=1, writer="w", counter=2) is not None
    places.drain(sender)
    assert len(blobs(places.logs["inbox"])) == 3


def test_an_empty_spool_takes_an_entry_above_its_limit_but_none_that_is_too_large_for_a_receiver() -> None:
    places = Places(limit=10)
    assert places.remote().append(b"x" * 1000, count=1, writer="w", counter=0) is not None
    with pytest.raises(Refused, match="at most"):
        places.remote().append(b"x" * (ENTRY + 1), count=1, writer="w", counter=1)
    with pytest.raises(Refused, match="-1 records"):
        places.remote().append(b"x", count=-1, writer="w", counter=1)
    with pytest.raises(Refused, match="log name"):
        places.remote("../x")
    places.drain(places.sender())
    assert len(blobs(places.logs["inbox"])) == 1


@pytest.mark.parametrize("other", [Owner("d2", "edge-1", "cloud"), Owner("d1", "edge-2", "cloud")])
def test_a_spool_of_another_deployment_or_place_is_refused_and_both_are_named(other: Owner) -> None:
    places = Places()
    places.spool(OWNER)
    places.spool(OWNER)
    with pytest.raises(Refused) as caught:
        places.spool(other)
    assert str(OWNER) in str(caught.value)
    assert str(other) in str(caught.value)


def test_large_entries_are_files_until_they_have_arrived(tmp_path: Path) -> None:
    places = Places(large=LargeEntries(tmp_path, least=1000), limit=5000)
    remote, sent = places.remote(), [b"small", b"x" * 2000, b"y" * 2000]
    for counter, blob in enumerate(sent):
        assert remote.append(blob, count=1, writer="a/b", counter=counter) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inbox%2FDATA%2Fa%2Fb.1", "inbox%2FDATA%2Fa%2Fb.2"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert places.spool().waiting > 4000, "their bytes count"
    with pytest.raises(SpoolFull):
        remote.append(b"z" * 2000, count=1, writer="a/b", counter=3)
    assert remote.append(b"y" * 2000, count=1, writer="a/b", counter=2) is None
    with pytest.raises(Diverged):
        remote.append(b"z" * 2000, count=1, writer="a/b", counter=2)
    places.drain(places.sender())
    assert blobs(places.logs["inbox"]) == sent
    assert remote.append(b"y" * 2000, count=1, writer="a/b", counter=2) is None
    assert not list(tmp_path.iterdir())


def test_files_that_a_crash_left_are_removed_and_no_others(tmp_path: Path) -> None:
    large = LargeEntries(tmp_path, least=10)
    places = Places(large=large)
    remote = places.remote()
    for counter in range(3):
        remote.append(b"x" * 100, count=1, writer="w", counter=counter)
    places.spooled.trim(1)  # the process died before the file was removed
    large.write("inbox%2FDATA%2Fw.3", b"another process has not appended its entry yet")
    places.sender()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["inbox%2FDATA%2Fw.1", "inbox%2FDATA%2Fw.2", "inbox%2FDATA%2Fw.3"]


@pytest.mark.parametrize(("damage", "told"), [(b"other", "is damaged"), (None, "is missing")])
def test_a_damaged_file_stops_the_sender_and_is_named(tmp_path: Path, damage: bytes | None, told: str) -> None:
    places = Places(large=LargeEntries(tmp_path, least=10))
    places.remote().append(b"x" * 100, count=1, writer="w", counter=0)
    (file,) = tmp_path.iterdir()
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    sender = places.sender()
    with pytest.raises(Corrupt, match=f"{file.name}.*{told}"):
        places.drain(sender)
    assert not sender.spool.is_empty
