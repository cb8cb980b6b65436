"""What a site, a stage, an instance or a token may be called.

Names become parts of file names, so each one that comes over a port is checked where it is decoded (`Name`), and each
one that a user chooses where it is given (`check_name`). The first and the last character are a letter, a digit or `_`;
between them `.` and `-` may stand as well. So a name is one step of a path, never `.` or `..`, never hidden, never an
option of a command, and holds no control character.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from whimbrel.core.errors import Refused

LONGEST, CHOSEN = 100, 64
"""Characters of any name, and of one that a user chooses: an instance is called like its stage, and a number."""
PATTERN = rf"^\w(?:[\w.-]{{0,{LONGEST - 2}}}\w)?\Z"
Name = Annotated[str, msgspec.Meta(pattern=PATTERN)]
"""A name as it is decoded: anything else does not fit the type."""
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[\w.:\[\]-]{1,260}\Z")]
"""Where a process can be reached: scheme, host and port, and nothing behind."""

GATEWAY, SUPERVISOR = "gateway", "orchestrator"
"""The roles of processes, as their credentials are called; a site's is `site_role`."""


def site_role(site: str) -> str:
    """The role of a site."""
    return f"site-{site}"


def check_name(kind: str, name: str, longest: int = CHOSEN) -> str:
    """The name, if it is one. Raises `Refused`; `kind` says of what."""
    if len(name) > longest or not re.search(PATTERN, name):
        raise Refused(
            f"{kind} name {name!r} is not allowed: use letters, digits and _, inside also . and -, "
            f"at most {longest} characters"
        )
    return name
