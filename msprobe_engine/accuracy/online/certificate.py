"""Reads what people need to know of an X.509 certificate (RFC 5280): names, days, number, addresses, roles.

The standard library verifies certificates, but says nothing of our own. This reads, and decides nothing.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from msprobe_engine.errors import SettingsError

_PEM = re.compile(rb"-----BEGIN (CERTIFICATE|X509 CRL)-----\s+([A-Za-z0-9+/=\s]+?)-----END \1-----")
_SEQUENCE, _SET, _INTEGER, _OID, _OCTETS, _BOOLEAN = 0x30, 0x31, 0x02, 0x06, 0x04, 0x01
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_COMMON_NAME = bytes.fromhex("550403")
_ALTERNATIVE_NAMES, _EXTENDED_USE, _BASIC_CONSTRAINTS = bytes.fromhex("551d11"), bytes.fromhex("551d25"), bytes.fromhex("551d13")
_ROLES = {bytes.fromhex("2b06010505070301"): "server", bytes.fromhex("2b06010505070302"): "client"}
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Certificate:
    """What a certificate says.

    Attributes:
        subject, issuer: common names, "" when there is none.
        serial: its number at the issuer.
        begins, ends: first and last moment (UTC).
        addresses: host names and IP addresses it is for.
        roles: ``server``, ``client``; empty: any.
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
    """What a CRL says: who made it, when, when the next is due (None: never), and the serials it revokes."""

    issuer: str
    made: datetime
    due: datetime | None
    serials: frozenset[int]


def read_certificate(path: Path) -> Certificate:
    """The first certificate of a PEM file.

    Raises:
        SettingsError: it cannot be read, or has none.
    """
    der = _pem(path, b"CERTIFICATE")
    try:
        return _certificate(der)
    except (ValueError, IndexError) as error:
        raise SettingsError(
            f"{path}: the certificate in it is damaged ({str(error)[:100]}); copy it again from where it was made"
        ) from None


def read_revocations(path: Path) -> RevocationList:
    """The first CRL of a PEM file.

    Raises:
        SettingsError: it cannot be read, or has none.
    """
    der = _pem(path, b"X509 CRL")
    try:
        return _revocations(der)
    except (ValueError, IndexError) as error:
        raise SettingsError(f"{path}: the list in it is damaged ({str(error)[:100]}); make it anew") from None


def _pem(path: Path, what: bytes) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); is tls_path right?") from None
    for kind, body in _PEM.findall(text):
        if kind == what:
            try:
                return base64.b64decode(body, validate=False)
            except ValueError:
                break
    raise SettingsError(f"{path}: holds no '-----BEGIN {what.decode()}-----'; it must be a PEM file")


class _Reader:
    """Walks the elements of one constructed DER value."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        return self._at < len(self._data)

    def peek(self) -> int:
        return self._data[self._at] if self.more else -1

    def next(self, *tags: int) -> bytes:
        """The contents of the next element, whose tag must be one of `tags` when there are any."""
        if self._at + 2 > len(self._data):
            raise ValueError("it ends too early")
        tag, size = self._data[self._at], self._data[self._at + 1]
        begin = self._at + 2
        if size & 0x80:
            count = size & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("a length nobody writes")
            size = int.from_bytes(self._data[begin : begin + count], "big")
            begin += count
        if begin + size > len(self._data):
            raise ValueError("an element is longer than what holds it")
        if tags and tag not in tags:
            raise ValueError(f"an element of kind {tag:#x} where {tags[0]:#x} should be")
        self._at = begin + size
        return self._data[begin : self._at]


def _time(reader: _Reader) -> datetime:
    tag = reader.peek()
    text = reader.next(_UTC_TIME, _GENERALIZED_TIME).decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text  # RFC 5280, 4.1.2.5.1
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


def _common_name(name: bytes) -> str:
    found = ""
    parts = _Reader(name)
    while parts.more:
        attribute = _Reader(_Reader(parts.next(_SET)).next(_SEQUENCE))
        oid, value = attribute.next(_OID), attribute.next()
        if oid == _COMMON_NAME:
            found = value.decode("utf-8", "replace")
    return found


def _certificate(der: bytes) -> Certificate:
    body = _Reader(_Reader(_Reader(der).next(_SEQUENCE)).next(_SEQUENCE))
    if body.peek() == 0xA0:  # version
        body.next()
    serial = int.from_bytes(body.next(_INTEGER), "big")
    body.next(_SEQUENCE)  # algorithm
    issuer = _common_name(body.next(_SEQUENCE))
    days = _Reader(body.next(_SEQUENCE))
    begins, ends = _time(days), _time(days)
    subject = _common_name(body.next(_SEQUENCE))
    addresses: list[str] = []
    roles: list[str] = []
    authority = False
    while body.more:
        tag = body.peek()
        value = body.next()
        if tag != 0xA3:
            continue
        extensions = _Reader(_Reader(value).next(_SEQUENCE))
        while extensions.more:
            extension = _Reader(extensions.next(_SEQUENCE))
            oid = extension.next(_OID)
            if extension.peek() == _BOOLEAN:
                extension.next()
            inner = _Reader(extension.next(_OCTETS))
            if oid == _ALTERNATIVE_NAMES:
                addresses += _names(_Reader(inner.next(_SEQUENCE)))
            elif oid == _EXTENDED_USE:
                uses = _Reader(inner.next(_SEQUENCE))
                while uses.more:
                    use = uses.next(_OID)
                    roles.append(_ROLES.get(use, use.hex()))
            elif oid == _BASIC_CONSTRAINTS:
                constraints = _Reader(inner.next(_SEQUENCE))
                authority = constraints.peek() == _BOOLEAN and constraints.next() != b"\x00"
    fingerprint = hashlib.sha256(der).hexdigest()
    return Certificate(subject, issuer, serial, begins, ends, tuple(addresses), tuple(roles), authority, fingerprint)


def _names(names: _Reader) -> list[str]:
    found = []
    while names.more:
        tag = names.peek()
        value = names.next()
        if tag == 0x82:
            found.append(value.decode("ascii", "replace"))
        elif tag == 0x87 and len(value) in (4, 16):
            found.append(str(ipaddress.ip_address(value)))
    return found


def _revocations(der: bytes) -> RevocationList:
    body = _Reader(_Reader(_Reader(der).next(_SEQUENCE)).next(_SEQUENCE))
    if body.peek() == _INTEGER:  # version
        body.next()
    body.next(_SEQUENCE)  # algorithm
    issuer = _common_name(body.next(_SEQUENCE))
    made = _time(body)
    due = _time(body) if body.peek() in (_UTC_TIME, _GENERALIZED_TIME) else None
    serials = set()
    if body.peek() == _SEQUENCE:
        revoked = _Reader(body.next())
        while revoked.more:
            serials.add(int.from_bytes(_Reader(revoked.next(_SEQUENCE)).next(_INTEGER), "big"))
    return RevocationList(issuer, made, due, frozenset(serials))
