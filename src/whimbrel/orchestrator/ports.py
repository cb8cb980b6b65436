"""What the three roles ask of each other: orchestrator, gateway, site.

In `wb.run` a port is the object itself; between processes it is a client that speaks to it (remote.py). So whatever
stands here keeps three rules:

1. A call may be repeated: its answer may have been lost.
2. `Unavailable` means that this call has done nothing; any other `Retry`, that it may have. Neither says anything
   about an earlier call, by another life of the caller.
3. Arguments and answers are plain data that `core/wire` can carry, typed by these signatures. What names something is
   a `Name`: no call gets in with one that could lead out of a folder.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from whimbrel.checkpoints.version import StoreStatus
from whimbrel.core.errors import Refused
from whimbrel.core.names import GATEWAY, LONGEST, Name, Url, check_name, site_role
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Move, Report
from whimbrel.core.router import Abort, Begin, Cutover, Fence, Restore
from whimbrel.log.backoff import HeldUp
from whimbrel.site.status import SiteStatus


class SitePort(Protocol):
    """A site, as the orchestrator reaches it. `Site` (site/site.py) says what each call does."""

    def start(self, instance: Name, wait: bool = True, anew: bool = False) -> None:
        """Run an instance; returns when it serves, unless told not to wait. Nothing happens if it runs. `anew`: from an
        empty checkpoint. Raises `Unstarted` if it has done nothing since it was brought there, `Stale` if what lies
        there is not what its logs were made from."""

    def stop(self, instance: Name) -> None:
        """Stop an instance and wait for its end. Nothing happens if it does not run."""

    def take(self, instance: Name, origin: Name) -> int:
        """Copy the checkpoint of a stopped instance from another site; return its size."""

    def place(self, places: dict[Name, Name]) -> None:
        """Hear which instance runs at which site: all of them."""

    def send(self, source: Name, destination: Name, blob: bytes, count: int, writer: str, counter: int) -> None:
        """Append messages to an instance's inbox, behind all that an instance here has sent to it."""

    def carry(self, to: Name, size: int) -> float:
        """How many seconds a checkpoint of so many bytes takes from here to another site."""

    def cut(self, other: Name, is_cut: bool = True) -> None:
        """Let nothing through between here and another site, or mend the link."""

    def is_idle(self) -> bool:
        """Whether nothing is under way on the links that begin here, now."""

    def failed(self) -> dict[str, str]:
        """Instances that keep dying, or that must not be started again, with the reason; as last heard."""

    def status(self) -> SiteStatus:
        """How things are here, as last heard."""


class FlowStatus(msgspec.Struct, frozen=True):
    """How records flow through a stage."""

    rate: float = 0.0
    """Records that come in, a second, smoothed."""
    record_bytes: int = 0
    """The mean size of a record."""
    state_bytes: dict[str, int] = {}
    """By instance: how much state it has, as its parts last said."""
    refused: int = 0
    error: str | None = None
    store: StoreStatus | None = None
    """None: there is no central store."""


class GatewayStatus(msgspec.Struct, frozen=True):
    """How records come in and results leave."""

    sent: int = 0
    delivered: int = 0
    dead_letters: dict[str, int] = {}
    """By reason."""
    ended: bool = False
    """Whether the source has ended and all its rows are taken in; never true of one that has failed."""
    error: str | None = None
    """What the source, or the gateway's snapshots, failed of, for good."""
    stages: dict[str, FlowStatus] = {}
    disk: str | None = None
    """Why nothing is taken in, or delivered: its disk is full."""
    held_up: dict[str, HeldUp] = {}
    """What waits for an error to pass: `source`, `outlet of <stage>`, `snapshots`."""


class GatewayPort(Protocol):
    """The gateway, as the orchestrator reaches it: where records enter, and where results leave."""

    def command(self, stage: Name, command: Begin | Cutover | Abort | Fence | Restore) -> None:
        """Give a command its place between a stage's records."""

    def check_restore(self, stage: Name, checkpoint: int | None) -> None:
        """Raise if keys cannot be restored: `Refused` without a store, `UnknownName` without that checkpoint, a `Stop`
        if the records behind it are gone."""

    def fence(self, stage: Name, move: Move) -> None:
        """Let nothing out any more that a lost instance says of a move's keys. Raises `Retry` until that is safe."""

    def load(self, stage: Name, move: Move, checkpoint: int | None) -> Loaded:
        """Put what the store has of a fenced move's keys into its destination's inbox: the newest versions, or those of
        a checkpoint. Raises a `Stop` if the store cannot be read: an older checkpoint may be whole."""

    def checkpoints(self, stage: Name) -> list[int]:
        """The checkpoints that a stage's keys can be restored from, oldest first."""

    def place(self, stage: Name, instances: list[Name]) -> None:
        """Hear which instances a stage has: all of them."""

    def save(self, stage: Name) -> bool:
        """Make a snapshot of a stage's router safe, from which a replay starts then; False if something moves."""

    def order_checkpoint(self, stage: Name) -> None:
        """Let everything that has changed in a stage be saved now. Raises `Refused` if there is no central store."""

    def has_delivered(self, stage: Name, instance: Name) -> bool:
        """Whether everything that an instance has said is delivered, now."""

    def is_drained(self, stage: Name) -> bool:
        """Whether the instances know how late it is, and everything they have said is delivered, now."""

    def status(self) -> GatewayStatus:
        """How things are here, as last heard."""


class SiteBeat(msgspec.Struct, frozen=True, tag=True):
    """A site lives. `life` is another one after each start; `url`: where it can be reached."""

    name: Name
    life: str
    url: Url
    status: SiteStatus


class GatewayBeat(msgspec.Struct, frozen=True, tag=True):
    """The gateway lives."""

    life: str
    url: Url
    status: GatewayStatus


class OrchestratorPort(Protocol):
    """The orchestrator, as gateway and sites reach it."""

    def hear(self, stage: Name, notice: Report) -> None:
        """A notice of an instance."""

    def beat(self, beat: SiteBeat | GatewayBeat) -> None:
        """Somebody lives."""


def check_names(caller: str, call: Any) -> None:
    """Raise `Refused` if a move in a call to the gateway has a name that is none. The type of a move cannot say so:
    inside the core, an increment is a move of no stage."""
    for field in call.__struct_fields__:
        value = getattr(call, field)
        move = value if isinstance(value, Move) else getattr(value, "move", None)
        if isinstance(move, Move):
            check_name("stage", move.stage)
            for instance in (move.source, move.destination, *move.parties):
                check_name("instance", instance, LONGEST)


def check_caller(caller: str, call: Any) -> None:
    """Raise `Refused` if who calls the orchestrator speaks in another one's name. Only the gateway hears instances."""
    beat = getattr(call, "beat", None)
    speaker = site_role(beat.name) if isinstance(beat, SiteBeat) else GATEWAY
    if caller != speaker:
        raise Refused(f"{type(call).__name__} is for {speaker} to call, and not for {caller}")
