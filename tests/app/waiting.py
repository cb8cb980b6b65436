"""How tests wait: for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, timeout: float = 30.0) -> None:
    """Return as soon as the condition holds; fail, and say what did not happen, if it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {what}")
        time.sleep(0.005)
