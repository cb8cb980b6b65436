"""Transport: appends from one place to the logs of another, through a durable spool and a connection.

`OutgoingSpool` is what a place's producers write to, `Sender` carries it, `Receiver` appends at the other place.
"""

from whimbrel.transport.receiver import Receiver
from whimbrel.transport.sender import Sender
from whimbrel.transport.spool import OutgoingSpool, RemoteLog

__all__ = ["OutgoingSpool", "Receiver", "RemoteLog", "Sender"]
