"""What a worker keeps in its memory between batches, and what it must not keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.spark.rig import SCHEMA, Running
from tests.spark.test_bundle import table
from tests.spark.test_stored import Handle
from whimbrel.core import wire
from whimbrel.core.keys import bin_of
from whimbrel.core.record import Outgoing, Record
from whimbrel.spark import processor
from whimbrel.spark.bundle import bundle
from whimbrel.spark.groups import group_ids
from whimbrel.spark.processor import OUTGOING, GroupProcessor
from whimbrel.spark.shipping import ship


class Worker:
    """One group in one worker, and the state store below it: a batch that fails leaves the store as it was."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.processor = GroupProcessor("a", ship(Running()), 1)
        self.processor.init(self.handle)  # type: ignore[arg-type]

    def batch(self, *numbers: int) -> list[int]:
        """Apply some records of one key; return the counts that the operator emitted."""
        before = dict(self.handle.blobs)
        records = [Record(0, 0, bin_of("k"), "k", n, 0, "router", n, n, (n, "word")) for n in numbers]
        cut = bundle(table(records, position=numbers[0], user=SCHEMA), 1, 0).to_pylist()
        rows = iter([SimpleNamespace(**row) for row in cut])
        try:
            out = list(self.processor.handleInputRows((group_ids(1)[0],), rows, None))
        except OSError:
            self.handle.blobs.clear()
            self.handle.blobs.update(before)
            raise
        said = [wire.decode(row._body, Outgoing) for row in out if row._kind == OUTGOING]
        return [result.values["count"] for group in said for result in group.results]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(processor, "_held", {})
    return Worker()


def test_a_batch_that_fails_leaves_nothing_of_itself_in_the_worker(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records were applied in memory, then the state store failed: the batch is repeated over what is stored."""

    def broken(*_: Any) -> None:
        raise OSError("the state store failed")

    assert worker.batch(0, 1) == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(type(worker.handle.blobs), "updateValue", broken)
        with pytest.raises(OSError, match="the state store failed"):
            worker.batch(2, 3)
    assert worker.batch(2, 3) == [3, 4], "neither doubled nor taken for repetitions"


def test_what_the_store_confirms_is_not_loaded_again(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.batch(0) == [1]
    kept = processor._held["a", 0].instance
    assert worker.batch(1) == [2]
    assert processor._held["a", 0].instance is kept
