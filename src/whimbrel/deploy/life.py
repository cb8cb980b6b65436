"""The life of a process: it starts, serves until it is told to end, and stops what it has started.

It ends at SIGTERM or Ctrl-C; and, if whoever started it says so, when that one is gone: then its standard input ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
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
"""Seconds between two beats."""
ADDRESS = "orchestrator.url"
"""The file in the data directory that says where the orchestrator is."""


class Process(Protocol):
    """What runs in a process."""

    @property
    def error(self) -> Exception | None:
        """Why it had to end, if nobody wanted it to."""

    def start(self) -> None:
        """Begin to serve."""

    def stop(self) -> None:
        """Stop whatever was started, though `start` may have been interrupted. What is not done goes on at the next
        start."""


class Ended(BaseException):
    """Somebody wants this process to end."""


def live(
    make: Callable[[], Process],
    *,
    until_input_ends: bool = False,
    private: bool = False,
    log: LogSettings | None = None,
) -> None:
    """Run a process until it is told to end. Called in the main thread. `private`: what it writes, and whatever it
    starts, is for its owner alone. `log`: what it logs to its standard error; if not given, it configures nothing."""
    if log is not None:
        log_to_stderr(log)
    if private:
        os.umask(OTHERS)

    def end(number: int, frame: object) -> None:
        raise Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if until_input_ends:
        threading.Thread(target=_end_with_input, name="parent", daemon=True).start()
    process: Process | None = None
    try:
        process = make()
        process.start()
        while True:
            signal.pause()
    except (Ended, KeyboardInterrupt):
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if process is not None:
            process.stop()
    if process is not None and process.error is not None:
        raise process.error


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class Heart:
    """Says once in a while that this process lives; goes on when nobody hears it, and says so.

    If it cannot be said how things are, because the JVM is gone for instance, the process ends: a new one can help.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._complaint, self._complained = beat, "", False
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
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
                self.error = kept(LOGGER, "this process cannot say how it is, and ends", error)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._stopping.wait(BEAT):
                return

    def _complain(self, told: str) -> None:
        """Say why nobody hears it: once, when it has been so twice. An orchestrator that is starting is no news."""
        if told == self._complaint and not self._complained:
            LOGGER.warning("the orchestrator does not hear this process: %s", told)
        self._complaint, self._complained = told, told == self._complaint


def orchestrator_at(data: Path, credential: Credential, url: str | None, tls: Tls | None = None) -> OrchestratorPort:
    """The orchestrator, at a URL, or wherever the one of this data directory is now."""
    return remote(OrchestratorPort, lambda: url or address_in(data), credential, tls=tls)


def address_in(data: Path) -> str:
    """Where the orchestrator of a data directory is now."""
    try:
        return (data / ADDRESS).read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise Unavailable(f"no orchestrator has said where it is, in {data}") from error


def new_life() -> str:
    """A name for this start of the process."""
    return secrets.token_hex(8)
