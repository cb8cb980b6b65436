"""The archive of Spark's classes: which file a JVM may be given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from whimbrel.spark import archive

JAVA = "/some/java"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(archive, "find_java", lambda: JAVA)
    archive.archives().mkdir(parents=True)
    return archive.archives()


def kept(tmp_path: Path, text: str = "classes") -> Path:
    made = tmp_path / "made"
    made.write_text(text)
    return archive.keep(JAVA, made)


def test_without_an_archive_the_jvm_is_told_nothing() -> None:
    assert archive.is_wanted()
    assert archive.jvm_options(JAVA) == ""


def test_an_archive_is_for_one_java(tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert not archive.is_wanted()
    assert f"-XX:SharedArchiveFile={path}" in archive.jvm_options(JAVA)
    assert archive.archive("/another/java") is None


def test_a_file_that_was_cut_short_or_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.chmod(0o622)
    assert archive.archive(JAVA) is None
    path.chmod(0o644)
    assert archive.archive(JAVA) == path
    path.write_text("clas")  # a JVM would die of it
    assert archive.archive(JAVA) is None


def test_the_next_archive_takes_the_place_of_the_one_before(tmp_path: Path, folder: Path) -> None:
    kept(tmp_path)
    path = kept(tmp_path, "more classes")
    assert archive.archive(JAVA) == path
    assert list(folder.iterdir()) == [path]


def test_a_java_that_makes_none_is_not_asked_again(tmp_path: Path) -> None:
    archive.keep(JAVA, None)
    assert not archive.is_wanted()
    assert archive.archive(JAVA) is None
    assert archive.jvm_options(JAVA) == ""
