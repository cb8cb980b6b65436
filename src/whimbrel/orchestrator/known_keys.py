"""The keys that a stage has received, and how many of them each instance owns.

Every `status()` needs the counts per instance. So they are maintained incrementally: new keys are added, and when
routes have changed the counts are rebuilt from the number of keys in each bin and the individually routed keys.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Retry
from whimbrel.core.keys import BINS, bin_of
from whimbrel.core.router import RouteTable
from whimbrel.log.chunks import chunk
from whimbrel.log.contract import Log
from whimbrel.log.folder import Logs


class Seen(msgspec.Struct, frozen=True):
    """Keys from a gateway's log of keys, and the position to read on from."""

    keys: list[str]
    end: int


Follow = Callable[[int], Seen]
"""Reads a log of keys from a position on, at most a chunk. Raises `Retry` if it cannot be read now."""


def seen(log: Log, start: int) -> Seen:
    """The keys in a log from a position on, at most a chunk."""
    entries = chunk(log, start)
    keys = [key for entry in entries for key in wire.unpack(entry.blob, list[str])]
    return Seen(keys, entries[-1].position + 1 if entries else start)


def keys_in(logs: Logs) -> Callable[[str], list[Follow]]:
    """By stage: the log of keys in a folder of logs that this process can read."""
    return lambda stage: [partial(seen, logs.log(f"keys-{stage}"))]


class KnownKeys:
    """Every key that a stage has ever received, in the order of their first records: read from the gateways' logs."""

    def __init__(self, logs: Sequence[Follow]) -> None:
        """`logs`: of the homes of the stage's keys."""
        self._logs, self._read = logs, [0] * len(logs)
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
        """Read the new entries of the logs. What cannot be read now is read at the next call."""
        for number, follow in enumerate(self._logs):
            with suppress(Retry):
                while (found := follow(self._read[number])).end > self._read[number]:
                    self._add(found.keys)
                    self._read[number] = found.end

    def _add(self, keys: Collection[str]) -> None:
        for key in keys:
            if key not in self._keys:
                self._keys[key] = None
                self._by_bin[bin_of(key)] += 1
                if self._table is not None:
                    self._uncounted.append(key)
