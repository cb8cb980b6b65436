"""A JVM that takes a call and never answers: the engine notices, so that its process can end and start again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.app.waiting import until
from whimbrel.core.errors import Unavailable
from whimbrel.spark import engine
from whimbrel.spark.query import longest_call, translated


def test_a_call_that_does_not_return_makes_the_engine_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    running = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=running))
    monkeypatch.setattr(engine, "STUCK", 0.2)
    released = threading.Event()
    caller = threading.Thread(target=translated()(released.wait))
    caller.start()
    try:
        one = engine.SparkEngine("test", spark)
        one.check()
        until(lambda: longest_call() > 0.2, "the call lasts")
        with pytest.raises(Unavailable, match="has not returned"):
            one.check()
    finally:
        released.set()
        caller.join()
    one.check()
    assert longest_call() == 0
