"""The log format of a process: one handler to its standard error, a line of text or a JSON object per message.

    time=2026-03-01T12:00:00.123Z level=WARNING role="site edge-1" logger=whimbrel.site message="the link a->b fails"

Parts of a message come from outside (names, keys, messages of libraries): characters that a terminal or a line-based
reader would interpret are escaped. In text, a traceback follows its line, each of its lines indented by two spaces; in
JSON it is the field `traceback`.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from whimbrel.core.errors import UnknownName
from whimbrel.core.text import visible

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LogSettings:
    """The role, format and level of a process's log. Raises `UnknownName` for an unknown format or level."""

    role: str
    format: str = "text"
    level: str = "info"

    def __post_init__(self) -> None:
        for kind, value, known in (("log format", self.format, FORMATS), ("log level", self.level, LEVELS)):
            if value not in known:
                raise UnknownName(kind, value, list(known))


class Formatter(logging.Formatter):
    """Time in UTC, level, role, logger and message of a record, and its traceback if it has one."""

    def __init__(self, role: str, format: str = "text") -> None:
        super().__init__()
        self._role, self._is_json = role, format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """One line, or one line and the lines of a traceback."""
        fields = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            return json.dumps(fields | ({"traceback": traceback} if traceback else {}))
        lines = [" ".join(f"{name}={_quoted(value)}" for name, value in fields.items())]
        return "\n  ".join([*lines, *visible(traceback, lines=True).splitlines()])


def log_to_stderr(settings: LogSettings) -> logging.Handler:
    """Log everything of Whimbrel in this process from a level on to standard error; return the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(settings.role, settings.format))
    logger = logging.getLogger("whimbrel")
    logger.addHandler(handler)
    logger.setLevel(settings.level.upper())
    logger.propagate = False  # a root handler of the user's job would log it a second time
    return handler


def _quoted(value: str) -> str:
    """A value as one word, or in quotation marks."""
    shown = visible(value)
    if shown and not any(mark in shown for mark in ' ="'):
        return shown
    return '"' + shown.replace('"', '\\"') + '"'
