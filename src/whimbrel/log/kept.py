"""Logs the errors that a component stores for its status, when it first stores them."""

from __future__ import annotations

import logging
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def kept(logger: logging.Logger, what: str, error: E, before: BaseException | None = None) -> E:
    """Log an error with its traceback, and return it to be stored.

    `before`: the error stored so far. The same error is not logged again: a failing watch fails several times a second.
    """
    if before is None or (type(before), str(before)) != (type(error), str(error)):
        logger.error("%s: %s: %s", what, type(error).__name__, error, exc_info=error)
    return error
