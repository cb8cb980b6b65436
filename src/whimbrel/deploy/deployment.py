"""What all processes of a deployment must agree on: the pipeline, and its layout.

The pipeline is a Python file that each of them imports. The orchestrator decides the rest and writes it to the journal
of the shared data directory, where the others read it.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.host.contract import MICRO_BATCH
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import PROCESS
from whimbrel.orchestrator.directory import check_directory
from whimbrel.orchestrator.journal import JOURNAL, Journal, JournalReader
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import SAVE_EVERY

SNAPSHOT = "deployment"
TRIGGER = "500 milliseconds"
"""The minimum interval between batches of an instance, unless configured: without one, sites on few cores only slow
each other down, and a site without records would poll all the time."""
JOURNAL_TIMEOUT = 60.0
"""Seconds to wait for the orchestrator's first write to a new data directory."""


class Deployment(msgspec.Struct, frozen=True):
    """The layout of a pipeline."""

    sites: list[str]
    links: str = "ideal"
    trigger: str = TRIGGER
    keep: bool = False
    max_backlog: int = 200_000
    store: str | None = None
    """The address of the central store."""
    save_every: float = SAVE_EVERY
    reserve: int = RESERVE
    """Bytes that must be free on every disk for a role to accept input."""
    durability: str = PROCESS
    """What an acknowledgement survives (log/durability.py)."""
    host: str = MICRO_BATCH
    """What runs the instances (host/contract.py)."""

    def save(self, journal: Journal) -> None:
        """Write it to the journal, for the other processes."""
        journal.save(SNAPSHOT, wire.pack(self))


def agreed(data: Path, pipeline: Pipeline) -> Deployment:
    """The layout that the orchestrator has decided; waits for it in a new directory. Raises if the directory belongs to
    another pipeline."""
    journal = JournalReader(data / JOURNAL)
    deadline = time.monotonic() + JOURNAL_TIMEOUT
    while (blob := journal.load(SNAPSHOT)) is None:
        if time.monotonic() > deadline:
            raise Unavailable(f"no orchestrator has ever run in {data}; start it first: whimbrel orchestrator ...")
        time.sleep(0.05)
    found = wire.unpack(blob, Deployment)
    check_directory(data, journal, pipeline.name, [stage.name for stage in pipeline.stages], found.sites)
    return found


def load_job(path: str) -> Pipeline:
    """The pipeline of a Python file: the one at its top level, or `file.py:name` if it has several."""
    file, _, name = path.partition(":")
    script = Path(file).resolve()
    if script.suffix != ".py" or not script.is_file():
        raise Refused(f"{file} is not a Python file; give the file that makes the pipeline, as job.py or job.py:name")
    sys.path.insert(0, str(script.parent))  # Spark's workers must also be able to import it by name
    module = importlib.import_module(script.stem)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Pipeline)}
    if name:
        found = {name: found[name]} if name in found else {}
    if len({id(pipeline) for pipeline in found.values()}) != 1:
        listed = ", ".join(found) or "none"
        raise Refused(
            f"{file} must have one Pipeline at its top level, not inside a function or `if __name__ == ...`; "
            f"it has {listed}. If there are several, name one: {file}:name"
        )
    pipeline = next(iter(found.values()))
    if not pipeline.stages:
        raise Refused(f"the pipeline of {file} has no stage; add one with pipeline.stage(name, operator)")
    return pipeline
