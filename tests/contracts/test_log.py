"""The log contract, run over every backend: first its rules one by one, then a model that meets them in any order.

A new backend joins by one line in BACKENDS. `embedded-afresh` opens the file again for each single call, as if every
call came from a new process: whatever a log keeps only in memory fails here. `remote` appends through a spool, a sender
and a receiver at another place; its reads are made there.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.transport.places import Places
from whimbrel.core.errors import Diverged, Refused, Stop, Trimmed
from whimbrel.log import Append, EmbeddedLog, Entry, Lane, Log, MemoryLog, append_all
from whimbrel.log.readers import beginning, end_of

DATA, CONTROL = Lane.DATA, Lane.CONTROL


class Afresh:
    """Opens the log for each call and closes it after."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log = EmbeddedLog(self._path)
            try:
                return getattr(log, name)(*args, **kwargs)
            finally:
                log.close()

        return call


class Remote:
    """A log of another place: appends cross a link, everything else is asked where the log is.

    A writer that `replays` is compared with what is still in the spool: what crossed the link does not cross it again.
    """

    compares_replays = False

    def __init__(self, path: Path) -> None:
        self._log = EmbeddedLog(path)
        self._lock = threading.Lock()
        self._places = Places(make=lambda name: self._log if name == "inbox" else MemoryLog())
        self._remote, self._sender = self._places.remote(), self._places.sender()

    def append(self, blob: bytes, *, lane: Lane = DATA, **given: Any) -> int | None:
        with self._lock:
            before = self._log.tail(lane)
            self._remote.append(blob, lane=lane, **given)
            try:
                self._places.drain(self._sender)
            except Stop:
                # The sender has stopped for good: somebody looks into it, and discards the entry.
                self._sender.spool.trim(self._sender.spool.head() + 1)
                self._sender = self._places.sender()
                raise
            return None if self._log.tail(lane) == before else before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


Maker = Callable[[Path], Log]
BACKENDS: dict[str, Maker] = {
    "memory": lambda folder: MemoryLog(),
    "embedded": lambda folder: EmbeddedLog(folder / "log"),
    "embedded-afresh": lambda folder: Afresh(folder / "log"),
    "remote": lambda folder: Remote(folder / "log"),
}


@pytest.fixture(params=BACKENDS)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Log]:
    log = BACKENDS[request.param](tmp_path)
    yield log
    before = everything(log)
    log.close()
    assert everything(log) == before, "close releases, it loses nothing"
    if request.param != "memory":
        assert everything(EmbeddedLog(tmp_path / "log", create=False)) == before


def everything(log: Log) -> list[object]:
    lanes = [(lane, log.head(lane), log.tail(lane), log.read(log.head(lane), lane=lane)) for lane in Lane]
    return [
        *lanes,
        *((lane, writer, log.counter(writer, lane)) for lane in Lane for writer in "abcd"),
        *map(log.readers, Lane),
    ]


def compares_replays(log: Log) -> bool:
    """Whether a writer that replays is compared with everything that the log has."""
    return getattr(log, "compares_replays", True)


def write(log: Log, *counts: int, writer: str = "a", lane: Lane = DATA) -> None:
    """Append one entry for each count, the blob saying which append of its writer it is."""
    for count in counts:
        counter = log.counter(writer, lane) + 1
        blob = f"{writer}{counter}".encode()
        assert log.append(blob, count=count, writer=writer, counter=counter, lane=lane) is not None


def test_a_new_log_is_empty(log: Log) -> None:
    for lane in Lane:
        assert (log.head(lane), log.tail(lane), log.counter("a", lane)) == (0, 0, -1)
        assert (log.read(0, lane=lane), log.advance(0, 10, lane), log.backlog(0, lane)) == ([], 0, 0)


def test_entries_keep_the_order_of_their_appends(log: Log) -> None:
    assert log.append(b"x", count=3, writer="a", counter=0) == 0
    assert log.append(b"", count=0, writer="b", counter=7) == 1
    assert log.append(b"\0\xff", count=1, writer="a", counter=5) == 2
    assert log.read(0) == [Entry(0, 3, b"x"), Entry(1, 0, b""), Entry(2, 1, b"\0\xff")]
    assert log.tail() == 3


