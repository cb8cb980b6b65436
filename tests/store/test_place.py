"""Where objects lie: the same rules in memory, in a directory and in S3."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.store.objects import at_s3, increment, version
from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.place import LONGEST, Place, checked
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Refused, Unavailable


def test_what_is_put_is_found_by_its_name_and_replaced_by_it(place: Place) -> None:
    place.put("s/a/1", b"one")
    place.put("s/a/2", b"")
    place.put("s/a/1", b"other")
    names, blobs = ["s/a/3", "s/a/1", "t/x", "s/a/2"], [None, b"other", None, b""]
    assert [place.get(name) for name in names] == place.get_all(names) == blobs
    assert (place.get_all([]), place.get_all(["s/a/3"]), place.get_all(["s/a/1"])) == ([], [None], [b"other"])


def test_names_are_listed_in_order_by_folder(place: Place) -> None:
    for name in ["s/a/10", "s/a/02", "s/ab/1", "t/a/1"]:
        place.put(name, b"x")
    assert place.names("s/a") == ["s/a/02", "s/a/10"]
    assert place.names("s") == ["s/a/02", "s/a/10", "s/ab/1"]
    assert place.names("") == ["s/a/02", "s/a/10", "s/ab/1", "t/a/1"]
    assert place.names("nowhere") == []


def test_deleting_takes_away_what_is_there(place: Place) -> None:
    for name in ["s/a/1", "s/a/2", "s/a/3"]:
        place.put(name, b"x")
    place.delete(["s/a/1", "s/a/3", "s/a/4"])
    place.delete([])
    place.delete(["s/a/1"])
    assert place.names("s") == ["s/a/2"]


LEADING_OUT = ["../x", "s/../../x", "/etc/passwd", "s//x", "s/./x", "s/.x", "", "s/a b", "s/a\0b", "s/" + "x" * 201]


def test_a_name_that_leads_out_is_refused_before_anything_happens(place: Place) -> None:
    for name in LEADING_OUT:
        for use in (partial(place.put, name, b"x"), partial(place.get_all, [name]), partial(place.delete, [name])):
            with pytest.raises(Refused, match="lead out of the store"):
                use()
    assert place.names("") == []


def test_which_words_may_stand_in_a_name() -> None:
    for word in ["average", "größe", "s-1", "s-1@x.2+3", "_a", "x" * LONGEST]:
        assert checked("stage", word) == word
    for word in ["", ".", "..", "-x", "a/b", "a\\b", "a:b", "a\n", "é" * LONGEST, "\ud800"]:
        with pytest.raises(Refused):
            checked("stage", word)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full before the bytes are safe."""
    place = Place(str(tmp_path / "store"))
    place.put("s/x", b"whole")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(Unavailable, match="No space left"):
        place.put("s/x", b"half")
    with pytest.raises(Unavailable):
        place.put("s/y", b"half")
    assert (place.get("s/x"), place.names("")) == (b"whole", ["s/x"])


def test_a_place_that_cannot_be_reached_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    place = Place(str(tmp_path / "file" / "store"))
    with pytest.raises(Unavailable, match="cannot be used now"):
        place.put("s/x", b"x")
    away = Place("s3://bucket/x", endpoint_url="http://127.0.0.1:1", key="k", secret="s", config_kwargs=IMPATIENT)
    for use in (
        partial(away.put, "x", b""),
        partial(away.get, "x"),
        partial(away.names, "x"),
        partial(away.delete, "x"),
    ):
        with pytest.raises(Unavailable, match="s3://bucket/x cannot be used now"):
            use()


IMPATIENT = {"retries": {"max_attempts": 0}, "connect_timeout": 1}


@pytest.mark.parametrize("url", ["http://x/y", "ftp://x", "simplecache::s3://b/x", "s3://", "zip://x::file://y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(Refused, match=r"not a store address|no bucket"):
        Place(url)


def test_s3_is_found_as_amazons_tools_find_it(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command line relies on: an address is all that it is given."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret"])
    url = at_s3(s3).url
    store = CentralStore(url)
    store.write("average", increment(1, version("a", 1), reached=1 << 20))
    store.checkpoint("average", {"s-1": 1}, 1_772_366_400_000_000)
    shown = CliRunner().invoke(make_app(), ["checkpoints", url], env={"COLUMNS": "120"})
    assert shown.output.split()[-6:] == ["1", "2026-03-01", "12:00:00Z", "1", "5", "1.0"]
