"""A small certificate authority for one cluster, made with the package cryptography: EC keys (P-256), one directory.

``DIRECTORY``: ca.key (mode 600), ca.crt, crl.pem, and the books: ``issued/`` and ``revoked/`` hold the certificates of hosts. Files of
hosts are made wherever they are wanted, named as ``tls_path`` has them. First days lie one day back, so that clocks need not agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_engine.accuracy.online.certificates.certificate import (
    LARGEST,
    Certificate,
    read_certificate,
    read_revocations,
    require_cryptography,
)
from msprobe_engine.accuracy.online.certificates.tls import CLIENT, PASSPHRASE, SERVER
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import open_input, read_input
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_PASSPHRASE = "MSPROBE_CA_PASSPHRASE"
AUTHORITY_DAYS, HOST_DAYS, CRL_DAYS = 3650, 825, 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?)*")
_BACK = timedelta(days=1)
_KEY_MODE = 0o600


class Authority:
    """The authority in a directory.

    Args:
        directory: made by `create` before.

    Raises:
        UsageError: there is none.
        MissingExtraError: the package cryptography is not installed.
    """

    def __init__(self, directory: Path) -> None:
        require_cryptography()
        self.directory = directory
        if not (directory / "ca.key").is_file():
            raise UsageError(f"{directory}: holds no authority (ca.key); make one with 'msprobe certs init {directory}'")

    @classmethod
    def create(cls, directory: Path, name: str, days: int = AUTHORITY_DAYS) -> Authority:
        """A new authority. Its key is encrypted when the environment variable ``MSPROBE_CA_PASSPHRASE`` is set.

        Raises:
            UsageError: there is one, or the directory cannot be written.
            MissingExtraError: the package cryptography is not installed.
        """
        require_cryptography()
        from cryptography import x509

        _check_name(name)
        _check_days(days)
        if (directory / "ca.key").exists() or (directory / "issued").exists():
            raise UsageError(f"{directory}: holds an authority already; a second one would make all its certificates useless")
        key = _new_key()
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = _sign(_subject(name), key, _subject(name), key, days, constraints, ["key_cert_sign", "crl_sign"])
        made: list[Path] = []
        try:
            (directory / "issued").mkdir(parents=True, mode=0o700)
            directory.chmod(0o700)
            for file, data, mode in (("ca.key", _key_pem(key, CA_PASSPHRASE), _KEY_MODE), ("ca.crt", _pem(certificate), 0o640)):
                write_file(directory / file, [data], mode)
                made.append(directory / file)
            authority = cls(directory)
            authority.renew_revocations()
        except BaseException as error:
            for path in made:
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (directory / "issued").rmdir()
            if isinstance(error, OSError):
                raise UsageError(f"{directory}: cannot be written ({error.strerror}); name an empty directory") from None
            raise
        return authority

    def issue(self, output: Path, name: str, addresses: Sequence[str] = (), *, client: bool = True, days: int = HOST_DAYS) -> list[Path]:
        """The files of one host. Keys are encrypted when the environment variable ``MSPROBE_TLS_PASSPHRASE`` is set.

        Args:
            output: directory for them; becomes ``tls_path`` there.
            name: of the host, in messages.
            addresses: host names and IP addresses under which its server is reached; none: no server's files.
            client: make a client's files too.
            days: how long they are valid.

        Returns:
            The files made.

        Raises:
            UsageError: a name or address is none, or the files are there already.
        """
        _check_name(name)
        _check_days(days)
        roles = [role for role, wanted in ((CLIENT, client), (SERVER, bool(addresses))) if wanted]
        if not roles:
            raise UsageError("neither a client's nor a server's certificate is wanted")
        end = read_certificate(self.directory / "ca.crt").ends
        if datetime.now(timezone.utc) + timedelta(days=days) > end:
            raise UsageError(f"--days {days}: the authority itself ends on {end:%Y-%m-%d}; ask for fewer days, or make a new authority")
        alternatives = [_alternative(address) for address in addresses]
        there = [path for role in roles for end_ in ("key", "crt") if (path := output / f"{role}.{end_}").exists()]
        if there:
            raise UsageError(f"{there[0]}: is there already; remove it first, or name another directory with -o")
        signer = self._key()
        made: list[Path] = []
        try:
            make_directories(str(output))
            with self._lock_books():
                for role in roles:
                    key = _new_key()
                    certificate = self._sign_host(name, key, signer, days, role, alternatives)
                    # the number keeps the order of what is made within one second
                    book = self.directory / "issued" / f"{len(self._books()):06d}-{certificate.serial_number:X}.pem"
                    write_file(book, [_pem(certificate)])
                    for end_, data, mode in (("key", _key_pem(key, PASSPHRASE), _KEY_MODE), ("crt", _pem(certificate), 0o640)):
                        write_file(output / f"{role}.{end_}", [data], mode)
                        made.append(output / f"{role}.{end_}")
            return [*made, *self.copy(output)]
        except OSError as error:
            for path in made:
                path.unlink(missing_ok=True)
            raise UsageError(f"{output}: cannot be written ({error.strerror}); name another directory with -o") from None

    def copy(self, output: Path) -> list[Path]:
        """Put ca.crt and crl.pem into a host's directory."""
        made = []
        for name in ("ca.crt", "crl.pem"):
            write_file(output / name, [read_input(self.directory / name, LARGEST)])  # a server that runs looks at these files
            made.append(output / name)
        return made

    def revoke(self, name: str) -> int:
        """Take back all valid certificates of this name; returns how many. ``crl.pem`` is made anew and has to be copied to the hosts.

        Raises:
            UsageError: there are none.
        """
        self._key()  # asks for the passphrase before anything changes
        with self._lock_books():
            valid = [(path, certificate.subject) for path, certificate, revoked in self._books() if not revoked]
            chosen = [path for path, subject in valid if subject == name]
            if not chosen:
                known = ", ".join(sorted({subject for _, subject in valid})[:20]) or "none"
                raise UsageError(f"'{name}': has no valid certificate of this authority; there are: {known}")
            (self.directory / "revoked").mkdir(mode=0o700, exist_ok=True)
            for path in chosen:
                path.rename(self.directory / "revoked" / path.name)
        self.renew_revocations()
        return len(chosen)

    def renew_revocations(self, days: int = CRL_DAYS) -> None:
        """Make ``crl.pem`` anew, from the books and from what it says itself."""
        from cryptography import x509
        from cryptography.hazmat.primitives.hashes import SHA256

        _check_days(days)
        signer = self._key()
        now = datetime.now(timezone.utc)
        with self._lock_books():
            authority = x509.load_pem_x509_certificate(read_input(self.directory / "ca.crt", LARGEST))
            builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
            builder = builder.last_update(now - _BACK).next_update(now + timedelta(days=days))
            builder = builder.add_extension(x509.CRLNumber(int(time.time())), critical=False)
            builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            for serial, date in sorted(self._read_revoked().items()):
                entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(date).build()
                builder = builder.add_revoked_certificate(entry)
            write_file(self.directory / "crl.pem", [_pem(builder.sign(signer, SHA256()))])

    def list_certificates(self) -> list[tuple[Certificate, bool]]:
        """All certificates of hosts, and whether they were revoked, in the order in which they were made."""
        return [(certificate, revoked) for _, certificate, revoked in self._books()]

    def _books(self) -> list[tuple[Path, Certificate, bool]]:
        revoked = self._read_revoked()
        found = []
        for folder in ("issued", "revoked"):
            for path in (self.directory / folder).glob("*.pem"):
                certificate = read_certificate(path)
                if not certificate.authority:
                    found.append((path, certificate, certificate.serial in revoked))
        return sorted(found, key=lambda entry: (entry[1].begins, entry[0].name))

    def _read_revoked(self) -> dict[int, datetime]:
        """Serial to date. The folder makes up for a list that was lost, the list for an authority that had no folder."""
        revoked = {}
        for path in (self.directory / "revoked").glob("*.pem"):
            revoked[read_certificate(path).serial] = datetime.fromtimestamp(int(path.stat().st_ctime), timezone.utc)
        if (self.directory / "crl.pem").exists():
            revoked.update(read_revocations(self.directory / "crl.pem").revoked)
        return revoked

    def _key(self) -> EllipticCurvePrivateKey:
        """Raises:
        UsageError: the key cannot be used.
        """
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        path = self.directory / "ca.key"
        try:
            data = read_input(path, LARGEST)
            given = os.environ.get(CA_PASSPHRASE, "")
            key = load_pem_private_key(data, given.encode() if given and b"ENCRYPTED" in data else None)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
        except Exception as error:  # encrypted, damaged, of another kind
            raise UsageError(f"{path}: cannot be used ({str(error)[:200]}); is {CA_PASSPHRASE} set and right?") from None
        if not isinstance(key, EllipticCurvePrivateKey):
            raise UsageError(f"{path}: is no elliptic key; make an authority with 'msprobe certs init'")
        return key

    def _sign_host(
        self,
        name: str,
        key: EllipticCurvePrivateKey,
        signer: EllipticCurvePrivateKey,
        days: int,
        role: str,
        alternatives: list[x509.GeneralName],
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        issuer = x509.load_pem_x509_certificate(read_input(self.directory / "ca.crt", LARGEST)).subject
        use = ExtendedKeyUsageOID.CLIENT_AUTH if role == CLIENT else ExtendedKeyUsageOID.SERVER_AUTH
        more: list[tuple[x509.ExtensionType, bool]] = [(x509.ExtendedKeyUsage([use]), True)]
        if role == SERVER:
            more.append((x509.SubjectAlternativeName(alternatives), False))
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        return _sign(_subject(name), key, issuer, signer, days, constraints, ["digital_signature"], more)

    @contextlib.contextmanager
    def _lock_books(self) -> Iterator[None]:
        """The books are for one at a time."""
        with open_input(self.directory / "ca.crt") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name for a certificate; letters, digits, '.', '_' and '-', at most 64, are")


def _check_days(days: int) -> None:
    if not 1 <= days <= 36500:
        raise UsageError(f"--days {days}: is not allowed; 1 to 36500 are")


def _alternative(address: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        if not _HOST_NAME.fullmatch(address):
            raise UsageError(f"'{address}' is neither a host name nor an IP address") from None
        return x509.DNSName(address)


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign", "crl_sign",
    "encipher_only", "decipher_only",
)  # fmt: skip


def _sign(
    subject: x509.Name,
    key: EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: EllipticCurvePrivateKey,
    days: int,
    constraints: x509.BasicConstraints,
    uses: Sequence[str],
    more: Sequence[tuple[x509.ExtensionType, bool]] = (),
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA256

    now = datetime.now(timezone.utc)
    builder = x509.CertificateBuilder(
        issuer, subject, key.public_key(), x509.random_serial_number(), now - _BACK, now + timedelta(days=days)
    )  # fmt: skip
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (constraints, True),
        (x509.KeyUsage(**{use: use in uses for use in _USES}), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        *more,
    ]
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, SHA256())


def _pem(made: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return made.public_bytes(Encoding.PEM)


def _key_pem(key: EllipticCurvePrivateKey, variable: str) -> bytes:
    from cryptography.hazmat.primitives import serialization

    passphrase = os.environ.get(variable, "").encode()
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
