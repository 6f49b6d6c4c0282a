"""What ``msprobe certs show`` says."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from msprobe_engine.accuracy.online.certificates.authority import Authority
from msprobe_engine.accuracy.online.certificates.certificate import Certificate, read_certificate, read_revocations
from msprobe_engine.accuracy.online.certificates.tls import CLIENT, SERVER, SOON, Credentials
from msprobe_engine.accuracy.online.options import TlsOptions
from msprobe_engine.core.errors import SettingsError, UsageError


def describe(path: Path) -> tuple[list[str], list[str]]:
    """Lines of what is at `path`, and what does not work.

    Raises:
        UsageError: there are no certificates.
        SettingsError: the file is no certificate.
    """
    if path.is_file():
        certificate = read_certificate(path)
        return _lines(path.name, certificate), _warn_of_expiry(str(path), certificate)
    if (path / "ca.key").is_file():
        return _authority(path)
    if not (path / "ca.crt").is_file():
        raise UsageError(f"{path}: holds no ca.crt; give a certificate, a directory of tls_path, or the directory of an authority")
    return _host(path)


def _host(path: Path) -> tuple[list[str], list[str]]:
    lines, troubles = [], []
    for role in (CLIENT, SERVER):
        file = path / f"{role}.crt"
        if not os.path.lexists(file):  # whatever else stands there is said by the reader
            continue
        certificate = read_certificate(file)
        lines += _lines(file.name, certificate)
        troubles += _warn_of_expiry(str(file), certificate)
        try:
            Credentials(TlsOptions(path), role)
        except SettingsError as error:
            if certificate.ends > _now():
                troubles.append(str(error))
        if os.path.lexists(path / "crl.pem") and certificate.serial in read_revocations(path / "crl.pem").revoked:
            troubles.append(f"{file} was revoked")
        if certificate.issuer != read_certificate(path / "ca.crt").subject:
            troubles.append(f"{file} is of '{certificate.issuer}', and ca.crt is another authority")
    authority = read_certificate(path / "ca.crt")
    lines += _lines("ca.crt", authority)
    troubles += _warn_of_expiry(str(path / "ca.crt"), authority)
    return lines + _revocations(path), troubles


def _authority(path: Path) -> tuple[list[str], list[str]]:
    own = read_certificate(path / "ca.crt")
    lines, troubles = _lines("ca.crt", own), _warn_of_expiry(str(path / "ca.crt"), own)
    for certificate, revoked in Authority(path).list_certificates():
        lines += _lines("revoked" if revoked else "issued", certificate)
        if not revoked:
            troubles += _warn_of_expiry(f"'{certificate.subject}' ({' and '.join(certificate.roles)})", certificate)
    return lines + _revocations(path), troubles


def _lines(what: str, certificate: Certificate) -> list[str]:
    use = "authority" if certificate.authority else " and ".join(certificate.roles) or "any use"
    reached = f", for {', '.join(certificate.addresses)}" if certificate.addresses else ""
    return [
        f"{what}: '{certificate.subject}' ({use}{reached}) of '{certificate.issuer}', valid until {certificate.ends:%Y-%m-%d}",
        f"    SHA-256 {certificate.fingerprint}",
    ]


def _revocations(path: Path) -> list[str]:
    file = path / "crl.pem"
    if not os.path.lexists(file):
        return ["crl.pem: none"]
    found = read_revocations(file)
    due = "for ever" if found.due is None else f"until {found.due:%Y-%m-%d}"
    return [f"crl.pem: of '{found.issuer}', {len(found.revoked)} revoked, valid {due}"]


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _warn_of_expiry(owner: str, certificate: Certificate) -> list[str]:
    remaining = certificate.ends - _now()
    if remaining.total_seconds() < 0:
        return [f"{owner} has expired on {certificate.ends:%Y-%m-%d}"]
    return [f"{owner} is valid for {remaining.days} more days only"] if remaining < SOON else []
