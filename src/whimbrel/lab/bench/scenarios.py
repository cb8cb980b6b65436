"""The named comparisons, as data: candidates, points of the sweep, repetitions, and published figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.lab.bench import published as known
from whimbrel.lab.bench.published import Published
from whimbrel.lab.bench.run import NO_MOVE, Setting

MIB = 1 << 20


class Candidate(msgspec.Struct, frozen=True):
    """A protocol and its options."""

    protocol: str
    options: dict[str, Any] = {}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. Every candidate runs at every cell; a cell contains its differences from `base`."""

    about: str
    base: Setting = Setting()
    candidates: tuple[Candidate, ...] = (Candidate("live"), Candidate("pause"), Candidate("restart"))
    cells: tuple[dict[str, Any], ...] = ({},)
    repeat: int = 3
    fits: bool = False
    """Whether a line is fitted to the durations, and the same bytes are copied without a move."""
    published: tuple[Published, ...] = ()

    @property
    def varied(self) -> list[str]:
        """The parameters that span the sweep."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell))

    def points(self) -> list[Setting]:
        """The setting of each cell, for any candidate."""
        return [msgspec.structs.replace(self.base, **cell) for cell in self.cells]


LIVE_PAUSE = (Candidate("live"), Candidate("pause"))
SLOW_LINK = "delay=20ms,rate=6mbit"
"""An uplink of mobile networks. The benefit of a protocol depends on it: without a slow link, protocols differ only in
the number of micro-batches for which a key waits (docs/performance.md)."""

_DELAYS = (None, "delay=100ms", "delay=500ms")

SCENARIOS: dict[str, Scenario] = {
    "key-count": Scenario(
        about="half of 10,000 keys of 1 KiB move over a slow link, 2,000 records/s",
        base=Setting(link=SLOW_LINK),
        candidates=tuple(map(Candidate, ("live", "push", "fetch", "pause", "fluid", "replicate", "restart"))),
        published=(*known.PAM, *known.TRADE_OFFS),
    ),
    "thesis-e1": Scenario(
        about="one key with 0, 1 or 5 MiB of state, over a link with 0, 100 or 500 ms of delay",
        base=Setting(keys=1, moved=1, rate=1 / 0.3),
        cells=tuple({"link": link, "state_bytes": mib * MIB} for link in _DELAYS for mib in (0, 1, 5)),
        published=known.MIGRATION_DOWNTIME,
    ),
    "thesis-e2": Scenario(
        about="the source dies at any moment; what does each record cost that is replayed elsewhere?",
        base=Setting(keys=1000, state_bytes=100),
        candidates=(Candidate("restore"),),
        cells=tuple({"save_every": every, "outage": outage} for every in (2.0, 20.0) for outage in (1.0, 15.0)),
        published=known.RESTORATION,
    ),
    "thesis-e3": Scenario(
        about="the cost of a micro-batch to commit 0, 1 or 5 MiB of state; nothing moves",
        base=Setting(keys=1, rate=1 / 0.3, churn=True, before=20.0, after=0.0),
        candidates=(Candidate(NO_MOVE),),
        cells=tuple({"state_bytes": mib * MIB} for mib in (0, 1, 5)),
        published=known.CHECKPOINTS,
    ),
    "pam-spike": Scenario(
        about="a sudden spike of a few keys while half of all move over a slow link, in order of need or by name",
        base=Setting(
            skew=1.1, active=0.05, rate=1000.0, state_bytes=4096, spike=(4.0, 5.0), link="delay=20ms,rate=20mbit"
        ),
        candidates=(Candidate("push"), Candidate("push", {"order": "key"})),
        published=known.PAM,
    ),
    "meces-keycount": Scenario(
        about="a second instance takes over half of the keys, under load",
        base=Setting(keys=100_000, state_bytes=0, instances=2),
        candidates=(*LIVE_PAUSE, Candidate("fetch")),
        published=known.MECES,
    ),
    "megaphone-sweep": Scenario(
        about="half of the keys move at once, in batches, or bin by bin",
        candidates=tuple(Candidate("fluid", {"plan": plan}) for plan in ("sudden", "batched", "fluid")),
        published=(*known.MEGAPHONE, *known.TRADE_OFFS),
    ),
    "falcon-keys": Scenario(
        about="1, 5 or 6 of 10 keys, 100 and 400 keys; small states and 20 KB updates; some link delays",
        base=Setting(rate=100.0),
        cells=tuple(
            {"keys": keys, "moved": moved, "state_bytes": size, "churn": size > 0, "link": link}
            for link in (None, "delay=50ms", "delay=100ms")
            for keys, moved in ((10, 1), (10, 5), (10, 6), (100, 100), (400, 400))
            for size in (0, 20_000)
        ),
        repeat=1,
        published=known.FALCON,
    ),
    "growth": Scenario(
        about="1 MiB to 1 GiB in 1 to 100,000 keys; the same keys with none, few or many others that stay",
        # A record writes the whole state of its key: at a high rate that, and not the move, would be measured.
        base=Setting(rate=10.0, patience=600.0),
        candidates=LIVE_PAUSE,
        cells=(
            *({"keys": 16_384, "moved": 16_384, "state_bytes": mib * 64} for mib in (1, 4, 16, 64, 256, 1024)),
            *({"keys": keys, "moved": keys, "state_bytes": 16 * MIB // keys} for keys in (1, 100, 100_000)),
            *({"keys": keys, "moved": 1024, "state_bytes": 16 * 1024} for keys in (1024, 2048, 8192)),
        ),
        repeat=1,
        fits=True,
        published=known.RHINO,
    ),
}


def scenario_named(name: str) -> Scenario:
    """The scenario of that name, or a clear error."""
    if name not in SCENARIOS:
        raise UnknownName("scenario", name, list(SCENARIOS))
    return SCENARIOS[name]


def candidate(text: str) -> Candidate:
    """Parse `live`, or with options: `push:order=key`."""
    protocol, _, rest = text.strip().partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(":")):
        name, equals, value = part.partition("=")
        if not equals:
            raise Refused(f"a candidate is written protocol:option=value, not {text!r}")
        options[name] = int(value) if value.isdigit() else value
    return Candidate(protocol, options)


def little(setting: Setting) -> Setting:
    """The same setting reduced to a few seconds: to check that it works, or to warm up, not to measure."""
    keys = min(setting.keys, 60)
    return msgspec.structs.replace(
        setting,
        keys=keys,
        moved=None if setting.moved is None else min(setting.moved, keys),
        state_bytes=min(setting.state_bytes, 1024),
        rate=min(setting.rate, 100.0),
        spike=None if setting.spike is None else (2.0, 1.0),
        save_every=min(setting.save_every, 1.0),
        outage=min(setting.outage, 1.0),
        before=2.0,
        after=1.5,
        patience=60.0,
    )


def shortened(scenario: Scenario) -> Scenario:
    """The first and the last cell of a scenario, with reduced settings, once."""
    points = [little(point) for point in scenario.points()]
    ends = {msgspec.json.encode(point): point for point in (points[0], points[-1])}.values()
    return msgspec.structs.replace(
        scenario,
        cells=tuple({name: getattr(point, name) for name in scenario.varied} for point in ends),
        base=little(scenario.base),
        repeat=1,
    )


def overridden(scenario: Scenario, given: dict[str, Any], candidates: Sequence[Candidate]) -> Scenario:
    """Apply a user's choices. A parameter that is given holds at every cell; cells that become equal are merged."""
    cells = [{name: value for name, value in cell.items() if name not in given} for cell in scenario.cells]
    unlike = tuple({msgspec.json.encode(cell): cell for cell in cells}.values())
    return msgspec.structs.replace(
        scenario,
        base=msgspec.structs.replace(scenario.base, **given),
        cells=unlike,
        candidates=tuple(candidates) or scenario.candidates,
    )
