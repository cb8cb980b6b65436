"""The names of objects. They sort like their numbers, and contain all that is needed to find an object again: data read
from the store never becomes a name.

    <stage>/manifests/<instance>/<part>-<number>
    <stage>/segments/<instance>/<part>-<number>-<piece>
    <stage>/checkpoints/<number>
    <stage>/bases/<number>
    <stage>/base-segments/<number>-<piece>
    <stage>/owner

No name contains a key.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from whimbrel.checkpoints.place import checked
from whimbrel.core.errors import Refused

PART, NUMBER, PIECE, MOMENT = 5, 18, 6, 10
"""Digits of each kind of number."""


class IncrementId(NamedTuple):
    """Identifies an increment, as the name of its manifest does."""

    instance: str
    part: int
    number: int


def folder(stage: str, kind: str) -> str:
    """The folder of a stage's objects of one kind."""
    return f"{checked('stage', stage)}/{kind}"


def manifest(stage: str, saved: IncrementId) -> str:
    """The name of an increment's index."""
    return f"{folder(stage, 'manifests')}/{_increment(saved)}"


def segment(stage: str, saved: IncrementId, piece: int) -> str:
    """The name of a piece of an increment."""
    return f"{folder(stage, 'segments')}/{_increment(saved)}-{_digits('piece', piece, PIECE)}"


def moment(stage: str, number: int) -> str:
    """The name of a checkpoint."""
    return f"{folder(stage, 'checkpoints')}/{_digits('checkpoint', number, MOMENT)}"


def base(stage: str, number: int) -> str:
    """The name of a base's index."""
    return f"{folder(stage, 'bases')}/{_digits('checkpoint', number, MOMENT)}"


def base_segment(stage: str, number: int, piece: int) -> str:
    """The name of a piece of a base."""
    return f"{folder(stage, 'base-segments')}/{_digits('checkpoint', number, MOMENT)}-{_digits('piece', piece, PIECE)}"


def owner(stage: str) -> str:
    """The name of the object with the owner of a stage's states."""
    return f"{checked('stage', stage)}/owner"


@lru_cache(maxsize=1 << 14)
def increment_of(name: str) -> IncrementId | None:
    """The increment whose manifest or segment has this name; None for a name of another form."""
    found = _INCREMENT.fullmatch(name)
    return IncrementId(found[1], int(found[2]), int(found[3])) if found else None


@lru_cache(maxsize=1 << 14)
def number_of(name: str) -> int | None:
    """The number of the checkpoint that has this name, or whose base or piece of a base has it."""
    found = _MOMENT.fullmatch(name)
    return int(found[1]) if found else None


_INCREMENT = re.compile(
    rf"[^/]+/(?:manifests|segments)/([^/]+)/([0-9]{{{PART}}})-([0-9]{{{NUMBER}}})(?:-[0-9]{{{PIECE}}})?"
)
_MOMENT = re.compile(rf"[^/]+/(?:checkpoints|bases|base-segments)/([0-9]{{{MOMENT}}})(?:-[0-9]{{{PIECE}}})?")


def _increment(saved: IncrementId) -> str:
    part, number = _digits("part", saved.part, PART), _digits("number", saved.number, NUMBER)
    return f"{checked('instance', saved.instance)}/{part}-{number}"


def _digits(kind: str, number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise Refused(f"{kind} {number} cannot be used in an object's name: it must be from 0 to {10**width - 1}")
    return f"{number:0{width}}"
