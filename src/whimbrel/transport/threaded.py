"""A sender with a thread of its own."""

from __future__ import annotations

import logging
import threading
import time

from whimbrel.log.kept import kept
from whimbrel.transport.connection import Connect
from whimbrel.transport.sender import Sender
from whimbrel.transport.spool import OutgoingSpool

LOGGER = logging.getLogger("whimbrel.transport")
LOOK = 0.05
"""Seconds between two looks at the spool: other processes of the place append to it, too, and cannot wake this one."""


class ThreadedSender:
    """Runs a sender from `start` to `stop`."""

    def __init__(self, spool: OutgoingSpool, connect: Connect, *, yields: bool | None = None) -> None:
        """`yields`: whether it leaves the link to others; None: if it sends state."""
        self.sender = Sender(spool, connect, spool.appended.set, yields=yields)
        self.error: Exception | None = None
        """Why it has ended by itself."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sender to {spool.owner.there}", daemon=True)

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; the rest of the spool is sent after the next start."""
        self._stopping.set()
        self.sender.spool.appended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.sender.close()

    def _run(self) -> None:
        appended = self.sender.spool.appended
        try:
            while not self._stopping.is_set():
                appended.clear()
                due_us = self.sender.step(now_us())
                appended.wait(LOOK if due_us is None else min(max(due_us - now_us(), 0) / 1e6, LOOK))
        except Exception as error:
            self.error = kept(LOGGER, f"sending to {self.sender.there} has stopped for good", error)
            self.sender.close()


def now_us() -> int:
    """The clock of senders and of the links that they go through."""
    return time.monotonic_ns() // 1000
