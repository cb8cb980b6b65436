"""Small processes for test_up.py.

python small.py child NAME      lives until it is told to end, or its input ends
python small.py refused         cannot run
python small.py up NAME ...     supervises such children
"""

from __future__ import annotations

import os
import sys

from whimbrel.deploy.life import live
from whimbrel.deploy.up import REFUSED, supervise


def say(line: str) -> None:
    os.write(1, (line + "\n").encode())


class Small:
    """Says when it starts and when it stops."""

    error = None

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self) -> None:
        say(f"{self.name} lives as {os.getpid()}")

    def stop(self) -> None:
        say(f"{self.name} stops")


def main(what: str, *names: str) -> None:
    if what == "child":
        live(lambda: Small(names[0]), until_input_ends=True)
    elif what == "refused":
        sys.exit(REFUSED)
    else:
        me = [sys.executable, __file__]
        commands = {name: [*me, "refused"] if name == "refused" else [*me, "child", name] for name in names}
        supervise(commands, say, lambda: False)
        say("over")


if __name__ == "__main__":
    main(*sys.argv[1:])
