"""Files and folders that only their owner can access, and paths that cannot leave their folder.

A data directory holds records, states and secrets. Its folders have mode 0700, its files 0600, whatever the umask of
the process is: `wb.run` runs in a user's process, and must not change its umask. Files that Spark and SQLite create
below it (checkpoints, -wal, -shm) are inaccessible because the directory is; SQLite gives its files the mode of the
database.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from whimbrel.core.errors import Refused

FOLDER, FILE = 0o700, 0o600
OTHERS = 0o077
"""The permissions of group and others: the umask of Whimbrel's own processes."""
OURS = ("journal.db", "lock", "logs", "sites", "token", "url", "orchestrator", "credentials", "gateway.", "site-", ".")
"""Prefixes of all names that Whimbrel creates in a data directory."""


def below(folder: Path, *names: str) -> Path:
    """The path below a folder, one component per name. Raises `Refused` for a name with several, or that leads out."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise Refused(f"{name!r} is not a file name in {folder}: it must be one path component, not '.' or '..'")
    return folder.joinpath(*names)


def make_folder(path: Path) -> Path:
    """Create a folder with mode 0700 unless it exists. Its parents get the usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER, exist_ok=True)
    return path


def claim(data: Path) -> Path:
    """Create a data directory with mode 0700 unless it exists.

    If it exists and others can access it, its mode becomes 0700 if it holds only files that Whimbrel makes. If it holds
    other files it has other uses as well: its mode stays, and a warning is issued.
    """
    make_folder(data)
    found = data.stat()
    if found.st_uid == os.getuid() and found.st_mode & OTHERS:
        if all(path.name.startswith(OURS) for path in data.iterdir()):
            data.chmod(FOLDER)
        else:
            warnings.warn(
                f"other users can access {data}, which holds files that are not Whimbrel's; "
                "give Whimbrel a directory of its own, or chmod 700 it",
                stacklevel=2,
            )
    return data


def opener(path: str, flags: int) -> int:
    """For `open`: new files get mode 0600."""
    return os.open(path, flags, FILE)


def make_file(path: Path) -> None:
    """Create an empty file with mode 0600 unless it exists."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically: a reader sees the old text or the new one."""
    number, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its mode is 0600
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