def test_several_appends_at_once_are_what_they_are_one_by_one(log: Log) -> None:
    write(log, 1)
    many = [
        Append(b"a0", 1, "a", 0),
        Append(b"a1", 2, "a", 1),
        Append(b"b", 0, "b", 7, CONTROL),
        Append(b"c", 1, "a", 2),
    ]
    assert append_all(log, many) == [None, 1, 0, 2]
    assert append_all(log, many) == [None] * 4, "a repetition changes nothing"
    assert append_all(log, []) == []
    assert log.read(0) == [Entry(0, 1, b"a0"), Entry(1, 2, b"a1"), Entry(2, 1, b"c")]
    assert log.read(0, lane=CONTROL) == [Entry(0, 0, b"b")]


def test_of_several_appends_those_before_a_difference_are_appended(log: Log) -> None:
    write(log, 1)
    with pytest.raises(Diverged):
        append_all(log, [Append(b"a1", 1, "a", 1), Append(b"other", 1, "a", 0), Append(b"a2", 1, "a", 2)])
    assert [entry.blob for entry in log.read(0)] == [b"a0", b"a1"]
    assert log.counter("a") == 1


def test_a_repeated_append_changes_nothing(log: Log) -> None:
    write(log, 1, 1)
    before = everything(log)
    assert log.append(b"a1", count=1, writer="a", counter=1) is None
    assert log.append(b"a0", count=1, writer="a", counter=0) is None
    assert everything(log) == before


@pytest.mark.parametrize("counter", [0, 1, 2])
@pytest.mark.parametrize("given", [{"blob": b"other"}, {"count": 2}], ids=["content", "count"])
def test_a_repetition_with_other_content_is_refused(log: Log, counter: int, given: dict[str, Any]) -> None:
    write(log, 1, 1, 1)
    before = everything(log)
    for replays in (False, True) if counter == 2 or compares_replays(log) else (False,):
        with pytest.raises(Diverged, match=f"a repeats its append {counter}"):
            log.append(
                **{"blob": f"a{counter}".encode(), "count": 1, **given}, writer="a", counter=counter, replays=replays
            )
    assert everything(log) == before


def test_a_repetition_that_cannot_be_compared_is_refused_unless_its_writer_replays(log: Log) -> None:
    write(log, 1, 1, 1)
    log.trim(2)
    before = everything(log)
    with pytest.raises(Diverged, match="trimmed that entry"):
        log.append(b"a1", count=1, writer="a", counter=1)
    assert log.append(b"a1", count=1, writer="a", counter=1, replays=True) is None
    assert log.append(b"a2", count=1, writer="a", counter=2) is None
    assert everything(log) == before


def test_a_number_that_was_left_out_is_no_repetition(log: Log) -> None:
    log.append(b"a5", count=1, writer="a", counter=5)
    with pytest.raises(Diverged):
        log.append(b"a3", count=1, writer="a", counter=3)


def test_the_last_append_of_a_writer_is_remembered_for_ever(log: Log) -> None:
    write(log, 1, 1, writer="a")
    write(log, 1, writer="b")
    log.trim(3)
    write(log, 1, 1, 1, 1, writer="b")  # sweeps
    assert log.append(b"a1", count=1, writer="a", counter=1) is None
    with pytest.raises(Diverged):
        log.append(b"a9", count=1, writer="a", counter=1)
    assert log.append(b"a2", count=1, writer="a", counter=2) is not None
    with pytest.raises(Diverged, match="trimmed that entry"):
        log.append(b"a1", count=1, writer="a", counter=1)


def test_each_writer_has_its_own_counter_and_may_skip_numbers(log: Log) -> None:
    assert log.append(b"a", count=1, writer="a", counter=100) == 0
    assert log.append(b"b", count=1, writer="b", counter=0) == 1
    assert log.append(b"a", count=1, writer="a", counter=99, replays=True) is None
    assert (log.counter("a"), log.counter("b"), log.counter("c")) == (100, 0, -1)
    assert (log.writers(), log.writers(CONTROL)) == ({"a": 100, "b": 0}, {})


def test_reading_a_range(log: Log) -> None:
    write(log, 1, 1, 1, 1)
    positions = {(s, e): [entry.position for entry in log.read(s, e)] for s in range(6) for e in (None, *range(6))}
    assert positions == {(s, e): list(range(s, 4 if e is None else min(e, 4))) for s, e in positions}


def test_lanes_are_independent(log: Log) -> None:
    write(log, 1, 2, 3)
    write(log, 7, lane=CONTROL)
    assert (log.tail(DATA), log.tail(CONTROL)) == (3, 1)
    assert (log.counter("a", DATA), log.counter("a", CONTROL)) == (2, 0)
    assert (log.backlog(0, DATA), log.backlog(0, CONTROL)) == (6, 7)
    log.trim(2, DATA)
    assert (log.head(DATA), log.head(CONTROL)) == (2, 0)
    assert log.read(0, lane=CONTROL) == [Entry(0, 7, b"a0")]


