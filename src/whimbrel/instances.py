"""The instances of one stage: which there are, at which site, with which logs; who is new, and who is to leave.

Two snapshots in the journal say it. `instances/<stage>` has those that there are; `gone/<stage>` has those that have
left, whose names are not given again, and those that are to leave. Who is to leave goes when it has nothing any more;
whoever still has keys, and nobody moves them, stays after all. That makes every death harmless: a new instance is to
leave until the order that fills it is journalled, and an old one before the order that empties it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from whimbrel.core import wire
from whimbrel.log import EmbeddedLog

if TYPE_CHECKING:
    from whimbrel.app import App


class Instances:
    """The instances of one stage."""

    def __init__(self, app: App, stage: str) -> None:
        self.app, self.stage = app, stage
        self.inboxes: dict[str, EmbeddedLog] = {}
        self.outboxes: dict[str, EmbeddedLog] = {}
        placed, gone = (app.journal.load(f"{name}/{stage}") for name in ("instances", "gone"))
        self.sites = wire.unpack(placed, dict[str, str]) if placed else {}
        """By instance, where it runs. The coordinator has the same dictionary."""
        self._gone = wire.unpack(gone, list[str]) if gone else []
        self._deciding = threading.Lock()
        for name in self._gone:
            if name not in self.sites:
                app.remove(name)
        for site in app.sites:
            if site not in self.sites.values():
                self.sites[self._new_name()] = site
        self._save("instances", self.sites)
        for name in self.sites:
            self._open(name)

    def _new_name(self) -> str:
        return f"{self.stage}-{max(map(_number, [*self.sites, *self._gone]), default=0) + 1}"

    def _open(self, name: str) -> None:
        self.inboxes[name] = self.app.log(f"inbox-{name}")
        self.outboxes[name] = self.app.log(f"outbox-{name}")

    def _save(self, what: str, value: object) -> None:
        self.app.journal.save(f"{what}/{self.stage}", wire.pack(value))

    def at(self, site: str) -> list[str]:
        """Those at a site."""
        return [name for name, place in list(self.sites.items()) if place == site]

    @property
    def leaving(self) -> list[str]:
        """Those that are to leave."""
        return [name for name in self._gone if name in self.sites]

    # ── Coming ───────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def staying(self, site: str, counts: Mapping[str, int], count: int | None = None) -> Iterator[list[str]]:
        """Those at a site that stay, to order moves to: `count` of them, or all there are but at least one.

        `counts`: how many keys each has. Those with the fewest are too many, and are to leave; those that lack are
        made, and serve if a `count` was asked for. If the order is not taken, nothing has changed.
        """
        with self._deciding:
            self._review()
            here = sorted(set(self.at(site)) - set(self._gone), key=lambda name: (-counts[name], _number(name)))
            fresh = [self._add(site) for _ in range(max(1, count or 0) - len(here))]
            too_many = here[count:] if count else []
            self._let_go(*too_many)
            try:
                for name in fresh:
                    self.app.sites[site].start(name, wait=count is not None)
                yield [name for name in here if name not in too_many] + fresh
            except BaseException:
                self._remove(*fresh)
                self._keep(*too_many)
                raise
            self._keep(*fresh)

    def _add(self, site: str) -> str:
        name = self._new_name()
        self._open(name)
        self._let_go(name)
        self._save("instances", {**self.sites, name: site})
        self.sites[name] = site
        return name

    # ── Going ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_go(self, *names: str) -> None:
        if names:
            self._save("gone", [*self._gone, *names])
            self._gone += names

    def _keep(self, *names: str) -> None:
        if names:
            self._gone = [name for name in self._gone if name not in names]
            self._save("gone", self._gone)

    def _review(self) -> list[str]:
        """Of those that are to leave, who can; whoever has keys which nobody moves is to stay."""
        moving, owning = self.app.orchestrator.engaged(self.stage)
        idle = set(self.leaving) - moving
        self._keep(*idle & owning)
        return sorted(idle - owning)

    def idle(self) -> list[str]:
        """Of those that are to leave, who can; nobody, if somebody decides right now."""
        if not self._deciding.acquire(blocking=False):
            return []
        try:
            return self._review()
        finally:
            self._deciding.release()

    def see_off(self, *names: str) -> None:
        """Let those leave that can, and whom no replay will name."""
        if names:
            with self._deciding:
                self._remove(*(name for name in names if name in self.leaving))

    def _remove(self, *names: str) -> None:
        """Stop and forget. The files are removed at the next start: until then others may be looking into them."""
        for name in names:
            self.app.sites[self.sites[name]].stop(name)
            self._save("instances", {other: site for other, site in self.sites.items() if other != name})
            del self.sites[name], self.inboxes[name], self.outboxes[name]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
