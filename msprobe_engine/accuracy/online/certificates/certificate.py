"""Reads what people need to know of an X.509 certificate (RFC 5280): names, days, number, addresses, roles.

The standard library verifies certificates, but says nothing of our own. This reads, by the package cryptography, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msprobe_engine.core.errors import SettingsError, needs_extra
from msprobe_engine.core.io.input_files import read_input

if TYPE_CHECKING:
    from cryptography import x509

LARGEST = 1 << 20
"""Bytes of a file with a key, a certificate or a list of revoked ones."""
_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True)
class Certificate:
    """What a certificate says.

    Attributes:
        subject, issuer: common names, "" when there is none.
        serial: its number at the issuer.
        begins, ends: first and last moment (UTC).
        addresses: host names and IP addresses it is for.
        roles: ``server``, ``client``, another use by its number; empty: any.
        authority: may sign others.
        fingerprint: SHA-256 of it, hex.
    """

    subject: str
    issuer: str
    serial: int
    begins: datetime
    ends: datetime
    addresses: tuple[str, ...]
    roles: tuple[str, ...]
    authority: bool
    fingerprint: str


@dataclass(frozen=True)
class RevocationList:
    """What a CRL says: who made it, when, when the next is due (None: never), and what it revokes (serial to date)."""

    issuer: str
    made: datetime
    due: datetime | None
    revoked: dict[int, datetime]


def require_cryptography() -> None:
    """Raises:
    MissingExtraError: the package is not installed.
    """
    with needs_extra("cryptography", "tls", "certificates (msprobe certs, tls_path)"):
        import cryptography.x509  # noqa: F401


def read_certificate(path: Path) -> Certificate:
    """The first certificate of a PEM file.

    Raises:
        SettingsError: it cannot be read, or has none.
        MissingExtraError: the package cryptography is not installed.
    """
    return _read_pem(path, "CERTIFICATE", _certificate, "the certificate in it is damaged (%s); copy it again from where it was made")


def read_revocations(path: Path) -> RevocationList:
    """The first CRL of a PEM file.

    Raises:
        SettingsError: it cannot be read, or has none.
        MissingExtraError: the package cryptography is not installed.
    """
    return _read_pem(path, "X509 CRL", _revocations, "the list in it is damaged (%s); make it anew")


def _read_pem(path: Path, kind: str, parse: Callable[[bytes], _Parsed], damaged: str) -> _Parsed:
    require_cryptography()
    try:
        data = read_input(path, LARGEST)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); is tls_path right?") from None
    begin = data.find(f"-----BEGIN {kind}-----".encode())
    if begin < 0:
        raise SettingsError(f"{path}: holds no '-----BEGIN {kind}-----'; it must be a PEM file")
    try:
        return parse(data[begin:])
    except Exception as error:  # the parser has a dozen kinds of errors for what is damaged
        raise SettingsError(f"{path}: {damaged % str(error)[:100]}") from None


def _common_name(name: x509.Name) -> str:
    from cryptography.x509.oid import NameOID

    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[-1].value) if found else ""


def _certificate(pem: bytes) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names = {ExtendedKeyUsageOID.SERVER_AUTH: "server", ExtendedKeyUsageOID.CLIENT_AUTH: "client"}
    found = x509.load_pem_x509_certificate(pem)
    addresses: list[str] = []
    roles: list[str] = []
    authority = False
    for extension in found.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            addresses = [str(name.value) for name in value if isinstance(name, (x509.DNSName, x509.IPAddress))]
        elif isinstance(value, x509.ExtendedKeyUsage):
            roles = [names.get(use, use.dotted_string) for use in value]
        elif isinstance(value, x509.BasicConstraints):
            authority = value.ca
    return Certificate(
        _common_name(found.subject), _common_name(found.issuer), found.serial_number, found.not_valid_before_utc, found.not_valid_after_utc,
        tuple(addresses), tuple(roles), authority, found.fingerprint(SHA256()).hex(),
    )  # fmt: skip


def _revocations(pem: bytes) -> RevocationList:
    from cryptography import x509

    found = x509.load_pem_x509_crl(pem)
    revoked = {entry.serial_number: entry.revocation_date_utc for entry in found}
    return RevocationList(_common_name(found.issuer), found.last_update_utc, found.next_update_utc, revoked)
