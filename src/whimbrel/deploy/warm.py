"""Makes the archive of Spark's classes (spark/archive.py): `whimbrel warm`, which `make test` runs.

A separate process runs a small pipeline twice, the second time from the checkpoints of the first, with a move and a
stateless part: everything that a site does. When its JVM ends, it writes the classes it has loaded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from whimbrel.core.errors import Unavailable
from whimbrel.core.operator import Emit, Operator, State
from whimbrel.pipeline import Items, Pipeline
from whimbrel.spark.archive import SILENT, archives, keep
from whimbrel.spark.session import JVM_OPTIONS, TUNED, java_home, session

TIMEOUT = 600.0
"""Seconds that this may take; on two idle cores it takes 40 s."""


def make_archive() -> Path:
    """Make the archive for the Java that Spark would use. Raises `Unavailable` without Java, or if this Java fails."""
    java = java_home()
    archives().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archives(), prefix="making-") as folder:
        made = Path(folder, "archive.jsa")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "whimbrel.deploy.warm", made],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"a small pipeline did not end within {TIMEOUT:.0f} s") from error
        if done.returncode:
            raise Unavailable(f"a small pipeline has failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        if not made.exists() or not _works(java, made, done.stdout.strip()):
            keep(java, None)
            raise Unavailable(
                f"the Java at {java} cannot archive the classes it has loaded; Spark runs without an archive"
            )
        return keep(java, made)


def _works(java: str, made: Path, class_path: str) -> bool:
    """Whether a JVM with Spark's class path accepts the archive, with every byte verified."""
    command = [f"{java}/bin/java", "-cp", class_path, f"-XX:SharedArchiveFile={made}", "-Xshare:on"]
    return subprocess.run([*command, "-XX:+VerifySharedSpaces", "-version"], capture_output=True).returncode == 0


class _Count(Operator):
    class State(State):
        count: int = 0

    def process(self, key: str, event: Any, state: Any, emit: Emit) -> None:
        state.count += 1
        emit(device=key, value=state.count)


def _rows() -> Iterator[dict[str, Any]]:
    for number in range(2_000):
        yield {"device": f"device-{number % 50}", "value": number}


def _train(made: str) -> str:
    """Run a small pipeline in a JVM that writes an archive when it ends; return that JVM's class path."""
    from whimbrel.deploy.embedded import run

    writes = {JVM_OPTIONS: f"{TUNED[JVM_OPTIONS]} -XX:ArchiveClassesAtExit={made} {SILENT}"}
    spark = session("whimbrel-warm", extra=writes, archived=False)
    schema = pa.schema([("device", pa.string()), ("value", pa.int64())])
    with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder:
        for _ in range(2):
            pipeline = Pipeline("warm", Items(_rows, schema, 1_000), key="device")
            pipeline.stage("counted", _Count(), prepare=lambda frame: frame.where("value >= 0"))
            pipeline.stage("again", _Count(), key="device", schema=schema)
            with run(pipeline, data=folder, spark=spark, trigger="100 milliseconds") as app:
                app.migrate("counted", to="edge-1", share=0.5).wait(60)
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    class_path = str(gateway.jvm.java.lang.System.getProperty("java.class.path"))
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends when its input ends
    gateway.proc.wait()
    return class_path


if __name__ == "__main__":
    print(_train(sys.argv[1]))
