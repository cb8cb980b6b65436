"""What is large goes through files, for the length of a batch, and nobody can tell from what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt
from whimbrel.core.record import Kind, Outgoing, Record
from whimbrel.host.events import placed
from whimbrel.log import Entry, Lane, MemoryLog
from whimbrel.log.carrier import outgoing
from whimbrel.log.codec import encode, entry_schema, messages
from whimbrel.spark.bundle import bundle, unbundle
from whimbrel.spark.nearby import LARGE, NOWHERE, Nearby
from whimbrel.spark.processor import MESSAGES, OUTGOING
from whimbrel.spark.sink import Sink
from whimbrel.spark.source import row_schema

BIG = b"x" * LARGE


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def batch(*rows: dict[str, Any]) -> Any:
    common = {"_part": 0, "_to": "b", "_count": 1, "_body": b"", "_file": ""}
    return [{**common, **row} for row in rows]


def test_only_what_is_large_is_left_and_only_where_there_is_a_folder(tmp_path: Path) -> None:
    nearby = Nearby(str(tmp_path))
    name = nearby.leave(BIG)
    assert (nearby.blob(b"", name), nearby.leave(BIG[1:]), NOWHERE.leave(BIG)) == (BIG, "", "")
    assert Nearby(str(tmp_path / "elsewhere")).leave(BIG) == ""
    assert nearby.blob(b"small", "") == b"small"


def test_the_end_of_a_batch_takes_what_was_left_in_it_and_nothing_else(tmp_path: Path) -> None:
    nearby = Nearby(str(tmp_path))
    name = nearby.leave(BIG)
    nearby.leave(BIG, "a delta")
    nearby.sweep()
    assert names(tmp_path) == ["a delta"]
    with pytest.raises(Corrupt, match="is gone"):
        nearby.blob(b"", name)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, blob: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert (Nearby(str(tmp_path)).leave(BIG), names(tmp_path)) == ("", [])


@pytest.mark.parametrize("far", [False, True])
def test_the_sink_carries_out_what_was_left_as_if_it_had_come(tmp_path: Path, far: bool) -> None:
    nearby = NOWHERE if far else Nearby(str(tmp_path))
    said = wire.encode(Outgoing([], [], 0, len(BIG)))
    body = wire.encode([(Kind.PARCEL, 3, BIG), (Kind.SHIPPED, 3, b"all")])
    left = nearby.leave(body)
    nearby.leave(BIG + b"of a try that failed")
    inbox, outbox = MemoryLog(), MemoryLog()
    sink = Sink(lambda: "a@1", outbox, lambda name: inbox, nearby=nearby, rows_of=list)
    large = {"_kind": MESSAGES, "_file": left, "_body": b"" if left else body}
    small = {"_part": 1, "_kind": MESSAGES, "_body": wire.encode([(Kind.PARCEL, 4, b"small")])}
    sink.append(batch(small, large, {"_kind": OUTGOING, "_body": said}), 7)
    assert messages(inbox.read(0, lane=Lane.CONTROL)[0].blob) == [
        (Kind.PARCEL, 3, BIG),
        (Kind.PARCEL, 4, b"small"),
        (Kind.SHIPPED, 3, b"all"),
    ]
    assert outgoing(outbox.read(0)[0])[0].state_bytes == len(BIG)
    assert (bool(left), names(tmp_path)) == (not far, [])


def test_a_large_bundle_is_left_and_read_by_whoever_serves_its_group(tmp_path: Path) -> None:
    records = [Record(0, Kind.PARCEL, bin, "", -1, 0, "", 0, 0, BIG if bin == 1 else b"small") for bin in (0, 1)]
    user = pa.schema([])
    entry = Entry(0, 2, encode(records, entry_schema(user)))
    table = pa.Table.from_batches([placed(entry, Lane.CONTROL, row_schema(user))])
    nearby = Nearby(str(tmp_path))
    small, large = bundle(table, 2, 0, nearby).to_pylist()
    assert (small["_file"], large["_bundle"]) == ("", b"")
    for row, body in ((small, b"small"), (large, BIG)):
        found, _ = unbundle([(0, nearby.blob(row["_bundle"], row["_file"]))])
        assert [record.body for record in found] == [body]
    assert len(names(tmp_path)) == 1, "a task that is tried again finds it"
