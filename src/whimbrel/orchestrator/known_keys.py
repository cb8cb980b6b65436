"""The keys that have come to a stage, and how many of them each instance has.

What each instance has is asked for by every `status()`. So it is not counted each time: keys that are new are added,
and when routes have changed it is put together from the number of keys in each bin and the keys that are routed singly.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

from whimbrel.core import wire
from whimbrel.core.keys import BINS, bin_of
from whimbrel.core.router import RouteTable
from whimbrel.log.chunks import chunked
from whimbrel.log.contract import Log


class KnownKeys:
    """Every key that has ever come to a stage, in the order of their first records: read from the gateway's log."""

    def __init__(self, log: Log) -> None:
        self._log, self._read = log, 0
        self._keys: dict[str, None] = {}
        self._by_bin = [0] * BINS
        """How many there are in each bin."""
        self._counts: Counter[str] = Counter()
        """By instance: how many it has, by the routes that were last asked for, without those that are uncounted."""
        self._uncounted: list[str] = []
        self._table: RouteTable | None = None
        self._changes = -1
        """Which routes these were."""
        self._lock = threading.Lock()

    def now(self) -> list[str]:
        """All of them."""
        with self._lock:
            self._look()
            return list(self._keys)

    def unknown(self, keys: Collection[str]) -> list[str]:
        """Those that have never come."""
        with self._lock:
            self._look()
            return sorted(key for key in keys if key not in self._keys)

    def counts(self, table: RouteTable) -> Counter[str]:
        """By instance: how many it has by these routes."""
        with self._lock:
            owners, changes = table.owners, table.owners.changes
            self._look()
            fresh, self._uncounted = self._uncounted, []
            if self._table is table and self._changes == changes:
                self._counts.update(owners[key] for key in fresh)
                return Counter(self._counts)
            self._counts = Counter()
            for owner, count in zip(owners.by_bin, self._by_bin, strict=True):
                self._counts[owner] += count
            for key, owner in list(owners.by_key.items()):  # a copy: another thread may put meanwhile
                if key in self._keys:
                    self._counts[owners.by_bin[bin_of(key)]] -= 1
                    self._counts[owner] += 1
            self._counts = +self._counts
            self._table, self._changes = table, changes
            return Counter(self._counts)

    def _look(self) -> None:
        """Read what is new."""
        for entry in chunked(self._log, self._read):
            for key in wire.unpack(entry.blob, list[str]):
                if key not in self._keys:
                    self._keys[key] = None
                    self._by_bin[bin_of(key)] += 1
                    if self._table is not None:
                        self._uncounted.append(key)
            self._read = entry.position + 1
