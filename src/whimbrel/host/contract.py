"""The host contract: what runs an `Instance`. Sits between the logs and the site, which starts and stops hosts.

A host reads the inbox of its instance (the control lane first), applies the records to the instance's parts, hands
their output to the carrier (log/carrier.py), and makes state and position durable together, in its checkpoint. Two
implementations:

    micro-batch   a Spark query, whose state is in Spark's checkpoint (spark/query.py): the default
    inline        a thread of this process, whose checkpoint is a log (inline.py): no Spark, no JVM

Rules for every host (tests/contracts/test_host.py, tests/spark/test_query.py):

1. Batches: a host works in batches of its own size. It makes the end of a batch durable before it applies the batch,
   so that a repeated batch has the same records, and repeats it under the same number until it is committed.
2. Effects first: a position is committed, in the checkpoint and in the inbox, when the batch's output is in the logs.
3. Restart: everything durable is in the checkpoint and the logs. A host that died is replaced by a new one with the
   same arguments. A stopped host's checkpoint may be copied to another site, and continues there.
4. Ages: a host does not start from a checkpoint that does not match its logs (starting.py); it raises `Stale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from whimbrel.core.errors import UnknownName
from whimbrel.core.operator import Operator
from whimbrel.log import Appendable, Log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MICRO_BATCH, INLINE = "micro-batch", "inline"
HOSTS = (MICRO_BATCH, INLINE)

Prepare = Callable[["DataFrame"], "DataFrame"]
"""A stage's stateless part: any function of DataFrames that preserves Whimbrel's own columns."""


@dataclass(frozen=True)
class InstanceSpec:
    """The definition of an instance. `groups` and `partitions` are fixed by the first start from a checkpoint."""

    name: str
    stage: str
    operator: Operator
    schema: pa.Schema
    """The user's columns, as an Arrow schema: processes without Spark write the inbox's entries with it. Spark's own
    schema follows from it."""
    prepare: Prepare | None = None
    groups: int = 4
    """The number of parts."""
    partitions: int = 2
    """The number of Spark tasks that process them."""
    max_records: int = 20_000
    trigger: str = "0 seconds"
    """The minimum interval between batches; zero: as soon as there are records."""
    trim: bool = True

    @property
    def trigger_ms(self) -> float:
        """The minimum interval between batches, in milliseconds."""
        import pandas as pd  # a client that never runs an instance does not load it

        return float(pd.Timedelta(self.trigger.removeprefix("interval")).total_seconds() * 1000)


class Host(Protocol):
    """Runs one instance. Its methods may be called from several threads."""

    @property
    def spec(self) -> InstanceSpec:
        """The instance that it runs."""

    def start(self) -> None:
        """Start, from the checkpoint if there is one. Raises `Stale` if that does not match the logs."""

    def stop(self) -> None:
        """Stop after the current batch, and wait for the end. Does nothing if it never ran."""

    def renew(self) -> None:
        """Discard the checkpoint, with the state of all keys: the next start is a first one, after the records whose
        results are in the outbox."""

    def wait(self) -> None:
        """Wait until it serves: it has done a batch, and any configuration error has surfaced.

        Raises `Unavailable` if it has ended, or takes too long; `Overloaded` if a new start may succeed at once.
        """

    def hold(self, held: bool) -> None:
        """Pause before the next batch, or resume."""

    @property
    def is_active(self) -> bool:
        """Whether it runs."""

    @property
    def exception(self) -> Exception | None:
        """The error that ended it, if it was not stopped."""

    @property
    def contradiction(self) -> str | None:
        """The error that ended it, if a new start would only repeat it: its checkpoint does not match its logs."""

    @property
    def progress(self) -> Sequence[float]:
        """The durations of its recent batches, in milliseconds, oldest first."""

    @property
    def batch_ms(self) -> float:
        """Their median, 0 before the first."""

    @property
    def backlog(self) -> int:
        """The number of records waiting in the inbox."""

    @property
    def is_drained(self) -> bool:
        """Whether every entry of the inbox has been applied, and its output is written."""


class Saved(Protocol):
    """The checkpoint of an instance in a folder, which may not exist; the instance does not run."""

    @property
    def folder(self) -> Path:
        """Where it is."""

    @property
    def id(self) -> str | None:
        """Its name, chosen by its first start; a copy has the same one. None if there is none."""

    @property
    def planned(self) -> int:
        """The number of the last batch that was begun from it, -1 if there is none."""

    @property
    def committed(self) -> int:
        """The number of the last finished batch, -1 if there is none."""

    def end(self, batch: int) -> dict[str, int]:
        """The end of the last planned or of the last finished batch in the inbox, by lane; empty if it is unknown."""

    def needless(self, folder: str, names: Iterable[str]) -> set[str]:
        """For `shutil.copytree`: the files of a folder here that a start does not need."""


class Engine(Protocol):
    """What hosts of one kind share in a process, for instance a SparkSession."""

    warm_ups: int
    """How often every host does a batch, at the same time as the others, before the first record is ingested."""

    def host(
        self,
        spec: InstanceSpec,
        *,
        inbox: Path,
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        checkpoint: Path,
        appended: Callable[[], None],
        durable: bool,
    ) -> Host:
        """The host of an instance. `inbox_of`: the destination logs of its messages. `appended` is called when its
        outbox has a new entry. `durable`: the effects of a batch survive a power failure before they become visible."""

    def saved(self, folder: Path) -> Saved:
        """The checkpoint in a folder."""

    def check(self) -> None:
        """Raise `Unavailable` if hosts can no longer run in this process."""

    def stop(self) -> None:
        """Release what hosts share. They have been stopped."""


def check_host(name: str) -> str:
    """The name of a host. Raises `UnknownName` if there is no such host."""
    if name not in HOSTS:
        raise UnknownName("host", name, list(HOSTS))
    return name
