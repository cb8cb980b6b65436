"""The process that test_kill.py kills: runs a pipeline from a data directory, and says what it does, line by line.

    python job.py HOST DATA OUT ROWS [PROTOCOL SITE|INSTANCES]

Goes on where the directory stands. Waits until the migrations it has found there are over, then orders a move of
everything to SITE, if one is given, or that many INSTANCES in the cloud, while records come in. Each phase is told
right after it has been journalled, before its commands are carried out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import whimbrel as wb
from tests.app.waiting import until
from tests.spark_app.jobs import SCHEMA, Chain, rows
from whimbrel.core.protocols.machine import Migration
from whimbrel.orchestrator.journal import Journal

RATE = 400
BALLAST = 40_000
BUDGET = 50_000
"""A part ships its keys in several batches, so that there is something to kill."""
LINKS = "delay=100ms,jitter=20ms,rate=4mbit,loss=1%"
"""And each batch is under way for a while, so that something dies on the link."""


def say(*words: object) -> None:
    """One line, unbuffered: said is written."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def tell_phases() -> None:
    """From now on, say each phase of each migration as soon as it is safe."""
    write = Journal.write

    def write_and_tell(self: Journal, *migrations: Migration, answer: tuple[str, bytes] | None = None) -> None:
        write(self, *migrations, answer=answer)
        for migration in migrations:
            say("phase", migration.move.id, migration.phase)

    Journal.write = write_and_tell  # type: ignore[method-assign]


def job(out: Path, count: int) -> wb.Pipeline:
    """The pipeline, with a source that ends after `count` rows."""
    pipeline = wb.Pipeline("killed", source=wb.Items(rows(count), schema=SCHEMA, rate=RATE), key="key")
    return pipeline.stage("chain", Chain(BALLAST), groups=2).sink(wb.JsonLines(out, identity=True))


def main(host: str, data: str, out: str, count: str, protocol: str = "", to: str = "") -> None:
    """One life."""
    tell_phases()
    with wb.run(job(Path(out), int(count)), data=data, keep=True, links=LINKS, host=host) as app:
        known = list(app.status()["stages"]["chain"]["migrations"])
        app.control.orchestrator.wait("chain", known, 60)
        if protocol:
            before = app.status()["records"]["delivered"]
            until(lambda: app.status()["records"]["delivered"] > before, "results come out", 60)
            if to.isdigit():
                app.scale("chain", instances=int(to), at="cloud", protocol=protocol, budget=BUDGET).wait(60)
            else:
                app.migrate("chain", to=to, protocol=protocol, budget=BUDGET).wait(60)
    for id in app.status()["stages"]["chain"]["migrations"]:
        say("story", *app.story(id))
    say("ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
