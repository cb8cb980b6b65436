"""Child processes that are killed with everything they started, and the certainty that nothing of them is left.

Spark's Python workers put themselves into process groups of their own, so a process is known by a mark in its
environment, which every descendant inherits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from pathlib import Path

from tests.app.waiting import until
from whimbrel.lab.chaos.deployed import SHORT_LIFE, marked

ROOT = Path(__file__).parents[2]
MARK = "WHIMBREL_TEST_CHILD"


class Child:
    """A Python process in a group of its own; its lines can be waited for."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.errors = cwd / f"{self.mark}.err"
        temporary = cwd / "tmp"  # what is killed cannot clean up behind itself
        temporary.mkdir(exist_ok=True)
        settings = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "JAVA_TOOL_OPTIONS": SHORT_LIFE,
            "TMPDIR": str(temporary),
        }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=cwd,
                env={**os.environ, **settings, MARK: self.mark},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, line: str, timeout: float = 400.0) -> None:
        """Until it has said this."""
        until(lambda: line in self.lines or self.process.poll() is not None, f"{line!r}; {self.told()}", timeout)
        assert line in self.lines, f"ended without saying {line!r}; {self.told()}"

    def end(self, timeout: float = 400.0) -> int:
        """Wait for its end; return its exit status. Nothing it started may outlive it for long."""
        until(lambda: self.process.poll() is not None, f"the child's end; {self.told()}", timeout)
        self._reader.join(10)
        until(lambda: not self.alive(), f"the end of all it started: {self.alive()}", 20)
        return self.process.returncode

    def kill(self) -> None:
        """Kill it, its JVM and its workers at once: as if the machine had failed."""
        with suppress(ProcessLookupError):  # it has ended, and maybe not all that it started
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        until(lambda: not self.alive(), "all processes are dead", 20)

    def alive(self) -> list[int]:
        """All processes that descend from it and live."""
        return marked(MARK, self.mark)

    def told(self) -> str:
        """What it has said so far, for a test that fails."""
        return "\n".join([*self.lines[-20:], self.errors.read_text(errors="replace")[-3_000:]])
