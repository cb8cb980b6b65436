"""Hooks that the job installs in each process: its wall clock and HTTP calls can be disturbed from outside, by files.

    clock-<role>    the offset of the process's wall clock, in microseconds
    calls-<role>    `requests`: its calls to others do not arrive; `answers`: they do, but their responses are lost

A packet filter would need root and a kernel with the right modules. Here the caller sees the same behaviour as with
one: a call waits until the cut is mended, as TCP would retransmit it, or until its own timeout.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx

CLOCK, CALLS = "clock", "calls"
REQUESTS, ANSWERS = "requests", "answers"
PERIOD = 0.05
_time_ns = time.time_ns


def true_us() -> int:
    """The undisturbed wall clock of the machine."""
    return _time_ns() // 1000


def file_of(folder: Path, what: str, role: str) -> Path:
    """The file that disturbs a role."""
    return folder / f"{what}-{role}"


def disturb(folder: Path, what: str, role: str, text: str) -> None:
    """Disturb a role; an empty text ends the disturbance."""
    file = file_of(folder, what, role)
    if text:
        draft = file.with_name(f"{file.name}.draft")
        draft.write_text(text, encoding="ascii")
        draft.replace(file)
    else:
        file.unlink(missing_ok=True)


def install(folder: Path, role: str) -> None:
    """Install the hooks in this process. Only once: a job may be imported again."""
    if time.time_ns is not _time_ns:
        return
    off, calls = _FileValue(file_of(folder, CLOCK, role)), _FileValue(file_of(folder, CALLS, role))
    time.time_ns = lambda: _time_ns() + int(off.now() or 0) * 1000
    time.time = lambda: time.time_ns() / 1e9
    handle = httpx.HTTPTransport.handle_request

    def disturbed(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        _wait(calls, REQUESTS, timeout.get("connect"), httpx.ConnectTimeout)
        response = handle(transport, request)
        if calls.now() == ANSWERS:
            response.read()  # the other side has answered
            _wait(calls, ANSWERS, timeout.get("read"), httpx.ReadTimeout)
        return response

    httpx.HTTPTransport.handle_request = disturbed  # type: ignore[method-assign, assignment]


def _wait(calls: _FileValue, what: str, timeout: float | None, error: type[httpx.TimeoutException]) -> None:
    end = time.monotonic() + (60.0 if timeout is None else timeout)
    while calls.now() == what:
        if time.monotonic() > end:
            raise error(f"chaos: {what} do not get through")
        time.sleep(PERIOD)


class _FileValue:
    """The content of a file, read at most every `PERIOD` seconds."""

    def __init__(self, file: Path) -> None:
        self._file, self._text, self._next = file, "", 0.0

    def now(self) -> str:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + PERIOD
            try:
                self._text = self._file.read_text(encoding="ascii")
            except OSError:
                self._text = ""
        return self._text
