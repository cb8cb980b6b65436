"""How far an inbox has been read: its reader says so, and whoever needs to know looks.

Spark has no way to ask a reader anything, and runs it in a process of its own. So a folder lies beside each inbox:

    <inbox>.reading/applied     the offset up to which everything is applied, and what it said is written
    <inbox>.reading/halt        there while nothing new may be read
    <inbox>.reading/hurry       there while keys stand still for what comes through the control lane
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from whimbrel.core.errors import Trimmed
from whimbrel.log.contract import Lane, Log
from whimbrel.log.private import make_file, make_folder, opener

Offset = dict[str, int]
LANES = {"data": Lane.DATA, "control": Lane.CONTROL}
HALT, HURRY, APPLIED = "halt", "hurry", "applied"


def reading_of(inbox: str | Path) -> str:
    """The folder beside an inbox."""
    return f"{inbox}.reading"


def clear(folder: str) -> None:
    """Forget what was said before: a reader is about to start."""
    make_folder(Path(folder))
    for name in (HALT, HURRY, APPLIED):
        Path(folder, name).unlink(missing_ok=True)


def halt(folder: str) -> None:
    """Let the reader read nothing more."""
    make_file(Path(folder, HALT))


def is_halted(folder: str) -> bool:
    """Whether nothing more may be read."""
    return os.path.exists(os.path.join(folder, HALT))


def hurry(folder: str, hurries: bool) -> None:
    """Let what comes through the control lane begin a batch at once, or no more."""
    if hurries:
        make_file(Path(folder, HURRY))
    else:
        Path(folder, HURRY).unlink(missing_ok=True)


def is_hurried(folder: str) -> bool:
    """Whether what comes through the control lane begins a batch at once."""
    return os.path.exists(os.path.join(folder, HURRY))


def note_applied(folder: str, offset: Offset) -> None:
    """Say that everything up to here is done."""
    draft = Path(folder, f"{APPLIED}.draft")
    # The folder goes when its instance does, maybe before the reader notices.
    with suppress(FileNotFoundError):
        with open(draft, "w", encoding="utf-8", opener=opener) as file:
            json.dump(offset, file)
        draft.replace(Path(folder, APPLIED))


def resume(folder: str) -> None:
    """Let the reader read on."""
    Path(folder, HALT).unlink(missing_ok=True)


def applied_by(folder: str) -> Offset | None:
    """The offset up to which everything is applied and written; None if the reader has not said yet."""
    try:
        offset: Offset = json.loads(Path(folder, APPLIED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return offset


def is_drained(log: Log, folder: str) -> bool:
    """Whether everything that lies in an inbox now has been applied, and what it said has been written."""
    return applied_by(folder) == {name: log.tail(lane) for name, lane in LANES.items()}


def backlog(log: Log, folder: str) -> int:
    """How many records wait in an inbox."""
    reached = applied_by(folder)
    try:
        return log.backlog(reached["data"] if reached else log.head())
    except Trimmed as gone:  # just now: what is gone does not wait
        return log.backlog(gone.head)
