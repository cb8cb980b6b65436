"""The commands for a running application: what they print and write, how they end, what they refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.app.stories import timeless
from tests.rest.house import House, served
from tests.rest.test_client import finish
from whimbrel.cli.main import make_app
from whimbrel.core.errors import Refused, Unavailable, UnknownName

COMMANDS = ["status", "sites", "stages", "routes", "migrate", "story", "drain"]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with served(tmp_path / "data") as house:
        yield house


def invoke(house: House, *arguments: str) -> Result:
    result = CliRunner().invoke(make_app(), [*arguments, "--data", str(house.app.data)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_status_shows_records_and_instances(house: House, tmp_path: Path) -> None:
    shown = invoke(house, "status", "--json", str(tmp_path / "status.json"))
    assert "p: sent 12, delivered 0" in shown.output
    assert "count-2" in shown.output
    assert "under way" not in shown.output
    assert json.loads((tmp_path / "status.json").read_text())["records"]["sent"] == 12
    house.app.migrate("count", to="edge-1")
    assert "under way: m1 copying" in invoke(house, "status").output


def test_status_shows_the_store_if_there_is_one(tmp_path: Path) -> None:
    with served(tmp_path / "data", str(tmp_path / "store")) as house:
        assert "store of count: no checkpoint yet, 0 B under way" in invoke(house, "status").output


def test_sites_and_stages_as_tables(house: House, tmp_path: Path) -> None:
    sites = invoke(house, "sites", "--json", str(tmp_path / "sites.json")).output
    assert sites.splitlines()[1].split() == ["cloud", "count-1", "12", "0", "B", "running"]
    assert [site["name"] for site in json.loads((tmp_path / "sites.json").read_text())] == ["cloud", "edge-1", "edge-2"]
    stages = invoke(house, "stages", "--json", str(tmp_path / "stages.json")).output
    assert "count-1 at cloud, count-2 at edge-1, count-3 at edge-2" in stages
    assert json.loads((tmp_path / "stages.json").read_text())[0]["keys"] == 12


def test_routes_tell_bins_and_single_keys(house: House, tmp_path: Path) -> None:
    finish(house, house.app.migrate("count", to="edge-1", keys=["k00"]).ids[0])
    finish(house, house.app.migrate("count", to="edge-1", bins=[0, 1, 5]).ids[0])
    lines = invoke(house, "routes", "count", "--json", str(tmp_path / "routes.json")).output.splitlines()
    assert "2-4, 6-1023" in lines[1]
    assert "0-1, 5" in lines[2]
    assert lines[2].rstrip().endswith("k00")
    assert json.loads((tmp_path / "routes.json").read_text())[1]["bins"] == [[0, 1], [5, 5]]


def test_a_move_is_ordered_and_told(house: House, tmp_path: Path) -> None:
    path = tmp_path / "move.json"
    shown = invoke(house, "migrate", "count", "--keys", "k00,k01", "--to", "edge-1", "--no-wait", "--json", str(path))
    assert shown.exit_code == 0
    assert "m1" in shown.output
    assert "count-2 at edge-1" in shown.output
    assert json.loads(path.read_text())["outcome"] == "copying"
    told = invoke(house, "story", "m1").output.splitlines()
    assert timeless(told) == ["m1 ordered: ordered by operator over REST", "m1 ordered: Ordered"]
    assert re.search(r" \(ordered took 0\.\d{3} s\)$", told[1])
    finish(house, "m1")
    shown = invoke(house, "migrate", "count", "--keys", "k00", "--to", "edge-1")
    assert "already there" in shown.output


def test_a_move_that_is_waited_for_and_aborted_ends_with_an_error(house: House) -> None:
    house.app.links.cut("cloud", "edge-1")
    arguments = ["migrate", "count", "--to", "edge-1", "--protocol", "restart", "--deadline", "1"]
    shown = invoke(house, *arguments)
    assert shown.exit_code == 1
    assert "aborted" in shown.output


def test_options_and_bins_are_read(house: House) -> None:
    how = ("--protocol", "fluid", "--option", "step=6", "--no-wait")
    shown = invoke(house, "migrate", "count", "--bins", "0-9,20", "--to", "edge-1", *how)
    assert "m1/1" in shown.output
    assert "m1/2" in shown.output
    moves = [migration.move for migration in house.app.control.stages["count"].coordinator.migrations.values()]
    assert sorted(bin for move in moves for bin in move.selection.bins) == [*range(10), 20]


def test_a_site_is_drained_and_it_is_told_what_went_where(house: House, tmp_path: Path) -> None:
    path = tmp_path / "drain.json"
    shown = invoke(house, "drain", "cloud", "--to", "edge-2", "--no-wait", "--json", str(path))
    assert "count-1 at cloud" in shown.output
    assert "count-3 at edge-2" in shown.output
    assert [one["to_site"] for one in json.loads(path.read_text())["migrations"]] == ["edge-2"]
    assert "already there" in invoke(house, "drain", "edge-1").output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("migrate count --to edge-1 --bins 1-x", "numbers and ranges"),
        ("migrate count --to edge-1 --bins 0-99999999999", "numbers and ranges"),
        ("migrate count --to edge-1 --option step", "name=value"),
        ("migrate count --to edge-1 --option to=cloud", "there is: budget, chunk"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(house: House, arguments: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        invoke(house, *arguments.split())
    assert house.count() == 0


def test_errors_are_those_of_the_application(house: House) -> None:
    with pytest.raises(UnknownName, match="there is: cloud"):
        invoke(house, "drain", "moon")
    with pytest.raises(Refused, match="there is no central store"):
        invoke(house, "migrate", "count", "--to", "edge-1", "--protocol", "restore", "--from-checkpoint", "3")
    with pytest.raises(UnknownName, match="unknown migration 'm9'"):
        invoke(house, "story", "m9")


def test_address_and_token_may_be_in_the_environment(house: House) -> None:
    good = {"WHIMBREL_URL": house.server.url, "WHIMBREL_TOKEN": house.server.token}
    assert CliRunner().invoke(make_app(), ["sites"], env=good).exit_code == 0
    wrong = CliRunner().invoke(make_app(), ["sites"], env={**good, "WHIMBREL_TOKEN": "wrong"})
    assert isinstance(wrong.exception, Refused)
    assert isinstance(CliRunner().invoke(make_app(), ["sites"]).exception, Refused)


def test_a_directory_that_is_not_served_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["sites", "--data", str(tmp_path)])
    assert isinstance(result.exception, Unavailable)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    shown = CliRunner().invoke(make_app(), [command, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert f"whimbrel {command}" in shown.output
    for option in ("--url", "--data", "--json", "WHIMBREL_TOKEN"):
        assert option in shown.output
