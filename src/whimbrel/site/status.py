"""The status of a site, as data: its heartbeat carries it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class InstanceStatus(msgspec.Struct, frozen=True):
    """The status of an instance."""

    running: bool
    batch_ms: float
    """The median duration of its recent batches, as its host reports it."""
    trigger_ms: float
    """The minimum time between the starts of two batches."""
    backlog: int
    """Records waiting in its inbox."""
    max_records: int
    """The maximum number of records per batch."""
    error: str | None = None

    @property
    def period_ms(self) -> float:
        """The approximate time from one batch to the next: its duration, or the trigger interval if longer."""
        return max(self.batch_ms, self.trigger_ms)


class LinkStatus(msgspec.Struct, frozen=True):
    """The status of one direction of a link."""

    link: str
    cut: bool
    sent_bytes: int
    under_way_bytes: int


class SiteStatus(msgspec.Struct, frozen=True):
    """The status of a site: its instances, and the links that begin there."""

    instances: dict[str, InstanceStatus] = {}
    links: dict[str, LinkStatus] = {}
    """By direction, as `cloud->edge-1`."""
    failed: dict[str, str] = {}
    """Instances that crash repeatedly, or that must not be started again, with the reason."""
    stale: list[str] = []
    """Of those, the ones whose checkpoint and logs do not match: their state is not here."""
    error: str | None = None
    disk: str | None = None
    """Why its intake is paused: its disk is full."""


def described(error: BaseException | None) -> str | None:
    """An error in one line."""
    return None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def joined(parts: Iterable[Mapping[str, LinkStatus]]) -> dict[str, LinkStatus]:
    """The links by direction, with the sums of what several processes of a place send through them."""
    found: dict[str, LinkStatus] = {}
    for name, link in ((name, link) for links in parts for name, link in links.items()):
        other = found.get(name, LinkStatus(link.link, False, 0, 0))
        found[name] = LinkStatus(
            link.link,
            link.cut or other.cut,
            link.sent_bytes + other.sent_bytes,
            link.under_way_bytes + other.under_way_bytes,
        )
    return found
