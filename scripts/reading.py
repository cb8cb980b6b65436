"""What one must read to understand a `live` migration: the functions and types of the core that one runs through.

    python scripts/reading.py          by file: lines read, of how many
    python scripts/reading.py push     the same for another protocol

Runs a migration in the simulator, without faults, and notes which functions of the core are entered. A function counts
with all its lines, docstring and comments included; so does the body of a class of which a method is entered or an
instance made, without the methods that are not; and the head of each of these files.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from whimbrel.core.protocols.machine import DONE
from whimbrel.lab.sim.world import World

CORE = Path(__file__).parent.parent / "src" / "whimbrel" / "core"


def entered(protocol: str) -> dict[Path, set[int]]:
    """By file of the core: the first lines of the functions that a migration enters."""
    found: dict[Path, set[int]] = defaultdict(set)
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            path = Path(code.co_filename)
            if CORE in path.parents:
                found[path].add(code.co_firstlineno)

    done = 0
    for seed in range(20):
        world = World(seed, protocol, chaos=0, links=False)
        sys.setprofile(note)
        try:
            world.run()
        finally:
            sys.setprofile(None)
        done += any(migration.phase == DONE for migration in world.coordinator.every)
        if done == 3:
            return found
    raise SystemExit(f"no migration by {protocol} came to its end")


def lines_read(path: Path, starts: set[int]) -> tuple[int, int]:
    """How many lines of a file are read, and how many it has."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    read: set[int] = set()

    def first(node: ast.stmt) -> int:
        decorators: list[ast.expr] = getattr(node, "decorator_list", [])
        return min([node.lineno, *(one.lineno for one in decorators)])

    def span(node: ast.stmt) -> set[int]:
        return set(range(first(node), (node.end_lineno or node.lineno) + 1))

    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and first(node) in starts:
            read |= span(node)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            if any(first(one) in starts for one in methods):
                read |= span(node)
                skipped |= {line for one in methods if first(one) not in starts for line in span(one)}
    doc = tree.body[0]
    read |= span(doc)
    return len(read - skipped), len(text.splitlines())


def main(protocol: str = "live") -> None:
    """Print the table."""
    rows = [(path, *lines_read(path, starts)) for path, starts in entered(protocol).items()]
    for path, read, lines in sorted(rows, key=lambda row: -row[1]):
        print(f"{read:5} of {lines:4}  {path.relative_to(CORE.parent)}")
    print(f"{sum(read for _, read, _ in rows):5} lines in {len(rows)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
