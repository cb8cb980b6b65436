"""The deployment file: what it may say, and which line is wrong if it says something else."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

import whimbrel as wb
from tests.app.test_pipeline import Count
from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.keys import bin_of
from whimbrel.deploy.layout import PORTS, Layout, PlaceEntry, choose_addresses, homes_of, read_layout

WHOLE = """\
job = "traffic.py"
trigger = "200 milliseconds"

[orchestrator]
address = "10.0.0.1:7700"

[places.cloud]
address = "10.0.0.1:7701"

[places.edge-1]
address = "10.0.0.2:7701"
data = "/var/lib/whimbrel"

[places.edge-2]
address = "[fd00::2]:7701"

[homes.count]
edge-1 = { bins = "0-510, 512", keys = ["bus-7"] }
edge-2 = { bins = [511] }

[links]
default = "delay=20ms,rate=20mbit"
"cloud edge-2" = "delay=100ms"

[store]
url = "s3://bucket/whimbrel"
every = 2.5

[tls]
folder = "certificates"
"""


def read(folder: Path, text: str) -> Layout:
    path = folder / "deployment.toml"
    path.write_text(dedent(text))
    return read_layout(path)


def test_a_whole_file(tmp_path: Path) -> None:
    layout = read(tmp_path, WHOLE)
    assert (layout.job, layout.first, list(layout.places)) == ("traffic.py", "cloud", ["cloud", "edge-1", "edge-2"])
    assert layout.places["edge-1"] == PlaceEntry("10.0.0.2:7701", "/var/lib/whimbrel")
    assert layout.links["edge-2", "cloud"] == layout.links["cloud", "edge-2"] == "delay=100ms"
    assert layout.links["edge-1", "edge-2"] == "delay=20ms,rate=20mbit"
    homes = layout.homes["count"]
    assert homes["bus-7"] == "edge-1"
    assert [homes.by_bin[bin] for bin in (0, 510, 511, 512, 513)] == ["edge-1", "edge-1", "edge-2", "edge-1", "cloud"]
    assert layout.store is not None
    assert (layout.store.url, layout.store.every) == ("s3://bucket/whimbrel", 2.5)
    assert layout.tls is not None
    assert (layout.trigger, layout.durability, layout.host) == ("200 milliseconds", "process", "micro-batch")


def test_the_least_file(tmp_path: Path) -> None:
    layout = read(tmp_path, 'job = "job.py"\n[places.cloud]\n')
    assert (layout.places, layout.homes, layout.links) == ({"cloud": PlaceEntry()}, {}, {})


def test_keys_are_exceptions_from_bins_whatever_the_order(tmp_path: Path) -> None:
    text = f"""\
        job = "job.py"
        [places.a]
        [places.b]
        [places.c]
        [homes.s]
        c = {{ keys = ["k"] }}
        b = {{ bins = [{bin_of("k")}] }}
        """
    assert read(tmp_path, text).homes["s"]["k"] == "c"


@pytest.mark.parametrize(
    ("line", "instead", "where", "why"),
    [
        ('job = "traffic.py"', "jobb = 1", ":1", "unknown entry 'jobb'"),
        ('job = "traffic.py"', "", "", r'it lacks the pipeline: job = "job.py"'),
        ('job = "traffic.py"', "job = 5", ":1", "Expected `str`, got `int`"),
        ('job = "traffic.py"', 'job = "unfinished', "", "line 1"),
        ('address = "10.0.0.2:7701"', 'adress = "10.0.0.2:7701"', ":11", "unknown field `adress`"),
        ('address = "10.0.0.2:7701"', 'address = "10.0.0.2"', ":11", r'address must be "host:port", got \'10.0.0.2\''),
        ('address = "10.0.0.2:7701"', 'address = "a:70000"', ":11", r'address must be "host:port"'),
        (
            'address = "10.0.0.2:7701"',
            'address = "10.0.0.1:7701"',
            ":11",
            "place edge-1 has the address of place cloud",
        ),
        (
            'address = "10.0.0.2:7701"',
            'address = "10.0.0.1:7700"',
            ":5",
            "the orchestrator has the address of place edge",
        ),
        ("[places.edge-1]", "[places.cloud]", "", "line 10"),
        ("[places.edge-1]", '[places."../x"]', ":10", "place name '../x' is not allowed"),
        ("edge-2 = { bins = [511] }", "edge-9 = { bins = [511] }", ":19", "unknown place 'edge-9'"),
        (
            "edge-2 = { bins = [511] }",
            "edge-2 = { bins = [512] }",
            ":19",
            "edge-2 and edge-1 are both given as the home",
        ),
        ("edge-2 = { bins = [511] }", "edge-2 = { bins = [1024] }", ":19", "bins are numbers from 0 to 1023"),
        ("edge-2 = { bins = [511] }", 'edge-2 = { bins = "some" }', ":19", "bins must be numbers and ranges"),
        ("edge-2 = { bins = [511] }", "edge-2 = { bin = 511 }", ":19", "unknown field `bin`"),
        ('"cloud edge-2" = "delay=100ms"', '"cloud edge-7" = "delay=100ms"', ":23", "names two places"),
        ('"cloud edge-2" = "delay=100ms"', '"cloud edge-2" = "delay=100"', ":23", "delay"),
        ("every = 2.5", 'every = "often"', ":27", "Expected `float`, got `str`"),
        ("[tls]", "[tsl]", ":29", "unknown entry 'tsl'"),
    ],
)
def test_an_error_names_the_line_and_what_would_be_right(
    tmp_path: Path, line: str, instead: str, where: str, why: str
) -> None:
    assert line in WHOLE
    with pytest.raises(Refused, match=why) as caught:
        read(tmp_path, WHOLE.replace(line, instead))
    assert str(caught.value).startswith(f"{tmp_path / 'deployment.toml'}{where}: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"cannot read the deployment file .*No such file"):
        read_layout(tmp_path / "missing.toml")


def test_no_places(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no places; add at least one: \[places.cloud\]"):
        read(tmp_path, 'job = "job.py"\n')


OPEN = """\
job = "job.py"

