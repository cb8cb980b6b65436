"""Peers in other processes, as the orchestrator sees them: address, liveness, last reported status of each.

unheard ──beat──▶ alive ──3 s of silence──▶ suspect ──7 s more──▶ dead ──beat──▶ alive

A process that is only stopped (SIGSTOP, a suspended machine) keeps its connections, and a caller would wait for its
answer. So once a site is dead, pending calls to it are given up and new ones are not sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as await_all
from typing import Any, TypeVar

from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.names import GATEWAY
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Move
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore
from whimbrel.orchestrator.known_keys import Seen
from whimbrel.orchestrator.ports import GatewayBeat, GatewayPort, GatewayStatus, SiteBeat, SitePort
from whimbrel.rpc.access import Credential
from whimbrel.rpc.remote import CONNECT, remote
from whimbrel.rpc.tls import Tls
from whimbrel.site.status import SiteStatus

T = TypeVar("T")
SUSPECT, DEAD = 3.0, 10.0
"""Seconds without a heartbeat until a peer is suspect, and dead."""
START = 60.0
"""Seconds that a peer has until its first heartbeat: a JVM starts."""
LOOK = 0.05
"""Seconds between two checks whether a called peer is dead by now."""
SLOW = {"start": 300.0, "stop": 120.0, "take": 3600.0}
"""Seconds that the answers of a site may take: a JVM starts, a batch ends, a checkpoint is copied."""
SLOW_GATEWAY = {"command": 600.0, "load": 600.0, "fence": 30.0}
"""And those of the gateway: a log is replayed, a store is read."""


class Peer:
    """A role in another process."""

    def __init__(
        self,
        name: str,
        suspect: float = SUSPECT,
        dead: float = DEAD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._suspect, self._dead, self._clock = name, suspect, dead, clock
        self._url: str | None = None
        self._since = self._clock()
        self.life: str | None = None
        """A new value after each start of the peer; None before its first heartbeat."""

    def note_beat(self, life: str, url: str) -> None:
        """Record a heartbeat and the peer's address."""
        self.life, self._url, self._since = life, url, self._clock()

    @property
    def silence(self) -> float:
        """The seconds since the last heartbeat."""
        return self._clock() - self._since

    def forgive(self) -> None:
        """The orchestrator itself was stopped: count the silence from now."""
        self._since = self._clock()

    @property
    def is_gone(self) -> bool:
        """Whether the peer is dead, and not only slow to start."""
        return self.silence >= (self._dead if self.life is not None else max(self._dead, START))

    @property
    def state(self) -> str:
        """`unheard`, `alive`, `suspect` or `dead`."""
        if self.silence >= self._dead:
            return "dead"
        if self.life is None:
            return "unheard"
        return "suspect" if self.silence >= self._suspect else "alive"

    def url(self) -> str:
        """The peer's address. Raises `Unavailable` before its first heartbeat."""
        if self._url is None:
            raise Unavailable(f"{self.name} has not sent a heartbeat yet; is its process running?")
        return self._url


