"""Every kind of place that a store may be at. The S3 server starts once, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from tests.store.objects import at_s3, s3_server
from whimbrel.checkpoints.place import Place

settings.register_profile("whimbrel", deadline=None)
settings.load_profile("whimbrel")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(params=["memory", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place."""
    if request.param == "memory":
        return Place(f"memory://{uuid4().hex}")
    if request.param == "file":
        return Place(f"file://{tmp_path}/store")
    return at_s3(request.getfixturevalue("s3"))
