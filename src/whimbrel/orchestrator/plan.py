"""A plan of `fluid` that lies in a file. Read where the order is given: a name that comes by HTTP is never a file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from whimbrel.core.errors import Refused
from whimbrel.core.protocols.fluid import PLANS


def read_plan(options: dict[str, Any]) -> dict[str, Any]:
    """A plan that is no known name, but a file: turns, each a list of bins."""
    plan = options.get("plan")
    if not isinstance(plan, str | Path) or plan in PLANS or (isinstance(plan, str) and not Path(plan).is_file()):
        return options
    try:
        turns = msgspec.json.decode(Path(plan).read_bytes(), type=list[list[int]])
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(f"{plan} holds no plan: {error}; a plan is a JSON list of lists of bins") from error
    return {**options, "plan": turns}
