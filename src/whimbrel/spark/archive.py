"""Spark's classes, loaded and verified once for all later starts: an archive that the JVM maps (class data sharing).

A JVM that runs a query loads ten thousand classes: half of the start-up time of a site. `whimbrel warm` creates the
archive (deploy/warm.py), and from then on `session` passes it to each JVM.

An archive is valid for one Java and one Spark, so both are in its name. So is its size, because a truncated file
crashes the JVM. The JVM checks that the jars are those of the archive, and ignores the archive otherwise.
"""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from whimbrel.spark.java import find_java

SILENT = "-Xlog:cds*=off -Xlog:class+path=off"
"""A JVM that cannot use its archive ignores it; these options suppress the warning."""


def archives() -> Path:
    """The folder of the archives: in this Python's environment, like the jars that they were made of."""
    return Path(sys.prefix) / "share" / "whimbrel"


def archive(java: str) -> Path | None:
    """The archive for the Java with this home, if there is one."""
    for path in archives().glob(f"{_name(java)}-*.jsa"):
        found = path.stat()
        is_ours = found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022  # the JVM runs its content
        if is_ours and found.st_size and path.stem.rpartition("-")[2] == str(found.st_size):
            return path
    return None


def is_wanted() -> bool:
    """Whether there is no archive, and no empty file that marks that this Java cannot make one."""
    java = find_java()
    return java is not None and not any(archives().glob(f"{_name(java)}-*.jsa"))


def jvm_options(java: str) -> str:
    """The options that make a JVM use the archive."""
    path = archive(java)
    return f"-XX:SharedArchiveFile={path} {SILENT}" if path is not None and " " not in str(path) else ""


def keep(java: str, made: Path | None) -> Path:
    """Store an archive in place of earlier ones; an empty one if this Java makes none, so that no start tries again."""
    folder, name = archives(), _name(java)
    for old in folder.glob(f"{name}-*.jsa"):
        old.unlink(missing_ok=True)  # a JVM that has mapped it can still use it
    if made is None:
        path = folder / f"{name}-0.jsa"
        path.touch()
        return path
    made.chmod(0o644)
    with made.open("rb") as file:
        os.fsync(file.fileno())
    return made.rename(folder / f"{name}-{made.stat().st_size}.jsa")


def _name(java: str) -> str:
    """The name of the archives for a Java, without their size. Computed without importing pyspark."""
    spec, release = find_spec("pyspark"), Path(java, "release")
    assert spec is not None
    spark = version("pyspark")
    java_version = release.read_text(encoding="utf-8") if release.exists() else ""
    digest = hashlib.sha256("\0".join([java, java_version, spark, str(spec.origin)]).encode()).hexdigest()
    return f"spark-{spark}-{digest[:16]}"
