"""The stateful processor: hosts one core `Instance` for each group, inside Spark.

It is between the shuffle and the sink. One call handles *all* keys of a group of a micro-batch: unbundle the records,
bring the group's instance up to the version in the state store, apply, store the changes. The output is a few rows per
group, whatever the number of records: one with all results and notices, one per destination inbox of its messages.
Large bodies go to a file nearby, and the row has the file's name.

The worker caches decoded instances between batches; stored.py explains why that is safe.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from whimbrel.core import wire
from whimbrel.core.instance import Instance
from whimbrel.core.record import Emissions
from whimbrel.log.carrier import encoded
from whimbrel.spark.bundle import unbundle
from whimbrel.spark.groups import group_ids
from whimbrel.spark.nearby import Nearby
from whimbrel.spark.shipping import Shipment, unship
from whimbrel.spark.stored import Head, StoredPart

OUTGOING, MESSAGES, URGENT = range(3)
"""The `_kind` of a row: results and notices, or messages to one destination (kind, bin and body of each, in order),
or only that the part is urgent."""
DDL = "_part int, _kind int, _to string, _count int, _body binary, _file string"


class Held(NamedTuple):
    """An instance in a worker's memory, and its version: the nonce of the last delta that it wrote or read."""

    instance: Instance
    nonce: int
    maker: tuple[Any, ...]
    """The arguments it was created with: another operator or another event type needs another instance."""


_held: dict[tuple[str, int], Held] = {}
"""By instance and part. Used only if its nonce is in the store's head, so a stale one does no harm."""


class GroupProcessor(StatefulProcessor):
    """One instance's processor; Spark calls `handleInputRows` once per group that has records, with all its bundles."""

    instance_type: ClassVar[type[Instance]] = Instance

    def __init__(self, name: str, shipment: Shipment, groups: int, nearby: str = "") -> None:
        """`nearby`: the folder for large blobs."""
        self.name, self.shipment, self.groups, self.nearby = name, shipment, groups, nearby

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._nearby = Nearby(self.nearby)
        self._stored = StoredPart(handle, self._nearby)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        part = group_ids(self.groups).index(key[0])
        # A batch creates many objects and hardly any cycles: a collection amid it would scan the whole cache in vain.
        gc.disable()
        try:
            bundles = [(row._order, self._nearby.blob(row._bundle, row._file)) for row in rows]
            emissions, instance = self._apply(part, bundles)
            outgoing, messages = encoded(emissions, part, instance.table.state_bytes)
            if outgoing is not None:
                yield self._row(part, OUTGOING, "", len(emissions.results), outgoing)
            for to, ours in messages.items():
                yield self._row(part, MESSAGES, to, len(ours), wire.encode(ours))
            if instance.is_urgent:
                yield self._row(part, URGENT, "", 0, b"")
        finally:
            gc.enable()

    def _row(self, part: int, kind: int, to: str, count: int, body: bytes) -> Row:
        file = self._nearby.leave(body)
        body = b"" if file else body
        return Row(_part=part, _kind=kind, _to=to, _count=count, _body=body, _file=file)

    def _apply(self, part: int, bundles: list[tuple[int, bytes]]) -> tuple[Emissions, Instance]:
        """One batch of one part: load missing deltas, apply, store the changes."""
        records, event_type = unbundle(bundles)
        head = self._stored.open(self.groups)
        instance = self._instance(part, event_type, head)
        emissions = instance.apply(records)
        deltas = instance.deltas()
        if self._stored.outgrown(head, sum(map(len, deltas)), instance.table.weigh):
            nonce = self._stored.compact(head, instance.snapshot())
        else:
            nonce = self._stored.append(head, deltas)
        _held[self.name, part] = Held(instance, nonce, self._maker(event_type))
        return emissions, instance

    def close(self) -> None:
        pass

    def _maker(self, event_type: type) -> tuple[Any, ...]:
        return (self.shipment.digest, event_type, self.groups)

    def _instance(self, part: int, event_type: type, head: Head) -> Instance:
        """The part as the store has it. Removed from the cache, so that a failed batch leaves no half-updated one."""
        held = _held.pop((self.name, part), None)
        if held is not None and held.maker != self._maker(event_type):
            held = None
        missing = self._stored.missing(head, held.nonce if held else 0)
        if held is not None and missing.on_top:
            instance = held.instance
        else:
            instance = self.instance_type(self.name, unship(self.shipment), event_type, part=part, parts=self.groups)
        if missing.deltas:
            instance.load(missing.deltas)
        return instance
