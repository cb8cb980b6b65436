"""What each object is called. Names sort as their numbers do, and say all that is needed to find an object again:
nothing that was read from the store ever becomes a name.

    <stage>/seals/<instance>/<part>-<number>
    <stage>/segments/<instance>/<part>-<number>-<piece>
    <stage>/checkpoints/<number>
    <stage>/bases/<number>
    <stage>/folds/<number>-<piece>
    <stage>/owner

Keys stand in no name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from whimbrel.checkpoints.place import checked
from whimbrel.core.errors import Refused

PART, NUMBER, PIECE, MOMENT = 5, 18, 6, 10
"""Digits of each kind of number."""


class Saved(NamedTuple):
    """Which saving: what its seal's name says."""

    instance: str
    part: int
    number: int


def folder(stage: str, kind: str) -> str:
    """Where a stage's objects of one kind lie."""
    return f"{checked('stage', stage)}/{kind}"


def seal(stage: str, saved: Saved) -> str:
    """The name of a saving's index."""
    return f"{folder(stage, 'seals')}/{_saving(saved)}"


def segment(stage: str, saved: Saved, piece: int) -> str:
    """The name of a piece of a saving."""
    return f"{folder(stage, 'segments')}/{_saving(saved)}-{_digits('piece', piece, PIECE)}"


def moment(stage: str, number: int) -> str:
    """The name of a checkpoint."""
    return f"{folder(stage, 'checkpoints')}/{_digits('checkpoint', number, MOMENT)}"


def base(stage: str, number: int) -> str:
    """The name of a fold's index."""
    return f"{folder(stage, 'bases')}/{_digits('checkpoint', number, MOMENT)}"


def fold(stage: str, number: int, piece: int) -> str:
    """The name of a piece of a fold."""
    return f"{folder(stage, 'folds')}/{_digits('checkpoint', number, MOMENT)}-{_digits('piece', piece, PIECE)}"


def owner(stage: str) -> str:
    """The name of what says whose states these are."""
    return f"{checked('stage', stage)}/owner"


def saved_of(name: str) -> Saved | None:
    """The saving whose seal or segment has this name; a name of another shape is nobody's."""
    found = _SAVING.fullmatch(name)
    return Saved(found[1], int(found[2]), int(found[3])) if found else None


def number_of(name: str) -> int | None:
    """The checkpoint that has this name, or whose fold, or a piece of whose fold."""
    found = _MOMENT.fullmatch(name)
    return int(found[1]) if found else None


_SAVING = re.compile(rf"[^/]+/(?:seals|segments)/([^/]+)/([0-9]{{{PART}}})-([0-9]{{{NUMBER}}})(?:-[0-9]{{{PIECE}}})?")
_MOMENT = re.compile(rf"[^/]+/(?:checkpoints|bases|folds)/([0-9]{{{MOMENT}}})(?:-[0-9]{{{PIECE}}})?")


def _saving(saved: Saved) -> str:
    part, number = _digits("part", saved.part, PART), _digits("number", saved.number, NUMBER)
    return f"{checked('instance', saved.instance)}/{part}-{number}"


def _digits(kind: str, number: int, width: int) -> str:
    if not 0 <= number < 10**width:
        raise Refused(f"a {kind} of {number} cannot stand in an object's name: it must be from 0 to {10**width - 1}")
    return f"{number:0{width}}"
