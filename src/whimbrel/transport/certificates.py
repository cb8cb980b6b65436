"""The deployment's own certificate authority: one folder of files for each place, to be copied to its machine.

    DIR/authority/      ca.pem, ca.key, issued.json: stays where it is, and is backed up
    DIR/<place>/        certificate.pem, key.pem, ca.pem, revoked.pem: for that place alone

A place's name is the common name of its certificate: that is what a receiver's policy sees. Addresses are alternative
names, for callers that verify the host they called. `issued.json` holds every serial number that has not expired, so
that a revocation also reaches certificates that were renewed since. The list of revoked ones is a usual CRL.

Only this file signs; what is checked, and when, is in identity.py. A user's own authority serves as well, as long as
it signs common names that are names of places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from whimbrel.core.errors import Refused
from whimbrel.core.names import check_name
from whimbrel.log.private import make_folder, replace_text

AUTHORITY = "authority"
DAYS, AUTHORITY_DAYS = 365, 3650
"""For how long a place's certificate is valid, and the authority's."""
BACKDATED = timedelta(hours=1)
"""Certificates are valid since this long before they were made: clocks differ."""
RENEWED = 1 / 3
"""A certificate is renewed when this fraction of its time is left."""
LOCAL = ("localhost", "127.0.0.1", "::1")
"""The addresses of a place for which none is given."""


class Authority:
    """The authority in a folder, created unless it exists."""

    def __init__(self, folder: Path, now: datetime | None = None) -> None:
        """`now`: the time to count from, the clock's by default."""
        self.folder, self._now = make_folder(folder), now or datetime.now(UTC)
        self._own = make_folder(folder / AUTHORITY)
        self._certificate, self._key = self._open() if (self._own / "ca.pem").exists() else self._create()

    def issue(self, place: str, addresses: Iterable[str] = (), days: int = DAYS, *, renew: bool = False) -> bool:
        """Make a certificate for a place, unless it has a good one for these addresses; return whether it was made.

        `renew`: also if it has.
        """
        folder = self._folder(place)
        wanted = [*addresses] or [*LOCAL]
        if days < 1:
            raise Refused(f"a certificate must be valid for at least 1 day, got {days}")
        is_good = not renew and self._is_good(folder / "certificate.pem", place, wanted)
        if not is_good:
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = self._signed(place, key.public_key(), wanted, days)
            self._record(place, certificate)
            make_folder(folder)
            replace_text(folder / "key.pem", _pem(key))
            replace_text(folder / "certificate.pem", _text(certificate))
        replace_text(folder / "ca.pem", (self._own / "ca.pem").read_text(encoding="utf-8"))
        self._publish()
        return not is_good

    def revoke(self, place: str) -> int:
        """Revoke every certificate of a place that has not expired; return how many. Its next one is good again."""
        issued = self._issued()
        serials = [one for one in issued if one["place"] == place]
        if not serials:
            raise Refused(f"{self.folder} has issued no certificate to {place!r} that is still valid")
        for one in serials:
            one.setdefault("revoked", self._now.isoformat())
        self._write(issued)
        self._publish()
        return len(serials)

    # ── The authority itself ─────────────────────────────────────────────────────────────────────────────────────

    def _create(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"whimbrel {x509.random_serial_number():x}"[:40])])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            self._builder(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        replace_text(self._own / "ca.key", _pem(key))
        replace_text(self._own / "ca.pem", _text(certificate))
        return certificate, key

    def _open(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        try:
            certificate = x509.load_pem_x509_certificate((self._own / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((self._own / "ca.key").read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise Refused(f"{self._own} holds no certificate authority: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise Refused(f"{self._own}: ca.key is not the key of ca.pem")
        return certificate, key

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - BACKDATED)
            .not_valid_after(self._now + timedelta(days=days))
        )

    def _signed(self, place: str, key: ec.EllipticCurvePublicKey, addresses: list[str], days: int) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, place)])
        authority = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            self._builder(subject, self._certificate.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(_alternatives(place, addresses)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    # ── What was issued, what is revoked ─────────────────────────────────────────────────────────────────────────

    def _folder(self, place: str) -> Path:
        if check_name("place", place) == AUTHORITY:
            raise Refused(f"a place cannot be called {AUTHORITY!r}: the folder of that name holds the authority's key")
        return self.folder / place

    def _is_good(self, path: Path, place: str, addresses: list[str]) -> bool:
        if not path.exists():
            return False
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        known = {one["serial"]: one for one in self._issued()}
        mine = known.get(f"{certificate.serial_number:x}")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return (
            mine is not None
            and "revoked" not in mine
            and end - self._now > RENEWED * (end - start)
            and list(names) == _alternatives(place, addresses)
        )

    def _issued(self) -> list[dict[str, str]]:
        path = self._own / "issued.json"
        issued: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return [one for one in issued if datetime.fromisoformat(one["until"]) > self._now]

    def _record(self, place: str, certificate: x509.Certificate) -> None:
        serial, until = f"{certificate.serial_number:x}", certificate.not_valid_after_utc.isoformat()
        self._write([*self._issued(), {"place": place, "serial": serial, "until": until}])

    def _write(self, issued: list[dict[str, str]]) -> None:
        replace_text(self._own / "issued.json", json.dumps(issued, indent=1))

    def _publish(self) -> None:
        """Write the list of revoked certificates into the folder of each place."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self._certificate.subject)
            .last_update(self._now - BACKDATED)
            .next_update(self._now + timedelta(days=AUTHORITY_DAYS))
        )
        for one in self._issued():
            if "revoked" in one:
                builder = builder.add_revoked_certificate(
                    x509.RevokedCertificateBuilder()
                    .serial_number(int(one["serial"], 16))
                    .revocation_date(datetime.fromisoformat(one["revoked"]))
                    .build()
                )
        text = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
        for path in self.folder.glob("*/certificate.pem"):
            replace_text(path.parent / "revoked.pem", text)


def _alternatives(place: str, addresses: list[str]) -> list[x509.GeneralName]:
    """The names and addresses of a place as alternative names. Raises `Refused` for what is neither."""
    names: list[x509.GeneralName] = [x509.DNSName(place)] if place.isascii() else []
    for address in addresses:
        try:
            names.append(x509.IPAddress(ip_address(address)))
        except ValueError:
            try:
                names.append(x509.DNSName(check_name("host", address, 253)))
            except ValueError as error:
                raise Refused(f"{address!r} is neither an IP address nor a host name") from error
    return names


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
