"""How a site is, as data: what it says of itself in each beat."""

from __future__ import annotations

import msgspec


class InstanceStatus(msgspec.Struct, frozen=True):
    """How an instance is."""

    running: bool
    batch_ms: float
    """The median of its recent micro-batches."""
    trigger_ms: float
    """How long from the start of one to that of the next, at least."""
    backlog: int
    """Records that wait in its inbox."""
    max_records: int
    """How many of them one micro-batch takes."""
    error: str | None = None

    @property
    def period_ms(self) -> float:
        """How long from one micro-batch to the next, about: as long as one takes, or as the trigger says."""
        return max(self.batch_ms, self.trigger_ms)


class LinkStatus(msgspec.Struct, frozen=True):
    """How one direction of a link is."""

    link: str
    cut: bool
    sent_bytes: int
    under_way_bytes: int


class SiteStatus(msgspec.Struct, frozen=True):
    """How a site is: its instances, and the links that begin there."""

    instances: dict[str, InstanceStatus] = {}
    links: dict[str, LinkStatus] = {}
    """By direction, as `cloud->edge-1`."""
    failed: dict[str, str] = {}
    """Instances that keep dying, or that must not be started again, with the reason."""
    stale: list[str] = []
    """Of those, the ones whose checkpoint and logs do not fit: their state is not here."""
    error: str | None = None
    disk: str | None = None
    """Why it takes nothing in: its disk is full."""


def told(error: BaseException | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
