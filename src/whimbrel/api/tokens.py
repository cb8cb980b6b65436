"""The users of a data directory, by their tokens, with their roles: `read` or `operate`.

    operator    the file `token`         operate
    reader      the file `token-read`    read
    others      `tokens.json`: name, role, the SHA-256 of the token, creation time

A token of 32 random bytes needs no slow hash. The files are checked on every call, so that an added, revoked or rotated
token takes effect with the next call, without a restart.
"""

from __future__ import annotations

import hmac
import secrets
import time
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from whimbrel.core.errors import Conflict, Corrupt, NewerFormat, Refused, UnknownName, WhimbrelError
from whimbrel.core.names import check_name
from whimbrel.log.lock import lock_tokens
from whimbrel.log.private import replace_text
from whimbrel.rpc.access import OPERATING, READING, TOKEN_BYTES, Secret, make_secret, rotate_secret

Role = Literal["read", "operate"]
ROLES: tuple[Role, ...] = get_args(Role)
FILES: dict[str, tuple[str, Role]] = {"operator": (OPERATING, "operate"), "reader": (READING, "read")}
"""The users with a token file each: the file, and their role."""
NAMED, FORMAT = "tokens.json", 1


class User(NamedTuple):
    """The user who makes a call."""

    name: str
    role: Role


class Token(msgspec.Struct, frozen=True):
    """A token, stored only as its digest."""

    name: str
    role: Role
    sha256: str
    made: str
    """The creation time in UTC."""


class Kept(msgspec.Struct, frozen=True):
    """The content of `tokens.json`."""

    version: int = FORMAT
    tokens: list[Token] = []


class Tokens:
    """The tokens of a data directory. Safe for use from several threads and processes."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._files = {User(name, role): Secret(data / file) for name, (file, role) in FILES.items()}
        self._seen: tuple[int, int] | None = None
        self._kept = Kept()

    def prepare(self) -> str:
        """Create the token files that do not exist; return the token with the role `operate`."""
        make_secret(self.data / READING)
        return make_secret(self.data / OPERATING)()

    def who(self, token: str) -> User | None:
        """The user of a token, now; None if it is unknown."""
        given = sha256(token.encode()).hexdigest()
        for user, secret in self._files.items():
            try:
                if hmac.compare_digest(sha256(secret().encode()).hexdigest(), given):
                    return user
            except WhimbrelError:  # missing, or readable by others: not accepted
                continue
        try:
            known = self.named()
        except WhimbrelError:
            return None
        found = [one for one in known if hmac.compare_digest(one.sha256, given)]
        return User(found[0].name, found[0].role) if found else None

    def named(self) -> list[Token]:
        """The tokens in `tokens.json`, the oldest first."""
        path = self.data / NAMED
        try:
            found = path.stat()
            if (seen := (found.st_ino, found.st_mtime_ns)) != self._seen:
                self._kept, self._seen = _read(path), seen
        except FileNotFoundError:
            self._kept, self._seen = Kept(), None
        return list(self._kept.tokens)

    def add(self, name: str, role: str) -> str:
        """Create a token for a new user; it is returned once and cannot be recovered."""
        check_name("token", name)
        if role not in ROLES:
            raise UnknownName("role", role, list(ROLES))
        with lock_tokens(self.data):
            known = self.named()
            if name in FILES or any(one.name == name for one in known):
                raise Conflict(f"there is a token {name!r} already; rotate or revoke it, or choose another name")
            token, made = _new(name, role)
            self._write([*known, made])
        return token

    def revoke(self, name: str) -> None:
        """Make a token invalid."""
        if name in FILES:
            raise Refused(f"the token of {name} is in the file {FILES[name][0]}: rotate it instead")
        with lock_tokens(self.data):
            known = self.named()
            self._find(name, known)
            self._write([one for one in known if one.name != name])

    def rotate(self, name: str) -> str:
        """Replace a token, and return the new one."""
        if name in FILES:
            return rotate_secret(self.data / FILES[name][0])
        with lock_tokens(self.data):
            known = self.named()
            old = self._find(name, known)
            token, made = _new(name, old.role)
            self._write([made if one is old else one for one in known])
        return token

    def _find(self, name: str, known: list[Token]) -> Token:
        for one in known:
            if one.name == name:
                return one
        raise UnknownName("token", name, [*FILES, *(one.name for one in known)])

    def _write(self, tokens: list[Token]) -> None:
        replace_text(self.data / NAMED, msgspec.json.encode(Kept(tokens=tokens)).decode() + "\n")


def _new(name: str, role: Role) -> tuple[str, Token]:
    token = secrets.token_urlsafe(TOKEN_BYTES)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return token, Token(name, role, sha256(token.encode()).hexdigest(), made)


def _read(path: Path) -> Kept:
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is not a file of tokens: {error}") from error
    if kept.version > FORMAT:
        raise NewerFormat(f"{path} has format {kept.version}, this version reads up to {FORMAT}")
    return kept
