"""Escapes untrusted text for display: a key, a reason or a name may contain terminal control sequences."""

from __future__ import annotations

import re

_UNSEEN = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""The control characters C0 and C1, characters that change the text direction, line and paragraph separators, and
surrogates, which cannot be sent to a terminal."""
_IN_A_LINE = re.compile(f"[{_UNSEEN}]")
_IN_LINES = re.compile(rf"(?![\n\t])[{_UNSEEN}]")


def visible(text: object, *, lines: bool = False) -> str:
    """The text with a visible escape, like \\x1b, for each invisible character; `lines`: newlines and tabs stay."""
    return (_IN_LINES if lines else _IN_A_LINE).sub(_escaped, str(text))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
