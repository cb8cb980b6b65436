"""What carries out a batch: messages first and in their order, and no batch that begins where another one has been."""

from __future__ import annotations

import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Diverged
from whimbrel.core.record import Kind
from whimbrel.log import Lane, MemoryLog, codec
from whimbrel.log.carrier import Carrier


def carrier(outbox: MemoryLog, inbox: MemoryLog) -> Carrier:
    return Carrier(lambda: "s-1@x", outbox, lambda name: inbox)


def test_a_new_batch_that_begins_in_an_earlier_one_is_refused_and_appends_nothing() -> None:
    """Its checkpoint is older than its outbox: its results would be there twice."""
    outbox, inbox = MemoryLog(), MemoryLog()
    carrier(outbox, inbox).carry(0, {"data": 0}, {"data": 10}, [], 0, {})
    again = carrier(outbox, inbox)
    with pytest.raises(Diverged, match=r"batch 1 of s-1@x begins at .* which an earlier batch has applied"):
        again.carry(1, {"data": 5}, {"data": 12}, [], 0, {"s-2": [wire.encode([(Kind.SHIPPED, 0, b"")])]})
    assert (outbox.tail(), inbox.tail(Lane.CONTROL)) == (1, 0)
    again.carry(0, {"data": 0}, {"data": 10}, [], 0, {})
    again.carry(1, {"data": 10}, {"data": 12}, [], 0, {})
    assert outbox.tail() == 2, "a repetition is none of these, and what follows goes on"


def test_the_messages_of_all_parts_travel_in_the_order_of_their_kinds() -> None:
    outbox, inbox = MemoryLog(), MemoryLog()
    parts = [
        [(Kind.PARCEL, 3, b"first"), (Kind.SHIPPED, 0, b"first")],
        [(Kind.PARCEL, 4, b"second"), (Kind.SHIPPED, 0, b"second")],
    ]
    carrier(outbox, inbox).carry(0, {"data": 0}, {"data": 1}, [], 0, {"s-2": [wire.encode(part) for part in parts]})
    (entry,) = inbox.read(0, lane=Lane.CONTROL)
    assert [(kind, bytes(body)) for kind, _, body in codec.messages(entry.blob)] == [
        (Kind.PARCEL, b"first"),
        (Kind.PARCEL, b"second"),
        (Kind.SHIPPED, b"first"),
        (Kind.SHIPPED, b"second"),
    ]
