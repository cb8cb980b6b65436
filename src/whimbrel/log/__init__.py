"""Logs: the durable steps on a record's way. The contract, and the backends that implement it.

`MemoryLog` is for tests and the simulator, `EmbeddedLog` is the default: one SQLite file, nothing to install.
"""

from whimbrel.log.contract import Append, Appendable, Entry, Lane, Log, append_all
from whimbrel.log.embedded import EmbeddedLog
from whimbrel.log.memory import MemoryLog

__all__ = ["Append", "Appendable", "EmbeddedLog", "Entry", "Lane", "Log", "MemoryLog", "append_all"]
