"""How whatever was started is stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.deploy")


def end_all(ends: Iterator[Callable[[], object]]) -> None:
    """Do all of these, though some fail; then raise what failed first."""
    errors = []
    for end in ends:
        try:
            end()
        except Exception as error:
            errors.append(error)
    for other in errors[1:]:
        kept(LOGGER, "something else could not be ended", other)
    if errors:
        raise errors[0]
