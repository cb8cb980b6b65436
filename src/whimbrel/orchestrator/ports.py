"""The interfaces between the three roles: orchestrator, gateway, site.

In `wb.run` a port is the object itself; between processes it is an RPC client of that object (remote.py). So every
method here follows three rules:

1. A call is idempotent: it may be retried, because its answer may have been lost.
2. `Unavailable` means that this call has done nothing; any other `Retry`, that it may have. Neither implies anything
   about an earlier call, made before the caller restarted.
3. Arguments and answers are plain data that `core/wire` can carry, typed by these signatures. Names of things are of
   type `Name`: a call with a name that could lead out of a folder is refused.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from whimbrel.checkpoints.version import StoreStatus
from whimbrel.core.errors import Refused
from whimbrel.core.names import GATEWAY, LONGEST, Name, Url, check_name, gateway_role, site_role
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Move, Report
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore
from whimbrel.log.backoff import HeldUp
from whimbrel.orchestrator.known_keys import Seen
from whimbrel.site.status import LinkStatus, SiteStatus


class SitePort(Protocol):
    """A site, as the orchestrator calls it. `Site` (site/site.py) documents each call."""

    def start(self, instance: Name, wait: bool = True, anew: bool = False) -> None:
        """Start an instance; returns when it serves, unless `wait` is false. Does nothing if it runs. `anew`: from an
        empty checkpoint. Raises `Unstarted` if the instance has done nothing since it was moved there, `Stale` if the
        checkpoint there does not match the instance's logs."""

    def stop(self, instance: Name) -> None:
        """Stop an instance and wait for its end. Does nothing if it does not run."""

    def take(self, instance: Name, origin: Name) -> int:
        """Copy the checkpoint of a stopped instance from another site; return its size."""

    def place(self, places: dict[Name, Name]) -> None:
        """Receive the site of every instance."""

    def send(self, source: Name, destination: Name, blob: bytes, count: int, writer: str, counter: int) -> None:
        """Append messages to an instance's inbox, behind all messages that an instance here has sent to it."""

    def carry(self, to: Name, size: int) -> float:
        """How many seconds a checkpoint of `size` bytes takes from here to another site."""

    def cut(self, other: Name, is_cut: bool = True) -> None:
        """Cut the link between here and another site, or restore it."""

    def is_idle(self) -> bool:
        """Whether nothing is in transit now on the links that begin here."""

    def failed(self) -> dict[str, str]:
        """Instances that keep dying, or that must not be started again, with the reason; as last reported."""

    def status(self) -> SiteStatus:
        """The status of the site, as last reported."""


class FlowStatus(msgspec.Struct, frozen=True):
    """The flow of records through a stage."""

    rate: float = 0.0
    """Incoming records per second, smoothed."""
    record_bytes: int = 0
    """The mean size of a record in bytes."""
    state_bytes: dict[str, int] = {}
    """By instance: its bytes of state, as its parts last reported."""
    refused: int = 0
    error: str | None = None
    store: StoreStatus | None = None
    """None: there is no central store."""


class GatewayStatus(msgspec.Struct, frozen=True):
    """The status of ingestion and delivery."""

    sent: int = 0
    delivered: int = 0
    dead_letters: dict[str, int] = {}
    """By reason."""
    ended: bool = False
    """Whether the source has ended and all its rows are ingested; never true for a source that has failed."""
    error: str | None = None
    """The permanent error of the source, or of the gateway's snapshots."""
    stages: dict[str, FlowStatus] = {}
    disk: str | None = None
    """Why nothing is ingested or delivered: the gateway's disk is full."""
    held_up: dict[str, HeldUp] = {}
    """What retries after an error: `source`, `outlet of <stage>`, `snapshots`, `sending to <place>`."""
    links: dict[str, LinkStatus] = {}
    """Of a place: the links that begin there, by direction, as `cloud->edge-1`."""


