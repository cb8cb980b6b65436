"""A place's identity in TLS: its certificate, whom it trusts, and clear words for what can be wrong with either.

Both ends show a certificate, and each verifies the other's: the authority has signed it, it is valid now, it is not in
the list of revoked ones, and its common name is the place that is expected (the sender's check) or that the policy
judges (the receiver's). The address of a place is not part of its identity: a place may move.

Files are read when a connection is made, so that renewed certificates and new revocations need no restart. Whatever is
wrong is `Unavailable`: the spool waits, the connection is tried again, and the message says what to do meanwhile.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from whimbrel.core.errors import Refused, Unavailable
from whimbrel.core.names import check_name

CLOCK = "is the clock of this machine right, and that of the other?"
FAULTS = {
    9: f"is not valid yet: {CLOCK}",
    10: f"has expired: renew it with `whimbrel certificates`; or {CLOCK}",
    18: "is signed by another authority: it belongs to another deployment",
    19: "is signed by another authority: it belongs to another deployment",
    20: "is signed by another authority: it belongs to another deployment",
    21: "is signed by another authority: it belongs to another deployment",
    26: "may not be used by a server and by a client: make it with `whimbrel certificates`",
}
"""By OpenSSL's number (x509_vfy.h): what is wrong with a certificate that was shown to us."""
ALERTS = {
    "CERTIFICATE_EXPIRED": f"it has expired: renew it with `whimbrel certificates`; or {CLOCK}",
    "UNKNOWN_CA": "another authority has signed it: it belongs to another deployment",
    "BAD_CERTIFICATE": f"it is damaged, or not valid yet: {CLOCK}",
    "CERTIFICATE_REQUIRED": "none was shown",
    "CERTIFICATE_REVOKED": "it is revoked",
    "CERTIFICATE_UNKNOWN": "it is not acceptable",
    "UNSUPPORTED_CERTIFICATE": "it may not be used by a client: make it with `whimbrel certificates`",
}
"""By the end of TLS's alert: what the other side found wrong with ours."""


class Identity(NamedTuple):
    """The files of one place."""

    certificate: Path
    key: Path
    ca: Path
    revoked: Path | None = None
    """A list of revoked certificates (CRL), signed by the same authority. If it is given it must exist."""

    @classmethod
    def of(cls, folder: Path) -> Identity:
        """The files in a folder that `whimbrel certificates` has made."""
        return cls(*(folder / name for name in ("certificate.pem", "key.pem", "ca.pem", "revoked.pem")))

    def place(self) -> str:
        """The name in this place's own certificate."""
        return _name(_certificate(self.certificate))

    def authority(self) -> str:
        """A short name of the authority, which tells deployments apart."""
        return _certificate(self.ca).fingerprint(hashes.SHA256()).hex()[:16]

    def check(self, now: datetime | None = None) -> None:
        """Raise `Unavailable` if this place's own certificate is not acceptable to others."""
        own, authority, now = _certificate(self.certificate), _certificate(self.ca), now or datetime.now(UTC)
        what = f"the certificate of {_name(own)} ({self.certificate})"
        start, end = own.not_valid_before_utc, own.not_valid_after_utc
        if now < start:
            raise Unavailable(
                f"{what} is not valid yet, but from {start:%Y-%m-%d %H:%M} on: is the clock of {_name(own)} right? "
                f"It says {now:%Y-%m-%d %H:%M} UTC"
            )
        if now > end:
            raise Unavailable(
                f"{what} has expired at {end:%Y-%m-%d %H:%M}; it is {now:%Y-%m-%d %H:%M} UTC: renew it with "
                "`whimbrel certificates`"
            )
        try:
            own.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise Unavailable(f"{what} is not signed by the authority in {self.ca}: they are not a pair") from error
        self._check_revoked(own)

    def peer(self, shown: bytes | None, expected: str | None = None) -> str:
        """The place in a verified certificate (DER). Raises `Unavailable` if it is revoked, or not `expected`."""
        if not shown:
            raise Unavailable("the other side showed no certificate")
        certificate = x509.load_der_x509_certificate(shown)
        name = _name(certificate)
        self._check_revoked(certificate)
        if expected is not None and name != expected:
            raise Unavailable(f"the other side shows the certificate of {name}, expected {expected}: a wrong address")
        return name

    def _check_revoked(self, certificate: x509.Certificate) -> None:
        if self.revoked is None:
            return
        try:
            revoked = x509.load_pem_x509_crl(self.revoked.read_bytes())
            is_ours = revoked.is_signature_valid(_certificate(self.ca).public_key())  # type: ignore[arg-type]
        except (OSError, ValueError, TypeError) as error:
            raise Unavailable(f"{self.revoked} is not a list of revoked certificates: {error}") from error
        if not is_ours:
            raise Unavailable(f"{self.revoked} is not signed by the authority in {self.ca}")
        found = revoked.get_revoked_certificate_by_serial_number(certificate.serial_number)
        if found is not None:
            raise Unavailable(
                f"the certificate of {_name(certificate)} is revoked since {found.revocation_date_utc:%Y-%m-%d %H:%M}: "
                "make a new one with `whimbrel certificates`"
            )

    # ── Contexts ─────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self) -> ssl.SSLContext:
        """The TLS context of a sender."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server(self) -> ssl.SSLContext:
        """The TLS context of a receiver."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the name of a place is compared instead
        context.verify_mode = ssl.CERT_REQUIRED
        self.load(context)
        return context

    def load(self, context: ssl.SSLContext) -> None:
        """Read the files into a context; those of later connections, if it is in use."""
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"{self.ca} is not a certificate of an authority: {error}") from error
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(
                f"{self.certificate} and {self.key} are not a certificate with its key: {error}"
            ) from error

    def changed(self) -> tuple[int, ...]:
        """When the files were written last: compare it to notice a renewal or a revocation."""
        return tuple(path.stat().st_mtime_ns for path in self if path is not None and path.exists())


def told(error: BaseException, there: str) -> str | None:
    """What is wrong between this place and `there`, if an error, or one of its causes, is TLS's; else None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"the certificate of {there} {FAULTS.get(seen.verify_code, f'is refused: {seen.verify_message}')}"
        if isinstance(seen, ssl.SSLError):
            reason = seen.reason or ""
            for alert, why in ALERTS.items():
                if reason.endswith(f"ALERT_{alert}"):
                    return f"{there} refuses the certificate of this place: {why}"
            return f"no TLS connection to {there}: {reason or seen}"
        seen = seen.__cause__ or seen.__context__
    return None


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} is not a certificate: {error}") from error


def _name(certificate: x509.Certificate) -> str:
    names = [str(one.value) for one in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1:
        raise Unavailable(f"a certificate with {len(names)} common names: it needs one, the name of its place")
    try:
        return check_name("place", names[0])
    except Refused as error:
        raise Unavailable(f"a certificate whose common name is not one of a place: {error}") from error
