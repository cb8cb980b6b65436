"""Whimbrel moves the state of a running PySpark stream between sites, key by key, without stopping it.

The whole public surface: what a user imports is here, everything else may change.
"""

from __future__ import annotations

from whimbrel.app import App, run
from whimbrel.control.client import Client, RemoteHandle, connect
from whimbrel.control.handle import Handle
from whimbrel.core.errors import Refused, Retry, Stop, UnknownName, WhimbrelError
from whimbrel.core.link import Link
from whimbrel.core.operator import Context, Operator, State
from whimbrel.pipeline import Csv, Items, JsonLines, Parquet, Pipeline

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
