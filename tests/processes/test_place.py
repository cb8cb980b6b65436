"""The directory of a place: it stays with its place, and with what was fixed at its first start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from whimbrel.core.errors import Refused
from whimbrel.core.keys import KeyMap, Selection
from whimbrel.deploy.layout import Layout
from whimbrel.deploy.place import Place, PlaceGateway
from whimbrel.deploy.places import prepare


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A place of a deployment of two, ready to start."""
    file = tmp_path / "deployment.toml"
    file.write_text('job = "job.py"\nhost = "inline"\n\n[places.cloud]\n[places.edge-1]\n')
    layout, _, keys = prepare(file, tmp_path / "all")
    pipeline = wb.Pipeline("p", wb.Items([{"k": "a"}]), key="k").stage("count", Count())
    return Place("cloud", layout, pipeline, tmp_path / "cloud", keys / "cloud")


def starts(place: Place) -> None:
    PlaceGateway(place).stop()


def with_layout(place: Place, layout: Layout) -> Place:
    return place._replace(layout=layout)


def test_it_starts_again_as_it_was(place: Place) -> None:
    starts(place)
    starts(place)


def test_other_homes_of_keys_are_refused(place: Place) -> None:
    starts(place)
    homes = KeyMap("cloud")
    homes.put(Selection(bins=frozenset(range(512))), "edge-1")
    with pytest.raises(Refused, match="was first started with other homes of keys"):
        starts(with_layout(place, msgspec.structs.replace(place.layout, homes={"count": homes})))
    starts(place)


def test_other_places_are_refused(place: Place) -> None:
    starts(place)
    places = dict(reversed(list(place.layout.places.items())))
    with pytest.raises(Refused, match="belongs to place 'cloud' of a deployment of cloud, edge-1, and not"):
        starts(with_layout(place, msgspec.structs.replace(place.layout, places=places)))


def test_the_directory_of_another_place_is_refused(place: Place) -> None:
    starts(place)
    with pytest.raises(Refused, match=r"belongs to place 'cloud' .* and not to place 'edge-1'"):
        starts(place._replace(name="edge-1", keys=place.keys.parent / "edge-1"))


def test_places_that_disagree_belong_to_different_deployments(place: Place) -> None:
    homes = KeyMap("edge-1")
    other = with_layout(place, msgspec.structs.replace(place.layout, homes={"count": homes}))
    assert place.deployment == with_layout(place, place.layout).deployment
    assert place.deployment != other.deployment
