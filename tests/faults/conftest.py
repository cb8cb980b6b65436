"""The session of the tests that need no process of their own."""

from tests.spark_app.conftest import spark

__all__ = ["spark"]
