"""Where objects are stored: below one address, in a directory or in S3. The only module that uses fsspec.

    file:///var/lib/whimbrel, or a plain path     a directory
    s3://bucket/prefix                            S3, or a compatible store (needs s3fs: pip install 'whimbrel[s3]')
    memory://name                                 this process's memory: for tests

Writes are atomic: in S3 by design, in a directory because an object is written under a temporary name and then
renamed. Names consist of checked words only, so that no name leads out of the place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from whimbrel.core.errors import Refused, Unavailable

SCHEMES = ("file", "s3", "memory")
WORD = re.compile(r"\w[\w.@+-]*")
LONGEST = 200


def checked(kind: str, word: str) -> str:
    """Return a word that may be used in an object's name. Raises `Refused` if it could lead anywhere else."""
    if not WORD.fullmatch(word) or len(word.encode(errors="replace")) > LONGEST:
        raise Refused(
            f"the {kind} {word[:LONGEST]!r} cannot be used in an object's name, it might lead out of the store: use "
            f"letters, digits, '_', '.', '@', '+' and '-', none of the last four as the first, at most {LONGEST} bytes"
        )
    return word


class Objects(Protocol):
    """Blobs by name. Safe to use from several threads. Raises `Unavailable` if the place cannot be reached."""

    def put(self, name: str, blob: bytes) -> None:
        """Write an object, replacing one of the same name."""

    def get(self, name: str) -> bytes | None:
        """An object's bytes, None if it does not exist."""

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        """The bytes of many objects, in the given order; fetched concurrently where that is faster."""

    def names(self, folder: str) -> list[str]:
        """The names of all objects in a folder, sorted; of all objects, if the folder is ''."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, if they exist."""


class Place:
    """The objects below an address. `options` are passed to fsspec unchanged (`endpoint_url`, `key`, `secret` ...)."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        scheme = url.partition("://")[0] if "://" in url else "file"
        if scheme not in SCHEMES or "::" in url:
            raise Refused(f"{url!r} is not a store address: give a directory, or one of {_schemes()}")
        if scheme == "s3":
            options.setdefault("use_listings_cache", False)  # objects of other processes must be visible
        try:
            self._fs = fsspec.filesystem(scheme, skip_instance_cache=True, **options)
        except ImportError as error:
            raise Refused(f"{scheme}:// needs a library that is not installed: pip install 'whimbrel[s3]'") from error
        self._is_remote = scheme == "s3"
        self._root = str(self._fs._strip_protocol(url)).rstrip("/")
        if scheme == "s3" and not self._root:
            raise Refused(f"{url!r} names no bucket: give s3://bucket/prefix")

    def put(self, name: str, blob: bytes) -> None:
        path = self._path(name)
        try:
            if isinstance(self._fs, LocalFileSystem):
                _replace(Path(path), blob)
            else:
                self._fs.pipe_file(path, blob)
        except Exception as error:
            raise self._away(error) from error

    def get(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            return bytes(self._fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception as error:
            raise self._away(error) from error

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        if not self._is_remote or not names:
            return [self.get(name) for name in names]
        paths = [self._path(name) for name in names]
        found = dict.fromkeys(paths)
        found.update(self._fs.cat(paths, on_error="return"))
        for error in found.values():
            if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
                raise self._away(error) from error
        return [None if isinstance(found[path], Exception) else found[path] for path in paths]

    def names(self, folder: str) -> list[str]:
        path = self._path(folder) if folder else self._root
        try:
            found = self._fs.find(path)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._away(error) from error
        names = (str(one).removeprefix(self._root).lstrip("/") for one in found)
        # A folder that was emptied may still be listed, by its own name.
        inside = (name for name in names if name.startswith(f"{folder}/" if folder else ""))
        return sorted(name for name in inside if all(WORD.fullmatch(word) for word in name.split("/")))

    def delete(self, names: Iterable[str]) -> None:
        paths = [self._path(name) for name in names]
        try:
            if self._is_remote:
                with suppress(FileNotFoundError):
                    self._fs.rm(paths)  # many in one request
                return
            for path in paths:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)
        except Exception as error:
            raise self._away(error) from error

    def _path(self, name: str) -> str:
        return "/".join([self._root, *(checked("name", word) for word in name.split("/"))])

    def _away(self, error: Exception) -> Unavailable:
        # Any error of a library (there are dozens, in four layers) is transient: none shows that the data is damaged.
        return Unavailable(f"the store at {self.url} cannot be used now: {type(error).__name__}: {error}")


def _replace(path: Path, blob: bytes) -> None:
    """Write a file atomically. A file whose name begins with a dot is not an object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    with beside.open("wb") as file:
        file.write(blob)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _schemes() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)