def test_what_was_trimmed_cannot_be_asked_for(log: Log) -> None:
    write(log, 1, 1, 1, 1)
    log.trim(2)
    assert log.read(2, 3) == [Entry(2, 1, b"a2")]
    assert log.read(2, 1) == log.read(3, 0) == []
    for ask in (lambda: log.read(1), lambda: log.read(0, 1), lambda: log.advance(1, 5), lambda: log.backlog(0)):
        with pytest.raises(Trimmed) as caught:
            ask()
        assert caught.value.head == 2


def test_trim_moves_the_head_neither_backwards_nor_beyond_the_tail(log: Log) -> None:
    write(log, 1, 1, 1)
    log.trim(2)
    log.trim(1)
    log.trim(-5)
    assert (log.head(), log.tail()) == (2, 3)
    log.trim(99)
    assert (log.head(), log.tail()) == (3, 3)


def test_counters_and_tail_survive_the_trimming_of_everything(log: Log) -> None:
    write(log, 2, 2)
    log.trim(2)
    assert (log.head(), log.tail(), log.read(2), log.backlog(2), log.advance(2, 9)) == (2, 2, [], 0, 2)
    assert log.append(b"a1", count=2, writer="a", counter=1) is None
    assert log.append(b"new", count=5, writer="a", counter=2) == 2
    assert (log.read(2), log.backlog(2)) == ([Entry(2, 5, b"new")], 5)


def test_a_trimmed_log_goes_on_where_it_was(log: Log) -> None:
    for _ in range(5):
        write(log, 3, 0, 2)
        log.trim(log.tail() - 1)
    assert (log.head(), log.tail(), log.backlog(14)) == (14, 15, 2)
    write(log, 1, 1)
    assert [entry.blob for entry in log.read(14)] == [b"a14", b"a15", b"a16"]
    assert (log.backlog(14), log.advance(14, 3)) == (4, 16)


def test_within_takes_what_fits_and_at_least_one_entry(log: Log) -> None:
    for counter, size in enumerate((10, 5, 30, 1)):
        log.append(b"x" * size, count=1, writer="w", counter=counter)
    reach = {(0, 0): 1, (0, 14): 1, (0, 15): 2, (0, 44): 2, (0, 45): 3, (0, 46): 4, (0, 99): 4, (2, 3): 3, (4, 9): 4}
    assert {(start, size): log.within(start, size) for start, size in reach} == reach
    log.trim(2)
    with pytest.raises(Trimmed):
        log.within(1, 99)


def test_a_start_without_state_reads_what_is_in_the_control_lane_before_any_data(log: Log) -> None:
    for counter in range(3):
        log.append(b"x" * 10, count=1, writer="w", counter=counter)
        log.append(b"x" * 10, count=1, writer="w", counter=counter, lane=CONTROL)
    log.trim(1)
    assert (start := beginning(log)) == {"data": 1, "control": 0, "ahead": 3}
    assert (some := end_of(log, start, 1, 20)) == {"data": 1, "control": 2, "ahead": 3}
    log.append(b"y" * 10, count=1, writer="w", counter=3, lane=CONTROL)
    assert (rest := end_of(log, some, 1, 10)) == {"data": 2, "control": 3}
    assert end_of(log, rest, 9, 1) == {"data": 3, "control": 4}, "what comes later does not wait for each other"


def test_a_start_with_an_empty_control_lane_reads_data_at_once(log: Log) -> None:
    log.append(b"x", count=1, writer="w", counter=0)
    assert beginning(log) == {"data": 0, "control": 0}


def test_advance_takes_what_fits_and_at_least_one_entry(log: Log) -> None:
    write(log, 10, 1, 0, 2, 0, 50)
    reach = {(0, 0): 1, (0, 9): 1, (0, 10): 1, (0, 11): 3, (0, 12): 3, (0, 13): 5, (1, 3): 5, (1, 53): 6, (2, 0): 3}
    reach |= {(2, 1): 3, (5, 1): 6, (4, 0): 5, (0, 10**9): 6, (3, -1): 4, (6, 5): 6, (8, 5): 8}
    assert {(start, records): log.advance(start, records) for start, records in reach} == reach


