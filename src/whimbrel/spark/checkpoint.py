"""Spark's checkpoint of an instance: reads it without Spark, for a start (host/starting.py) and for a copy.

<checkpoint>/metadata          the query's id, created at its first start; a copy has the same id
<checkpoint>/offsets/<batch>   the end of a batch in its inbox; written when the batch is planned
<checkpoint>/commits/<batch>   the batch is done
<checkpoint>/state/<operator>/_metadata/v2/<batch>    the paths of the files that describe the state's columns
<checkpoint>/state/<operator>/<part>/<n>.zip          a full snapshot of the state before batch n
<checkpoint>/state/<operator>/<part>/<n>.changelog    the changes of batch n - 1
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from whimbrel.core.errors import Corrupt, Unavailable
from whimbrel.log.durability import sync
from whimbrel.log.private import replace_text
from whimbrel.log.readers import Offset

STATE = re.compile(r"(\d+)\.(zip|changelog)")
"""Files with full snapshots, and with the changes of a batch."""
PATHS = re.compile(r'"file:[^"]*/state/[^"/]*/_stateSchema/')
"""Prefixes of the paths of the files that describe columns."""


class Checkpoint:
    """The folder of one instance's checkpoint, which may not exist."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._synced: set[tuple[str, int]] = set()

    @property
    def id(self) -> str | None:
        """The query's id; None if there is none."""
        try:
            with _readable(self.folder):
                return str(json.loads((self.folder / "metadata").read_text(encoding="utf-8"))["id"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"{self.folder / 'metadata'} is not a metadata file of Spark: {error}") from error

    @property
    def planned(self) -> int:
        """The last planned batch, -1 if there is none."""
        return self._last("offsets")

    @property
    def committed(self) -> int:
        """The last finished batch, -1 if there is none."""
        return self._last("commits")

    def _last(self, kind: str) -> int:
        with _readable(self.folder):
            names = [file.name for file in (self.folder / kind).glob("[0-9]*")]
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def end(self, batch: int) -> Offset:
        """The end of a batch in its inbox; empty if Spark has no record of it."""
        try:
            with _readable(self.folder):
                lines = (self.folder / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
            found: Offset = json.loads(lines[2])
        except FileNotFoundError:
            return {}
        except (ValueError, IndexError) as error:
            raise Corrupt(f"{self.folder / 'offsets' / str(batch)} is not an offset of Spark: {error}") from error
        return found

    def range(self, batch: int) -> tuple[Offset, Offset]:
        """Start and end of a batch in its inbox."""
        return self.end(batch - 1), self.end(batch)

    def needless(self, folder: str, names: Iterable[str]) -> set[str]:
        """For `shutil.copytree`: the files of a folder here that a start does not need. Temporary files, which a query
        that has just ended may still be removing; and state from before the last snapshot that the start can load,
        which Spark removes only every few minutes."""
        names, done = list(names), self.committed + 1
        numbered = [(int(found[1]), found[2], name) for name in names if (found := STATE.fullmatch(name))]
        last = max((n for n, kind, _ in numbered if kind == "zip" and n <= done), default=-1)
        old = {name for n, kind, name in numbered if n < last or (n == last and kind == "changelog")}
        return old | {name for name in names if name.endswith(".tmp")}

    def settle(self) -> None:
        """Rewrite paths in these files to point into this folder. Spark writes absolute paths, and reads the files
        there when a query starts: in a copy, and in a renamed data directory, they point to the old folder."""
        for file in self.folder.glob("state/*/_metadata/v2/*"):
            if file.name.isdigit():
                here = json.dumps(f"file:{file.parents[2].absolute()}/_stateSchema/")[:-1]
                text = file.read_text(encoding="utf-8")
                ours = PATHS.sub(here.replace("\\", r"\\"), text)
                if ours != text:
                    replace_text(file, ours)

    def sync(self) -> None:
        """fsync all files here. Files here are written once, and replaced as a whole: each is fsynced once."""
        if not self._synced:
            sync(self.folder.parent)
        folders = [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]
        for folder in folders:
            with suppress(FileNotFoundError):  # Spark removes old files meanwhile
                fresh = [one for one in os.scandir(folder) if (one.path, one.inode()) not in self._synced]
                for one in fresh:
                    sync(Path(one.path))
                    self._synced.add((one.path, one.inode()))
                if fresh:
                    sync(folder)

    def sync_commits(self) -> None:
        """fsync the last commit: only then the batch is never replayed."""
        commits = self.folder / "commits"
        with suppress(FileNotFoundError):
            sync(commits / str(self.committed))
            sync(commits)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Errors of the operating system may pass, unless a file is missing: too many open files, a failing disk."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unavailable(f"the checkpoint {folder} cannot be read now: {error}") from error
