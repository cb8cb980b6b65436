"""The increments of one stage: ordered, carried to the central store, made checkpoints of.

    every few seconds   BARRIER goes between the records            Gateway.order_checkpoint
    CHECKPOINTED in a spool    versions are put into the store          Uploader
    the gate confirms   the increment is committed, and counts         Outlet ──▶ confirm ──▶ Uploader ──▶ Gateway.count
    all parts have      a checkpoint is made, old ones given up  Keeper ──▶ Gateway.keep_from

One thread does all of it, and nobody waits for that. So a store that is slow or away is not asked for more than it can
take: the next increment is ordered when the last one is there, and until then parts only note which keys have changed.
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
from whimbrel.site.status import told

LOGGER = logging.getLogger("whimbrel.checkpoints")
FIRST, MOST = 0.2, 10.0
"""Seconds until the store is tried again: at first, and at most."""
PERSISTENCE = 10
"""Who is idle and has not saved everything is asked once in so many times."""
GRACE = 5.0
"""Seconds that `stop` waits for what is being carried."""


class Checkpointer:
    """What a stage with a central store has beside its gateway and its outlet."""

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
        """`parts_of`, `spool_of`: how many parts an instance has, and where its increments are spooled. `every`:
        seconds between two checkpoints. `run`: a name that no other data directory has. `uptime`: seconds that only
        grow. `barrier`: what a checkpoint is ordered with."""
        self.stage, self._parts_of, self.store, self.keeper = stage, parts_of, store, Keeper(store, stage)
        self.backoff = Backoff(f"the central store of {stage}", LOGGER, first=FIRST, most=MOST)
        self._gateway, self._spool_of, self._every, self._clock_us = gateway, spool_of, every, clock_us
        self._uptime, self._barrier = uptime, barrier
        self._run_name, self._since = run, -1
        self._instances: list[str] = []
        self._uploaders: dict[str, Uploader] = {}
        self._was_away = False
        self._committed: set[tuple[str, int]] = set()
        """Which parts have saved since the last checkpoint."""
        self._number = gateway.ingress.counter("increments")
        self._ordered, self._idle = -1, 0
        """Where the last order stands in the log, and how often since then nothing else had come."""
        self._next = uptime() + every
        self._is_asked, self._wake, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"increments-{stage}", daemon=True)
        gateway.keep_from(-1)  # until it is known which checkpoints there are

    def start(self) -> None:
        """Begin; what an earlier run left comes first."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, without waiting long for a store that does not answer; the next start carries what is left."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(GRACE)

    def place(self, instances: list[str]) -> None:
        """These instances save, and no other: who has left owns nothing, and others have saved what it had."""
        self._instances = instances

    def wake(self) -> None:
        """Something counts that is not in the store."""
        self._wake.set()

    def order(self) -> None:
        """Let everybody save, now."""
        self._is_asked.set()
        self._wake.set()

    def status(self) -> StoreStatus:
        """How far the store is."""
        return StoreStatus(
            checkpoint=self.keeper.number or None,
            made_us=self.keeper.made_us or None,
            horizon=self._gateway.horizon(),
            unsaved=self._gateway.behind_horizon(),
            under_way_bytes=sum(one.spool.under_way for one in list(self._uploaders.values())),
            error=told(self.backoff.error),
        )

    # ── At work ──────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """Do all there is to do now."""
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
        # While keys have lost their owner, nobody saves them: a checkpoint would promise what it has not.
        if UNOWNED not in owners and self._committed >= {(name, part) for name in parts for part in range(parts[name])}:
            self.keeper.step(parts, self._clock_us(), self._gateway.horizon())
            self._committed.clear()
        self._gateway.keep_from(self.keeper.horizon)
        if self._is_asked.is_set() or self._uptime() >= self._next:
            self._order()

    def _check_there(self) -> None:
        """Raise `Unavailable` if the store is away. What was put meanwhile lies in a folder that something else will be
        mounted over: it does not count, and is carried again from the spools."""
        try:
            self.store.check_there(self.stage)
        except Unavailable:
            self._was_away = True
            raise

    def _claim(self) -> int:
        """Make sure that these states are ours; return from which increment on.

        A store that has none gets all there is. Who has never saved does so anyway; else that is ordered, and then the
        store is ours: a death between the two must not leave it with less.
        """
        owner = self.store.owner(self.stage)
        if owner is None:
            owner = Owner(self._run_name, 0 if self._number < 0 else self._tell(anew=True) * codec.ROWS)
            self.store.claim(self.stage, owner)
        if owner.run != self._run_name:
            raise Refused(
                f"the states of {self.stage} in this store belong to another run, with another data directory: "
                "give another store, or delete them"
            )
        return owner.since

    def _tell(self, *, anew: bool = False) -> int:
        self._number += 1
        self._ordered = (
            self._gateway.order_checkpoint(self._number, msgspec.structs.replace(self._barrier, anew=anew)) or 0
        )
        return self._ordered

    def _order(self) -> None:
        """Let everybody save, unless nothing has come since they were told to: then all are idle, and shall stay so.

        Only if not everything is covered after a while they are told again: keys may have been under way.
        """
        self._next = self._uptime() + self._every
        is_idle = self._gateway.ingress.tail() == self._ordered + 1
        self._idle = self._idle + 1 if is_idle else 0
        is_due = self._idle % PERSISTENCE == 0 and not self._gateway.has_saved
        if self._is_asked.is_set() or is_due:
            self._is_asked.clear()
            self._tell()

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
            except Exception as error:  # the store is away, or waits for somebody to look at it
                self._stopping.wait(self.backoff.failed(error))
            else:
                self.backoff.succeeded()
                self._wake.wait(max(self._next - self._uptime(), 0.0))
