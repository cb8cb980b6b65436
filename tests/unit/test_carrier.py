"""What carries out a batch: messages first and in their order, and no batch that begins where another one has been."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Diverged
from whimbrel.core.increments import STORE
from whimbrel.core.keys import Selection
from whimbrel.core.record import Closed, Emissions, Kind, OutboxEntry, Outgoing, Result
from whimbrel.log import Lane, MemoryLog, codec
from whimbrel.log.carrier import WHOLE, Carrier, batches, encoded, last_entry, number
from whimbrel.log.codec import ROWS


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


# ── Large output ─────────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = 200
"""Bytes per entry."""
CLOSED = Closed("m1", "s-1", 0, 1, Selection(), 1)


def results(*seqs: int, text: str = "x" * 60) -> list[Result]:
    return [Result("k", 0, seq, 0, 0, 0, {"text": text}) for seq in seqs]


def said(*parts: list[Result]) -> list[bytes]:
    """What parts say, each with a notice behind its results."""
    every = [encoded(Emissions(results=part, notices=[CLOSED]), n, 7)[0] for n, part in enumerate(parts)]
    return [one for one in every if one is not None]


class House:
    """The logs of an instance, and its carrier of the moment."""

    def __init__(self, most: int | None = SMALL) -> None:
        self.outbox, self.inbox, self.most = MemoryLog(), MemoryLog(), most

    def carry(self, batch: int, out: list[bytes], count: int, **messages: Sequence[codec.Content]) -> None:
        sent = {to: [wire.encode(ours)] for to, ours in messages.items()}
        carrier = Carrier(lambda: "s-1@x", self.outbox, lambda name: self.inbox, most=self.most)
        carrier.carry(batch, {"data": batch}, {"data": batch + 1}, out, count, sent)

    def said(self) -> list[OutboxEntry]:
        return [wire.unpack(entry.blob, OutboxEntry) for entry in self.outbox.read(self.outbox.head())]


def test_large_output_is_in_several_entries_of_which_the_last_has_the_range() -> None:
    house = House()
    house.carry(3, said(results(*range(5)), results(9)), 6)
    entries = house.outbox.read(0)
    assert len(entries) > 3
    assert max(len(entry.blob) for entry in entries) < SMALL + 100
    assert sum(entry.records for entry in entries) == 6
    whole = house.said()
    assert [(one.piece, one.more, one.end) for one in whole[:-1]] == [(n, True, {}) for n in range(len(whole) - 1)]
    assert (whole[-1].more, whole[-1].start, whole[-1].end) == (False, {"data": 3}, {"data": 4})
    ((end, parts),) = batches(house.outbox, 0)
    assert end == len(entries)
    assert [one.seq for part in parts for one in part.results] == [0, 1, 2, 3, 4, 9]
    told = [(part.part, bool(part.results), part.notices) for part in parts if part.notices]
    assert told == [(0, False, [CLOSED]), (1, True, [CLOSED])], "a part's notices follow its results"


def test_output_that_fits_is_one_entry_as_ever() -> None:
    house = House(most=None)
    house.carry(0, said(results(1), results(2)), 2)
    assert [len(one.outgoing) for one in house.said()] == [2]
    assert house.outbox.counter("s-1@x") == number(0)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_batch_that_lacks_its_last_piece_does_not_count_and_is_finished_by_its_repetition(pieces: int) -> None:
    whole, house = House(), House()
    for one in (whole, house):
        one.carry(0, said(results(1)), 1)
    whole.carry(1, said(results(*range(5))), 5)
    for place, entry in enumerate(whole.outbox.read(1)[:pieces]):  # and here its writer died
        house.outbox.append(entry.blob, count=entry.records, writer="s-1@x", counter=number(1, place))
    assert [end for end, _ in batches(house.outbox, 0)] == [1]
    assert last_entry(house.outbox).end == {"data": 1}
    house.carry(1, said(results(*range(5))), 5)
    assert house.said() == whole.said()
    house.outbox.trim(house.outbox.tail() - 1)
    house.carry(1, said(results(*range(5))), 5)
    assert len(house.said()) == 1, "what is trimmed need not be compared"


def test_a_batch_that_differs_when_it_is_repeated_is_refused() -> None:
    house = House()
    house.carry(1, said(results(*range(5))), 5)
    with pytest.raises(Diverged, match=r"the operator gave .*'x.* for key 'k', now .*'y"):
        house.carry(1, said(results(*range(5), text="y" * 60)), 5)
    whole = house.outbox.read(0)
    unfinished = House()
    for place, entry in enumerate(whole[:3]):
        unfinished.outbox.append(entry.blob, count=entry.records, writer="s-1@x", counter=number(1, place))
    with pytest.raises(Diverged, match="has 1 outbox entries now; at first it wrote 3 and had more"):
        unfinished.carry(1, said(results(0)), 1)


def test_an_instance_that_starts_afresh_leaves_its_unfinished_batch_behind() -> None:
    house = House()
    house.carry(0, said(results(*range(5))), 5)
    first, *_ = house.outbox.read(0)
    outbox = MemoryLog()
    outbox.append(first.blob, count=1, writer="s-1@x", counter=number(0, 0))
    outbox.append(wire.pack(OutboxEntry([], renewed=True)), count=0, writer="renewal", counter=0)
    outbox.append(wire.pack(OutboxEntry([Outgoing(results(7), [])])), count=1, writer="s-1@y", counter=number(0))
    assert [[one.seq for part in parts for one in part.results] for _, parts in batches(outbox, 0)] == [[], [7]]


def test_a_piece_of_another_batch_is_an_error() -> None:
    outbox = MemoryLog()
    outbox.append(wire.pack(OutboxEntry([], piece=1)), count=0, writer="s-1@x", counter=0)
    with pytest.raises(Corrupt, match="outbox entry 0 is piece 1 of its batch; expected 0"):
        list(batches(outbox, 0))


def test_many_messages_are_in_several_entries_each_with_the_number_of_its_last() -> None:
    house = House()
    messages = [(Kind.PARCEL, 0, b"%d" % n * 90) for n in range(5)]
    for _ in range(2):
        house.carry(2, [], 0, other=messages)
    entries = house.inbox.read(0, lane=Lane.CONTROL)
    assert [len(codec.messages(entry.blob)) for entry in entries] == [2, 2, 1]
    assert [body for entry in entries for _, _, body in codec.messages(entry.blob)] == [body for _, _, body in messages]
    assert house.inbox.counter("s-1@x", Lane.CONTROL) == number(2, 4)
    assert last_entry(house.outbox).sent == {"other": number(2, 4)}
    house.inbox.trim(2, Lane.CONTROL)
    house.carry(2, [], 0, other=messages)
    assert house.inbox.tail(Lane.CONTROL) == 3
    with pytest.raises(Diverged):
        house.carry(2, [], 0, other=[*messages[:-1], (Kind.PARCEL, 0, b"x")])


def test_the_ends_of_a_part_s_increments_stay_in_one_entry() -> None:
    house = House()
    chunks, ends = [(Kind.PARCEL, 0, b"x" * 150)] * 3, [(Kind.CHECKPOINTED, 0, b"x" * 150)] * 3
    house.carry(0, [], 0, **{STORE: [*ends, *chunks]})
    spooled = [wire.unpack(entry.blob, list[codec.Content]) for entry in house.inbox.read(0, lane=Lane.CONTROL)]
    assert [[kind for kind, _, _ in one] for one in spooled] == [
        [Kind.PARCEL],
        [Kind.PARCEL],
        [Kind.PARCEL, *[Kind.CHECKPOINTED] * 3],
    ]


def test_a_number_tells_its_batch() -> None:
    assert [number(2) // ROWS, number(2) % ROWS, number(3, -1)] == [2, WHOLE, number(2)]
