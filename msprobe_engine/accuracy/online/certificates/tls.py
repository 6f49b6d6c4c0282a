"""TLS 1.2 and 1.3 with certificates on both sides, from the files of ``tls_path``; what goes wrong in words.

``client.key``, ``client.crt`` (a server: ``server.key``, ``server.crt``), ``ca.crt``, and ``crl.pem`` when something was revoked. A key
may be encrypted: the passphrase is in the environment variable ``MSPROBE_TLS_PASSPHRASE``, else it is asked once where there is a terminal.
"""

from __future__ import annotations

import getpass
import os
import ssl
import stat
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

from msprobe_engine.accuracy.online.certificates.certificate import read_certificate, read_revocations
from msprobe_engine.accuracy.online.options import TlsOptions
from msprobe_engine.core.errors import SettingsError

PASSPHRASE = "MSPROBE_TLS_PASSPHRASE"
CLIENT, SERVER = "client", "server"
SOON = timedelta(days=30)
_asked: dict[Path, str] = {}
_asking = threading.Lock()


class Credentials:
    """The files of one end; a context is made anew when they have changed.

    Args:
        role: `CLIENT` or `SERVER`.

    Raises:
        SettingsError: they cannot be used.
    """

    def __init__(self, options: TlsOptions, role: str) -> None:
        self._options = options
        self._role = role
        directory = options.directory
        self._key, self._certificate = directory / f"{role}.key", directory / f"{role}.crt"
        self._authority, self._revoked = directory / "ca.crt", directory / "crl.pem"
        self._lock = threading.Lock()
        self._state: tuple[object, ...] = ()
        self._context = self._build_context()
        self._state = self._read_file_states()

    def context(self) -> ssl.SSLContext:
        """For the next connection.

        Raises:
            SettingsError: the files have changed and cannot be used now.
        """
        with self._lock:
            state = self._read_file_states()
            if state != self._state:
                self._context = self._build_context()
                self._state = state
            return self._context

    def have_files_changed(self) -> bool:
        """Have the files changed since the last context was made?"""
        return self._read_file_states() != self._state

    def warnings(self) -> list[str]:
        """What will stop working soon, as sentences."""
        sentences = []
        now = datetime.now(timezone.utc)
        for path in (self._certificate, self._authority):
            ends = read_certificate(path).ends
            if ends - now < SOON:
                sentences.append(f"{path} is valid until {_day(ends)} only ({(ends - now).days} days); make a new one: msprobe certs host")
        if self._revoked.exists():
            due = read_revocations(self._revoked).due
            if due is not None and due - now < SOON:
                sentences.append(f"{self._revoked} is valid until {_day(due)} only; make it anew: msprobe certs crl")
        return sentences

    def _read_file_states(self) -> tuple[object, ...]:
        state: list[object] = []
        for path in (self._key, self._certificate, self._authority, self._revoked):
            try:
                found = os.stat(path)
            except OSError:
                state.append(None)
            else:
                state.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return tuple(state)

    def _build_context(self) -> ssl.SSLContext:
        self._check()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if self._role == CLIENT else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        if self._role == CLIENT:
            context.check_hostname = self._options.check_host
        context.verify_mode = ssl.CERT_REQUIRED
        if self._role == SERVER:
            context.num_tickets = 0  # a connection lasts for hours, and what was revoked must not come in by a ticket
        try:
            context.load_cert_chain(self._certificate, self._key, password=self._passphrase)
        except ssl.SSLError as error:
            reason = f"{_reason(error)}; an encrypted key needs the right {PASSPHRASE}"
            raise SettingsError(f"{self._certificate} and {self._key}: cannot be used together ({reason}); {self._remedy()}") from None
        except OSError as error:
            raise SettingsError(f"{self._key}: cannot be read ({error.strerror}); {self._remedy()}") from None
        try:
            context.load_verify_locations(self._authority)
            if self._revoked.exists():
                context.load_verify_locations(self._revoked)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"{self._authority}, {self._revoked}: cannot be used ({_reason(error)}); {self._remedy()}") from None
        return context

    def _check(self) -> None:
        now = datetime.now(timezone.utc)
        own, authority = read_certificate(self._certificate), read_certificate(self._authority)
        for path, certificate in ((self._certificate, own), (self._authority, authority)):
            if certificate.ends < now:
                raise SettingsError(
                    f"{path}: was valid until {_day(certificate.ends)}, and today is {_day(now)}; make a new one: msprobe certs host"
                )
            if certificate.begins > now:
                raise SettingsError(f"{path}: is valid from {certificate.begins} on, and it is {now} here; set the clock of this host")
        if own.roles and self._role not in own.roles:
            raise SettingsError(f"{self._certificate}: is for {' and '.join(own.roles)}, not for a {self._role}; {self._remedy()}")
        if not self._key.exists():
            raise SettingsError(f"{self._key}: is not there; tls_path must hold {self._role}.key, {self._role}.crt and ca.crt")
        mode = self._key.stat().st_mode
        if mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise SettingsError(
                f"{self._key}: others can read or change this private key (mode {stat.S_IMODE(mode):o}); chmod 600 {self._key}"
            )
        if self._revoked.exists():
            read_revocations(self._revoked)

    def _passphrase(self) -> str:
        """Called by the library when the key is encrypted."""
        given = os.environ.get(PASSPHRASE)
        if given is not None:
            return given
        with _asking:
            if self._key not in _asked:
                if not (sys.stdin and sys.stdin.isatty()):
                    raise SettingsError(f"{self._key}: is encrypted; put its passphrase into the environment variable {PASSPHRASE}")
                _asked[self._key] = getpass.getpass(f"passphrase of {self._key}: ")
            return _asked[self._key]

    def _remedy(self) -> str:
        return f"make this host's files with 'msprobe certs host' and copy all of them to {self._options.directory}"


