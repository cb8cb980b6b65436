"""Locks on a data directory, held for as long as the file is open: the kernel releases them when the process dies.

<data>/lock             `wb.run` alone, or all roles together
<data>/<role>.lock      one process of each role
<data>/tokens.lock      a command that changes the tokens, while it does
"""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from whimbrel.core.errors import Conflict
from whimbrel.log.private import claim, opener


def lock_all(data: Path) -> IO[str]:
    """Lock the directory exclusively: two runs in one directory would corrupt it."""
    return _locked(data / "lock", fcntl.LOCK_EX, f"another run uses {data}; stop it, or choose another directory")


def lock_role(data: Path, role: str) -> ExitStack:
    """Lock one role exclusively, in a directory that other roles share."""
    held = ExitStack()
    with ExitStack() as stack:
        stack.enter_context(
            _locked(data / "lock", fcntl.LOCK_SH, f"another run uses {data}; stop it, or choose another directory")
        )
        conflict = f"{role} is running already in {data}; stop it first, or choose another directory"
        stack.enter_context(_locked(data / f"{role}.lock", fcntl.LOCK_EX, conflict))
        held = stack.pop_all()
    return held


def lock_tokens(data: Path) -> IO[str]:
    """Lock the users' tokens against changes by other commands."""
    return _locked(
        data / "tokens.lock", fcntl.LOCK_EX, f"another command is changing the tokens of {data}; run this one again"
    )


def _locked(path: Path, kind: int, conflict: str) -> IO[str]:
    claim(path.parent)
    file = open(path, "a", opener=opener)  # noqa: SIM115 - the lock is held while it is open
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise Conflict(conflict) from error
    return file
