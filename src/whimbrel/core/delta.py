"""The durable state of an instance: the changes of each batch, as blobs of bounded size.

A blob is an encoded `Delta`. A state store takes it as one value, through sockets and several copies. So a state that
is too large for that is stored as chunks, each a delta of its own, before the key state they belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from whimbrel.core import wire
from whimbrel.core.record import Buffered, KeyState

LARGE_DELTA = 8 << 20
"""Approximate maximum bytes of a blob for a state store."""
HOLDING = ("entries", "replicas", "stashed")
"""The fields of a delta that hold key state."""


class Gathered(msgspec.Struct, array_like=True):
    """Pieces of a large key that have arrived. `anew`: discard those that arrived before."""

    anew: bool
    added: list[bytes] = []


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a state that is too large for one blob: it belongs to the key state that follows."""

    field: str
    key: str
    state: bytes


class Delta(msgspec.Struct, omit_defaults=True):
    """The changes of one batch, or some of them. None for a key means: dropped."""

    entries: dict[str, KeyState | None] = {}
    waiting: dict[str, list[Buffered] | None] = {}
    replicas: dict[str, KeyState | None] = {}
    positions: dict[str, int] = {}
    moves: bytes = b""
    """The encoded `Moves` (moves.py), complete; empty: unchanged."""
    stashed: dict[str, KeyState | None] = {}
    gathered: dict[str, Gathered] = {}
    chunk: Chunk | None = None


def packed(delta: Delta, limit: int) -> list[bytes]:
    """A delta as blobs of at most about `limit` bytes, to be loaded in order."""
    blob = wire.pack(delta)
    if len(blob) <= limit:
        return [blob]
    blobs, part, size = [], Delta(positions=delta.positions), 0
    for field in HOLDING:
        changed: dict[str, KeyState | None] = getattr(delta, field)
        for key, key_state in changed.items():
            if key_state is not None and len(key_state.state) > limit:
                state = key_state.state
                for at in range(0, len(state), limit):
                    blobs.append(wire.pack(Delta(chunk=Chunk(field, key, state[at : at + limit]))))
                key_state = msgspec.structs.replace(key_state, state=b"")
            getattr(part, field)[key] = key_state
            size += len(key_state.state) + len(key) if key_state else len(key)
            if size > limit:
                blobs.append(wire.pack(part))
                part, size = Delta(positions=delta.positions), 0
    for key, pieces in delta.gathered.items():
        for number, piece in enumerate(pieces.added or [b""]):
            one = Gathered(pieces.anew and not number, [piece] if pieces.added else [])
            blobs.append(wire.pack(Delta(positions=delta.positions, gathered={key: one})))
    part.waiting, part.moves = delta.waiting, delta.moves
    blobs.append(wire.pack(part))
    return blobs


def unpacked(blobs: Iterable[bytes]) -> Iterator[Delta]:
    """The deltas of blobs, with the chunks of large states joined."""
    chunks: dict[tuple[str, str], list[bytes]] = {}
    for blob in blobs:
        delta = wire.unpack(blob, Delta)
        if delta.chunk is not None:
            chunks.setdefault((delta.chunk.field, delta.chunk.key), []).append(delta.chunk.state)
            continue
        for field, key in [place for place in chunks if place[1] in getattr(delta, place[0])]:
            key_state: KeyState = getattr(delta, field)[key]
            getattr(delta, field)[key] = msgspec.structs.replace(key_state, state=b"".join(chunks.pop((field, key))))
        yield delta