def explain(error: BaseException, role: str) -> str:
    """A failed handshake in words: what it means and what to do. `role` is the end that says it."""
    other = SERVER if role == CLIENT else CLIENT
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message or str(error)
        hint = _VERIFY.get(error.verify_code, "is its certificate of the same authority (ca.crt)?")
        return f"the certificate of the {other} is not accepted: {said}; {hint}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).lower().replace("_", " ")
        for word, hint in _ALERTS.items():
            if word in reason:
                return f"TLS: the {other} says '{reason}': {hint}" if "alert" in reason else f"TLS: {reason}: {hint}"
        return f"TLS fails: {reason}"
    return str(error) or type(error).__name__


_VERIFY = {
    3: "crl.pem here is of another authority than ca.crt: copy all files of one authority",
    9: "its first day is still to come: compare the clocks of both hosts",
    10: "it has expired: make a new one with 'msprobe certs host'",
    12: "crl.pem has expired: make it anew with 'msprobe certs crl' and copy it to both hosts",
    18: "it is of no authority: make it with 'msprobe certs host'",
    19: "it is of another authority than ca.crt here",
    20: "it is of another authority than ca.crt here",
    23: "it was revoked: make a new one with 'msprobe certs host'",
    26: "it is for the other end's part: a training needs client.crt, a benchmark host server.crt",
    62: "it does not name this host: make it with it ('msprobe certs host NAME --serve ADDRESS'), or set tls_check_host to false",
    64: "it does not name this IP address: make it with it ('msprobe certs host NAME --serve ADDRESS'), or set tls_check_host to false",
}
"""By X509_V_ERR_*, in OpenSSL's x509_vfy.h."""
_ALERTS = {
    "certificate required": "it wants a certificate and got none; is tls_path set here?",
    "unknown ca": "our certificate is of another authority than its ca.crt",
    "certificate expired": "our certificate has expired: make a new one with 'msprobe certs host'",
    "certificate revoked": "our certificate was revoked: make a new one with 'msprobe certs host'",
    "unsupported certificate": "our certificate is for the other end's part: a training needs client.crt, a benchmark host server.crt",
    "bad certificate": "it does not accept our certificate; its own messages say why",
    "wrong version number": "there is no TLS at the other end: set tls_path on both hosts, or on none",
    "http request": "there is no TLS at the other end: set tls_path on both hosts, or on none",
    "record layer failure": "there is no TLS at the other end: set tls_path on both hosts, or on none",
    "handshake failure": "both ends have no version or cipher in common",
    "unexpected eof": "the other end hung up in the middle of the handshake; its messages say why",
}


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else (error.strerror or str(error))


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d")
