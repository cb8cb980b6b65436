"""The sink: writes the output of an instance's micro-batch to the logs.

The last step inside Spark. It collects the few rows that the groups produced from the batch, and a carrier
(log/carrier.py) appends them. Spark replays a batch that it cannot prove to have finished, under the same batch id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pyspark.sql import DataFrame

from whimbrel.log import Appendable, Log
from whimbrel.log.carrier import Carrier
from whimbrel.log.readers import Offset
from whimbrel.spark.collect import collected
from whimbrel.spark.nearby import NOWHERE, Nearby
from whimbrel.spark.processor import MESSAGES, OUTGOING, URGENT

Ranges = Callable[[int], tuple[Offset, Offset]]
"""By batch id: start and end of a batch in its inbox. The start is empty if it is unknown."""


class Sink:
    """One instance's sink; `append` is its `foreachBatch` function."""

    def __init__(
        self,
        writer: Callable[[], str],
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        appended: Callable[[], None] = lambda: None,
        urge: Callable[[bool], None] = lambda is_urgent: None,
        nearby: Nearby = NOWHERE,
        ranges: Ranges = lambda batch_id: ({}, {}),
        operator: str = "the operator",
        synced: Callable[[], None] = lambda: None,
        rows_of: Callable[[Any], list[dict[str, Any]]] = collected,
    ) -> None:
        """`appended` is called after each batch with output, `urge` with whether any of its parts is urgent.
        `nearby`: the folder for large blobs. `operator`: its name, for errors. `synced` is called before
        anything is appended: with durability "power" it fsyncs the checkpoint of the batch. `rows_of`: the rows of a
        batch."""
        self._carrier = Carrier(writer, outbox, inbox_of, operator)
        self._ranges, self._synced = ranges, synced
        self._appended, self._urge, self._rows_of = appended, urge, rows_of
        self._nearby = nearby
        self._urgent: set[int] = set()

    def append(self, batch: DataFrame, batch_id: int) -> None:
        """Append the output of one batch. May be called again with the same batch and id."""
        rows = self._rows(batch)
        start, end = self._ranges(batch_id)
        self._synced()
        messages: dict[str, list[bytes]] = {}
        for row in rows:
            if row._kind == MESSAGES:
                messages.setdefault(row._to, []).append(row._body)
        outgoing = [row for row in rows if row._kind == OUTGOING]
        count = sum(row._count for row in outgoing)
        self._carrier.carry(batch_id, start, end, [row._body for row in outgoing], count, messages)
        if rows:
            self._note_urgent(rows)
            self._appended()

    def _rows(self, batch: DataFrame) -> list[Any]:
        """A batch's rows, by part. Through Arrow: `collect` handles bytes as text, which is five times slower."""
        rows = [SimpleNamespace(**row) for row in self._rows_of(batch)]
        for row in rows:
            row._body = self._nearby.blob(row._body, row._file)
        self._nearby.sweep()  # safe: Spark replays a batch from its source on
        return sorted(rows, key=lambda row: row._part)

    def _note_urgent(self, rows: Sequence[Any]) -> None:
        """Parts without rows in a batch keep their urgency."""
        before = self._urgent
        self._urgent = before - {row._part for row in rows} | {row._part for row in rows if row._kind == URGENT}
        if bool(self._urgent) != bool(before):
            self._urge(bool(self._urgent))
