"""Two places in one process, for tests: edge-1 sends to cloud, with seams at which either of them can die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whimbrel.core.errors import UnknownName
from whimbrel.log import Entry, Lane, Log, MemoryLog
from whimbrel.log.large import LargeEntries
from whimbrel.transport import OutgoingSpool, Receiver, RemoteLog, Sender
from whimbrel.transport.connection import Connect, local
from whimbrel.transport.spool import LIMIT, Owner

OWNER = Owner("d1", "edge-1", "cloud")


def anything(place: str, log: str, lane: Lane, writer: str) -> bool:
    """The policy that allows everything."""
    return True


class Places:
    """Logs survive; sender and receiver are made anew after each death."""

    def __init__(
        self,
        *names: str,
        make: Callable[[str], Log] = lambda name: MemoryLog(),
        limit: int = LIMIT,
        large: LargeEntries | None = None,
    ) -> None:
        self.logs = {name: make(name) for name in names or ("inbox",)}
        self.spooled, self.limit, self.large = make("spool"), limit, large
        self.now_us = 0

    def log_of(self, name: str) -> Log:
        if name not in self.logs:
            raise UnknownName("log", name, list(self.logs))
        return self.logs[name]

    def spool(self, owner: Owner = OWNER) -> OutgoingSpool:
        return OutgoingSpool(self.spooled, owner, self.limit, self.large)

    def remote(self, name: str = "inbox") -> RemoteLog:
        return RemoteLog(self.spool(), name)

    def receiver(self, **other: Any) -> Receiver:
        return Receiver(
            **{"place": "cloud", "deployment": "d1", "log_of": self.log_of, "may_append": anything, **other}
        )

    def sender(self, connect: Connect | None = None, **other: Any) -> Sender:
        return Sender(self.spool(), connect or local(self.receiver(), "edge-1"), **other)

    def drain(self, sender: Sender, most: int = 10_000) -> None:
        """Drive a sender until the other place has everything."""
        for _ in range(most):
            if sender.spool.is_empty:
                return
            due_us = sender.step(self.now_us)
            self.now_us = max(self.now_us + 1, due_us or 0)
        raise AssertionError(f"the spool still has {sender.spool.waiting} bytes: {sender.held_up()}")


def blobs(log: Log, lane: Lane = Lane.DATA) -> list[bytes]:
    """What a log holds."""
    return [entry.blob for entry in read(log, lane)]


def read(log: Log, lane: Lane = Lane.DATA) -> list[Entry]:
    """The entries of a log."""
    return log.read(log.head(lane), lane=lane)


def fill(places: Places, number: int, log: str = "inbox") -> list[bytes]:
    """Append so many entries of three writers, in turn."""
    remote, made = places.remote(log), []
    for counter in range(number):
        for writer in "abc":
            made.append(f"{writer}{counter}".encode())
            remote.append(made[-1], count=1, writer=writer, counter=counter)
    return made
