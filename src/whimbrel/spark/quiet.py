"""Removes the lines that Spark's processes always print from the user's terminal, and nothing else.

The JVM and the Python processes it starts write to the standard error they inherit: a note about incubating modules,
five lines for each stateful query that starts. No setting turns that off. So the JVM inherits a pipe, and a thread
passes on every line except these.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHATTER = re.compile(
    rb"WARNING: Using incubator modules"
    rb"|(Starting )?Streaming TransformWithStateInPandas Python worker"
    rb"|WARN(ING)?:? .*(NativeCodeLoader|native-hadoop)"
    rb"|Using Spark's default log4j profile|Setting default log level to"
    rb"|To adjust logging level use sc.setLogLevel"
)


@contextmanager
def quiet_children() -> Iterator[None]:
    """Processes started inside this block, and their children, write to a standard error without these lines."""
    out, inlet = os.pipe()
    terminal = os.dup(2)
    threading.Thread(target=_pass_on, args=(out, terminal), name="quiet", daemon=True).start()
    sys.stderr.flush()
    os.dup2(inlet, 2)
    os.close(inlet)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)


def _pass_on(source: int, terminal: int) -> None:
    """Copy lines until the last writer closes the pipe, without the chatter and the empty line after it."""
    skipped = False
    with os.fdopen(source, "rb") as lines, os.fdopen(terminal, "wb", buffering=0) as out:
        for line in lines:
            chatter = CHATTER.match(line) is not None or (skipped and not line.strip())
            if not chatter:
                out.write(line)
            skipped = chatter