[places.cloud]
[places.edge-1]
address = "127.0.0.1:0"
[places.edge-2]
address = "127.0.0.1:7701"
"""


def test_open_ports_are_chosen_once_and_lie_apart(tmp_path: Path) -> None:
    file, layout = tmp_path / "addresses.json", read(tmp_path, OPEN)
    choose_addresses(layout, file)
    first = read_layout(tmp_path / "deployment.toml", file)
    choose_addresses(layout, file)
    assert read_layout(tmp_path / "deployment.toml", file) == first
    ports = [first.orchestrator.endpoint[1], *(entry.endpoint[1] for entry in first.places.values())]
    taken = [port + number for port in ports for number in range(PORTS)]
    assert len(set(taken)) == len(taken)
    assert first.places["edge-2"].endpoint == ("127.0.0.1", 7701)


def test_the_homes_of_keys_are_at_places_of_the_deployment(tmp_path: Path) -> None:
    def pipeline(home: str | None) -> wb.Pipeline:
        rows = [{"k": "a"}]
        return wb.Pipeline("p", wb.Items(rows, home=home), key="k").stage("count", Count())

    layout = read(tmp_path, OPEN)
    assert homes_of(pipeline(None), layout)["count"].values() == {"cloud"}
    assert homes_of(pipeline("edge-1"), layout)["count"].values() == {"edge-1"}
    with pytest.raises(UnknownName, match="edge-9"):
        homes_of(pipeline("edge-9"), layout)
    other = read(tmp_path, OPEN + '[homes.sum]\nedge-1 = { bins = "0-511" }\n')
    with pytest.raises(UnknownName, match="sum"):
        homes_of(pipeline(None), other)


@pytest.mark.parametrize(("one", "other", "fits"), [(7700, 7702, False), (7700, 7703, True), (7702, 7700, False)])
def test_the_ports_of_places_on_one_machine_lie_apart(tmp_path: Path, one: int, other: int, fits: bool) -> None:
    text = f'job = "j.py"\n[places.a]\naddress = "10.0.0.1:{one}"\n[places.b]\naddress = "10.0.0.1:{other}"\n'
    if fits:
        read(tmp_path, text)
    else:
        with pytest.raises(Refused, match=r"deployment.toml:5: place b and place a share ports: a place has 3"):
            read(tmp_path, text)
