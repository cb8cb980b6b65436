"""Whimbrel moves the state of a running PySpark stream between sites, key by key, without stopping it.

The whole public surface: what a user imports is here, everything else may change. Each name is loaded when it is first
used, so that a client or a worker loads neither Spark nor pandas.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whimbrel.api.client import Client, RemoteHandle, connect
    from whimbrel.core.errors import Refused, Retry, Stop, UnknownName, WhimbrelError
    from whimbrel.core.link import Link
    from whimbrel.core.operator import Context, Operator, State
    from whimbrel.deploy.embedded import App, run
    from whimbrel.orchestrator.handle import Handle
    from whimbrel.pipeline import Csv, Items, JsonLines, Parquet, Pipeline

_MODULES = {
    "whimbrel.api.client": ("Client", "RemoteHandle", "connect"),
    "whimbrel.core.errors": ("Refused", "Retry", "Stop", "UnknownName", "WhimbrelError"),
    "whimbrel.core.link": ("Link",),
    "whimbrel.core.operator": ("Context", "Operator", "State"),
    "whimbrel.deploy.embedded": ("App", "run"),
    "whimbrel.orchestrator.handle": ("Handle",),
    "whimbrel.pipeline": ("Csv", "Items", "JsonLines", "Parquet", "Pipeline"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application decides what a library logs, and where

__all__ = [
    "App",
    "Client",
    "Context",
    "Csv",
    "Handle",
    "Items",
    "JsonLines",
    "Link",
    "Operator",
    "Parquet",
    "Pipeline",
    "Refused",
    "RemoteHandle",
    "Retry",
    "State",
    "Stop",
    "UnknownName",
    "WhimbrelError",
    "connect",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
