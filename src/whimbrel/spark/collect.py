"""All rows of a micro-batch, through Arrow.

`DataFrame.toArrow()` opens a socket to a thread of the JVM that serves the rows. If it cannot, because the process has
no file handle left, it waits for that thread nevertheless, which waits for its only client without a timeout: the
query hangs for ever, and looks alive. So the same steps are taken here, and a failed connection is an error.
"""

from __future__ import annotations

from typing import Any

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import DataFrame
from pyspark.sql.pandas.serializers import ArrowCollectSerializer
from pyspark.util import _create_local_socket

from whimbrel.core.errors import Unavailable


def collected(batch: DataFrame) -> list[dict[str, Any]]:
    """The rows of a batch, by column. Raises `Unavailable` if they cannot be fetched now."""
    address, secret, server = batch._jdf.collectAsArrowToPython()
    try:
        file, sock = _create_local_socket((address, secret))
    except (PySparkRuntimeError, OSError) as error:
        raise Unavailable(f"no connection to Spark's JVM for the rows of a batch: {error}") from error
    try:
        found = list(ArrowCollectSerializer().load_stream(file))  # type: ignore[arg-type]
    finally:
        file.close()
        sock.close()
        server.getResult()  # raises what went wrong in the JVM
    return [row for rows in found for row in rows.to_pylist()]
