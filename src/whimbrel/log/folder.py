"""The logs of a data directory, each opened once, by name. Several processes may have the same folder open."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from whimbrel.log.embedded import EmbeddedLog
from whimbrel.log.private import below
from whimbrel.log.spool import IncrementSpool


class Logs:
    """A folder of logs. Safe to use from several threads."""

    def __init__(self, folder: Path, durable: bool = False) -> None:
        """`durable`: appends survive a power failure."""
        self.folder, self.durable = folder, durable
        self._open: dict[str, EmbeddedLog] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        """The file of a log."""
        return below(self.folder, f"{name}.db")

    def log(self, name: str, durable: bool = False) -> EmbeddedLog:
        """A log, created unless it exists. `durable`: even if the others are not."""
        with self._lock:
            if name not in self._open:
                self._open[name] = EmbeddedLog(self.path(name), durable=durable or self.durable)
            return self._open[name]

    def inbox(self, instance: str) -> EmbeddedLog:
        """An instance's inbox."""
        return self.log(f"inbox-{instance}")

    def outbox(self, instance: str) -> EmbeddedLog:
        """An instance's outbox."""
        return self.log(f"outbox-{instance}")

    def arrivals(self, instance: str) -> EmbeddedLog:
        """What the place of an instance elsewhere has sent of its output."""
        return self.log(f"arrivals-{instance}")

    def increments(self, instance: str) -> IncrementSpool:
        """The spool of an instance's increments."""
        return IncrementSpool(self.log(f"increments-{instance}"), self._spooled(instance))

    def spools(self) -> list[EmbeddedLog]:
        """The spools of all existing links."""
        return [self.log(path.stem) for path in self.folder.glob("link-*.db")]

    def _spooled(self, instance: str) -> Path:
        return below(self.folder, f"increments-{instance}")

    def forget(self, instance: str) -> None:
        """Close the logs of an instance that has left; their files stay."""
        for name in _names(instance):
            with self._lock:
                log = self._open.pop(name, None)
            if log is not None:
                log.close()

    def remove(self, instance: str) -> None:
        """Remove the files of an instance that has left, if there are any."""
        self.forget(instance)
        for name in _names(instance):
            for file in self.folder.glob(f"{name}.db*"):
                if file.is_file():
                    file.unlink()
        shutil.rmtree(self._spooled(instance), ignore_errors=True)

    def close(self) -> None:
        """Close all logs."""
        with self._lock:
            for log in self._open.values():
                log.close()


def _names(instance: str) -> list[str]:
    return [f"{kind}-{instance}" for kind in ("inbox", "outbox", "arrivals", "increments")]
