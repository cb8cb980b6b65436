"""Errors that a component keeps for its status are logged when it first keeps them."""

from __future__ import annotations

import logging
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def kept(logger: logging.Logger, what: str, error: E, before: BaseException | None = None) -> E:
    """Log an error with its traceback, and return it to be kept.

    `before`: what is kept so far. The same error again is no news: a watch that fails does so several times a second.
    """
    if before is None or (type(before), str(before)) != (type(error), str(error)):
        logger.error("%s: %s: %s", what, type(error).__name__, error, exc_info=error)
    return error
