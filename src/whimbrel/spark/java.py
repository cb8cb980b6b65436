"""Finds a Java that can run Spark.

A SparkSession starts a JVM, and Spark uses `$JAVA_HOME/bin/java` or the `java` on the PATH, without checking its
version. `find_java` checks first, so that a missing or outdated Java is an error before a JVM crashes. `make setup`
uses the same function and installs a Java into the virtual environment if the machine has none.

This file starts no session and changes no environment variable: session.py does.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def find_java() -> str | None:
    """The home of a Java that can run Spark (17, or 21 and later), or None.

    Checks `JAVA_HOME`, then `java` on the PATH, then the Java that `make setup` may have installed into this
    environment (`sys.prefix/java`). A candidate that is missing or of another version is skipped: Spark would
    still use it, so set `JAVA_HOME` to the result before the session starts, even if it was already set.
    """
    for home in _places():
        if os.access(home / "bin" / "java", os.X_OK) and _runs_spark(_major_version(home)):
            return str(home)
    return None


def _places() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if java := shutil.which("java"):
        # Debian's /usr/bin/java is a link to the real home. A version manager's shim leads to no home and is
        # skipped; those managers set JAVA_HOME.
        yield Path(java).resolve().parent.parent
    yield Path(sys.prefix) / "java"


def _runs_spark(major: int | None) -> bool:
    return major is not None and (major == 17 or major >= 21)


def _major_version(home: Path) -> int | None:
    """Read from the `release` file of the JDK; only without one, from the output of `java -version` (0.1 s)."""
    try:
        found = re.search(r'^JAVA_VERSION="(\d+)', (home / "release").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is None:
        try:
            asked = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r'version "(\d+)', asked.stderr)
    return int(found[1]) if found else None
