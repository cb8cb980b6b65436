"""Locks on a data directory, held for as long as the file is open: death lets go of them.

<data>/lock             `wb.run` alone, or all roles together
<data>/<role>.lock      one process of each role
<data>/tokens.lock      whoever changes the tokens, for that moment
"""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from whimbrel.core.errors import Conflict
from whimbrel.log.private import claim, opener


def lock_all(data: Path) -> IO[str]:
    """The directory is ours alone: two runs in one directory would ruin it."""
    return _locked(data / "lock", fcntl.LOCK_EX, f"another run uses {data}; stop it, or choose another directory")


def lock_role(data: Path, role: str) -> ExitStack:
    """The role is ours alone, in a directory that others share with us."""
    held = ExitStack()
    with ExitStack() as stack:
        stack.enter_context(
            _locked(data / "lock", fcntl.LOCK_SH, f"another run uses {data}; stop it, or choose another directory")
        )
        told = f"{role} is running already in {data}; stop it first, or choose another directory"
        stack.enter_context(_locked(data / f"{role}.lock", fcntl.LOCK_EX, told))
        held = stack.pop_all()
    return held


def lock_tokens(data: Path) -> IO[str]:
    """Nobody else changes the users' tokens."""
    return _locked(
        data / "tokens.lock", fcntl.LOCK_EX, f"another command changes the tokens of {data}; repeat this one"
    )


def _locked(path: Path, kind: int, told: str) -> IO[str]:
    claim(path.parent)
    file = open(path, "a", opener=opener)  # noqa: SIM115 - held for as long as it is open
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise Conflict(told) from error
    return file
