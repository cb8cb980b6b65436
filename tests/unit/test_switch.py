"""A move that switches at once, from end to end: nobody can tell from the results that there was one."""

from __future__ import annotations

from operator import attrgetter

import msgspec
import pytest

from tests.unit.records import data, delivered, mark, part, passed, reloaded, shipped, switch, switching
from whimbrel.core.keys import EVERY_BIN
from whimbrel.core.record import Emissions, Kind, Move, Ready, Record
from whimbrel.core.router import Begin, Cutover, Routed, Router, RouteTable

BEGIN, CUTOVER = Kind.BEGIN, Kind.CUTOVER
PUSH = switching("k", "j")
FETCH = switching("k", "j", order="demand")


@pytest.mark.parametrize("moved", [PUSH, FETCH], ids=["push", "fetch"])
def test_a_late_switch_is_ignored_at_both_ends(moved: Move) -> None:
    """A coordinator that died says it again, maybe when the move is over."""
    one, other = part("a"), part("b")
    one.apply([switch(moved), mark(BEGIN, moved, 10)])
    other.apply([switch(moved), mark(BEGIN, moved, 10), passed(moved), shipped(moved)])
    for end in (one, other):
        end.apply([mark(CUTOVER, moved, 11)])
        for late in (end, reloaded(end)):
            assert late.apply([switch(moved)]) == Emissions()
            assert late.moves.open == []


# ── The whole way ────────────────────────────────────────────────────────────────────────────────────────────────────

ROUTERS = ("r", "s")


class Line:
    """The parts of two instances and their inboxes; with `restarts`, each part is built from its deltas every time."""

    def __init__(self, parts: dict[str, int], restarts: bool) -> None:
        self.restarts = restarts
        self.parts = {name: [part(name, number, count) for number in range(count)] for name, count in parts.items()}
        self.deltas: dict[str, list[list[bytes]]] = {name: [[] for _ in many] for name, many in self.parts.items()}
        self.data: dict[str, list[Record]] = {name: [] for name in parts}
        self.control: dict[str, list[Record]] = {name: [] for name in parts}
        self.written = 0
        self.told: dict[str, list[tuple[str, int]]] = {}
        self.said: list[Emissions] = []

    def write(self, routed: Routed) -> None:
        for name, records in routed.items():
            self.written += 1
            self.data[name] += [record._replace(offset=(self.written << 20) + n) for n, record in enumerate(records)]

    def run(self, name: str, count: int) -> None:
        """One batch: the whole control lane, and so many records."""
        control, self.control[name] = self.control[name], []
        batch, self.data[name] = self.data[name][:count], self.data[name][count:]
        for number, one in enumerate(self.parts[name]):
            mine = [r for r in (*control, *batch) if r.bin == EVERY_BIN or r.bin % one.parts == one.part]
            out = one.apply(mine)
            # of two keys that open together it does not matter which one comes first
            self.said.append(msgspec.structs.replace(out, results=sorted(out.results, key=attrgetter("key"))))
            self.deltas[name][number] += one.deltas()
            if self.restarts:
                self.parts[name][number] = part(name, number, one.parts)
                self.parts[name][number].load(self.deltas[name][number])
            for message in sorted(out.messages, key=lambda message: message.kind):
                self.control[message.to].append(delivered(message))
            for result in out.results:
                self.told.setdefault(result.key, []).append((result.values["seen"], result.epoch))


KEYS = [f"key-{n}" for n in range(10)]


def travel(moved: Move | None, parts: tuple[int, int], restarts: bool = False) -> Line:
    """Thirty rounds of records and ticks of two routers, with a move amid them or none, past a source that lags."""
    line = Line(dict(zip("ab", parts, strict=True)), restarts)
    routers = {name: Router(name, RouteTable("a")) for name in ROUTERS}
    for turn in range(30):
        if turn == 8 and moved:
            for name in "ba":
                line.control[name].append(switch(moved))
        for number, (name, router) in enumerate(routers.items()):
            seq = turn * 10
            if turn == 9 + 3 * number and moved:
                line.write(router.apply(Begin(moved), seq))
            # three keys a router come often, one is seen once before the switch, one only after it; both have a timer
            rare = {1: KEYS[6 + number], 20: KEYS[8 + number]}
            often = [key for n, key in enumerate([f"other-{name}", *KEYS[number:6:2]]) if turn % (n + 1) == 0]
            said = dict.fromkeys(often, f"timer {turn + 4}" if turn % 3 == 0 else f"{turn}")
            if turn in rare:
                said[rare[turn]] = "timer 28"
            records = [data(key, seq + n, event, name, at=turn) for n, (key, event) in enumerate(said.items(), 1)]
            line.write(router.route(records))
            line.write(router.tick(seq + 9, turn, turn))
        line.run("a", 4)
        line.run("b", 100)
    for router in routers.values():
        line.write(router.tick(999, 999, 999))
    for cut in (False, True):
        while any(line.data.values()) or any(line.control.values()):
            line.run("a", 4)
            line.run("b", 100)
        if moved and not cut:
            assert sum(isinstance(notice, Ready) for out in line.said for notice in out.notices) == parts[1]
            for router in routers.values():
                line.write(router.apply(Cutover(moved), 1000))
    return line


VARIANTS = [
    switching(*KEYS, routers="rs", order=order, **(more | ({"step": 2} if more and order == "demand" else {})))
    for order in ("arrival", "key", "demand")
    for more in ({}, {"budget": 1, "chunk": 16})
]


@pytest.mark.parametrize("parts", [(1, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("moved", VARIANTS, ids=lambda moved: f"{moved.options}-{moved.budget}")
def test_a_switch_amid_a_stream_changes_no_result_and_a_restart_after_every_batch_nothing_at_all(
    moved: Move, parts: tuple[int, int]
) -> None:
    line, still = travel(moved, parts), travel(None, parts)
    assert line.told.keys() == still.told.keys()
    for key, results in line.told.items():
        assert [text for text, _ in results] == [text for text, _ in still.told[key]], key
        epochs = [epoch for _, epoch in results]
        assert epochs == sorted(epochs)
        assert (1 in epochs) == (key in moved.selection)
    assert sorted(key for one in line.parts["b"] for key in one.table.entries) == KEYS
    assert [one.table.waiting for many in line.parts.values() for one in many] == [{}] * sum(parts)
    assert travel(moved, parts, restarts=True).said == line.said
