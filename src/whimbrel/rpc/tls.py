"""TLS between the processes of a deployment: PEM files that the user gives to each of them.

Both sides present their certificate, and both verify it: the authority has signed it, and the server's is issued for
the host that was called. So a client with a credential but no certificate cannot even send the credential.
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

    @classmethod
    def of(cls, folder: Path) -> Tls:
        """The files in a folder that `whimbrel certificates` has made."""
        return cls(folder / "certificate.pem", folder / "key.pem", folder / "ca.pem")

    def client(self) -> ssl.SSLContext:
        """The TLS context of a client."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise Refused(f"{self.ca} is not a certificate of an authority: {error}") from error
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise Refused(f"{self.certificate} and {self.key} are not a certificate with its key: {error}") from error
        return context


def tls_of(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """The files that a user has given. Raises unless there are all three, or none."""
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise Refused("TLS between processes needs --certificate, --key and --ca: give all three, or none")
    return Tls(certificate.resolve(), key.resolve(), ca.resolve())
