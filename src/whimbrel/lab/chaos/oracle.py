"""The expected results of a chaos run: plain Python over its rows, without any code of the product.

The first stage is keyed by account. The second is keyed by shop: the order in which the records of two accounts reach a
shop is not guaranteed. So a result of the second stage contains the chain of its own pair of account and shop, whose
order is guaranteed, and also its `place` among all results of the shop, which must count 1, 2, 3, ... in the order of
delivery.

Timers: event times grow with the row number. A timer for time T fires after all records of its account that are older
than T and before all others, whichever tick or record advances the time. So its result is known exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from whimbrel.lab.bench.oracle import Delivered, Expected, compare
from whimbrel.lab.chaos import rows
from whimbrel.lab.chaos.rows import Load, row

INTAKE, LEDGER, SHOPS = "rows", "ledger", "shops"
"""The origins of dead letters: the source, and the two stages."""
ENTRY, TIMER = "entry", "timer"


class Letter(NamedTuple):
    """A dead letter, identified by its cause."""

    where: str
    row: int
    part: int = 0


@dataclass
class Account:
    """The state of one key of the first stage."""

    ballast: bytes
    count: int = 0
    digest: int = 0
    timers: list[int] = field(default_factory=list)


@dataclass
class Expectation:
    """The expected output of the first rows."""

    results: dict[Hashable, list[tuple[Hashable, Any]]] = field(default_factory=lambda: defaultdict(list))
    """By shop and account."""
    letters: Counter[Letter] = field(default_factory=Counter)
    accepted: int = 0
    """Rows that the intake must accept."""
    timers: int = 0
    """The number of results of timers."""


def expect(load: Load, count: int) -> Expectation:
    """Compute the expected output of the first `count` rows."""
    found = Expectation()
    accounts = {name: Account(Random(name).randbytes(load.weight(name))) for name in load.names}
    latest = 0
    for n in range(count):
        if rows.is_keyless(n) or rows.is_mistyped(n):
            found.letters[Letter(INTAKE, n)] += 1
            continue
        found.accepted += 1
        values = row(load, n)
        latest, account = values["at"], accounts[values["account"]]
        if not rows.is_dropped(values["amount"]):
            for part in range(rows.parts(values["amount"])):
                _take(found, load, account, values, part)
    for name, account in accounts.items():
        _fire(found, load, name, account, latest)
    return found


def _take(found: Expectation, load: Load, account: Account, values: Mapping[str, Any], part: int) -> None:
    """Process one row of an account, as `prepare` emits it."""
    n, amount = values["row"], values["amount"]
    _fire(found, load, values["account"], account, values["at"])
    if rows.ledger_raises(amount, part):
        found.letters[Letter(LEDGER, n, part)] += 1
        return
    account.count += 1
    probe = account.ballast[account.count % len(account.ballast)]
    account.digest = crc32(f"{account.digest} {n} {part} {amount} {probe}".encode())
    if rows.sets_timer(amount) and values["at"] + rows.DELAY_US not in account.timers:
        heappush(account.timers, values["at"] + rows.DELAY_US)
    if rows.shop_raises(amount, part):
        found.letters[Letter(SHOPS, n, part)] += 1
    else:
        _expect(found, values["shop"], values["account"], account, ENTRY, n, part)


def _fire(found: Expectation, load: Load, name: str, account: Account, now_us: int) -> None:
    while account.timers and account.timers[0] <= now_us:
        n = (heappop(account.timers) - rows.DELAY_US - rows.START_US) // rows.STEP_US
        found.timers += 1
        _expect(found, home(load, name), name, account, TIMER, n, 0)


def home(load: Load, account: str) -> str:
    """The shop that an account's timers go to."""
    return f"shop-{crc32(account.encode()) % load.shops:02}"


def _expect(found: Expectation, shop: str, name: str, account: Account, kind: str, n: int, part: int) -> None:
    chain = found.results[shop, name]
    pair = crc32(f"{chain[-1][1]['pair'] if chain else 0} {kind} {n} {part}".encode())
    values = {"count": account.count, "digest": account.digest, "pair": pair}
    chain.append(((kind, n, part), values))


# ── Comparison ───────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(expected: Expectation, delivered: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count results that are lost, duplicated, out of order or wrong. `delivered`: in the order of their release."""
    results = list(delivered)
    counts = compare(expected.results, map(_named, results))
    counts["wrong"] += _displaced(expected.results, results)
    return counts


def _named(result: Mapping[str, Any]) -> Delivered:
    values = {name: result[name] for name in ("count", "digest", "pair")}
    return (result["shop"], result["account"]), (result["kind"], result["row"], result["part"]), values


def _displaced(expected: Expected, results: Iterable[Mapping[str, Any]]) -> int:
    """Count places of a shop other than 1, 2, 3, ..., unless a result of the shop is lost, duplicated or out of order.

    If one is, it is counted already, and wrong places after it are only a consequence.
    """
    by_shop: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for result in results:
        by_shop[result["shop"]].append(result)
    found = 0
    for shop, mine in by_shop.items():
        wanted: dict[Hashable, Sequence[tuple[Hashable, Any]]] = {
            group: chain for group, chain in expected.items() if isinstance(group, tuple) and group[0] == shop
        }
        if not any(compare(wanted, map(_named, mine)).values()):
            found += sum(result["place"] != place for place, result in enumerate(mine, 1))
    return found


def judge_letters(expected: Expectation, found: Counter[Letter]) -> dict[str, int]:
    """Count dead letters that are missing, duplicated, and unexpected."""
    return {
        "lost": sum(1 for letter in expected.letters if not found[letter]),
        "duplicated": sum(count - 1 for letter, count in found.items() if letter in expected.letters and count > 1),
        "wrong": sum(count for letter, count in found.items() if letter not in expected.letters),
    }
