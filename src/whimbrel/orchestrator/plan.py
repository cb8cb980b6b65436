"""A plan of `fluid` in a file. It is read where the order is given: a name received over HTTP is never a file name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core.errors import Refused
from whimbrel.core.protocols.fluid import PLANS


def read_plan(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a plan that is a file name replaced by the file's content: turns, each a list of bins."""
    plan = options.get("plan")
    if not isinstance(plan, str | Path) or plan in PLANS or (isinstance(plan, str) and not Path(plan).is_file()):
        return options
    try:
        turns = msgspec.json.decode(Path(plan).read_bytes(), type=list[list[int]])
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(f"{plan} is not a plan: {error}; a plan is a JSON list of lists of bins") from error
    return {**options, "plan": turns}
