"""A site: one place with Spark. Starts, stops and takes over instances; each has its checkpoint in the site's folder.

    <folder>/<instance>/      the checkpoint of an instance that runs, or ran, here

The site obeys; what is to run where is decided by the orchestrator.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from whimbrel.core.errors import Retry, Unavailable
from whimbrel.spark.query import StageQuery

Make = Callable[[str, Path], StageQuery]
"""Makes the query of an instance over a checkpoint."""


class Site:
    """One place."""

    def __init__(self, name: str, folder: Path, make: Make) -> None:
        self.name, self.folder, self._make = name, folder, make
        self.queries: dict[str, StageQuery] = {}
        self._past: list[float] = []

    def checkpoint(self, instance: str) -> Path:
        """Where the checkpoint of an instance lies."""
        return self.folder / instance

    def start(self, instance: str, *, wait: bool = True) -> None:
        """Run an instance, from its checkpoint if it has one here; returns when it serves, unless told not to wait.

        Nothing happens if it runs. What cannot be started raises `Unavailable`, and nothing has run; what ran and then
        stopped raises `Retry`: its checkpoint has moved on, here and nowhere else.
        """
        if instance in self.queries and self.queries[instance].is_active:
            return
        begun = self._batches_begun(instance)
        query = self._make(instance, self.checkpoint(instance))
        query.start()
        self.queries[instance] = query
        if wait:
            try:
                self.wait()
            except Unavailable as error:
                if self._batches_begun(instance) == begun:
                    raise
                raise Retry(f"{instance} began to run at {self.name} and stopped: {error}") from error

    def wait(self) -> None:
        """Until everything that was started here serves."""
        for instance, query in list(self.queries.items()):
            try:
                query.wait()
            except Unavailable:
                self.stop(instance)
                raise

    def _batches_begun(self, instance: str) -> int:
        """The number of the last batch that Spark has planned from the checkpoint here."""
        offsets = self.checkpoint(instance) / "offsets"
        return max((int(file.name) for file in offsets.glob("[0-9]*") if file.name.isdigit()), default=-1)

    def stop(self, instance: str) -> None:
        """Stop an instance and wait for its end. Nothing happens if it does not run."""
        query = self.queries.pop(instance, None)
        if query is not None:
            query.stop()
            self._past += query.progress

    def take(self, instance: str, origin: Site) -> int:
        """Copy the checkpoint of a stopped instance from another site; return its size. May be repeated."""
        here, whole = self.checkpoint(instance), self.folder / f"{instance}.partial"
        for leftover in (whole, here):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            # A query that has just ended may still be removing temporary files.
            shutil.copytree(origin.checkpoint(instance), whole, ignore=shutil.ignore_patterns("*.tmp", ".*.tmp"))
            whole.rename(here)
        except (OSError, shutil.Error) as error:
            raise Unavailable(f"the checkpoint of {instance} cannot be copied to {self.name}: {error}") from error
        return sum(file.stat().st_size for file in here.rglob("*") if file.is_file())

    def batches(self) -> list[float]:
        """How long the micro-batches here took, in milliseconds, as far as Spark remembers."""
        return self._past + [ms for query in list(self.queries.values()) for ms in query.progress]
