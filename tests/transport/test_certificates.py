"""The deployment's own authority: what `whimbrel certificates` makes, renews and revokes."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from typer.testing import CliRunner

from whimbrel.cli.main import make_app
from whimbrel.core.errors import Refused, Unavailable, WhimbrelError
from whimbrel.transport.certificates import Authority
from whimbrel.transport.identity import Identity

NOW = datetime.now(UTC)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(make_app("certificates"), ["certificates", *map(str, arguments)])
    if isinstance(done.exception, WhimbrelError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def serial(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes()).serial_number


def names(folder: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one.value) for one in found]


def test_the_command_makes_a_folder_for_each_place_and_one_for_the_orchestrator(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    run(keys, "--place", "cloud", "--place", "edge-1=10.0.0.2,edge.example.org")
    assert sorted(path.name for path in keys.iterdir()) == ["authority", "cloud", "edge-1", "orchestrator"]
    for place in ("cloud", "edge-1", "orchestrator"):
        identity = Identity.of(keys / place)
        identity.check()
        assert identity.place() == place
        assert sorted(path.name for path in (keys / place).iterdir()) == [
            "ca.pem", "certificate.pem", "credentials", "key.pem", "revoked.pem",
        ]  # fmt: skip
    for role in ("gateway-edge-1", "site-edge-1"):
        shared = [(keys / place / "credentials" / role).read_text() for place in ("edge-1", "orchestrator")]
        assert shared[0] == shared[1], "the place and the orchestrator know it, and no other place"
    assert not (keys / "cloud" / "credentials" / "site-edge-1").exists()
    assert names(keys / "edge-1") == ["edge-1", "10.0.0.2", "edge.example.org"]
    assert names(keys / "cloud") == ["cloud", "localhost", "127.0.0.1", "::1"]
    run(keys, "--place", "orchestrator=10.0.0.1")
    run(keys, "--place", "edge-2=10.0.0.3")
    assert names(keys / "orchestrator") == ["orchestrator", "10.0.0.1"], "a later call for others leaves it as it is"


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    run(keys, "--place", "cloud")
    for path in [keys, *keys.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_another_program_agrees_that_they_are_good(tmp_path: Path) -> None:
    Authority(tmp_path).issue("cloud", ["10.0.0.1"])
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", "10.0.0.1", "-CAfile",
         tmp_path / "authority" / "ca.pem", tmp_path / "cloud" / "certificate.pem"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_second_call_keeps_what_is_good_and_renews_what_is_not(tmp_path: Path) -> None:
    authority = Authority(tmp_path, NOW)
    assert authority.issue("cloud", days=90)
    first = serial(tmp_path / "cloud")
    assert not Authority(tmp_path, NOW + timedelta(days=50)).issue("cloud", days=90)
    assert serial(tmp_path / "cloud") == first
    assert Authority(tmp_path, NOW + timedelta(days=61)).issue("cloud", days=90), "less than a third is left"
    assert serial(tmp_path / "cloud") != first
    assert Authority(tmp_path, NOW + timedelta(days=61)).issue("cloud", ["10.0.0.9"], days=90), "another address"
    assert Authority(tmp_path, NOW + timedelta(days=61)).issue("cloud", ["10.0.0.9"], days=90, renew=True)


def test_a_revocation_reaches_renewed_certificates_too_and_the_next_one_is_good(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("edge-1")
    authority.issue("cloud")
    old = (tmp_path / "edge-1" / "certificate.pem").read_text()
    authority.issue("edge-1", renew=True)
    run(tmp_path, "--revoke", "edge-1")
    cloud = Identity.of(tmp_path / "cloud")
    cloud.check()
    for text in (old, (tmp_path / "edge-1" / "certificate.pem").read_text()):
        shown = x509.load_pem_x509_certificate(text.encode())
        with pytest.raises(Unavailable, match="the certificate of edge-1 is revoked since"):
            cloud.peer(_der(shown))
    run(tmp_path, "--place", "edge-1")
    new = x509.load_pem_x509_certificate((tmp_path / "edge-1" / "certificate.pem").read_bytes())
    assert cloud.peer(_der(new)) == "edge-1"
    with pytest.raises(Refused, match="no certificate to 'edge-9'"):
        run(tmp_path, "--revoke", "edge-9")


def _der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


def test_a_list_of_revoked_certificates_of_somebody_else_is_not_believed(tmp_path: Path) -> None:
    Authority(tmp_path / "a").issue("cloud")
    Authority(tmp_path / "b").issue("cloud")
    (tmp_path / "a" / "cloud" / "revoked.pem").write_bytes((tmp_path / "b" / "cloud" / "revoked.pem").read_bytes())
    with pytest.raises(Unavailable, match="is not signed by the authority in"):
        Identity.of(tmp_path / "a" / "cloud").check()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to do"),
        (["--place", "../x"], "place name '../x' is not allowed"),
        (["--place", "authority"], "cannot be called 'authority'"),
        (["--place", "edge-1=a b"], "host name 'a b' is not allowed"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path: Path, arguments: list[str], told: str) -> None:
    with pytest.raises(Refused, match=told):
        run(tmp_path / "keys", *arguments)


def test_a_damaged_authority_is_not_replaced(tmp_path: Path) -> None:
    Authority(tmp_path).issue("cloud")
    (tmp_path / "authority" / "ca.key").write_text("none")
    with pytest.raises(Refused, match="holds no certificate authority"):
        Authority(tmp_path)
    Authority(tmp_path / "other")
    (tmp_path / "authority" / "ca.key").write_bytes((tmp_path / "other" / "authority" / "ca.key").read_bytes())
    with pytest.raises(Refused, match=r"ca\.key is not the key of ca\.pem"):
        Authority(tmp_path)


def test_a_certificate_without_the_name_of_a_place_is_told(tmp_path: Path) -> None:
    Authority(tmp_path).issue("cloud")
    identity, key = Identity.of(tmp_path / "cloud"), ec.generate_private_key(ec.SECP256R1())
    for common, told in [((), "0 common names"), (("a b",), "is not one of a place")]:
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one) for one in common])
        certificate = (
            x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(5).not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1)).sign(key, hashes.SHA256())
        )  # fmt: skip
        with pytest.raises(Unavailable, match=told):
            identity.peer(_der(certificate))
