"""The table of scenarios: each can be read, shortened, changed, and is refused clearly where it cannot run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.lab.bench.comparison import Comparison, plan
from whimbrel.lab.bench.run import NO_MOVE, Setting, check, described, order
from whimbrel.lab.bench.scenarios import (
    SCENARIOS,
    Candidate,
    Scenario,
    candidate,
    overridden,
    scenario_named,
    shortened,
)

NAMES = [
    "key-count",
    "thesis-e1",
    "thesis-e2",
    "thesis-e3",
    "pam-spike",
    "meces-keycount",
    "megaphone-sweep",
    "falcon-keys",
    "growth",
]


def test_these_are_the_scenarios() -> None:
    assert sorted(SCENARIOS) == sorted(NAMES)
    with pytest.raises(UnknownName, match="scenario 'teleport'; there is: falcon-keys"):
        scenario_named("teleport")


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_makes_sense_and_stands_beside_published_figures(name: str) -> None:
    scenario = SCENARIOS[name]
    points = scenario.points()
    assert len({msgspec.json.encode(point) for point in points}) == len(points), "no cell twice"
    for point in points:
        assert point.moved is None or point.moved <= point.keys
        assert name == "thesis-e3" or (point.before >= 10 and point.after >= 11), "long enough for every figure"
    assert scenario.published
    assert all(line.system and line.venue and line.figure and line.unit for line in scenario.published)


@pytest.mark.parametrize("name", NAMES)
def test_short_is_short_and_has_every_candidate(name: str) -> None:
    short = shortened(SCENARIOS[name])
    settings = plan(short)
    assert len(settings) <= 2 * len(short.candidates)
    assert short.candidates == SCENARIOS[name].candidates
    for setting in settings:
        assert setting.before + setting.after < 5
        assert setting.keys * setting.state_bytes <= 60 * 1024
        assert setting.moved is None or setting.moved <= setting.keys


def test_candidates_take_turns_in_both_orders() -> None:
    cells = ({"keys": 1}, {"keys": 2})
    scenario = Scenario(about="", candidates=(Candidate("live"), Candidate("pause")), cells=cells, repeat=2)
    assert [(setting.protocol, setting.keys) for setting in plan(scenario)] == [
        ("live", 1),
        ("pause", 1),
        ("live", 2),
        ("pause", 2),
        ("pause", 1),
        ("live", 1),
        ("pause", 2),
        ("live", 2),
    ]


def test_a_candidate_is_written_with_its_options() -> None:
    assert candidate("live") == Candidate("live")
    assert candidate(" push:order=key:budget=100") == Candidate("push", {"order": "key", "budget": 100})
    with pytest.raises(Refused, match="protocol:option=value"):
        candidate("push:order")


def test_what_is_given_holds_everywhere_and_like_cells_are_one() -> None:
    changed = overridden(SCENARIOS["thesis-e1"], {"link": None}, [Candidate("live")])
    assert [(point.link, point.state_bytes >> 20) for point in changed.points()] == [(None, 0), (None, 1), (None, 5)]
    assert changed.candidates == (Candidate("live"),)
    assert overridden(SCENARIOS["thesis-e1"], {}, ()) == SCENARIOS["thesis-e1"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (Setting(protocol="teleport"), "protocol 'teleport' is not there; this version has: "),
        (Setting(options={"colour": "red"}), "protocol 'live' has no option 'colour'"),
        (Setting(keys=0), "at least one key"),
        (Setting(rate=0), "a rate above 0"),
        (Setting(share=1.5), "a share"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(setting: Setting, told: str) -> None:
    with pytest.raises(Refused, match=told):
        check(setting)


def test_a_scenario_that_needs_what_is_not_there_says_so() -> None:
    scenario = Scenario(about="", candidates=(Candidate("live"), Candidate("teleport")))
    with pytest.raises(Refused, match="scenario far: protocol 'teleport' is not there"):
        Comparison("far", scenario, 1)


def test_much_state_gets_more_memory() -> None:
    few = Scenario(about="", base=Setting(keys=10, state_bytes=1024))
    assert Comparison("few", few, 1).memory == {}
    many = Scenario(about="", base=Setting(keys=1024, state_bytes=1 << 20))
    assert Comparison("many", many, 1).memory


def test_a_setting_in_words() -> None:
    told = described(Setting(keys=1000, state_bytes=2048, rate=1 / 0.3, moved=5).parameters)
    assert told == "1,000 keys of 2,048 bytes, 3.333 records/s; 5 of the keys move; link: none"


class Orders:
    """In place of an application: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def migrate(self, stage: str, **told: Any) -> None:
        self.told.append(told)


class Scaling(Orders):
    """One that can scale, too."""

    def scale(self, stage: str, **told: Any) -> None:
        self.told.append(told)


def told(setting: Setting, app: Orders) -> list[dict[str, Any]]:
    """What an application is told, but for the deadline."""
    order(app, setting, ["a", "b", "c"])
    return [{name: value for name, value in one.items() if name != "deadline"} for one in app.told]


def test_what_is_ordered() -> None:
    live = {"to": "edge-1", "protocol": "live"}
    assert told(Setting(share=0.3), Orders()) == [{**live, "share": 0.3}]
    assert told(Setting(keys=3, moved=2), Orders()) == [{**live, "keys": ["a", "b"]}]
    assert told(Setting(keys=3, moved=3), Orders()) == [{**live, "at": "cloud"}], "all keys need not be named"
    push = Setting(protocol="push", options={"order": "key"})
    assert told(push, Orders()) == [{"to": "edge-1", "protocol": "push", "share": 0.5, "order": "key"}]
    assert told(Setting(protocol="restart"), Orders()) == [{"to": "edge-1", "protocol": "restart", "at": "cloud"}]
    assert told(Setting(protocol=NO_MOVE), Orders()) == []
    assert told(Setting(instances=2), Scaling()) == [{"protocol": "live", "instances": 2, "at": "cloud"}]
    assert told(Setting(instances=2), Orders()) == [{**live, "share": 0.5}], "what comes nearest"
