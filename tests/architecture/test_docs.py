"""What the documents say is so: links lead somewhere, the map is complete, commands exist, printed blocks are real."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from configparser import ConfigParser
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

from scripts import diagrams, journeys
from whimbrel.cli.main import make_app
from whimbrel.core import record
from whimbrel.core.protocols import PROTOCOLS, machine
from whimbrel.deploy.up import REFUSED, STOP_TIMEOUT
from whimbrel.log import EmbeddedLog
from whimbrel.orchestrator.journal import GatewayJournal, Journal
from whimbrel.spark.nearby import NOWHERE
from whimbrel.spark.session import NEEDED, TUNED
from whimbrel.spark.stored import HEAD, StoredPart

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "whimbrel"


def named(page: Path) -> str:
    """A page as a test's name."""
    return str(page.relative_to(ROOT))


# ── Links ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prose(page: Path) -> str:
    """A page without its code blocks: what looks like a link in there is none."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a heading is called in an address, as forges do it."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_names_a_place_of_somebodys_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|root|home|Users)/", page.read_text(encoding="utf-8"))


# ── The code map ─────────────────────────────────────────────────────────────────────────────────────────────────────


def mapped() -> list[str]:
    """The files that the code map names."""
    section = ARCHITECTURE.split("## The code map")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def sources() -> list[str]:
    """The files there are, without empty ones and what tools leave behind."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.stat().st_size]
    return [str(path.relative_to(PACKAGE)) for path in files if "__pycache__" not in path.parts]


def test_the_code_map_names_every_file_once_and_no_other() -> None:
    assert sorted(mapped()) == sorted(sources())


# ── Commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────

COMMANDS = sorted(set(re.findall(r"(?:^|`)(?:\.venv/bin/)?whimbrel ([^`\n#]+)", README, re.MULTILINE)))
TARGETS = sorted(set(re.findall(r"\bmake ([a-z]+)(?=[ `])", README)))


def test_the_readme_names_commands_at_all() -> None:
    assert len(COMMANDS) > 3
    assert {"demo", "test", "setup"} <= set(TARGETS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_exists_with_its_options(command: str) -> None:
    words = command.split()
    options = [word for word in words if word.startswith("--")]
    names = words[: words.index(options[0])] if options else words
    run = [sys.executable, "-c", "from whimbrel.cli.main import main; main()", *names, "--help"]
    wide = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    shown = subprocess.run(run, cwd=ROOT, env=wide, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert not [option for option in options if option not in shown.stdout]


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_of_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


# ── What scripts print into pages ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocols_page_shows_its_table(name: str) -> None:
    committed = (ROOT / "docs" / "protocols" / f"{name}.md").read_text(encoding="utf-8")
    assert diagrams.section(PROTOCOLS[name]) in committed, "run: .venv/bin/python scripts/diagrams.py --write"


def test_the_journeys_show_what_the_code_does() -> None:
    blocks, used = journeys.printed(), set()
    for name in journeys.PAGES:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        used |= {found[2] for found in journeys.MARKED.finditer(text)}
        assert journeys.page(text, blocks) == text, "run: .venv/bin/python scripts/journeys.py --write"
    assert len(used) == sum(
        (ROOT / "docs" / name).read_text(encoding="utf-8").count("```text") for name in journeys.PAGES
    )


def test_a_journey_prints_the_same_each_time() -> None:
    assert journeys.printed() == journeys.printed()


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_spark_setting_has_its_reason_and_no_other() -> None:
    page = (ROOT / "docs" / "operations" / "spark-profile.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    told = {setting for cell in cells for setting in re.findall(r"`(spark\.[\w.]+)`", cell)}
    assert told == {*NEEDED, *TUNED, "spark.executorEnv.PYTHONPATH"}  # the last is known only when a session starts


# ── What is on the disk, and how decisions are counted ───────────────────────────────────────────────────────────────


def tables(path: Path) -> set[str]:
    """The tables of a SQLite file."""
    with closing(sqlite3.connect(path)) as db:
        return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_the_tables_of_logs_and_journals_are_those_that_the_architecture_names(tmp_path: Path) -> None:
    EmbeddedLog(tmp_path / "a log file").close()
    Journal(tmp_path / "journal.db").close()
    GatewayJournal(tmp_path / "gateway.db").close()
    for name in ("a log file", "journal.db", "gateway.db"):
        row = next(line for line in ARCHITECTURE.splitlines() if line.startswith((f"| {name} |", f"| `{name}` |")))
        told = re.sub(r"\([^)]*\)", "", row.split("table", 1)[1])
        assert set(re.findall(r"`(\w+)`", told.split("|")[0])) == tables(tmp_path / name), name


def test_a_part_in_the_state_store_is_stored_as_the_architecture_says() -> None:
    asked: list[str] = []
    handle = SimpleNamespace(getMapState=lambda name, *schemas: asked.append(name))
    StoredPart(handle, NOWHERE)  # type: ignore[arg-type]
    row = next(line for line in ARCHITECTURE.splitlines() if line.startswith("| a part in Spark's state store |"))
    assert asked == re.findall(r"map `(\w+)`", row)
    assert f"{HEAD} → the head" in row


def test_decisions_are_counted_without_a_gap() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_contributing_names_events_and_commands_that_there_are() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    habit = next(line for line in page.splitlines() if "One word per idea" in line)
    named = set(re.findall(r"`(\w+)`", habit))
    assert named, "examples help"
    assert not [name for name in named if not hasattr(machine, name) and not hasattr(record, name)]


@pytest.mark.parametrize("unit", sorted((ROOT / "docs/operations/systemd").iterdir()), ids=lambda path: path.name)
def test_the_systemd_units_start_commands_that_exist(unit: Path) -> None:
    """Each option in ExecStart is one of the command's, and the settings are those that a restart needs."""
    parsed = ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read(unit)
    service = parsed["Service"]
    words = service["ExecStart"].replace("%i", "edge-1").split()
    assert words[0].endswith("/whimbrel")
    commands: Any = get_command(make_app(words[1]))
    commands.commands[words[1]].make_context(words[1], words[2:])
    assert service["RestartPreventExitStatus"] == str(REFUSED)
    assert float(service["TimeoutStopSec"]) > STOP_TIMEOUT
