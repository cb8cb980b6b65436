"""Where the results of a stage go, as seen from one place: to the sinks' places, or to the homes of the next stage's
keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from whimbrel.core.keys import KeyMap
from whimbrel.core.names import place_of
from whimbrel.core.record import Result

EACH = "each"
"""In place of a sink's place: results are written where they are made."""


class ToSinks:
    """The ways of the last stage's results. A result goes to the place of every sink."""

    def __init__(self, here: str, sinks: Collection[str], routers: Collection[str], places: Sequence[str]) -> None:
        """`sinks`: the place of each sink, or `EACH`. `routers`: of the stage. `places`: all of them."""
        self.here = here
        self._to = sorted({here if place == EACH else place for place in sinks})
        everywhere = places if EACH in sinks else self._to
        self.receivers: Sequence[str] = sorted({*everywhere, *map(place_of, routers)})

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        return {place: list(results) for place in self._to}

    def home_of(self, router: str) -> str:
        return place_of(router)


class ToHomes:
    """The ways of results that are records of the next stage."""

    def __init__(
        self, here: str, homes: KeyMap[str], key_of: Callable[[Result], str | None], routers: Collection[str]
    ) -> None:
        """`homes`: of the next stage's keys. `key_of`: the next stage's key of a result; None: it has none, and becomes
        a dead letter at one of the homes. `routers`: of this stage."""
        self.here, self._homes, self._key_of = here, homes, key_of
        self.receivers: Sequence[str] = sorted({*homes.values(), *map(place_of, routers)})

    def split(self, results: Sequence[Result]) -> Mapping[str, list[Result]]:
        found: dict[str, list[Result]] = {}
        for result in results:
            key = self._key_of(result)
            found.setdefault(self._homes[key or ""], []).append(result)
        return found

    def home_of(self, router: str) -> str:
        return place_of(router)
