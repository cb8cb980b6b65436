"""What the documents say is so: links lead somewhere, the map is complete, commands exist, printed blocks are real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import diagrams, journeys
from whimbrel.core.protocols import PROTOCOLS
from whimbrel.spark.session import NEEDED, TUNED

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
