"""The SparkSession for instances: Spark's settings, each with its reason.

Two profiles. `tuned` is Whimbrel's: the same queries, but without the overhead of a micro-batch that is useless on a
local disk. `stock` is Spark with its defaults, and only the settings needed to run at all: benchmarks compare the two.

This file finds Java and sets the environment for it; everything else uses Spark's own configuration.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from whimbrel.core.errors import Unavailable
from whimbrel.spark.archive import jvm_options
from whimbrel.spark.java import find_java
from whimbrel.spark.quiet import quiet_children

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JVM_OPTIONS = "spark.driver.extraJavaOptions"
QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"

NEEDED = {
    JVM_OPTIONS: QUIET,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # Only RocksDB has the column families that transformWithState needs.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # A query's temporary files are removed with it; its checkpoint, in a folder of its own, stays.
    "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
}

TUNED = {
    # A batch writes its state changes only; full snapshots are written in the background.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Without Hadoop's native library every creation of a file forks a `chmod`, and every rename through Hadoop's newer
    # interface forks several `readlink`: 16 ms for each file of a checkpoint. So: the older interface, fewer files (no
    # checksum for each, see also `_write_no_checksums`), a cheaper fork. That leaves 3 ms.
    # Do not change `fs.file.impl`: RocksDB's commits break with the raw file system.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # The C1 compiler only: the JVM mainly plans here, and C2 never pays off. Half the CPU time of the first 100
    # batches, and no more after 700. With C1 alone the JVM reserves 48 MB for compiled code by default instead of
    # 240 MB: that is full after 5 minutes of two stages, and then nothing more is compiled.
    JVM_OPTIONS: (
        f"{QUIET} -Djdk.lang.Process.launchMechanism=VFORK -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
    ),
    # No batch without records: nothing in these queries waits for a watermark.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "4",
    # How often an idle query polls for records. Spark's default of 10 ms takes 7 % of a core for each query.
    "spark.sql.streaming.pollingDelay": "20ms",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.stateStore.stateSchemaCheck": "true",
    "spark.sql.adaptive.enabled": "false",
    # Several instances share the cores: each has a pool of its own (query.py), scheduled fairly.
    "spark.scheduler.mode": "FAIR",
    # Python workers are forked from a process that has imported everything already.
    "spark.python.daemon.module": "whimbrel.spark.daemon",
    "spark.python.worker.reuse": "true",
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    "spark.broadcast.compress": "false",
}

BOTH_COMPILERS = {JVM_OPTIONS: f"{QUIET} -Djdk.lang.Process.launchMechanism=VFORK"}
"""For benchmarks against stock queries, which do more of their work in the JVM: C1 alone slows them down."""

_launches: list[threading.Thread] = []
"""The thread that starts the JVM, after a call of `launch`."""


def session(
    name: str,
    *,
    cores: int | str = "*",
    tuned: bool = True,
    extra: Mapping[str, str] | None = None,
    archived: bool = True,
) -> SparkSession:
    """A local SparkSession for instances. Settings of `extra` override the profile's. `archived`: its JVM loads Spark's
    classes from the archive, if there is one (archive.py).

    Raises `Unavailable` if there is no suitable Java.
    """
    from pyspark.sql import SparkSession  # not at the top: it takes 1 s, in which a JVM can start

    home = java_home()
    builder = SparkSession.builder.appName(name).master(f"local[{cores},4]")
    for key, value in _settings(home, tuned, archived, extra or {}).items():
        builder = builder.config(key, value)
    while _launches:
        _launches.pop().join()
    with quiet_children():
        spark = builder.getOrCreate()
    if tuned:
        _write_no_checksums(spark)
        _use_installed_pyspark(spark)
    return spark


def launch() -> None:
    """Start the JVM of a tuned session, and return at once: `session` waits for it. For a process with many imports
    before it needs the session."""
    from pyspark import SparkConf, SparkContext

    conf = SparkConf().setAll(list(_settings(java_home(), tuned=True, archived=True, extra={}).items()))

    def start() -> None:
        with suppress(Exception), quiet_children():  # `session` tries again, and raises the error
            SparkContext._ensure_initialized(conf=conf)

    _launches.append(threading.Thread(target=start, name="jvm", daemon=True))
    _launches[-1].start()


def java_home() -> str:
    """The home of Java; also sets `JAVA_HOME` to it. Raises `Unavailable` if there is none."""
    home = find_java()
    if home is None:
        raise Unavailable(
            "Spark needs Java 17, or 21 and later, and none was found. Install one (Debian: apt-get install "
            "openjdk-17-jre-headless) or set JAVA_HOME to it; in a checkout, `make setup` puts one into .venv"
        )
    os.environ["JAVA_HOME"] = home
    # Otherwise workers use `python3` from the PATH, and transformWithState fails.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return home


def _settings(home: str, tuned: bool, archived: bool, extra: Mapping[str, str]) -> dict[str, str]:
    settings = {
        **NEEDED,
        **(TUNED if tuned else {}),
        # Workers can import what the user's script can.
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        **extra,
    }
    if tuned and archived:
        settings[JVM_OPTIONS] = f"{settings[JVM_OPTIONS]} {jvm_options(home)}"
    return settings


def _write_no_checksums(spark: SparkSession) -> None:
    """Write no `.crc` file for each file. Hadoop has no setting for it, only a method of the file system."""
    jvm, context = spark.sparkContext._jvm, spark.sparkContext._jsc
    assert jvm is not None
    local = jvm.org.apache.hadoop.fs.FileSystem.get(jvm.java.net.URI("file:///"), context.hadoopConfiguration())
    local.setWriteChecksum(False)


def _use_installed_pyspark(spark: SparkSession) -> None:
    """Make Python processes import the installed pyspark, not the zip file of its sources under SPARK_HOME.

    Spark puts that file first on their path, where each process compiles its modules again: 0.6 s for each of the five
    or more processes that a query's start waits for. It does so if its environment has SPARK_HOME, which nothing else
    needs by now; and a JVM's own environment can only be changed through reflection.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        field = jvm.java.lang.Class.forName("java.util.Collections$UnmodifiableMap").getDeclaredField("m")
        field.setAccessible(True)
        field.get(jvm.java.lang.System.getenv()).remove("SPARK_HOME")
    except Py4JJavaError:
        pass  # the JVM does not allow it: everything works, but slower


@contextmanager
def brief_session(
    name: str, *, tuned: bool = True, extra: Mapping[str, str] | None = None
) -> Iterator[tuple[SparkSession, Path]]:
    """A session with a temporary folder. At the end the session stops first, because it writes until then."""
    with tempfile.TemporaryDirectory(prefix="whimbrel-") as folder:
        spark = session(name, tuned=tuned, extra=extra)
        try:
            yield spark, Path(folder)
        finally:
            spark.stop()
