"""Files and folders that are for their owner alone, and paths that stay where they belong.

A data directory holds records, states and secrets. Its folders have mode 0700, its files 0600, whatever the umask of
the process is: `wb.run` runs in a user's process, whose umask is not ours to change. What others make below it (Spark's
checkpoints, SQLite's -wal and -shm) is out of reach because the directory is; SQLite gives its files the mode of the
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
"""What nobody but the owner may: the umask of processes that are all ours."""
OURS = ("journal.db", "lock", "logs", "sites", "token", "url", "orchestrator", "credentials", "gateway.", "site-", ".")
"""How the names begin of all that lies in a data directory."""


def below(folder: Path, *names: str) -> Path:
    """The path below a folder, one step for each name. Raises `Refused` if a name is more, or leads elsewhere."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise Refused(f"{name!r} is no name of a file in {folder}")
    return folder.joinpath(*names)


def make_folder(path: Path) -> Path:
    """A folder for its owner alone, made if it is not there. What it lies in is made as usual."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=FOLDER, exist_ok=True)
    return path


def claim(data: Path) -> Path:
    """A data directory, made if it is not there, for its owner alone.

    One that is there and lets others in is tightened if nothing lies in it but what Whimbrel makes. One with other
    files in it was made for more than this: it is left as it is, and a warning says so.
    """
    make_folder(data)
    found = data.stat()
    if found.st_uid == os.getuid() and found.st_mode & OTHERS:
        if all(path.name.startswith(OURS) for path in data.iterdir()):
            data.chmod(FOLDER)
        else:
            warnings.warn(
                f"others may look into {data}, which holds other files as well; "
                "give Whimbrel a directory of its own, or chmod 700 it",
                stacklevel=2,
            )
    return data


def opener(path: str, flags: int) -> int:
    """For `open`: a file that is made is for its owner alone."""
    return os.open(path, flags, FILE)


def make_file(path: Path) -> None:
    """An empty file for its owner alone, unless there is one."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def replace_text(path: Path, text: str) -> None:
    """Give a file this text, as a whole: whoever reads it finds the old one or the new one."""
    number, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its mode is 0600
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
