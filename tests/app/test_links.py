"""The links between sites: which way messages go, what is counted, and that nothing overtakes on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_forwarder import read, sending
from tests.app.waiting import until
from whimbrel.core.errors import Refused, Unavailable, UnknownName
from whimbrel.core.link import IDEAL, Link
from whimbrel.log import Lane, MemoryLog
from whimbrel.log.carrier import number
from whimbrel.site.links import Given, Links, SpoolFolder, links_of
from whimbrel.site.status import LinkStatus

SITES = ["cloud", "edge-1", "edge-2"]
SIZE = 1000


class House:
    """Inboxes, which last, and the links of the moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = {"s-1": "cloud", "s-2": "edge-1", "s-3": "edge-2"}
        self.inboxes = {name: MemoryLog() for name in self.places}
        self.links: Links | None = None

    def begin(self, given: Given = IDEAL, *, running: bool = True) -> Links:
        """The links of a new run."""
        self.end()
        self.links = Links(SITES, given, SpoolFolder(self.folder), self.places.__getitem__, self.inboxes.__getitem__)
        if running:
            self.links.start()
        return self.links

    def of(self, site: str, given: Given) -> Links:
        """The links of a site that is a process of its own."""
        links = Links(
            SITES, given, SpoolFolder(self.folder), self.places.__getitem__, self.inboxes.__getitem__, here=[site]
        )
        links.start()
        return links

    def end(self) -> None:
        if self.links is not None:
            self.links.stop()

    def send(self, counter: int, texts: str, source: str = "s-1", to: str = "s-2") -> int | None:
        """As a sink does it."""
        assert self.links is not None
        blob, writer = sending(0, texts, size=SIZE).messages, f"{source}@x"
        inbox = self.links.inbox(source, to)
        last = number(counter, len(texts) - 1)
        return inbox.append(blob, count=len(texts), writer=writer, counter=last, lane=Lane.CONTROL)

    def arrived(self, name: str = "s-2") -> str:
        return "".join(read(self.inboxes[name]))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.end()


# ── What a user says ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_link_for_all_pairs_or_each_its_own() -> None:
    slow, fast = Link(delay_us=50_000), Link(rate=10**9)
    assert set(links_of(SITES, "delay=50ms").values()) == {slow}
    assert set(links_of(SITES, slow)) == {(a, b) for a in SITES for b in SITES if a != b}
    some = links_of(SITES, {("edge-1", "cloud"): "delay=50ms", ("cloud", "edge-2"): fast})
    assert some["cloud", "edge-1"] == some["edge-1", "cloud"] == slow
    assert some["edge-2", "cloud"] == fast
    assert some["edge-1", "edge-2"] == Link()
    assert links_of(["cloud"], "delay=50ms") == {}


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "site": ({("cloud", "moon"): "delay=1ms"}, UnknownName, "there is: cloud, edge-1, edge-2"),
    "itself": ({("cloud", "cloud"): "delay=1ms"}, Refused, "between cloud and itself"),
    "twice": ({("cloud", "edge-1"): "ideal", ("edge-1", "cloud"): "delay=1ms"}, Refused, "given twice"),
    "no pair": ({"cloud": "delay=1ms"}, Refused, "give pairs like"),
    "three": ({("cloud", "edge-1", "edge-2"): "delay=1ms"}, Refused, "give pairs like"),
    "text": ({("cloud", "edge-1"): "delay=1"}, Refused, "a number with s or ms"),
}


@pytest.mark.parametrize("name", BAD)
def test_links_that_make_no_sense_are_refused(name: str) -> None:
    given, error, told = BAD[name]
    with pytest.raises(error) as raised:
        links_of(SITES, given)
    assert told in str(raised.value)


def test_sites_whose_spools_would_have_one_name_are_refused() -> None:
    with pytest.raises(Refused, match="become ambiguous"):
        links_of(["a", "b-c", "a-b", "c"], IDEAL)


# ── Ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_over_an_ideal_link_posts_go_directly_and_are_counted(house: House) -> None:
    links = house.begin()
    assert links.status() == {}
    assert house.send(0, "ab") == 0
    assert house.send(0, "ab") is None
    assert house.arrived() == "ab"
    assert links.status() == {"cloud->edge-1": LinkStatus("ideal", False, 2 * SIZE, 0)}
    assert list(house.folder.iterdir()) == []


def test_at_one_site_posts_take_no_link_at_all(house: House) -> None:
    links = house.begin("delay=10s")
    house.places["s-2"] = "cloud"
    house.send(0, "ab")
    house.send(1, "cd", to="s-1")
    assert (house.arrived(), house.arrived("s-1")) == ("ab", "cd")
    assert {pair.sent_bytes + pair.under_way_bytes for pair in links.status().values()} == {0}
    assert len(links.status()) == 6


def test_over_any_other_link_they_arrive_in_their_order_and_time(house: House) -> None:
    links = house.begin({("cloud", "edge-1"): "delay=20ms,rate=2mbit"})
    for counter, text in enumerate(["abc", "de", "f"]):
        house.send(counter, text)
        house.send(counter, text, to="s-3")
    assert house.arrived("s-3") == "abcdef"
    assert not links.is_idle()
    until(links.is_idle, "everything has arrived")
    assert house.arrived() == "abcdef"
    status = links.status()
    assert status["cloud->edge-1"].link == "delay=20ms,rate=2mbit"
    assert {pair: told.sent_bytes for pair, told in status.items()} == {
        "cloud->edge-1": 6 * SIZE,
        "edge-1->cloud": 0,
        "cloud->edge-2": 6 * SIZE,
    }


# ── Cuts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("link", [IDEAL, "delay=1ms", "rate=10mbit"])
def test_a_cut_link_holds_everything_until_it_is_mended(house: House, link: str) -> None:
    links = house.begin(link)
    house.send(0, "ab")
    until(links.is_idle, "everything has arrived")
    links.cut("edge-1", "cloud")
    house.send(1, "cd")
    house.send(0, "xy", source="s-2", to="s-1")
    house.send(0, "k", to="s-3")
    until(lambda: house.arrived("s-3") == "k", "other links are not cut")
    assert (house.arrived(), house.arrived("s-1")) == ("ab", "")
    status = links.status()
    assert [status[pair].cut for pair in ("cloud->edge-1", "edge-1->cloud")] == [True, True]
    assert status["cloud->edge-1"].under_way_bytes == 2 * SIZE
    assert not links.is_idle()
    links.cut("cloud", "edge-1", is_cut=False)
    house.send(2, "ef")
    until(links.is_idle, "everything has arrived")
    assert (house.arrived(), house.arrived("s-1")) == ("abcdef", "xy")
    assert links.status()["cloud->edge-1"].sent_bytes == 6 * SIZE


def test_a_link_that_is_not_there_can_be_neither_cut_nor_mended(house: House) -> None:
    links = house.begin()
    with pytest.raises(UnknownName, match="there is: cloud, edge-1, edge-2"):
        links.cut("cloud", "moon")
    with pytest.raises(UnknownName):
        links.cut("moon", "cloud", is_cut=False)
    with pytest.raises(Refused, match="itself"):
        links.cut("cloud", "cloud")
    links.cut("cloud", "edge-1", is_cut=False)  # mending what is whole
    assert links.status() == {}


def test_what_is_told_after_the_end_needs_no_file(house: House) -> None:
    links = house.begin("delay=10s")
    house.send(0, "ab")
    links.stop()
    for file in house.folder.iterdir():
        file.unlink()
    assert links.status()["cloud->edge-1"].under_way_bytes == 2 * SIZE


# ── Relocations and deaths ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("moved", [{"s-2": "cloud"}, {"s-2": "edge-2"}, {"s-1": "edge-1"}, {"s-1": "edge-2"}])
@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dies"])
def test_posts_under_way_are_not_overtaken_when_an_instance_is_relocated(
    house: House, moved: dict[str, str], dies: bool
) -> None:
    """The batch that was under way is repeated at the new place, and others follow."""
    links = house.begin(running=not dies)
    links.cut("cloud", "edge-1")
    house.send(0, "ab")
    house.send(1, "cd")
    house.places |= moved
    if dies:
        links = house.begin(running=False)
    house.send(1, "cd")
    house.send(2, "ef")
    if dies:
        links.start()
    links.cut("cloud", "edge-1", is_cut=False)
    until(links.is_idle, "everything has arrived")
    house.send(2, "ef")
    house.send(3, "gh")
    assert house.arrived() == "abcdefgh"


