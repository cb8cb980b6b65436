"""How those outside get in: a token and an address, each a small file in the data directory.

    <data>/token      43 letters made of 32 random bytes, readable by its owner alone (mode 0600)
    <data>/url        where the API is, while it is served

Whoever may read the data directory may give orders: the token keeps out everybody else on the machine and its network.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.log.private import make_folder, replace_text

TOKEN_BYTES = 32


def make_token(data: Path) -> str:
    """The token of a data directory, made if there is none; whoever makes it first, all get the same."""
    path = data / "token"
    if not path.exists():
        make_folder(data)
        number, draft = tempfile.mkstemp(dir=data, prefix="token-")  # its mode is 0600
        try:
            with open(number, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            os.link(draft, path)
        except FileExistsError:  # somebody was faster
            pass
        finally:
            os.unlink(draft)
    if path.stat().st_mode & 0o077:
        raise Refused(f"others may read {path}: chmod 600 it, or better remove it, to get a new one")
    return read_token(data)


def read_token(data: Path) -> str:
    """The token of a data directory."""
    path = data / "token"
    try:
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise Unavailable(f"{path} is not there: nothing has been served from this directory yet") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if not token:
        raise Refused(f"{path} is empty: remove it, and start again")
    return token


def announce(data: Path, url: str) -> None:
    """Say where the API is."""
    replace_text(data / "url", url + "\n")


def withdraw(data: Path) -> None:
    """The API is no longer there."""
    (data / "url").unlink(missing_ok=True)


def find_url(data: Path) -> str:
    """Where the API of a data directory is."""
    try:
        return (data / "url").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Unavailable(f"{data} is not served: start the application, and call app.serve()") from error
