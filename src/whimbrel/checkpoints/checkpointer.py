"""The increments of one stage: ordered, uploaded to the central store, combined into checkpoints.

    every few seconds        BARRIER is appended between the records  Gateway.order_checkpoint
    CHECKPOINTED in a spool  versions are uploaded to the store       Uploader
    the gate confirms        the increment is committed, and counts   Outlet ──▶ confirm ──▶ Uploader ──▶ Gateway.count
    all parts have saved     a checkpoint is made, old ones deleted   Keeper ──▶ Gateway.keep_from

One thread does all of it, and no other component waits for it. So a slow or unreachable store is not overloaded: the
next increment is ordered when the last one is in the store; until then parts only track which keys have changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from whimbrel.checkpoints.central import CentralStore
from whimbrel.checkpoints.keeper import Keeper
from whimbrel.checkpoints.uploader import Uploader
from whimbrel.checkpoints.version import Owner, StoreStatus
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.record import Barrier, Checkpointed
from whimbrel.core.router import UNOWNED
from whimbrel.gateway.gateway import CHANGED, Gateway
from whimbrel.log import codec
from whimbrel.log.backoff import Backoff
from whimbrel.log.spool import IncrementSpool
from whimbrel.site.status import described

LOGGER = logging.getLogger("whimbrel.checkpoints")
FIRST, MOST = 0.2, 10.0
"""Seconds until the store is tried again: at first, and at most."""
PERSISTENCE = 10
"""While a stage is idle and not all is saved, only one in this many orders is sent."""
GRACE = 5.0
"""Seconds that `stop` waits for an upload in progress."""


class Checkpointer:
    """Takes the checkpoints of a stage with a central store, beside its gateway and its outlet."""

    def __init__(
        self,
        stage: str,
        parts_of: Callable[[str], int],
        gateway: Gateway,
        spool_of: Callable[[str], IncrementSpool],
        store: CentralStore,
        every: float,
        clock_us: Callable[[], int],
        run: str,
        *,
        uptime: Callable[[], float] = time.monotonic,
        barrier: Barrier = CHANGED,
    ) -> None:
        """`parts_of`, `spool_of`: the number of parts of an instance, and the spool of its increments. `every`: seconds
        between two checkpoints. `run`: a name that no other data directory has. `uptime`: a monotonic clock in
        seconds. `barrier`: the BARRIER that orders a checkpoint."""
        self.stage, self._parts_of, self.store, self.keeper = stage, parts_of, store, Keeper(store, stage)
        self.backoff = Backoff(f"the central store of {stage}", LOGGER, first=FIRST, most=MOST)
        self._gateway, self._spool_of, self._every, self._clock_us = gateway, spool_of, every, clock_us
        self._uptime, self._barrier = uptime, barrier
        self._run_name, self._since = run, -1
        self._instances: list[str] = []
        self._uploaders: dict[str, Uploader] = {}
        self._was_away = False
        self._committed: set[tuple[str, int]] = set()
        """The parts that have saved since the last checkpoint."""
        self._number = gateway.ingress.counter("increments")
        self._ordered, self._idle = -1, 0
        """The log position of the last order, and for how many periods it has been the last entry."""
        self._next = uptime() + every
        self._is_asked, self._wake, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"increments-{stage}", daemon=True)
        gateway.keep_from(-1)  # until the existing checkpoints are known

    def start(self) -> None:
        """Start the thread; it begins with what an earlier run left."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, without waiting long for a store that does not answer; the next start uploads the rest."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(GRACE)

    def place(self, instances: list[str]) -> None:
        """Set the instances that save. One that has left owns no keys, and others have saved those it had."""
        self._instances = instances

    def wake(self) -> None:
        """Wake the thread: a confirmed increment is not in the store yet."""
        self._wake.set()

    def order(self) -> None:
        """Order an increment of all parts now."""
        self._is_asked.set()
        self._wake.set()

    def status(self) -> StoreStatus:
        """The status of the store."""
        return StoreStatus(
            checkpoint=self.keeper.number or None,
            made_us=self.keeper.made_us or None,
            horizon=self._gateway.horizon(),
            unsaved=self._gateway.behind_horizon(),
            under_way_bytes=sum(one.spool.under_way for one in list(self._uploaders.values())),
            error=described(self.backoff.error),
        )

    # ── Work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Do all work that is due now."""
        if self._since < 0:
            self._since = self._claim()
        if self._was_away:
            self._check_there()
            self._uploaders, self._was_away = {}, False
        self.keeper.look()
        instances = self._instances
        self._uploaders = {name: self._uploaders.get(name) or self._uploader(name) for name in instances}
        for uploader in self._uploaders.values():
            uploader.step()
        owners = self._gateway.owners()
        parts = {name: self._parts_of(name) for name in owners if name != UNOWNED}
        # Keys without an owner are not saved by any part: a checkpoint would cover records that it lacks.
        if UNOWNED not in owners and self._committed >= {(name, part) for name in parts for part in range(parts[name])}:
            self.keeper.step(parts, self._clock_us(), self._gateway.horizon())
            self._committed.clear()
        self._gateway.keep_from(self.keeper.horizon)
        if self._is_asked.is_set() or self._uptime() >= self._next:
            self._order()

    def _check_there(self) -> None:
        """Raise `Unavailable` if the store is unavailable. Objects written meanwhile are in a folder that the store
        will be mounted over: they do not count, and are uploaded again from the spools."""
        try:
            self.store.check_there(self.stage)
        except Unavailable:
            self._was_away = True
            raise

    def _claim(self) -> int:
        """Ensure that this run owns the stage's states in the store; return the first increment that belongs there.

        An empty store gets all keys. Parts that have never saved send all keys anyway; otherwise that is ordered, and
        the store is claimed after it: a crash between the two must not leave a claimed store with fewer keys.
        """
        owner = self.store.owner(self.stage)
        if owner is None:
            owner = Owner(self._run_name, 0 if self._number < 0 else self._order_increment(anew=True) * codec.ROWS)
            self.store.claim(self.stage, owner)
        if owner.run != self._run_name:
            raise Refused(
                f"the states of {self.stage} in this store belong to another run, with another data directory: "
                "use another store, or delete them"
            )
        return owner.since

    def _order_increment(self, *, anew: bool = False) -> int:
        self._number += 1
        self._ordered = (
            self._gateway.order_checkpoint(self._number, msgspec.structs.replace(self._barrier, anew=anew)) or 0
        )
        return self._ordered

    def _order(self) -> None:
        """Order an increment, unless nothing was appended since the last order: then all parts are idle, and stay so.

        The order is repeated after a while only if not everything is covered: keys may have been in transit.
        """
        self._next = self._uptime() + self._every
        is_idle = self._gateway.ingress.tail() == self._ordered + 1
        self._idle = self._idle + 1 if is_idle else 0
        is_due = self._idle % PERSISTENCE == 0 and not self._gateway.has_saved
        if self._is_asked.is_set() or is_due:
            self._is_asked.clear()
            self._order_increment()

    def _uploader(self, name: str) -> Uploader:
        spool, parts = self._spool_of(name), self._parts_of(name)
        return Uploader(self.stage, name, parts, spool, self.store, self._count, self._since)

    def _count(self, saved: Checkpointed) -> None:
        self._check_there()
        self._gateway.count(saved)
        self._committed.add((saved.instance, saved.part))

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self.step()
            except Exception as error:  # the store is unavailable, or an operator must repair it
                self._stopping.wait(self.backoff.failed(error))
            else:
                self.backoff.succeeded()
                self._wake.wait(max(self._next - self._uptime(), 0.0))
