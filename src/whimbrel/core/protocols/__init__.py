"""The protocols, by name. Each file is one protocol: its page of theory, its phases, its rules, its table."""

from __future__ import annotations

from whimbrel.core.errors import UnknownName
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


def protocol_named(name: str) -> Protocol:
    """The protocol of that name, or a clear error."""
    if name not in PROTOCOLS:
        raise UnknownName("protocol", name, list(PROTOCOLS))
    return PROTOCOLS[name]
