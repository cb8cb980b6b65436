"""The instances of one stage: which exist, at which site; which are new, and which are to leave.

Two snapshots in the journal record this. `instances/<stage>` lists the existing instances; `gone/<stage>` lists those
that have left, whose names are never reused, and those that are to leave. A leaving instance is removed when it owns
nothing; if it still owns keys and no migration moves them, it stays after all. So a crash at any point is harmless: a
new instance is marked as leaving until the order that fills it is journalled, an old one before the order that empties
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from whimbrel.core import wire
from whimbrel.orchestrator.journal import Journal
from whimbrel.orchestrator.ports import SitePort

Engaged = Callable[[], tuple[set[str], set[str]]]
"""Which instances take part in a migration, and which own keys, read atomically."""


class Instances:
    """The instances of one stage."""

    def __init__(
        self,
        stage: str,
        journal: Journal,
        ports: Mapping[str, SitePort],
        engaged: Engaged,
        placed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ports`: the sites. `placed` is called whenever an instance has been added or removed."""
        self.stage, self._journal, self._ports = stage, journal, ports
        self._engaged, self._placed = engaged, placed
        found, gone = (journal.load(f"{name}/{stage}") for name in ("instances", "gone"))
        self.sites = wire.unpack(found, dict[str, str]) if found else {}
        """By instance: its site. The coordinator shares this dictionary object."""
        self._gone = wire.unpack(gone, list[str]) if gone else []
        self.past = [name for name in self._gone if name not in self.sites]
        """Instances that had left before this start: their remaining files may be removed."""
        self._deciding = threading.Lock()
        for site in ports:
            if site not in self.sites.values():
                self.sites[self._new_name()] = site
        self._save("instances", self.sites)

    def _new_name(self) -> str:
        return f"{self.stage}-{max(map(_number, [*self.sites, *self._gone]), default=0) + 1}"

    def _save(self, what: str, value: object) -> None:
        self._journal.save(f"{what}/{self.stage}", wire.pack(value))

    def at(self, site: str) -> list[str]:
        """The instances at a site."""
        return [name for name, place in list(self.sites.items()) if place == site]

    @property
    def leaving(self) -> list[str]:
        """The instances that are to leave."""
        return [name for name in self._gone if name in self.sites]

    # ── Adding ───────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def staying(self, site: str, counts: Mapping[str, int], count: int | None = None) -> Iterator[list[str]]:
        """The instances at a site that stay, as destinations of moves: `count` of them, or all, but at least one.

        `counts`: how many keys each owns. Surplus instances, those with the fewest keys, are to leave; missing ones are
        created, and serve already if `count` was given. If the order is not accepted, nothing has changed.
        """
        with self._deciding:
            self._review()
            here = sorted(set(self.at(site)) - set(self._gone), key=lambda name: (-counts[name], _number(name)))
            fresh = [self._add(site) for _ in range(max(1, count or 0) - len(here))]
            too_many = here[count:] if count else []
            self._let_go(*too_many)
            try:
                for name in fresh:
                    self._ports[site].start(name, wait=count is not None)
                yield [name for name in here if name not in too_many] + fresh
            except BaseException:
                self._remove(*fresh)
                self._keep(*too_many)
                raise
            self._keep(*fresh)

    @contextmanager
    def parting(self, name: str) -> Iterator[None]:
        """Mark an instance as leaving, to order its keys away. If the order is not accepted, nothing has changed."""
        with self._deciding:
            self._review()
            parts = name not in self._gone
            self._let_go(*[name] * parts)
            try:
                yield
            except BaseException:
                self._keep(*[name] * parts)
                raise

    def _add(self, site: str) -> str:
        name = self._new_name()
        self._let_go(name)
        self._save("instances", {**self.sites, name: site})
        self.sites[name] = site
        self._placed()
        return name

    # ── Removing ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_go(self, *names: str) -> None:
        if names:
            self._save("gone", [*self._gone, *names])
            self._gone += names

    def _keep(self, *names: str) -> None:
        if names:
            self._gone = [name for name in self._gone if name not in names]
            self._save("gone", self._gone)

    def _review(self) -> list[str]:
        """The leaving instances that can be removed. Those with keys that no migration moves are unmarked and stay."""
        moving, owning = self._engaged()
        idle = set(self.leaving) - moving
        self._keep(*idle & owning)
        return sorted(idle - owning)

    def idle(self) -> list[str]:
        """The leaving instances that can be removed; none while another thread is deciding."""
        if not self.leaving or not self._deciding.acquire(blocking=False):
            return []
        try:
            return self._review()
        finally:
            self._deciding.release()

    def see_off(self, *names: str) -> None:
        """Remove instances that can leave and that no replay will name."""
        if names:
            with self._deciding:
                self._remove(*(name for name in names if name in self.leaving))

    def _remove(self, *names: str) -> None:
        """Stop and forget instances. Their files are removed after the next start: until then others may read them."""
        for name in names:
            self._ports[self.sites[name]].stop(name)
            self._save("instances", {other: site for other, site in self.sites.items() if other != name})
            del self.sites[name]
            self._placed()


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
