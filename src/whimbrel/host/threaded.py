"""An inline host with a thread of its own, as in production, and the engine that makes it.

The thread does a batch at most once per trigger interval, or at once if keys wait for a message. An error ends it, as
it ends a query of Spark: the site restarts it, from its checkpoint (site/site.py).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow as pa

from whimbrel.core.errors import Conflict, Diverged, Refused, Stale
from whimbrel.core.instance import Instance
from whimbrel.core.operator import Operator, takes_context
from whimbrel.core.record import Record
from whimbrel.host.checkpoint import FILE, SavedLog
from whimbrel.host.contract import INLINE, MICRO_BATCH, InstanceSpec, Prepare
from whimbrel.host.events import event_type_of, placed, plain_schema, records_of
from whimbrel.host.inline import TRIM_EVERY, InlineHost
from whimbrel.host.starting import await_batch, check_age, renew, wake_up
from whimbrel.log import Appendable, EmbeddedLog, Entry, Lane, Log
from whimbrel.log.private import make_folder
from whimbrel.log.readers import INSTANCE, is_drained

GLANCE = 0.02
"""Seconds between polls of the inbox while it is empty, or while it is too early for a batch."""
RECENT = 100
"""The number of batches whose durations are kept."""


class ThreadedHost:
    """Calls `InlineHost.step` whenever a batch is due. Satisfies `Host` (contract.py)."""

    def __init__(
        self,
        spec: InstanceSpec,
        *,
        inbox: Path,
        outbox: Log,
        inbox_of: Callable[[str], Appendable],
        checkpoint: Path,
        appended: Callable[[], None] = lambda: None,
        durable: bool = False,
    ) -> None:
        """`inbox` is the path of its log, `inbox_of` returns the destination logs of its messages."""
        check_stage(spec.stage, spec.prepare)
        takes_context(spec.operator)
        self.spec = spec
        self.exception: Exception | None = None
        self._folder, self._durable, self._outbox = Path(checkpoint), durable, outbox
        self._inbox = EmbeddedLog(inbox, durable=durable)
        self._inbox_of, self._appended = inbox_of, appended
        self._saves: Log | None = None
        self._pace = spec.trigger_ms / 1000
        self._took: deque[float] = deque(maxlen=RECENT)
        self._held = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ── Life cycle ───────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start, from the checkpoint if there is one."""
        if self.is_active:
            raise Conflict(f"instance {self.spec.name} is running already")
        check_age(SavedLog(self._folder), self.spec.name, self._inbox, self._outbox)
        make_folder(self._folder)
        self._saves = EmbeddedLog(self._folder / FILE, durable=self._durable)
        wake_up(self._inbox)
        host = self._host(self._saves)
        self.exception, self._held = None, False
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, args=[host], name=f"host-{self.spec.name}", daemon=True)
        self._thread.start()

    def _host(self, saves: Log) -> InlineHost:
        spec = self.spec
        schema = plain_schema(spec.schema)
        # Copied, as Spark does: an operator of the user's may keep something in itself.
        make = partial(_part, spec.name, deepcopy(spec.operator), event_type_of(schema), spec.groups)
        return InlineHost(
            spec.name,
            spec.groups,
            make,
            inbox=self._inbox,
            outbox=self._outbox,
            inbox_of=self._inbox_of,
            checkpoint=saves,
            records=partial(_records, schema),
            appended=self._appended,
            operator=type(spec.operator).__name__,
            max_records=spec.max_records,
            trim_every=TRIM_EVERY if spec.trim else 0,
        )

    def stop(self) -> None:
        """Stop after the current batch, and wait for the end."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._saves is not None:
            self._saves.close()  # leaves one file, which can be copied
        self._inbox.close()

    def renew(self) -> None:
        """Discard the checkpoint, with the state of all keys."""
        renew(self._inbox, self._outbox)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until it has done a batch. Appends a WAKE to the inbox, so that there is one to do."""
        await_batch(self, self._inbox, wake_up(self._inbox), timeout)

    def hold(self, held: bool) -> None:
        """Pause before the next batch, or resume."""
        self._held = held

    def _run(self, host: InlineHost) -> None:
        due = 0.0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                if self._held or not self._is_due(host, began, due) or not host.step():
                    self._stopping.wait(GLANCE)
                    continue
                self._took.append((time.monotonic() - began) * 1000)
                due = began + self._pace
        except Exception as error:  # the status shows it, and the site restarts the host
            self.exception = error
        finally:
            host.forget()

    def _is_due(self, host: InlineHost, now: float, due: float) -> bool:
        if now < due:
            return host.is_urgent and self._inbox.lag(INSTANCE, Lane.CONTROL) > 0
        return True

    # ── Monitoring ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_active(self) -> bool:
        """Whether it runs."""
        return self._thread is not None and self._thread.is_alive() and self.exception is None

    @property
    def contradiction(self) -> str | None:
        """The error that ended it, if a new start would only repeat it."""
        return str(self.exception) if isinstance(self.exception, Diverged | Stale) else None

    @property
    def progress(self) -> list[float]:
        """The durations of the recent batches, in milliseconds."""
        return list(self._took)

    @property
    def batch_ms(self) -> float:
        """Their median, 0 before the first."""
        return median(self.progress or [0.0])

    @property
    def backlog(self) -> int:
        """The number of records waiting in the inbox."""
        return self._inbox.lag(INSTANCE)

    @property
    def is_drained(self) -> bool:
        """Whether every entry of the inbox has been applied, and its output is written."""
        return is_drained(self._inbox)


def _part(name: str, operator: Operator, event_type: type, parts: int, part: int) -> Instance:
    return Instance(name, operator, event_type, part=part, parts=parts)


def _records(schema: pa.Schema, entry: Entry, lane: Lane) -> list[Record]:
    return records_of(pa.Table.from_batches([placed(entry, lane, schema)]))[0]


def check_stage(stage: str, prepare: Prepare | None) -> None:
    """Raise `Refused` if a stage needs Spark."""
    if prepare is not None:
        raise Refused(
            f"stage {stage} has a prepare, a function of Spark's DataFrames, which the host {INLINE!r} cannot run: "
            f"use host={MICRO_BATCH!r}, or do the same in the stage's operator"
        )


class InlineEngine:
    """Makes inline hosts, each with a thread; they share nothing."""

    warm_ups = 1
    host = staticmethod(ThreadedHost)
    saved = staticmethod(SavedLog)

    def check(self) -> None:
        """Nothing can be gone: a host that fails is restarted."""

    def stop(self) -> None:
        """Nothing is shared."""
