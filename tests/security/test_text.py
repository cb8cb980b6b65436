"""Text from outside cannot give orders to a terminal: keys, reasons, names and errors are shown with their escapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import whimbrel as wb
from tests.rest.house import House, served, standing
from tests.rest.test_client import finish
from whimbrel.cli.main import make_app
from whimbrel.core.text import visible

EVIL = "k\x1b[2J\x1b]0;owned\x07\x9b1m\x7f\r\u202e[red]x[/]"
SHOWN = r"k\x1b[2J\x1b]0;owned\x07\x9b1m\x7f\x0d\u202e[red]x[/]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größe, 日本, 🐦", "plain, größe, 日本, 🐦"),
        (EVIL, SHOWN),
        ("a\nb\tc", r"a\x0ab\x09c"),
        ("\ud800", r"\ud800"),
        ("\u2028", r"\u2028"),
        (5, "5"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: object, shown: str) -> None:
    assert visible(text) == shown


def test_lines_may_stay_lines() -> None:
    assert visible("a\n\tb\x1b\r", lines=True) == "a\n\tb\\x1b\\x0d"


def run(house: House, *arguments: str) -> str:
    result = CliRunner().invoke(make_app(), [*arguments, "--data", str(house.app.data)], env={"COLUMNS": "300"})
    assert result.exception is None, result.exception
    return result.output


def test_commands_show_keys_reasons_and_errors_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rest.house.KEYS", [EVIL, "k01"])
    with served(tmp_path / "data") as house:
        finish(house, house.app.migrate("count", to="edge-1", keys=[EVIL]).ids[0])
        house.app.migrate("count", to="edge-2", keys=[EVIL]).abort(EVIL)
        house.app.control.orchestrator.error = RuntimeError(EVIL)
        shown = [run(house, *command) for command in (["routes", "count"], ["story", "m2"], ["status"], ["sites"])]
        shown.append(run(house, "migrate", "count", "--keys", "k01", "--to", "edge-1", "--no-wait"))
        for output in shown:
            assert not {*output} & {*map(chr, [*range(10), *range(11, 32), *range(127, 160), 0x202E])}, output
        assert SHOWN in shown[0], "a key"
        assert SHOWN in shown[1], "a reason"
        assert r"RuntimeError: k\x1b[2J" in shown[2], "an error"


def test_an_error_of_a_command_is_harmless(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "whimbrel", "status", "--data", str(tmp_path / EVIL)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert SHOWN in ended.stderr
    assert "\x1b" not in ended.stderr


def test_an_answer_of_another_server_is_harmless(tmp_path: Path) -> None:
    """The server may be somebody else's: what it says of an error is text from outside, too."""
    with standing(tmp_path / "data") as application, pytest.raises(wb.UnknownName) as raised:
        application.migrate("count", to=EVIL)
    assert "\x1b" not in visible(raised.value)