class GatewayPort(Protocol):
    """The gateway, as the orchestrator calls it: where records enter and results leave."""

    def command(self, stage: Name, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        """Append a command to a stage's ingress log, at a definite position between its records."""

    def check_restore(self, stage: Name, checkpoint: int | None) -> None:
        """Raise if keys cannot be restored: `Refused` without a store, `UnknownName` without that checkpoint, a `Stop`
        if the records after it are gone."""

    def fence(self, stage: Name, move: Move) -> None:
        """Refuse from now on all results of a lost instance for a move's keys. Raises `Retry` until that is durable."""

    def load(self, stage: Name, move: Move, checkpoint: int | None) -> Loaded:
        """Put the stored state of a fenced move's keys into its destination's inbox: the newest versions, or those of a
        checkpoint. Raises a `Stop` if the store cannot be read: an older checkpoint may be intact."""

    def checkpoints(self, stage: Name) -> list[int]:
        """The checkpoints that a stage's keys can be restored from, oldest first."""

    def place(self, stage: Name, instances: dict[Name, Name]) -> None:
        """Receive all instances of a stage, each with its site."""

    def save(self, stage: Name) -> bool:
        """Persist a snapshot of a stage's router, from which a replay then starts; False if a migration is open."""

    def order_checkpoint(self, stage: Name) -> None:
        """Order an increment of everything that has changed in a stage. Raises `Refused` without a central store."""

    def has_applied(self, stage: Name, instance: Name) -> bool:
        """Whether everything now in an instance's inbox has been applied, and its output is written."""

    def has_delivered(self, stage: Name, instance: Name) -> bool:
        """Whether all results of an instance are delivered now."""

    def keys(self, stage: Name, start: int) -> Seen:
        """The keys of a stage first seen here, from a position on; at most a chunk."""

    def is_idle(self) -> bool:
        """Whether the other places have everything that was sent to them from here."""

    def cut(self, other: Name, is_cut: bool = True) -> None:
        """Cut the emulated link from here to another place, or mend it."""

    def remove(self, instance: Name) -> None:
        """Remove the logs and checkpoints of an instance that has left."""

    def is_drained(self, stage: Name) -> bool:
        """Whether the instances have received the latest tick, and all their results are delivered now."""

    def status(self) -> GatewayStatus:
        """The status of the gateway, as last reported."""


class SiteBeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a site. `life` is a new value after each start; `url`: the site's address."""

    name: Name
    life: str
    url: Url
    status: SiteStatus


class GatewayBeat(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a gateway. `place`: where it is, if there are several."""

    life: str
    url: Url
    status: GatewayStatus
    place: str = ""


class OrchestratorPort(Protocol):
    """The orchestrator, as the gateway and the sites call it."""

    def receive(self, stage: Name, notice: Report) -> None:
        """Receive a notice of an instance."""

    def beat(self, beat: SiteBeat | GatewayBeat) -> None:
        """Receive a heartbeat."""


def check_names(caller: str, call: Any) -> None:
    """Raise `Refused` if a move in a call to the gateway has an invalid name. The type of a move cannot enforce this:
    inside the core, an increment is a move without a stage."""
    for field in call.__struct_fields__:
        value = getattr(call, field)
        move = value if isinstance(value, Move) else getattr(value, "move", None)
        if isinstance(move, Move):
            check_name("stage", move.stage)
            for instance in (move.source, move.destination, *move.parties):
                check_name("instance", instance, LONGEST)


def check_caller(caller: str, call: Any) -> None:
    """Raise `Refused` if a caller of the orchestrator uses another one's name. Only gateways forward notices."""
    beat = getattr(call, "beat", None)
    if beat is None:
        if not caller.startswith(GATEWAY):
            raise Refused(f"{type(call).__name__} may be called by a {GATEWAY} only, not by {caller}")
        return
    speaker = site_role(beat.name) if isinstance(beat, SiteBeat) else gateway_role(beat.place)
    if caller != speaker:
        raise Refused(f"{type(call).__name__} may be called by {speaker} only, not by {caller}")
