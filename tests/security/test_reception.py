"""What other places may append here: nobody writes in another one's name, or to a log it must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.log.contract import Lane
from whimbrel.log.folder import Logs
from whimbrel.roles.neighbourhood import Reception

PLACES = {"s-1": "cloud", "s-2": "edge-1", "s-3": "edge-2"}


class Flow:
    """A stage, as far as a reception asks it."""

    door = object()

    def place_of(self, instance: str) -> str:
        if instance not in PLACES:
            raise Unavailable(f"{instance} is not known yet")
        return PLACES[instance]


def reception(folder: Path, is_full: bool = False) -> Reception:
    flows: Any = {"s": Flow()}
    return Reception("cloud", flows, Logs(folder), lambda: is_full)


@pytest.mark.parametrize(
    ("log", "lane", "writer", "may"),
    [
        ("inbox-s-1", Lane.DATA, "gateway-s@edge-1", True),
        ("inbox-s-1", Lane.DATA, "gateway-s@edge-1/r7", True),  # it replays for a restoration
        ("inbox-s-1", Lane.DATA, "gateway-s@cloud", False),
        ("inbox-s-1", Lane.DATA, "gateway-s@edge-2", False),
        ("inbox-s-1", Lane.DATA, "gateway-s", False),
        ("inbox-s-1", Lane.CONTROL, "s-2@c0ffee", True),
        ("inbox-s-1", Lane.CONTROL, "s-3@c0ffee", False),
        ("inbox-s-1", Lane.CONTROL, "s-1@c0ffee", False),
        ("inbox-s-1", Lane.CONTROL, "coordinator/m1", True),
        ("inbox-s-3", Lane.DATA, "gateway-s@edge-1", False),  # it is not here
        ("arrivals-s-2", Lane.DATA, "s-2", True),
        ("arrivals-s-2", Lane.CONTROL, "s-2", False),
        ("arrivals-s-2", Lane.DATA, "s-1", False),
        ("arrivals-s-3", Lane.DATA, "s-3", False),
        ("door-s", Lane.DATA, "source@edge-1", True),
        ("door-s", Lane.DATA, "source@edge-2", False),
        ("door-s", Lane.CONTROL, "source@edge-1", False),
        ("door-t", Lane.DATA, "source@edge-1", False),
        ("arrivals-x", Lane.DATA, "gateway-s@edge-1", False),
    ],
)
def test_a_place_appends_what_is_its_own(tmp_path: Path, log: str, lane: Lane, writer: str, may: bool) -> None:
    assert reception(tmp_path).may_append("edge-1", log, lane, writer) is may


@pytest.mark.parametrize("log", ["ingress-s", "outbox-s-1", "keys-s", "dead-letters", "inbox-t-1"])
def test_there_is_no_other_log(tmp_path: Path, log: str) -> None:
    with pytest.raises(Refused):
        reception(tmp_path).may_append("edge-1", log, Lane.DATA, "gateway-s@edge-1")
    assert not list(tmp_path.glob("*.db*")), "nothing was made for it"


def test_what_is_not_known_yet_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        reception(tmp_path).may_append("edge-1", "inbox-s-9", Lane.DATA, "gateway-s@edge-1")


def test_a_full_place_takes_in_no_records_and_everything_else(tmp_path: Path) -> None:
    full = reception(tmp_path, is_full=True)
    with pytest.raises(Unavailable, match="an inbox or the disk is full"):
        full.log_of("door-s")
    assert full.log_of("inbox-s-1") is not full.log_of("arrivals-s-2")
    assert reception(tmp_path).log_of("door-s") is Flow.door
