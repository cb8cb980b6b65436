"""The keys that a stage has received, and how many of them each instance owns.

Every `status()` needs the counts per instance. So they are maintained incrementally: new keys are added, and when
routes have changed the counts are rebuilt from the number of keys in each bin and the individually routed keys.
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
    """Every key that a stage has ever received, in the order of their first records: read from the gateway's log."""

    def __init__(self, log: Log) -> None:
        self._log, self._read = log, 0
        self._keys: dict[str, None] = {}
        self._by_bin = [0] * BINS
        """The number of known keys in each bin."""
        self._counts: Counter[str] = Counter()
        """By instance: its number of keys by the routes of the last `counts` call, without those in `_uncounted`."""
        self._uncounted: list[str] = []
        self._table: RouteTable | None = None
        self._changes = -1
        """The change counter of those routes."""
        self._lock = threading.Lock()

    def now(self) -> list[str]:
        """All known keys."""
        with self._lock:
            self._look()
            return list(self._keys)

    def unknown(self, keys: Collection[str]) -> list[str]:
        """Those of these keys that have never been received."""
        with self._lock:
            self._look()
            return sorted(key for key in keys if key not in self._keys)

    def counts(self, table: RouteTable) -> Counter[str]:
        """By instance: its number of keys by these routes."""
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
            for key, owner in list(owners.by_key.items()):  # a copy: another thread may insert meanwhile
                if key in self._keys:
                    self._counts[owners.by_bin[bin_of(key)]] -= 1
                    self._counts[owner] += 1
            self._counts = +self._counts
            self._table, self._changes = table, changes
            return Counter(self._counts)

    def _look(self) -> None:
        """Read the new entries of the log."""
        for entry in chunked(self._log, self._read):
            for key in wire.unpack(entry.blob, list[str]):
                if key not in self._keys:
                    self._keys[key] = None
                    self._by_bin[bin_of(key)] += 1
                    if self._table is not None:
                        self._uncounted.append(key)
            self._read = entry.position + 1