class RemoteSite:
    """A site in another process."""

    def __init__(
        self,
        name: str,
        credential: Credential,
        suspect: float = SUSPECT,
        dead: float = DEAD,
        tls: Tls | None = None,
    ) -> None:
        self.peer = Peer(name, suspect, dead)
        self._there = remote(SitePort, self.peer.url, credential, SLOW, tls)
        self._status = SiteStatus()
        self._stuck: set[threading.Thread] = set()
        """Calls that were given up and may still run."""
        self.starting = threading.Lock()
        """Held while the orchestrator decides whether an instance runs there, until that is carried out."""

    def note_beat(self, beat: SiteBeat) -> None:
        """Record a heartbeat and the status in it."""
        self.peer.note_beat(beat.life, beat.url)
        self._status = beat.status

    def _ask(self, call: Callable[..., T], *values: Any) -> T:
        """Make a call that is given up when the site is dead. It may have been executed then."""
        if self.peer.state == "dead":
            raise Unavailable(f"site {self.peer.name} is dead: no heartbeat for {self.peer.silence:.0f} s")
        return self._retrying(call, *values)

    def _retrying(self, call: Callable[..., T], *values: Any) -> T:
        self._stuck = {thread for thread in self._stuck if thread.is_alive()}
        if self._stuck and self.peer.state == "dead":
            raise Retry(f"site {self.peer.name} is dead, and has not answered yet")
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(*values))
            except BaseException as error:
                answer.set_exception(error)

        thread = threading.Thread(target=ask, name=f"asking {self.peer.name}", daemon=True)
        thread.start()
        deadline = time.monotonic() + CONNECT + 1
        while not await_all([answer], LOOK).done:
            if self.peer.state == "dead" and time.monotonic() > deadline:
                self._stuck.add(thread)
                raise Retry(f"site {self.peer.name} is dead: it has not answered")
        return answer.result()

    def start(self, instance: str, wait: bool = True, anew: bool = False) -> None:
        self._ask(self._there.start, instance, wait, anew)

    def stop(self, instance: str) -> None:
        with self.starting:
            try:
                self._retrying(self._there.stop, instance)
            except Unavailable:
                if self.peer.state != "dead":
                    raise
                # No process has been there for long: nothing runs there.

    def take(self, instance: str, origin: str) -> int:
        return self._ask(self._there.take, instance, origin)

    def place(self, places: dict[str, str]) -> None:
        self._ask(self._there.place, places)

    def send(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        self._ask(self._there.send, source, destination, blob, count, writer, counter)

    def carry(self, to: str, size: int) -> float:
        return self._ask(self._there.carry, to, size)

    def cut(self, other: str, is_cut: bool = True) -> None:
        self._ask(self._there.cut, other, is_cut)

    def is_idle(self) -> bool:
        return self._ask(self._there.is_idle)

    def failed(self) -> dict[str, str]:
        return self._status.failed

    def status(self) -> SiteStatus:
        return self._status if self.peer.state != "dead" else SiteStatus(error=f"site {self.peer.name} is dead")


class RemoteGateway:
    """The gateway in another process."""

    def __init__(
        self,
        credential: Credential,
        suspect: float = SUSPECT,
        dead: float = DEAD,
        tls: Tls | None = None,
        name: str = GATEWAY,
    ) -> None:
        self.peer = Peer(name, suspect, dead)
        self._there = remote(GatewayPort, self.peer.url, credential, SLOW_GATEWAY, tls)
        self._status = GatewayStatus()

    def note_beat(self, beat: GatewayBeat) -> None:
        """Record a heartbeat and the status in it."""
        self.peer.note_beat(beat.life, beat.url)
        self._status = beat.status

    def command(self, stage: str, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        self._there.command(stage, command)

    def check_restore(self, stage: str, checkpoint: int | None) -> None:
        self._there.check_restore(stage, checkpoint)

    def fence(self, stage: str, move: Move) -> None:
        self._there.fence(stage, move)

    def load(self, stage: str, move: Move, checkpoint: int | None) -> Loaded:
        return self._there.load(stage, move, checkpoint)

    def checkpoints(self, stage: str) -> list[int]:
        return self._there.checkpoints(stage)

    def place(self, stage: str, instances: dict[str, str]) -> None:
        self._check_heard()
        self._there.place(stage, instances)

    def save(self, stage: str) -> bool:
        return self._there.save(stage)

    def order_checkpoint(self, stage: str) -> None:
        self._there.order_checkpoint(stage)

    def has_applied(self, stage: str, instance: str) -> bool:
        return self._there.has_applied(stage, instance)

    def has_delivered(self, stage: str, instance: str) -> bool:
        return self._there.has_delivered(stage, instance)

    def _check_heard(self) -> None:
        """Raise `Unavailable` at once if it is dead: a call that is made to many, and often, must not wait for one."""
        if self.peer.state == "dead":
            raise Unavailable(f"{self.peer.name} is dead: no heartbeat for {self.peer.silence:.0f} s")

    def keys(self, stage: str, start: int) -> Seen:
        self._check_heard()
        return self._there.keys(stage, start)

    def is_idle(self) -> bool:
        return self._there.is_idle()

    def cut(self, other: str, is_cut: bool = True) -> None:
        self._there.cut(other, is_cut)

    def remove(self, instance: str) -> None:
        self._there.remove(instance)

    def is_drained(self, stage: str) -> bool:
        return self._there.is_drained(stage)

    def status(self) -> GatewayStatus:
        return self._status
