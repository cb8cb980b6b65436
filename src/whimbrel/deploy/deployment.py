"""What all processes of a deployment must agree on: the pipeline, and how it is laid out.

The pipeline is a Python file that each of them imports. The rest is decided by the orchestrator, written to the journal
of the data directory they share, and read there by the others.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import msgspec

from whimbrel.core import wire
from whimbrel.core.errors import Refused, Unavailable
from whimbrel.log.disk import RESERVE
from whimbrel.log.durability import PROCESS
from whimbrel.orchestrator.directory import check_directory
from whimbrel.orchestrator.journal import JOURNAL, Journal, JournalReader
from whimbrel.pipeline import Pipeline
from whimbrel.roles.gateway import SAVE_EVERY

SNAPSHOT = "deployment"
TRIGGER = "500 milliseconds"
"""How often a site starts a micro-batch at most, unless told: as soon as possible, sites on few cores only get in each
other's way, and a site without records would ask for them all the time."""
PATIENCE = 60.0
"""Seconds to wait for the orchestrator's first word in a new data directory."""


class Deployment(msgspec.Struct, frozen=True):
    """How a pipeline is laid out."""

    sites: list[str]
    links: str = "ideal"
    trigger: str = TRIGGER
    keep: bool = False
    max_backlog: int = 200_000
    store: str | None = None
    """The address of the central store."""
    save_every: float = SAVE_EVERY
    reserve: int = RESERVE
    """Bytes that must be free on every disk for anything to be taken in."""
    durability: str = PROCESS
    """What an acknowledgement survives (log/durability.py)."""

    def save(self, journal: Journal) -> None:
        """Let the others know."""
        journal.save(SNAPSHOT, wire.pack(self))


def agreed(data: Path, pipeline: Pipeline) -> Deployment:
    """What the orchestrator has decided; waits for it in a new directory. Raises if that is another pipeline's."""
    journal = JournalReader(data / JOURNAL)
    deadline = time.monotonic() + PATIENCE
    while (blob := journal.load(SNAPSHOT)) is None:
        if time.monotonic() > deadline:
            raise Unavailable(f"no orchestrator has ever run in {data}; start it first: whimbrel orchestrator ...")
        time.sleep(0.05)
    found = wire.unpack(blob, Deployment)
    check_directory(data, journal, pipeline.name, [stage.name for stage in pipeline.stages], found.sites)
    return found


def load_job(path: str) -> Pipeline:
    """The pipeline that a Python file makes: the one it has at its top level, or `file.py:name` if it has several."""
    file, _, name = path.partition(":")
    script = Path(file).resolve()
    if script.suffix != ".py" or not script.is_file():
        raise Refused(f"{file} is no Python file; give the file that makes the pipeline, as job.py or job.py:name")
    sys.path.insert(0, str(script.parent))  # Spark's workers must be able to import it by name, too
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
