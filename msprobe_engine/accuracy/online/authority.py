"""A small certificate authority for one cluster, made with the ``openssl`` command: EC keys (P-256), one directory.

``DIRECTORY``: ca.key (mode 600), ca.crt, crl.pem, and ``openssl ca``'s own books (index.txt, crlnumber, issued/). Files of hosts are made
wherever they are wanted, named as ``tls_path`` has them. First days lie one day back, so that clocks need not agree.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from msprobe_engine.accuracy.online.certificate import Certificate, read_certificate, read_revocations
from msprobe_engine.accuracy.online.tls import CLIENT, PASSPHRASE, SERVER
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import FILE_MODE, make_directories
from msprobe_engine.errors import UsageError

CA_PASSPHRASE = "MSPROBE_CA_PASSPHRASE"
AUTHORITY_DAYS, HOST_DAYS, CRL_DAYS = 3650, 825, 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?)*")
_BACK = timedelta(days=1)
_SECONDS = 60
_CONFIGURATION = """\
[ca]
default_ca = authority
[authority]
dir = .
database = index.txt
new_certs_dir = issued
certificate = ca.crt
private_key = ca.key
crlnumber = crlnumber
rand_serial = yes
default_md = sha256
unique_subject = no
policy = names
default_crl_days = {crl_days}
[names]
commonName = supplied
[req]
distinguished_name = subject
prompt = no
[subject]
CN = {name}
[ca_extensions]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[client_extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[server_extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = critical, serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {addresses}
"""


class Authority:
    """The authority in a directory.

    Args:
        directory: made by `create` before.

    Raises:
        UsageError: there is none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / "ca.key").is_file():
            raise UsageError(f"{directory}: holds no authority (ca.key); make one with 'msprobe certs init {directory}'")

    @classmethod
    def create(cls, directory: Path, name: str, days: int = AUTHORITY_DAYS) -> Authority:
        """A new authority. Its key is encrypted when the environment variable ``MSPROBE_CA_PASSPHRASE`` is set.

        Raises:
            UsageError: there is one, the directory cannot be written, or this host has no openssl.
        """
        _check_name(name)
        _check_days(days)
        if (directory / "ca.key").exists() or (directory / "index.txt").exists():
            raise UsageError(f"{directory}: holds an authority already; a second one would make all its certificates useless")
        try:
            (directory / "issued").mkdir(parents=True, mode=0o700)
            directory.chmod(0o700)
            (directory / "index.txt").touch(mode=0o600)
            (directory / "crlnumber").write_text("01\n", encoding="ascii")
        except OSError as error:
            raise UsageError(f"{directory}: cannot be written ({error.strerror}); name an empty directory") from None
        try:
            with _request(directory, name, directory / "ca.key", CA_PASSPHRASE) as (config, request):
                _openssl(
                    directory, "ca", "-batch", "-selfsign", "-config", config, "-extensions", "ca_extensions", "-notext",
                    "-in", request, "-out", "ca.crt", *_dates(days), *_passin(CA_PASSPHRASE),
                )  # fmt: skip
            made = cls(directory)
            made.renew_revocations()
        except BaseException:
            for path in ("ca.key", "ca.crt", "crl.pem", "index.txt", "crlnumber"):
                (directory / path).unlink(missing_ok=True)
            shutil.rmtree(directory / "issued", ignore_errors=True)
            raise
        return made

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
        alternative = ",".join(_alternative(address) for address in addresses)
        made = [output / f"{role}.{end_}" for role in roles for end_ in ("key", "crt")]
        there = [path for path in made if path.exists()]
        if there:
            raise UsageError(f"{there[0]}: is there already; remove it first, or name another directory with -o")
        try:
            make_directories(str(output))
            with tempfile.TemporaryDirectory(dir=output, prefix=".new-") as folder, self._locked():
                for role in roles:
                    key, crt = Path(folder) / f"{role}.key", Path(folder) / f"{role}.crt"
                    with _request(self.directory, name, key, PASSPHRASE, alternative) as (config, request):
                        _openssl(
                            self.directory, "ca", "-batch", "-config", config, "-extensions", f"{role}_extensions", "-notext",
                            "-in", request, "-out", str(crt.resolve()), *_dates(days), *_passin(CA_PASSPHRASE),
                        )  # fmt: skip
                    os.chmod(crt, FILE_MODE & crt.stat().st_mode)
                for path in made:
                    os.rename(Path(folder) / path.name, path)
            return [*made, *self.copy(output)]
        except OSError as error:
            raise UsageError(f"{output}: cannot be written ({error.strerror}); name another directory with -o") from None

    def copy(self, output: Path) -> list[Path]:
        """Put ca.crt and crl.pem into a host's directory."""
        made = []
        for name in ("ca.crt", "crl.pem"):
            write_file(output / name, [(self.directory / name).read_bytes()])  # a server that runs looks at these files
            made.append(output / name)
        return made

    def revoke(self, name: str) -> int:
        """Take back all valid certificates of this name; returns how many. ``crl.pem`` is made anew and has to be copied to the hosts.

        Raises:
            UsageError: there are none.
        """
        with self._locked():
            valid = [serial for serial, subject in self._valid() if subject == name]
            if not valid:
                known = sorted({subject for _, subject in self._valid()})
                raise UsageError(f"'{name}': has no valid certificate of this authority; there are: {', '.join(known[:20]) or 'none'}")
            with _configuration(self.directory) as config:
                for serial in valid:
                    _openssl(self.directory, "ca", "-config", config, "-revoke", f"issued/{serial}.pem", *_passin(CA_PASSPHRASE))
        self.renew_revocations()
        return len(valid)

    def renew_revocations(self, days: int = CRL_DAYS) -> None:
        """Make ``crl.pem`` anew, from the books."""
        _check_days(days)
        back = ["-crl_lastupdate", _stamp(datetime.now(timezone.utc) - _BACK)] if _knows(self.directory, "-crl_lastupdate") else []
        with self._locked(), _configuration(self.directory) as config:
            _openssl(
                self.directory, "ca", "-config", config, "-gencrl", "-crldays", str(days), "-out", ".crl.pem.part", *back,
                *_passin(CA_PASSPHRASE),
            )  # fmt: skip
            os.rename(self.directory / ".crl.pem.part", self.directory / "crl.pem")

    def issued(self) -> list[tuple[Certificate, bool]]:
        """All certificates of hosts, and whether they were revoked, in the order in which they were made."""
        revoked = read_revocations(self.directory / "crl.pem").serials
        found = []
        for line in (self.directory / "index.txt").read_text(encoding="utf-8").splitlines():
            path = self.directory / "issued" / f"{line.split(chr(9))[3]}.pem"
            certificate = read_certificate(path)
            if not certificate.authority:
                found.append((certificate, certificate.serial in revoked))
        return found

    def _valid(self) -> list[tuple[str, str]]:
        """Serial (as file names have it) and common name of certificates of hosts that were not revoked."""
        found = []
        for line in (self.directory / "index.txt").read_text(encoding="utf-8").splitlines():
            status, _, _, serial, _, subject = line.split("\t")
            certificate = read_certificate(self.directory / "issued" / f"{serial}.pem")
            if status == "V" and not certificate.authority:
                found.append((serial, subject.rpartition("CN=")[2]))
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The books are for one at a time."""
        with open(self.directory / "index.txt", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is no name for a certificate; letters, digits, '.', '_' and '-', at most 64, are")


def _check_days(days: int) -> None:
    if not 1 <= days <= 36500:
        raise UsageError(f"--days {days}: is not allowed; 1 to 36500 are")


def _alternative(address: str) -> str:
    try:
        return f"IP:{ipaddress.ip_address(address)}"
    except ValueError:
        if not _HOST_NAME.fullmatch(address):
            raise UsageError(f"'{address}' is neither a host name nor an IP address") from None
        return f"DNS:{address}"


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y%m%d%H%M%SZ")


def _dates(days: int) -> list[str]:
    now = datetime.now(timezone.utc)
    return ["-startdate", _stamp(now - _BACK), "-enddate", _stamp(now + timedelta(days=days))]


def _passin(variable: str) -> list[str]:
    return ["-passin", f"env:{variable}"] if os.environ.get(variable) else []


@contextlib.contextmanager
def _configuration(directory: Path, name: str = "msprobe", addresses: str = "") -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".cnf", dir=directory, encoding="ascii") as file:
        file.write(_CONFIGURATION.format(name=name, addresses=addresses or "DNS:localhost", crl_days=CRL_DAYS))
        file.flush()
        yield Path(file.name).name


@contextlib.contextmanager
def _request(directory: Path, name: str, key: Path, variable: str, addresses: str = "") -> Iterator[tuple[str, str]]:
    """A new key, and a configuration and a request to sign its certificate."""
    encrypted = ["-passout", f"env:{variable}"] if os.environ.get(variable) else ["-nodes"]
    with _configuration(directory, name, addresses) as config, tempfile.NamedTemporaryFile(suffix=".csr", dir=directory) as request:
        _openssl(
            directory, "req", "-new", "-config", config, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *encrypted,
            "-keyout", str(key.resolve()), "-out", request.name,
        )  # fmt: skip
        os.chmod(key, 0o600)
        yield config, str(Path(request.name).resolve())


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("openssl")
    if program is None:
        raise UsageError(
            "there is no 'openssl' command on this host; install the package openssl, or make the certificates on another host"
        )
    mask = os.umask(0o077)
    try:
        return subprocess.run(
            [program, *arguments], cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"openssl {arguments[0]} has not ended within {_SECONDS} s; is the disk of {directory} there?") from None
    finally:
        os.umask(mask)


def _knows(directory: Path, option: str) -> bool:
    return option in _run(directory, "ca", "-help").stderr


def _openssl(directory: Path, *arguments: str) -> None:
    done = _run(directory, *arguments)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        secret = f"; is {CA_PASSPHRASE} (of ca.key) set and right?" if "pass" in done.stderr.lower() or "decrypt" in done.stderr else ""
        raise UsageError(f"openssl {arguments[0]} in {directory} failed: {' / '.join(said[-3:])[:600]}{secret}")
