"""The job of the deployment that test_kills.py kills: goes on until the file `ending` is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import whimbrel as wb
from tests.spark_app.jobs import SCHEMA, Chain, rows

FOLDER = Path(os.environ["WHIMBREL_TEST_FOLDER"])


def source() -> Iterator[dict[str, Any]]:
    for row in rows(10**9)():
        if (FOLDER / "ending").exists():
            return
        yield row


pipeline = wb.Pipeline("killed", source=wb.Items(source, schema=SCHEMA, rate=150), key="key")
pipeline.stage("chain", Chain(20_000), groups=2).sink(wb.JsonLines(FOLDER / "out.jsonl", identity=True))
