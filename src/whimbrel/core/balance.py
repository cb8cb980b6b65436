"""Load balancing: assigns bins and single keys to instances, so that each has about the same number of keys.

Pure planning, before a coordinator turns it into migrations. The item of assignment is an indivisible unit: a bin,
weighted by the known keys in it, or a key that is routed individually. Bins without known keys have no weight; they are
assigned by their count, so that future keys are distributed as well.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence

from whimbrel.core.keys import Selection, bin_of

Unit = int | str
"""A bin, or a key."""
Held = Mapping[str, Mapping[Unit, int]]
"""By instance: its units, each with its weight."""
Transfers = dict[tuple[str, str], set[Unit]]
"""By source and destination: the units to move."""


def weigh(selection: Selection, known: Iterable[str]) -> dict[Unit, int]:
    """The units of a selection, each with the number of known keys in it."""
    weights: dict[Unit, int] = {**dict.fromkeys(sorted(selection.bins), 0), **dict.fromkeys(sorted(selection.keys), 1)}
    for key in known:
        if key in selection and key not in selection.keys:
            weights[bin_of(key)] += 1
    return weights


def place(held: Held, to: Sequence[str]) -> Transfers:
    """Move all units of other instances to these, heaviest first, each to the instance with the least load then."""
    return _plan(held, to, even=False)


def level(held: Held, to: Sequence[str]) -> Transfers:
    """As `place`; then balance these instances with as few moves as needed.

    Afterwards none of them has a unit that the least loaded one could take without reaching the same load.
    """
    return _plan(held, to, even=True)


def select(units: Iterable[Unit], part: Selection) -> Selection:
    """Some units of a selection, as a selection."""
    bins = frozenset(unit for unit in units if isinstance(unit, int))
    keys = frozenset(unit for unit in units if isinstance(unit, str))
    return Selection(bins, keys, frozenset(key for key in part.without if bin_of(key) in bins))


Item = tuple[int, str, Unit]
"""Weight, a tie-breaker that makes the order deterministic, and the unit."""


class _Pile:
    """The units of one instance, lightest first."""

    def __init__(self, items: Iterable[Item]) -> None:
        self.items = sorted(items)
        self.load = sum(item[0] for item in self.items)

    def put(self, item: Item) -> None:
        insort(self.items, item)
        self.load += item[0]

    def give(self, gap: int) -> Item | None:
        """Remove the unit that closes a gap best: the heaviest of at most half of it, else the lightest if below it."""
        place = max(bisect_right(self.items, gap // 2, key=lambda item: item[0]) - 1, 0)
        if not self.items or self.items[place][0] >= gap:
            return None
        self.load -= self.items[place][0]
        return self.items.pop(place)


def _plan(held: Held, to: Sequence[str], *, even: bool) -> Transfers:
    transfers: Transfers = {}
    owner = {unit: name for name, units in held.items() for unit in units}
    for is_known in (True, False):
        items = {
            name: [(weight or 1, str(unit), unit) for unit, weight in units.items() if bool(weight) == is_known]
            for name, units in held.items()
        }
        piles = {name: _Pile(items.get(name, ())) for name in to}
        for item in sorted((item for name in items if name not in to for item in items[name]), reverse=True):
            min(piles.values(), key=_load).put(item)
        if even:
            _even_out(list(piles.values()))
        for name, pile in piles.items():
            for _, _, unit in pile.items:
                if owner[unit] != name:
                    transfers.setdefault((owner[unit], name), set()).add(unit)
    return transfers


def _even_out(piles: list[_Pile]) -> None:
    while True:  # terminates, because each iteration reduces the difference between two piles
        low = min(piles, key=_load)
        gifts = (high.give(high.load - low.load) for high in sorted(piles, key=_load, reverse=True))
        gift = next((gift for gift in gifts if gift is not None), None)
        if gift is None:
            return
        low.put(gift)


def _load(pile: _Pile) -> int:
    return pile.load