def test_backlog_counts_records_not_entries(log: Log) -> None:
    write(log, 10, 0, 5)
    assert [log.backlog(start) for start in range(5)] == [15, 5, 5, 0, 0]


def test_a_reader_that_never_committed_has_everything_before_it(log: Log) -> None:
    write(log, 1, 2, 3)
    assert (log.committed("r"), log.readers(), log.lag("r"), log.lag("r", CONTROL)) == (None, {}, 6, 0)
    log.trim(1)
    assert (log.committed("r"), log.lag("r")) == (None, 5)


def test_a_reader_commits_its_positions_in_several_lanes_as_one(log: Log) -> None:
    write(log, 1, 2, 3)
    write(log, 7, lane=CONTROL)
    log.commit("r", {DATA: 2, CONTROL: 1})
    assert (log.committed("r"), log.committed("r", CONTROL)) == (2, 1)
    assert (log.lag("r"), log.lag("r", CONTROL)) == (3, 0)
    log.commit("r", {DATA: 3})
    assert (log.committed("r"), log.committed("r", CONTROL)) == (3, 1), "a lane that is not named stays as it was"


def test_each_reader_has_its_own_position(log: Log) -> None:
    write(log, 1, 1, 1)
    log.commit("r", {DATA: 3})
    log.commit("s", {DATA: 0})
    assert (log.readers(), log.readers(CONTROL)) == ({"r": 3, "s": 0}, {})
    assert (log.lag("r"), log.lag("s"), log.lag("t")) == (0, 3, 3)


def test_a_position_only_grows_unless_it_is_reset_on_purpose(log: Log) -> None:
    write(log, 1, 1, 1)
    log.commit("r", {DATA: 2})
    log.commit("r", {DATA: 1})
    log.commit("r", {DATA: 2})
    assert log.committed("r") == 2
    log.commit("r", {DATA: 1}, resets=True)
    assert (log.committed("r"), log.lag("r")) == (1, 2)
    log.commit("r", {DATA: 3}, resets=True)
    assert log.committed("r") == 3


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("position", [-1, 3])
def test_a_position_that_no_reader_can_have_come_to_is_refused(log: Log, position: int, resets: bool) -> None:
    write(log, 1, 1)
    log.commit("r", {DATA: 1})
    write(log, 1, lane=CONTROL)
    for lanes in ({CONTROL: 1, DATA: position}, {DATA: position, CONTROL: 1}):
        with pytest.raises(Refused, match=f"r cannot have read up to position {position} of DATA: it ends at 2"):
            log.commit("r", lanes, resets=resets)
        assert (log.readers(), log.readers(CONTROL)) == ({"r": 1}, {}), "all lanes or none"


def test_trimming_and_positions_leave_each_other_alone(log: Log) -> None:
    write(log, 1, 1, 1, 1)
    log.commit("r", {DATA: 3})
    assert log.head() == 0
    log.trim(2)
    log.commit("s", {DATA: 1})  # a reader may have come less far than was trimmed: nothing is left for it to read there
    assert (log.committed("r"), log.committed("s"), log.lag("r"), log.lag("s")) == (3, 1, 1, 2)
    log.trim(4)
    assert (log.committed("r"), log.lag("r"), log.lag("s"), log.lag("t")) == (3, 0, 0, 0)


def test_an_entry_cannot_hold_fewer_than_no_records(log: Log) -> None:
    before = everything(log)
    with pytest.raises(Refused):
        log.append(b"x", count=-1, writer="a", counter=0)
    assert everything(log) == before