@pytest.mark.parametrize("link", ["delay=20ms,rate=2mbit", "delay=1ms"])
def test_posts_of_an_instance_that_came_from_another_process_queue_up_behind_those_it_left_there(
    house: House, link: str
) -> None:
    """Each site has links of its own: the spool of the first one is carried by nobody but the first one."""
    cloud, edge = house.of("cloud", link), house.of("edge-2", link)
    cloud.cut("cloud", "edge-1")
    house.links = cloud
    house.send(0, "ab")
    house.send(1, "cd")
    house.places["s-1"] = "edge-2"
    house.links = edge
    edge.look("s-1")
    house.send(1, "cd")
    house.send(2, "ef")
    assert house.arrived() == ""
    assert edge.status("edge-2").keys() == {"edge-2->cloud", "edge-2->edge-1"}
    assert (cloud.is_idle(), edge.is_idle()) == (False, True)
    cloud.cut("cloud", "edge-1", is_cut=False)
    until(cloud.is_idle, "everything has arrived")
    house.send(3, "gh")
    until(lambda: house.arrived() == "abcdefgh", "what comes now takes its own way")
    cloud.stop()


def test_a_message_in_the_name_of_an_instance_that_has_not_started_yet_waits_for_its_earlier_ones(house: House) -> None:
    """The orchestrator sends FORGET through the process of the site to which the source has moved."""
    cloud = Links(SITES, "delay=1s", SpoolFolder(house.folder), house.places.__getitem__, house.inboxes.__getitem__)
    house.links = cloud
    house.send(0, "ab")
    house.places["s-1"] = "edge-2"
    spools = SpoolFolder(house.folder)
    edge = Links(SITES, IDEAL, spools, house.places.__getitem__, house.inboxes.__getitem__, here=["edge-2"])
    edge.send("s-1", "s-2", sending(0, "f").messages, 1, "coordinator/m1", 0)
    assert house.arrived() == ""
    cloud.step(0)
    cloud.step(999_999)
    assert house.arrived() == ""
    cloud.step(1_000_000)
    assert house.arrived() == "abf"


@pytest.mark.parametrize("second", [IDEAL, "rate=5mbit"])
def test_what_a_run_left_in_a_spool_is_delivered_by_the_next_whatever_its_links(house: House, second: str) -> None:
    links = house.begin("delay=1ms,rate=1mbit", running=False)
    house.send(0, "abcd")
    assert links.status()["cloud->edge-1"].under_way_bytes == 4 * SIZE
    links = house.begin(second, running=False)
    house.send(0, "abcd")
    house.send(1, "ef")
    links.start()
    until(links.is_idle, "everything has arrived")
    house.send(1, "ef")
    assert house.arrived() == "abcdef"


# ── A checkpoint on its way ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "seconds"), [(IDEAL, 0.0), ("delay=100ms", 0.1), ("rate=8mbit", 2.0), ("delay=1s,rate=8mbit", 3.0)]
)
def test_a_checkpoint_takes_as_long_as_its_link_says(house: House, given: str, seconds: float) -> None:
    links = house.begin(given)
    assert links.carry("cloud", "edge-1", 2_000_000) == seconds
    assert links.status()["cloud->edge-1"].sent_bytes == 2_000_000
    assert links.carry("cloud", "cloud", 2_000_000) == 0, "nothing takes a way inside a site"


def test_a_checkpoint_does_not_pass_a_cut_link(house: House) -> None:
    links = house.begin()
    links.cut("cloud", "edge-1")
    with pytest.raises(Unavailable, match="the link between edge-1 and cloud is cut"):
        links.carry("edge-1", "cloud", 1)
    links.cut("cloud", "edge-1", is_cut=False)
    links.carry("edge-1", "cloud", 1)
