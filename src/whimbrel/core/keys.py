"""Keys, bins and the sets of them that a move selects.

A key is a string. Its bin is a stable hash modulo 1,024: bins make bulk moves cheap, keys are the finest unit of
movement. A `KeyMap` has a value for *every* key (its owner, its epoch), stored as one value per bin and a short
dictionary of exceptions by key. A `Selection` names *some* keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from whimbrel.core import wire

BINS = 1024
EVERY_BIN = -1
"""The bin of a record that concerns every part of an instance: markers, ticks."""

NAMED_BYTES = 4 << 20
"""The maximum number of bytes of all keys of a stage that are routed one by one, not with their bin. A marker names at
most these, and must fit into a log entry."""

V = TypeVar("V")


@lru_cache(maxsize=1 << 20)
def bin_of(key: str) -> int:
    """The bin of a key: stable across processes, machines and versions (Python's `hash` is not)."""
    return xxh3_64_intdigest(key.encode()) % BINS


@lru_cache(maxsize=1 << 20)
def unit_of(key: str, split: int) -> int:
    """The unit of a key: its bin, split into `split` units by the rest of the hash. Units of one bin share `% BINS`."""
    return xxh3_64_intdigest(key.encode()) % (BINS * split)


def part_of(bin: int, parts: int) -> int:
    """Which of an instance's `parts` holds a bin."""
    return bin % parts


class Selection(msgspec.Struct, frozen=True):
    """The keys of `bins` without those of `without`, and the keys of `keys`."""

    bins: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def __contains__(self, key: str) -> bool:
        return key in self.keys or (bin_of(key) in self.bins and key not in self.without)

    def __bool__(self) -> bool:
        return bool(self.bins or self.keys)

    def overlaps(self, other: Selection) -> bool:
        """Whether some key, known or not, is in both."""
        return (
            bool(self.keys & other.keys)
            or any(key in other for key in self.keys)
            or any(key in self for key in other.keys)
            or bool(self.bins & other.bins)
        )

    def of_part(self, part: int, parts: int) -> Selection:
        """The keys that one of an instance's `parts` holds."""
        if parts == 1:
            return self
        named = (self.keys, self.without)
        keys = (frozenset(key for key in names if part_of(bin_of(key), parts) == part) for names in named)
        return Selection(frozenset(bin for bin in self.bins if part_of(bin, parts) == part), *keys)

    @property
    def named(self) -> frozenset[str]:
        """The keys that it names one by one."""
        return self.keys | self.without

    def union(self, other: Selection) -> Selection:
        """The keys of both."""
        apart = frozenset(key for key in self.without | other.without if key not in self and key not in other)
        return Selection(self.bins | other.bins, self.keys | other.keys, apart)


EVERYTHING = Selection(bins=frozenset(range(BINS)))


class KeyMap(Generic[V]):
    """A value for every key: one per bin, with exceptions by key."""

    def __init__(self, default: V) -> None:
        self.by_bin: list[V] = [default] * BINS
        self.by_key: dict[str, V] = {}
        self.changes = 0
        """Counts changes; incremented before and after each one. A reader that caches a value derived from this map
        compares it to decide whether to derive it again; one that reads during a change will."""
        self._kinds: tuple[int, frozenset[V]] = (0, frozenset([default]))
        """The distinct values of `by_bin`, as of a number of changes."""
        self._encoded: tuple[int, msgspec.Raw] | None = None
        """The content as `encode` returns it, as of a number of changes."""

    def __getitem__(self, key: str) -> V:
        return self.by_key[key] if key in self.by_key else self.by_bin[bin_of(key)]

    def put(self, selection: Selection, value: V) -> None:
        """Give every selected key this value, and leave every other key as it is."""
        self.changes += 1
        bins = selection.bins
        for key in selection.without:
            if bin_of(key) in bins:
                self.by_key.setdefault(key, self[key])
        for key in [key for key in self.by_key if bin_of(key) in bins and key not in selection.without]:
            del self.by_key[key]
        if len(bins) == BINS:
            self.by_bin[:] = [value] * BINS
        else:
            for bin in bins:
                self.by_bin[bin] = value
        for key in selection.keys:
            self.by_key[key] = value
        self.changes += 1
        if len(bins) == BINS:
            self._kinds = self.changes, frozenset([value])

    def lift(self: KeyMap[int], selection: Selection, least: int) -> None:
        """Give every selected key at least this value, and leave every other key as it is."""
        self.changes += 1
        bins = selection.bins
        for key in selection.without:
            if bin_of(key) in bins:
                self.by_key.setdefault(key, self[key])
        for bin in bins:
            if self.by_bin[bin] < least:
                self.by_bin[bin] = least
        for key in [key for key in self.by_key if bin_of(key) in bins and key not in selection.without]:
            self.by_key[key] = max(self.by_key[key], least)
            if self.by_key[key] == self.by_bin[bin_of(key)]:
                del self.by_key[key]
        for key in selection.keys:
            self.by_key[key] = max(self[key], least)
        self.changes += 1

    def values(self, selection: Selection | None = None) -> set[V]:
        """The values that selected keys have, or any keys."""
        if selection is None:
            return {*self._by_bin_values(), *self.by_key.values()}
        found = self._by_bin_at(selection)
        if self.by_key:
            found.update(value for key, value in self.by_key.items() if key in selection)
        if selection.keys:
            found.update(self[key] for key in selection.keys)
        return found

    def _by_bin_at(self, selection: Selection) -> set[V]:
        """The values at the selected bins; fast if all bins have the same, or all are selected."""
        if not selection.bins:
            return set()
        kinds = self._by_bin_values()
        if len(kinds) == 1 or len(selection.bins) == BINS:
            return set(kinds)
        return set(map(self.by_bin.__getitem__, selection.bins))

    def _by_bin_values(self) -> frozenset[V]:
        """The distinct values of all bins; derived again only after a change."""
        known = self._kinds
        changes = self.changes
        if known[0] != changes or changes % 2:
            known = self._kinds = (changes, frozenset(self.by_bin))
        return known[1]

    def select(self, value: V, among: Selection | None = None) -> Selection:
        """All keys that have this value, or all such keys of a selection, as a selection.

        Canonical: the same set of keys always results in the same selection.
        """
        within = EVERYTHING if among is None else among
        by_bin = self.by_bin
        kinds = self._by_bin_values()
        if value not in kinds:
            bins: frozenset[int] = frozenset()
        elif len(kinds) == 1:
            bins = within.bins
        else:
            bins = frozenset([bin for bin in within.bins if by_bin[bin] == value])
        by_key = list(self.by_key.items())  # a copy: another thread may call `put` meanwhile
        apart = {key for key, held in by_key if held != value and bin_of(key) in bins}
        without = apart | {key for key in within.without - within.keys if bin_of(key) in bins}
        singly = [*within.keys, *(key for key, held in by_key if held == value and key in within)]
        keys = (key for key in singly if self[key] == value and bin_of(key) not in bins)
        return Selection(bins, frozenset(keys), frozenset(without))

    def copy(self) -> KeyMap[V]:
        """A copy with the same values."""
        copied, (changes, kinds) = KeyMap(self.by_bin[0]), self._kinds
        copied.restore((self.by_bin, self.by_key))
        if changes == self.changes and changes % 2 == 0:
            copied._kinds = copied.changes, kinds
        return copied

    def dump(self) -> tuple[list[V], dict[str, V]]:
        """The content, as `restore` expects it: by bin, or a single value if all bins have the same."""
        kinds = self._by_bin_values()
        return list(kinds if len(kinds) == 1 else self.by_bin), dict(self.by_key)

    def encode(self) -> Any:
        """As `dump`, but encoded already, as a `msgspec.Raw`: for a snapshot. Encoded again only after a change."""
        known, changes = self._encoded, self.changes
        if known is None or known[0] != changes or changes % 2:
            known = self._encoded = (changes, msgspec.Raw(wire.encode(self.dump())))
        return known[1]

    def restore(self, dumped: tuple[list[V], dict[str, V]]) -> None:
        """Replace the content by a dump."""
        self.changes += 1
        by_bin, by_key = dumped
        self.by_bin, self.by_key = by_bin * BINS if len(by_bin) == 1 else list(by_bin), dict(by_key)
        self.changes += 1
        if len(by_bin) == 1:
            self._kinds = self.changes, frozenset(by_bin)


def selection_of(keys: Iterable[str] = (), bins: Iterable[int] = ()) -> Selection:
    """The selection of these keys and these bins."""
    return Selection(bins=frozenset(bins), keys=frozenset(keys))