def test_many_threads(log: Log) -> None:
    """Four writers, each repeating every append, a reader and a trimmer: no gap, no double, each writer in order."""
    each, errors, seen = 40, list[BaseException](), list[Entry]()

    def write_all(writer: str) -> None:
        for counter in [i // 2 for i in range(2 * each)]:
            log.append(f"{writer}{counter}".encode(), count=1, writer=writer, counter=counter)

    def read_all() -> None:
        while len(seen) < 4 * each and not errors:
            seen.extend(log.read(len(seen)))
            log.trim(len(seen) - 3)

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    works = [read_all, *(partial(write_all, writer) for writer in "abcd")]
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert [entry.position for entry in seen] == list(range(4 * each))
    blobs = [entry.blob.decode() for entry in seen]
    for writer in "abcd":
        assert [blob for blob in blobs if blob[0] == writer] == [f"{writer}{i}" for i in range(each)]


class Model(RuleBasedStateMachine):
    """A lane as a plain list of all entries ever written, which remembers its head and its writers' counters."""

    lanes, positions, writers = st.sampled_from(Lane), st.integers(-1, 20), st.sampled_from("ab")

    def __init__(self, make: Maker) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.log = make(Path(self.folder.name))
        self.entries: dict[Lane, list[Entry]] = {lane: [] for lane in Lane}
        self.heads = dict.fromkeys(Lane, 0)
        self.counters: dict[tuple[Lane, str], int] = {}
        self.taken: dict[tuple[Lane, str, int], Entry] = {}
        self.readers: dict[Lane, dict[str, int]] = {lane: {} for lane in Lane}

    @rule(lane=lanes, writer=writers, step=st.integers(-2, 3), count=st.integers(0, 2), blob=st.binary(max_size=1))
    def append(self, lane: Lane, writer: str, step: int, count: int, blob: bytes) -> None:
        last = self.counters.get((lane, writer), -1)
        counter = max(last + step, 0)
        append = partial(self.log.append, blob, count=count, writer=writer, counter=counter, lane=lane)
        if counter > last:
            self.entries[lane].append(Entry(len(self.entries[lane]), count, blob))
            self.counters[lane, writer] = counter
            self.taken[lane, writer, counter] = self.entries[lane][-1]
            assert append() == len(self.entries[lane]) - 1
            return
        taken = self.taken.get((lane, writer, counter))
        if taken is not None and taken.position < self.heads[lane] and counter != last:
            taken = None
        if taken is not None and taken[1:] == (count, blob):
            assert append() is append(replays=True) is None
            return
        with pytest.raises(Diverged):
            append()
        if taken is None or (counter < last and not compares_replays(self.log)):
            assert append(replays=True) is None
        else:
            with pytest.raises(Diverged):
                append(replays=True)

    @rule(lane=lanes, position=positions)
    def trim(self, lane: Lane, position: int) -> None:
        self.log.trim(position, lane)
        self.heads[lane] = max(self.heads[lane], min(position, len(self.entries[lane])))

    @rule(places=st.dictionaries(lanes, positions, min_size=1), reader=writers, resets=st.booleans())
    def commit(self, places: dict[Lane, int], reader: str, resets: bool) -> None:
        if not all(0 <= position <= len(self.entries[lane]) for lane, position in places.items()):
            with pytest.raises(Refused):
                self.log.commit(reader, places, resets=resets)
            return
        self.log.commit(reader, places, resets=resets)
        for lane, position in places.items():
            last = 0 if resets else self.readers[lane].get(reader, 0)
            self.readers[lane][reader] = max(position, last)

    @rule(lane=lanes, start=positions, end=st.none() | positions, records=st.integers(0, 40))
    def look(self, lane: Lane, start: int, end: int | None, records: int) -> None:
        if start < self.heads[lane]:
            for ask in (self.log.read, self.log.backlog, partial(self.log.advance, records=records)):
                with pytest.raises(Trimmed):
                    ask(start, lane=lane)
            return
        rest = self.entries[lane][start:]
        assert self.log.read(start, end, lane) == [e for e in rest if end is None or e.position < end]
        assert self.log.backlog(start, lane) == sum(e.records for e in rest)
        fits = [n for n in range(len(rest) + 1) if n <= 1 or sum(e.records for e in rest[:n]) <= records]
        assert self.log.advance(start, records, lane) == start + fits[-1]

    @rule()
    def close(self) -> None:
        self.log.close()

    @invariant()
    def agree(self) -> None:
        for lane in Lane:
            assert (self.log.head(lane), self.log.tail(lane)) == (self.heads[lane], len(self.entries[lane]))
            assert self.log.readers(lane) == self.readers[lane]
            for reader in "ab":
                position = self.readers[lane].get(reader)
                assert self.log.committed(reader, lane) == position
                unread = self.entries[lane][max(position or 0, self.heads[lane]) :]
                assert self.log.lag(reader, lane) == sum(entry.records for entry in unread)
        assert all(self.log.counter(writer, lane) == n for (lane, writer), n in self.counters.items())

    def teardown(self) -> None:
        self.log.close()
        self.folder.cleanup()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_behaves_like_a_list(backend: str) -> None:
    few = settings(max_examples=30, stateful_step_count=30, deadline=None)
    # A factory is what it takes; its annotation says otherwise.
    run_state_machine_as_test(lambda: Model(BACKENDS[backend]), settings=few)  # type: ignore[arg-type]
