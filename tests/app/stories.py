"""Stories without what differs from run to run."""

from __future__ import annotations

import re
from collections.abc import Iterable

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
TOOK = r" \(\w+ took \d+\.\d{3} s\)"


def timeless(story: Iterable[str]) -> list[str]:
    """The lines of a story, each of which must have a time, without that, and without how long phases took."""
    found = [re.fullmatch(rf"{TIME} (.*?)({TOOK})?", line) for line in story]
    assert None not in found, "every line has its time"
    return [line[1] for line in found if line is not None]
