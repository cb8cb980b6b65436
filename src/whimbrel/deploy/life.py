"""The lifecycle of a process: it starts, serves until a signal to end, and stops what it has started.

It ends at SIGTERM or Ctrl-C; and, with `until_input_ends`, when its parent process is gone: then its standard input
ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from whimbrel.core.errors import Retry, Unavailable
from whimbrel.core.text import visible
from whimbrel.deploy.logformat import LogSettings, log_to_stderr
from whimbrel.log.kept import kept
from whimbrel.log.private import OTHERS
from whimbrel.orchestrator.ports import OrchestratorPort
from whimbrel.rpc.access import Credential
from whimbrel.rpc.remote import remote
from whimbrel.rpc.tls import Tls

LOGGER = logging.getLogger("whimbrel.deploy")
BEAT = 1.0
"""Seconds between two heartbeats."""
BROKEN = 10.0
"""Seconds that a process has to end after it could not determine its status."""
LOOK = 0.5
"""Seconds until the main thread notices a signal that another thread received."""
ADDRESS = "orchestrator.url"
"""The file in the data directory with the orchestrator's address."""


class Process(Protocol):
    """The role that a process runs."""

    @property
    def error(self) -> Exception | None:
        """Why the process had to end, if it was not asked to."""

    def start(self) -> None:
        """Start to serve."""

    def stop(self) -> None:
        """Stop everything that was started, even if `start` was interrupted. Unfinished work continues at the next
        start."""


class Ended(BaseException):
    """A signal asks this process to end."""


def live(
    make: Callable[[], Process],
    *,
    until_input_ends: bool = False,
    private: bool = False,
    log: LogSettings | None = None,
) -> None:
    """Run a process until a signal ends it. Called in the main thread. `private`: only the owner may read the files of
    this process and its children. `log`: its log to standard error; if not given, logging is not configured."""
    if log is not None:
        log_to_stderr(log)
    if private:
        os.umask(OTHERS)

    def end(number: int, frame: object) -> None:
        raise Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if until_input_ends:
        threading.Thread(target=end_with_input, name="parent", daemon=True).start()
    process: Process | None = None
    try:
        process = make()
        process.start()
        while True:
            # Not signal.pause(): the kernel may hand a signal to another thread, and would interrupt only that one.
            time.sleep(LOOK)
    except (Ended, KeyboardInterrupt):
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if process is not None and process.error is not None:  # what is broken may never end
            _exit_in(BROKEN)
        if process is not None:
            process.stop()
    if process is not None and process.error is not None:
        raise process.error


def _exit_in(seconds: float) -> None:
    """Exit after some seconds, whatever the other threads do."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end_with_input() -> None:
    """Send SIGTERM to this process when its standard input ends. Blocks until then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class Heart:
    """Sends periodic heartbeats of this process; continues when the orchestrator does not receive them, and logs that.

    If the status cannot be determined, for example because the JVM is gone, the process ends: a new one can recover.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._complaint, self._complained = beat, "", False
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Start the heartbeats."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeats."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._beat()
                self._complaint, self._complained = "", False
            except Retry as error:
                self._complain(visible(error))
            except Exception as error:
                self.error = kept(LOGGER, "this process cannot determine its status, and ends", error)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._stopping.wait(BEAT):
                return

    def _complain(self, reason: str) -> None:
        """Log why a heartbeat failed: once, after the second failure in a row, as the orchestrator may be starting."""
        if reason == self._complaint and not self._complained:
            LOGGER.warning("the orchestrator does not receive the heartbeats of this process: %s", reason)
        self._complaint, self._complained = reason, reason == self._complaint


def orchestrator_at(data: Path, credential: Credential, url: str | None, tls: Tls | None = None) -> OrchestratorPort:
    """The orchestrator at a URL, or at the current address in this data directory."""
    return remote(OrchestratorPort, lambda: url or address_in(data), credential, tls=tls)


def address_in(data: Path) -> str:
    """The current address of the orchestrator of a data directory."""
    try:
        return (data / ADDRESS).read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise Unavailable(f"no orchestrator has written its address to {data}; is it running?") from error


def new_life() -> str:
    """A unique name for this start of the process."""
    return secrets.token_hex(8)
