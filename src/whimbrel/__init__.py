"""Whimbrel moves the state of a running PySpark stream between sites, key by key, without stopping it."""

from __future__ import annotations
