"""The gateway's part of a restoration: the check whether it is possible, the fence, and the load.

The gateway has everything needed: the store, the ingress log, and the outlet, which knows up to which `seq` each key's
results are delivered. Versions go directly into the destination's inbox: the gateway has no site, so it uses no link.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from whimbrel.core.errors import Refused, Retry
from whimbrel.core.increments import Version
from whimbrel.core.keys import Selection
from whimbrel.core.protocols.machine import Loaded
from whimbrel.core.record import Message, Move
from whimbrel.core.restoration import loads
from whimbrel.gateway.gateway import Gateway
from whimbrel.log import codec
from whimbrel.log.contract import Lane, Log

if TYPE_CHECKING:
    from whimbrel.checkpoints.central import CentralStore

FENCE_TIMEOUT = 10.0
"""Seconds to wait for the outlet's next commit."""
ENTRY = 1 << 20
"""Approximate bytes of messages per inbox entry."""


class Fencing(Protocol):
    """The outlet, as far as a restoration needs it."""

    def fence(self, move: Move, timeout: float) -> bool:
        """Release no more results of the lost owner; False if that is not durable within `timeout` seconds."""

    def delivered_of(self, selection: Selection) -> dict[str, int]:
        """By key: the `seq` up to which its results are delivered."""


class Restoring:
    """The gateway's part of the restorations of one stage."""

    def __init__(
        self,
        stage: str,
        gateway: Gateway,
        outlet: Fencing,
        inbox_of: Callable[[str], Log],
        store: CentralStore,
        encode: Callable[[Sequence[codec.Content]], bytes] = codec.encode_messages,
        token: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """`encode` encodes messages into an inbox entry; `token` returns a new value at each call."""
        self._stage, self._gateway, self._outlet, self._inbox_of = stage, gateway, outlet, inbox_of
        self._store, self._encode, self._token = store, encode, token
        self._loading = threading.Lock()
        """Two loads must not interleave: a key's pieces belong together."""

    def since(self, checkpoint: int | None) -> int:
        """The `seq` from which on records are needed. Raises if the checkpoint or the records do not exist."""
        horizon = self._gateway.horizon()
        if checkpoint is not None:
            horizon = min(horizon, self._store.horizon(self._stage, checkpoint))
        self._gateway.check_readable((horizon + 1) // codec.ROWS)
        return horizon + 1

    def fence(self, move: Move) -> None:
        """Block further results of a lost owner; raises `Retry` if that is not durable in time."""
        if not self._outlet.fence(move, FENCE_TIMEOUT):
            raise Retry(f"the outlet of {self._stage} has not committed the fence of {move.id} yet")

    def load(self, move: Move, checkpoint: int | None) -> Loaded:
        """Append the store's versions to the destination's inbox. Each call is a new writer: the store may have grown,
        and an earlier load may have stopped half way."""
        with self._loading:
            since = self.since(checkpoint)
            delivered = self._outlet.delivered_of(move.selection)
            counted = _Counted(self._versions(move, checkpoint))
            inbox, writer = self._inbox_of(move.destination), f"store/{move.id}/{self._token()}"
            for number, messages in enumerate(_bundled(loads(move, counted, delivered))):
                blob = self._encode([(message.kind, message.bin, message.body) for message in messages])
                inbox.append(blob, count=len(messages), writer=writer, counter=number, lane=Lane.CONTROL)
        return Loaded({self._gateway.name: since}, counted.keys, counted.size)

    def _versions(self, move: Move, checkpoint: int | None) -> Iterator[Version]:
        """The store's versions, if it is available: a volume that is not mounted looks like an empty store."""
        self._check_there()
        yield from self._store.load(self._stage, move.selection, checkpoint)
        self._check_there()  # after the last version, before SHIPPED ends the load

    def _check_there(self) -> None:
        if self._gateway.horizon() >= 0:
            self._store.check_there(self._stage)

    def checkpoints(self) -> list[int]:
        """The checkpoints that can be loaded, oldest first."""
        found = self._store.checkpoints(self._stage)
        return [checkpoint.number for checkpoint in found if not checkpoint.damage]


def no_store() -> Refused:
    """The error if there is no central store."""
    return Refused(
        "there is no central store to restore from; run with one: wb.run(..., store=...), whimbrel up --store ..."
    )


class _Counted:
    """Counts versions as they are read."""

    def __init__(self, versions: Iterator[Version]) -> None:
        self._versions, self.keys, self.size = versions, 0, 0

    def __iter__(self) -> Iterator[Version]:
        for version in self._versions:
            self.keys += 1
            self.size += len(version.key_state)
            yield version


def _bundled(messages: Iterator[Message]) -> Iterator[list[Message]]:
    """Groups messages into entries."""
    bundle: list[Message] = []
    size = 0
    for message in messages:
        bundle.append(message)
        size += len(message.body)
        if size >= ENTRY:
            yield bundle
            bundle, size = [], 0
    if bundle:
        yield bundle
