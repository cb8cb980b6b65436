"""What a power failure leaves of a folder, while processes write to it.

A library that is preloaded into all of them (shim.c) copies files when they are synced. At a moment of its own choosing
the test stops the processes, and makes an image: of each file what was synced last, under the names that were synced
last; or, file by file, what the processes had written by then, for a disk may also have got more than it had to.
Folders exist as soon as they are made: what file systems with a journal do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from random import Random

HERE = Path(__file__).parent


def build_shim(folder: Path) -> Path:
    """The library."""
    library = folder / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, HERE / "shim.c", "-ldl"], check=True)
    return library


class Disk:
    """A folder that is watched."""

    def __init__(self, root: Path, shadow: Path, shim: Path) -> None:
        self.root, self.shadow, self._shim = root, shadow, shim
        for folder in (root, shadow):
            folder.mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        """For processes whose writes are watched."""
        return {"LD_PRELOAD": str(self._shim), "POWER_ROOT": str(self.root), "POWER_SHADOW": str(self.shadow)}

    def image(self, to: Path, random: Random | None) -> None:
        """What is left, as a copy. `random`: some files have more than was synced. Nobody may write meanwhile."""
        for folder, _, files in os.walk(self.root):
            here = to / Path(folder).relative_to(self.root)
            here.mkdir(parents=True)
            for name, key in self._names(Path(folder)).items():
                synced = self.shadow / f"f-{key}"
                if synced.exists():
                    shutil.copyfile(synced, here / name)
                else:
                    (here / name).touch()  # its name was synced, its content never
            for name in files:
                if random is not None and random.random() < 0.5:
                    shutil.copyfile(Path(folder, name), here / name)
            for path in here.glob("*-shm"):  # shared memory, and on no disk
                path.unlink()

    def _names(self, folder: Path) -> dict[str, str]:
        """By name: which file a folder has under it, as it was synced last."""
        listed = self.shadow / f"d-{_key(folder)}"
        if not listed.exists():
            return {}
        pairs = (line.split(" ", 1) for line in listed.read_text(encoding="utf-8").splitlines())
        return {name: key for key, name in pairs}


def _key(path: Path) -> str:
    found = subprocess.run(["stat", "-c", "%i %W %w", path], check=True, capture_output=True, text=True).stdout.split()
    fraction = found[3].partition(".")[2] if len(found) > 3 else "0"
    return f"{found[0]}-{found[1]}-{int(fraction)}"
