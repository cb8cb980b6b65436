"""TLS between the processes of a deployment: PEM files that the user gives to each of them.

Both sides show their certificate, and both check it: it is signed by the authority, and the server's is made out to the
host that was called. So whoever has a credential but no certificate does not even get to show it.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from whimbrel.core.errors import Refused


class Tls(NamedTuple):
    """A certificate with its key, and the certificate of the authority that has signed those of all processes."""

    certificate: Path
    key: Path
    ca: Path

    def client(self) -> ssl.SSLContext:
        """What a client needs."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise Refused(f"{self.ca} holds no certificate of an authority: {error}") from error
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise Refused(f"{self.certificate} and {self.key} are no certificate with its key: {error}") from error
        return context


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """What a user has given: all three, or none."""
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise Refused("TLS between processes needs --certificate, --key and --ca: give all three, or none")
    return Tls(certificate.resolve(), key.resolve(), ca.resolve())
