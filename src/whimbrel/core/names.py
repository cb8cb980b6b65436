"""Valid names of sites, stages, instances and tokens.

Names become parts of file names, so each one received over a port is checked when it is decoded (`Name`), and each one
chosen by a user when it is given (`check_name`). The first and the last character are a letter, a digit or `_`; `.` and
`-` are allowed between them. So a name is one path component, never `.` or `..`, never hidden, never a command-line
option, and contains no control character.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from whimbrel.core.errors import Refused

LONGEST, CHOSEN = 100, 64
"""Maximum characters of any name, and of one that a user chooses: an instance's name is its stage's with a number."""
PATTERN = rf"^\w(?:[\w.-]{{0,{LONGEST - 2}}}\w)?\Z"
Name = Annotated[str, msgspec.Meta(pattern=PATTERN)]
"""The type of a decoded name: an invalid name does not decode."""
Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[\w.:\[\]-]{1,260}\Z")]
"""The address of a process: scheme, host and port only."""

GATEWAY, SUPERVISOR = "gateway", "orchestrator"
"""The roles of processes, which are also the names of their credentials; a site's is `site_role`."""


def site_role(site: str) -> str:
    """The role of a site."""
    return f"site-{site}"


def gateway_role(place: str = "") -> str:
    """The role of the gateway of a place, or of the only one."""
    return f"{GATEWAY}-{place}" if place else GATEWAY


def router_of(stage: str, place: str = "") -> str:
    """The name of the router into a stage at a place."""
    return f"gateway-{stage}@{place}" if place else f"gateway-{stage}"


def place_of(router: str) -> str:
    """The place of a router."""
    return router.partition("@")[2]


def check_name(kind: str, name: str, longest: int = CHOSEN) -> str:
    """Return the name if it is valid, else raise `Refused`; `kind` is what it names."""
    if len(name) > longest or not re.search(PATTERN, name):
        raise Refused(
            f"{kind} name {name!r} is not allowed: use letters, digits and _, inside also . and -, "
            f"at most {longest} characters"
        )
    return name
