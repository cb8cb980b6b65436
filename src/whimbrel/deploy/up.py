"""The supervisor: starts all processes of a deployment on this machine, and restarts those that die.

Each child has its own session, so that Ctrl-C reaches only this process, which then ends the children in order. Their
standard input is a pipe from the supervisor: when it is gone, for any reason, the pipe ends, and the children end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from whimbrel.core.errors import Refused

REFUSED = 2
"""A child's exit status when a restart cannot help."""
FIRST, MOST, CALM = 0.1, 15.0, 30.0
"""Seconds until a dead child is restarted: at first, and at most; and how long it must run for the back-off to be
reset."""
STOP_TIMEOUT = 20.0
"""Seconds that children have to end after SIGTERM."""
PERIOD = 0.1

Report = Callable[[str], None]


class Child:
    """One child process, restarted as often as necessary."""

    def __init__(self, name: str, command: Sequence[str], report: Report) -> None:
        self.name, self._command, self._report = name, command, report
        self._process: subprocess.Popen[bytes] | None = None
        self._born, self._due, self._pause = 0.0, 0.0, FIRST

    def look(self) -> None:
        """Start the child if it is due; detect its death. Raises `Refused` if a restart cannot help."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
                self._born = now
                self._report(f"{self.name} runs as {self._process.pid}")
            return
        status = self._process.poll()
        if status is None:
            return
        self._kill_group()
        self._close()
        if status == REFUSED:
            raise Refused(f"{self.name} cannot run; see above")
        self._pause = FIRST if now - self._born > CALM else min(2 * self._pause, MOST)
        self._due = now + self._pause
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        self._report(f"{self.name} has ended ({how}); it is started again in {self._pause:g} s")

    def end(self) -> None:
        """Send SIGTERM to the child."""
        if self._process is not None:
            self._process.terminate()

    def await_end(self, deadline: float) -> None:
        """Wait for the child's end; after the deadline it is killed, with its whole process group."""
        if self._process is None:
            return
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._report(f"{self.name} does not end, and is killed")
            self._kill_group()
            self._process.wait()
        self._close()

    def _kill_group(self) -> None:
        """Kill what the child has started: it has a session, and so a process group, of its own."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _close(self) -> None:
        assert self._process is not None
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


def supervise(commands: Mapping[str, Sequence[str]], report: Report, has_finished: Callable[[], bool]) -> None:
    """Run all of these until SIGTERM or Ctrl-C, or until everything has finished. Called in the main thread."""
    children = [Child(name, command, report) for name, command in commands.items()]

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        while not has_finished():
            for child in children:
                child.look()
            time.sleep(PERIOD)
        report("everything is delivered")
    except KeyboardInterrupt:
        report("ending")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for child in children:
            child.end()
        deadline = time.monotonic() + STOP_TIMEOUT
        for child in children:
            child.await_end(deadline)
