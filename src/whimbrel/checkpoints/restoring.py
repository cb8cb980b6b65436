"""What a restoration asks of the gateway's role: whether it can be done, the fence, and the load.

Everything it needs is here: the store, the ingress log, and the outlet, which knows up to where each key's results are
out. Versions go straight into the destination's inbox: the gateway has no site, and what it writes takes no link.
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

PATIENCE = 10.0
"""Seconds to wait for the outlet's next commit."""
ENTRY = 1 << 20
"""Bytes of messages in an entry of an inbox, about."""


class Fencing(Protocol):
    """The outlet, as far as a restoration needs it."""

    def fence(self, move: Move, timeout: float) -> bool:
        """Let out nothing more of what the lost owner emitted; False if that does not last within so many seconds."""

    def delivered_of(self, selection: Selection) -> dict[str, int]:
        """By key: up to which `seq` its results are out."""


class Restoring:
    """Restorations of one stage, as far as its gateway takes part."""

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
        """`encode` makes an inbox entry of messages; `token` is another one at each call."""
        self._stage, self._gateway, self._outlet, self._inbox_of = stage, gateway, outlet, inbox_of
        self._store, self._encode, self._token = store, encode, token
        self._loading = threading.Lock()
        """Two loads must not mix: a key's pieces belong together."""

    def since(self, checkpoint: int | None) -> int:
        """From which `seq` on records are needed. Raises if there is no such checkpoint, or they are gone."""
        horizon = self._gateway.horizon()
        if checkpoint is not None:
            horizon = min(horizon, self._store.horizon(self._stage, checkpoint))
        self._gateway.check_readable((horizon + 1) // codec.ROWS)
        return horizon + 1

    def fence(self, move: Move) -> None:
        """Let nothing of a lost owner out any more; raises `Retry` if that is not safe in time."""
        if not self._outlet.fence(move, PATIENCE):
            raise Retry(f"the outlet of {self._stage} has not committed the fence of {move.id} yet")

    def load(self, move: Move, checkpoint: int | None) -> Loaded:
        """Put what the store has into the destination's inbox. Each time as another writer: the store may have grown,
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
        """What the store has, if it is the store: a volume that is not mounted looks like one that has nothing."""
        self._check_there()
        yield from self._store.load(self._stage, move.selection, checkpoint)
        self._check_there()  # behind the last version, before the destination hears that it has all

    def _check_there(self) -> None:
        if self._gateway.horizon() >= 0:
            self._store.check_there(self._stage)

    def checkpoints(self) -> list[int]:
        """Those that can be loaded, oldest first."""
        found = self._store.checkpoints(self._stage)
        return [checkpoint.number for checkpoint in found if not checkpoint.damage]


def no_store() -> Refused:
    """Why nothing can be restored."""
    return Refused(
        "there is no central store to restore from; run with one: wb.run(..., store=...), whimbrel up --store ..."
    )


class _Counted:
    """Versions on their way, counted."""

    def __init__(self, versions: Iterator[Version]) -> None:
        self._versions, self.keys, self.size = versions, 0, 0

    def __iter__(self) -> Iterator[Version]:
        for version in self._versions:
            self.keys += 1
            self.size += len(version.key_state)
            yield version


def _bundled(messages: Iterator[Message]) -> Iterator[list[Message]]:
    """Messages, as many together as an entry should have."""
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
