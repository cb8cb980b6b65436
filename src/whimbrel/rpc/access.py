"""Secrets and addresses: small files in the data directory, readable by their owner only (mode 0600).

    <data>/token                        of a user: role `operate`
    <data>/token-read                   of a user: role `read`
    <data>/tokens.json                  the digests of further users' tokens, by name (tokens.py)
    <data>/credentials/gateway          between the orchestrator and the gateway
    <data>/credentials/site-<name>      between the orchestrator and a site
    <data>/credentials/orchestrator     of the supervisor of the deployment
    <data>/url                          the address of the API, while it is served

If every site is a place of its own, the credentials are in folders made by `whimbrel certificates`: those of a place in
`<keys>/<place>/credentials`, all of them in `<keys>/orchestrator/credentials`.

A secret is 43 characters made of 32 random bytes. Every use of a secret goes through `Secret`, which checks whether its
file has changed: after a rotation both sides use the new secret at once, and the old one is invalid.

Each process has its own credential, which only it and the orchestrator know, and which authorises the calls between
these two in both directions. The orchestrator has no credential shared with all: a site could use it against others.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.names import SUPERVISOR, gateway_role, site_role
from whimbrel.log.private import OTHERS, below, make_folder, replace_text

TOKEN_BYTES = 32
OPERATING, READING, CREDENTIALS = "token", "token-read", "credentials"

Credential = str | Callable[[], str]
"""A secret, or a function that returns its current value."""


class Secret:
    """The current secret in a file: read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._value = ""

    def __call__(self) -> str:
        """The secret. Raises `Unavailable` if the file does not exist, `Refused` if others may read it."""
        try:
            found = self._path.stat()
        except OSError as error:
            raise Unavailable(
                f"{self._path} does not exist: nothing has been served from this directory yet"
            ) from error
        seen = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        if seen != self._seen:
            self._value = read_secret(self._path)
            self._seen = seen
        return self._value


def value_of(credential: Credential) -> str:
    """The current value of a secret."""
    return credential if isinstance(credential, str) else credential()


def make_secret(path: Path) -> Secret:
    """The secret in a file, created if there is none; concurrent callers all get the same one."""
    if not path.exists():
        make_folder(path.parent)
        number, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its mode is 0600
        try:
            with open(number, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
            os.link(draft, path)
        except FileExistsError:  # another process was faster
            pass
        finally:
            os.unlink(draft)
    secret = Secret(path)
    secret()
    return secret


def read_secret(path: Path) -> str:
    """The secret in a file."""
    try:
        secret = path.read_text(encoding="ascii").strip()
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise Unavailable(f"{path} does not exist: nothing has been served from this directory yet") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error
    if not secret:
        raise Refused(f"{path} is empty: remove it, and start again")
    if mode & OTHERS:
        raise Refused(
            f"others may read {path}: chmod 600 it, then replace the secret they may have read: whimbrel token rotate"
        )
    return secret


def rotate_secret(path: Path) -> str:
    """Replace a secret; the old one becomes invalid."""
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    replace_text(path, secret + "\n")
    return secret


def credential(data: Path, role: str) -> Secret:
    """The credential of a role, created if there is none."""
    make_folder(data)
    return make_secret(below(make_folder(data / CREDENTIALS), role))


def share_credentials(folder: Path, places: Iterable[str]) -> None:
    """Give each role of these places a credential: in the folder of its place, and in the orchestrator's. Those that
    exist stay."""
    for place in places:
        for role in (gateway_role(place), site_role(place)):
            known = credential(folder / SUPERVISOR, role)()
            theirs = below(make_folder(make_folder(folder / place) / CREDENTIALS), role)
            if not theirs.exists() or read_secret(theirs) != known:
                replace_text(theirs, known + "\n")


def rotate_credentials(data: Path) -> list[str]:
    """Replace the credentials of all roles; return their names."""
    names = sorted(path.name for path in (data / CREDENTIALS).glob("[!.]*"))
    for name in names:
        rotate_secret(below(data / CREDENTIALS, name))
    return names


def make_token(data: Path) -> str:
    """The token with the role `operate`, created if there is none."""
    return make_secret(data / OPERATING)()


def read_token(data: Path) -> str:
    """The token with the role `operate`."""
    return read_secret(data / OPERATING)


def announce(data: Path, url: str) -> None:
    """Publish the address of the API."""
    replace_text(data / "url", url + "\n")


def withdraw(data: Path) -> None:
    """Remove the address of the API."""
    (data / "url").unlink(missing_ok=True)


def find_url(data: Path) -> str:
    """The address of the API of a data directory."""
    try:
        return (data / "url").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Unavailable(f"{data} is not served: start the application, and call app.serve()") from error
