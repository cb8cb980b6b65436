"""Checkpoints, inboxes and outboxes of different ages, and batches that differ when they are repeated: all of it stops
the instance with an error, and none of it goes on in silence."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spark.rig import Rig, Running, by_key, stream
from whimbrel.core.errors import Stale
from whimbrel.core.operator import Emit, Operator
from whimbrel.log import EmbeddedLog
from whimbrel.spark.checkpoint import Checkpoint
from whimbrel.spark.source import open_log

pytestmark = pytest.mark.spark
Rigs = Callable[..., Rig]


def checkpoint(one: Rig) -> Path:
    return one.folder / "checkpoint-a"


def undo_last_commit(one: Rig) -> int:
    """What a death leaves behind that came between the outbox and the commit; returns the batch."""
    last = max(int(file.name) for file in (checkpoint(one) / "commits").glob("[0-9]*"))
    (checkpoint(one) / "commits" / str(last)).unlink()
    return last


def test_a_checkpoint_that_is_gone_is_noticed_and_can_be_given_up(rig: Rigs) -> None:
    one = rig(groups=1, partitions=1)
    one.apply_some()
    shutil.rmtree(checkpoint(one))
    one.feed(stream(10, 5, 40))
    for _ in range(2):
        with pytest.raises(Stale, match=r"checkpoint of a is gone.*'data': 1.*accept_loss=\['a'\]"):
            one.start()
    one.queries["a"].renew()
    one.queries["a"].start()
    one.settle()
    assert len(one.results()) == 50, "nothing twice"
    behind = by_key(one.results()[40:])
    one.sent = one.sent[40:]
    assert behind == one.expected(), "and without what was lost"


def test_what_is_left_of_a_first_batch_that_was_never_planned_is_cleared_away(rig: Rigs) -> None:
    """A power failure may keep files of the state, and lose that there was a batch."""
    one = rig(groups=1, partitions=1)
    left = checkpoint(one) / "state" / "0" / "0" / "1.changelog"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")
    one.apply_some()
    assert by_key(one.results()) == one.expected()


def test_an_old_checkpoint_is_noticed(rig: Rigs) -> None:
    one = rig(groups=1, partitions=1)
    one.apply_some()
    shutil.copytree(checkpoint(one), one.folder / "backup")
    one.apply_some(10, 40)
    shutil.rmtree(checkpoint(one))
    (one.folder / "backup").rename(checkpoint(one))
    with pytest.raises(Stale, match=r"the checkpoint of a .* is old: it knows batches up to"):
        one.start()
    one.queries.clear()


def test_an_inbox_that_lacks_its_last_entries_is_noticed(rig: Rigs) -> None:
    one = rig(groups=1, partitions=1)
    one.apply_some()
    one.apply_some(10, 40)
    one.inboxes["a"].close()
    open_log(str(one.folder / "inbox-a")).close()
    for file in one.folder.glob("inbox-a*"):
        if file.is_file():
            file.unlink()
    short = one.inboxes["a"] = EmbeddedLog(one.folder / "inbox-a")
    assert short.tail() == 0
    with pytest.raises(Stale, match=r"the inbox of a lacks its last entries: .* data position 2, the log ends at 0"):
        one.start()
    one.queries.clear()


def test_a_batch_that_is_repeated_after_a_death_is_taken_for_what_it_is(rig: Rigs) -> None:
    one = rig(groups=2, partitions=1)
    one.apply_some()
    undo_last_commit(one)
    one.apply_some(10, 40)
    assert by_key(one.results()) == one.expected()


class Clock(Operator):
    """Not deterministic: it looks at the clock."""

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        emit(at=time.time_ns())


class Changed(Running):
    """The same job with changed code."""

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        super().process(key, event, state, lambda **values: emit(**values, more=1))


@pytest.mark.parametrize(("first", "again"), [(Clock(), Clock()), (Running(), Changed())], ids=["clock", "changed"])
def test_a_repeated_batch_that_says_something_else_is_an_error(rig: Rigs, first: Operator, again: Operator) -> None:
    one = rig(groups=1, partitions=1, operator=first)
    one.apply_some()
    batch = undo_last_commit(one)
    one.start(operator=again)
    query = one.queries.pop("a")
    one.until(lambda: not query.is_active)
    text = str(query.exception)
    assert f"errors.Diverged: batch {batch} of a@" in text
    assert f"{type(again).__name__} gave {{" in text
    assert "for key 'k0', now {" in text
    assert len(one.results()) == 40, "nothing was appended"


def test_a_checkpoint_goes_on_elsewhere_without_what_is_old_and_though_the_place_it_comes_from_is_gone(
    rig: Rigs,
) -> None:
    one = rig(instances=("a",))
    one.start()
    one.feed(stream(20, 4))
    one.settle()
    one.until(lambda: bool(list(checkpoint(one).glob("state/0/0/*.zip"))))  # the state as a whole
    one.close()
    assert (checkpoint(one) / "state" / "0" / "0" / "1.changelog").exists()
    elsewhere = one.folder / "an other" / "place"
    for place, start in ((elsewhere, 20), (checkpoint(one), 40)):
        place.parent.mkdir(exist_ok=True)
        before = checkpoint(one) if place == elsewhere else elsewhere
        shutil.copytree(before, place, ignore=Checkpoint(before).needless)
        shutil.rmtree(before)
        assert not (place / "state" / "0" / "0" / "1.changelog").exists()
        one.start(checkpoint=place)
        one.feed(stream(20, 4, start))
        one.settle()
        one.close()
    assert by_key(one.results()) == one.expected()
