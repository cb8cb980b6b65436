"""The protocols, by name. Each file is one protocol: its description, its phases, its rules, its table."""

from __future__ import annotations

from typing import Any

from whimbrel.core.errors import Refused, UnknownName
from whimbrel.core.protocols.fetch import FETCH
from whimbrel.core.protocols.fluid import FLUID
from whimbrel.core.protocols.live import LIVE
from whimbrel.core.protocols.machine import Protocol
from whimbrel.core.protocols.pause import PAUSE
from whimbrel.core.protocols.push import PUSH
from whimbrel.core.protocols.replicate import REPLICATE
from whimbrel.core.protocols.restart import RESTART
from whimbrel.core.protocols.restore import RESTORE

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol for protocol in (LIVE, PUSH, FETCH, PAUSE, FLUID, REPLICATE, RESTART, RESTORE)
}

SIZES = frozenset({"budget", "chunk"})
"""The options that every order may set."""


def protocol_named(name: str) -> Protocol:
    """The protocol of that name. Raises `UnknownName`."""
    if name not in PROTOCOLS:
        raise UnknownName("protocol", name, list(PROTOCOLS))
    return PROTOCOLS[name]


def check_options(protocol: Protocol, options: dict[str, Any]) -> None:
    """Raise `Refused` if an order sets an option that its protocol does not have, or to an invalid value."""
    allowed = SIZES | protocol.choices
    for name, value in options.items():
        if name not in allowed:
            raise UnknownName(f"option of {protocol.name}", name, sorted(allowed))
        if name in ("plan", "standby"):
            continue
        if name == "order":
            if value not in ("arrival", "key"):
                raise UnknownName("order", value, ["arrival", "key"])
        elif value < 1:
            raise Refused(f"{name} must be at least 1, got {value}: otherwise no state would be sent")
