"""Shutdown of everything that was started."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.deploy")


def end_all(ends: Iterator[Callable[[], object]]) -> None:
    """Call all of these, even if some fail; then raise the first error."""
    errors = []
    for end in ends:
        try:
            end()
        except Exception as error:
            errors.append(error)
    for other in errors[1:]:
        kept(LOGGER, "another component could not be stopped", other)
    if errors:
        raise errors[0]
