"""The state of one part in Spark's state store: a base, the deltas since, and a head that lists them.

The processor uses it. Spark's state store is the source of truth; a worker only caches what it last wrote, and checks
before each batch that no other worker has written since: the head holds a nonce for each delta. Tasks move between
workers, so usually a worker that has missed batches lacks one or two deltas and fetches just those. Only a worker that
does not have the part at all, or has something that was never committed (a failed batch), loads everything.

The store returns bytes at 45 MB/s, because Spark handles them as text on the way. So a large blob is also written
nearby, under its nonce, for the next worker that lacks it; a worker that finds none reads from the store.

Each call to the store is a round trip to the JVM: a batch makes three (read the head, write a delta, write the head).
Each state variable costs Spark several milliseconds per task, used or not: so there is one, and the head is in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from whimbrel.core import wire
from whimbrel.core.errors import Corrupt, Refused
from whimbrel.spark.nearby import Nearby

BLOB = StructType([StructField("blob", BinaryType())])
NUMBER = StructType([StructField("number", IntegerType())])
HEAD = -1

GROWTH = 5
"""A part is compacted when its stored bytes exceed this multiple of its size: that bounds what loading reads. Deltas
of new keys add to the size as well, so they alone never reach the multiple."""
FLOOR = 64 << 10
"""Bytes: a smaller part counts as this large."""
MOST = 512
"""Deltas are compacted when there are this many, however small: loading makes one call for each."""
REMEMBERED = 64
"""The number of latest nonces in the head: a worker that has missed more deltas loads everything."""


class Head(msgspec.Struct, array_like=True):
    """The list of what is stored: numbers `first` (the base) to `next - 1`, the latest of them with their nonces."""

    parts: int
    first: int = 0
    next: int = 0
    base_bytes: int = 0
    delta_bytes: int = 0
    nonces: list[int] = []


class Missing(NamedTuple):
    """What a worker lacks: `deltas` on top of its cached instance, or, if not `on_top`, of an empty one."""

    deltas: list[bytes]
    on_top: bool


class StoredPart:
    """The stored state of the group that is being processed."""

    def __init__(self, handle: StatefulProcessorHandle, nearby: Nearby) -> None:
        self._blobs = handle.getMapState("blobs", NUMBER, BLOB)
        self._nearby = nearby

    def open(self, parts: int) -> Head:
        """The current head. Raises `Refused` if the number of parts has changed."""
        found = self._blobs.getValue((HEAD,))
        head = wire.unpack(bytes(found[0]), Head) if found else Head(parts)
        if head.parts != parts:
            raise Refused(
                f"this checkpoint was made with {head.parts} groups, not {parts}: the number cannot change; "
                f"start with groups={head.parts}, or from an empty checkpoint"
            )
        return head

    def missing(self, head: Head, nonce: int) -> Missing:
        """What a worker with everything up to `nonce` (zero: nothing) must load."""
        on_top = nonce in head.nonces
        behind = len(head.nonces) - 1 - head.nonces.index(nonce) if on_top else head.next - head.first
        return Missing([self._delta(head, number) for number in range(head.next - behind, head.next)], on_top)

    def outgrown(self, head: Head, size: int, whole: Callable[[], int]) -> bool:
        """Whether to write a base, of at least `whole` bytes, instead of deltas of this size."""
        stored = head.base_bytes + head.delta_bytes + size
        grown = stored > GROWTH * max(head.base_bytes, FLOOR) and stored > GROWTH * whole()
        return grown or head.next - head.first >= MOST

    def append(self, head: Head, deltas: list[bytes]) -> int:
        """Store the changes of a batch; return the nonce of the last delta."""
        head.delta_bytes += sum(map(len, deltas))
        return self._store(head, deltas)

    def compact(self, head: Head, base: list[bytes]) -> int:
        """Store a new base in place of everything so far; return the nonce of the last blob."""
        self._blobs.clear()
        self._remove(head.nonces)
        head.first, head.base_bytes, head.delta_bytes = head.next, sum(map(len, base)), 0
        # A base does not list removed keys, so it cannot be loaded on top of a cached instance.
        head.nonces = []
        return self._store(head, base)

    def _delta(self, head: Head, number: int) -> bytes:
        back = head.next - number
        left = self._nearby.find(str(head.nonces[-back])) if back <= len(head.nonces) else None
        if left is not None:
            return left
        found = self._blobs.getValue((number,))
        if found is None:
            raise Corrupt(f"the state store lacks delta {number}, which its head lists")
        return bytes(found[0])

    def _store(self, head: Head, blobs: list[bytes]) -> int:
        for blob in blobs:
            self._blobs.updateValue((head.next,), (blob,))
            head.next += 1
            nonce = secrets.randbits(63) | 1
            self._remove(head.nonces[: 1 - REMEMBERED])
            head.nonces = [*head.nonces[1 - REMEMBERED :], nonce]
            self._nearby.leave(blob, str(nonce))
        self._blobs.updateValue((HEAD,), (wire.pack(head),))
        return head.nonces[-1]

    def _remove(self, nonces: list[int]) -> None:
        for nonce in nonces:
            self._nearby.remove(str(nonce))
