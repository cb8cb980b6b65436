"""Those in other processes, as the orchestrator knows them: where each is, whether it lives, what it said last.

unheard ──beat──▶ alive ──3 s of silence──▶ suspect ──7 s more──▶ dead ──beat──▶ alive
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from whimbrel.control.ports import GatewayBeat, GatewayPort, GatewayStatus, SiteBeat, SitePort
from whimbrel.control.remote import remote
from whimbrel.core.errors import Unavailable
from whimbrel.core.router import Abort, Begin, Cutover
from whimbrel.site.status import SiteStatus

SUSPECT, DEAD = 3.0, 10.0
"""Seconds of silence."""
SLOW = {"start": 300.0, "stop": 120.0, "take": 3600.0}
"""Seconds that the answers of a site may take: a JVM starts, a batch ends, a checkpoint is copied."""


class Peer:
    """Somebody in another process."""

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
        """Another one after each of its starts; None before it was heard."""

    def heard(self, life: str, url: str) -> None:
        """It lives, and is there."""
        self.life, self._url, self._since = life, url, self._clock()

    @property
    def silence(self) -> float:
        """For how many seconds it has not been heard."""
        return self._clock() - self._since

    @property
    def state(self) -> str:
        """`unheard`, `alive`, `suspect` or `dead`."""
        if self.silence >= self._dead:
            return "dead"
        if self.life is None:
            return "unheard"
        return "suspect" if self.silence >= self._suspect else "alive"

    def url(self) -> str:
        """Where it is. Raises `Unavailable` before it was heard."""
        if self._url is None:
            raise Unavailable(f"{self.name} has not been heard yet; is its process running?")
        return self._url


class RemoteSite:
    """A site in another process."""

    def __init__(self, name: str, token: str, suspect: float = SUSPECT, dead: float = DEAD) -> None:
        self.peer = Peer(name, suspect, dead)
        self._there = remote(SitePort, self.peer.url, token, SLOW)
        self._status = SiteStatus()
        self.starting = threading.Lock()
        """Held while it is decided whether an instance shall run there, and until it does or does not."""

    def heard(self, beat: SiteBeat) -> None:
        """It lives, and this is how it is."""
        self.peer.heard(beat.life, beat.url)
        self._status = beat.status

    def start(self, instance: str, wait: bool = True) -> None:
        self._there.start(instance, wait)

    def stop(self, instance: str) -> None:
        with self.starting:
            try:
                self._there.stop(instance)
            except Unavailable:
                if self.peer.state != "dead":
                    raise
                # Nobody is there, nor has been for long: nothing runs there.

    def take(self, instance: str, origin: str) -> int:
        return self._there.take(instance, origin)

    def place(self, places: dict[str, str]) -> None:
        self._there.place(places)

    def post(self, source: str, destination: str, blob: bytes, count: int, writer: str, counter: int) -> None:
        self._there.post(source, destination, blob, count, writer, counter)

    def carry(self, to: str, size: int) -> float:
        return self._there.carry(to, size)

    def cut(self, other: str, is_cut: bool = True) -> None:
        self._there.cut(other, is_cut)

    def is_idle(self) -> bool:
        return self._there.is_idle()

    def failed(self) -> dict[str, str]:
        return self._status.failed

    def status(self) -> SiteStatus:
        return self._status if self.peer.state != "dead" else SiteStatus(error=f"site {self.peer.name} is dead")


class RemoteGateway:
    """The gateway in another process."""

    def __init__(self, token: str, suspect: float = SUSPECT, dead: float = DEAD) -> None:
        self.peer = Peer("gateway", suspect, dead)
        self._there = remote(GatewayPort, self.peer.url, token)
        self._status = GatewayStatus()

    def heard(self, beat: GatewayBeat) -> None:
        """It lives, and this is how it is."""
        self.peer.heard(beat.life, beat.url)
        self._status = beat.status

    def command(self, stage: str, command: Begin | Cutover | Abort) -> None:
        self._there.command(stage, command)

    def place(self, stage: str, instances: list[str]) -> None:
        self._there.place(stage, instances)

    def save(self, stage: str) -> bool:
        return self._there.save(stage)

    def order_saving(self, stage: str) -> None:
        self._there.order_saving(stage)

    def has_delivered(self, stage: str, instance: str) -> bool:
        return self._there.has_delivered(stage, instance)

    def is_drained(self, stage: str) -> bool:
        return self._there.is_drained(stage)

    def status(self) -> GatewayStatus:
        return self._status
