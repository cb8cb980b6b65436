"""What processes log: an error when it is first kept, a back-off when it begins and ends, in lines that stay lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator

import pytest

from whimbrel.core.errors import Refused, Retry, UnknownName
from whimbrel.deploy.logformat import Formatter, LogSettings, log_to_stderr
from whimbrel.log.backoff import Backoff
from whimbrel.log.kept import kept

LOGGER = logging.getLogger("whimbrel.test")


def raised(text: str = "no room") -> Exception:
    """An error with a traceback."""
    try:
        raise Retry(text)
    except Retry as error:
        return error


# ── Back-off ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_back_off_logs_its_first_failure_and_its_recovery(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "whimbrel")
    now = [100.0]
    backoff = Backoff("the feed of rows", LOGGER, first=1, most=4, clock=lambda: now[0])
    pauses = []
    for _ in range(4):
        pauses.append(backoff.failed(raised()))
        now[0] += pauses[-1]
    backoff.succeeded()
    backoff.succeeded()
    assert pauses == [1, 2, 4, 4]
    first, last = caplog.records
    assert (first.levelname, first.getMessage()) == (
        "WARNING",
        "the feed of rows fails and is tried again in 1 s: no room",
    )
    assert first.exc_info is not None
    assert first.exc_info[2] is not None, "with its traceback"
    assert (last.levelname, last.getMessage()) == ("INFO", "the feed of rows recovered after 11.0 s and 4 failures")


def test_a_back_off_logs_an_error_of_another_type_and_begins_anew_after_a_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backoff = Backoff("x", LOGGER, clock=lambda: 0.0)
    for error in (Retry("5 left"), Retry("4 left"), OSError("full"), OSError("full")):
        backoff.failed(error)
    backoff.succeeded()
    backoff.failed(OSError("full"))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["5 left", "full", "full"]


def test_a_usual_failure_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    Backoff("sending to cloud", LOGGER, traced=False).failed(raised())
    (only,) = caplog.records
    assert (only.levelname, only.exc_info) == ("WARNING", None)


def test_a_back_off_is_due_when_its_pause_is_over() -> None:
    now = [0.0]
    backoff = Backoff("x", LOGGER, first=1, clock=lambda: now[0])
    assert backoff.is_due
    backoff.failed(Retry("no"))
    assert not backoff.is_due
    now[0] = 1.0
    assert backoff.is_due


# ── Kept errors ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_error_is_logged_when_it_is_first_kept_and_not_when_it_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    error: Exception | None = None
    for text in ("one", "one", "two"):
        error = kept(LOGGER, "the watch", raised(text), error)
    assert [record.getMessage() for record in caplog.records] == ["the watch: Retry: one", "the watch: Retry: two"]
    assert all(record.levelname == "ERROR" and record.exc_info for record in caplog.records)


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


Settings = Callable[..., object]


@pytest.fixture
def configure() -> Iterator[Settings]:
    """Configures the log of this process; that is taken back."""
    logger = logging.getLogger("whimbrel")
    handlers, level, propagates = list(logger.handlers), logger.level, logger.propagate
    yield lambda *settings: log_to_stderr(LogSettings(*settings))
    logger.handlers, logger.propagate = handlers, propagates
    logger.setLevel(level)


def test_a_line_of_text_has_time_level_role_logger_and_message_and_stays_one_line(
    configure: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("site edge-1", "text", "info")
    LOGGER.warning("a \x1b[31mred\nkey = %s", 'the "best"')
    LOGGER.debug("unseen")
    line = capsys.readouterr().err.removesuffix("\n")
    assert "\n" not in line
    time, _, rest = line.partition(" ")
    assert len(time) == len("time=2026-03-01T12:00:00.123Z")
    assert rest == (
        'level=WARNING role="site edge-1" logger=whimbrel.test message="a \\x1b[31mred\\x0akey = the \\"best\\""'
    )


def test_a_traceback_follows_its_line_behind_two_spaces(
    configure: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("gateway")
    kept(LOGGER, "the outlet", raised("a\x1bb"))
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith('message="the outlet: Retry: a\\x1bb"')
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1].endswith("Retry: a\\x1bb")
    assert all(line.startswith("  ") for line in rest)


def test_json_is_an_object_a_line_with_the_traceback_in_it(
    configure: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("gateway", "json", "error")
    LOGGER.warning("unseen")
    kept(LOGGER, "the outlet", raised("a\nb"))
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert set(told) == {"time", "level", "role", "logger", "message", "traceback"}
    assert (told["role"], told["logger"], told["message"]) == ("gateway", "whimbrel.test", "the outlet: Retry: a\nb")
    assert "in raised" in told["traceback"]


def test_times_are_utc() -> None:
    record = logging.makeLogRecord({"name": "x", "msg": "m", "created": 0.25, "msecs": 250.0})
    assert Formatter("r").format(record).startswith("time=1970-01-01T00:00:00.250Z ")


@pytest.mark.parametrize("wrong", [{"format": "xml"}, {"level": "loud"}])
def test_formats_and_levels_are_known_names(wrong: dict[str, str]) -> None:
    with pytest.raises(UnknownName) as refused:
        LogSettings("gateway", **wrong)
    assert isinstance(refused.value, Refused)


def test_the_library_itself_configures_no_output() -> None:
    import whimbrel

    handlers = logging.getLogger(whimbrel.__name__).handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
