"""One HTTP request of a scraper: read by the parser of the standard library, and judged."""

from __future__ import annotations

import io
import ipaddress
import socket
from collections.abc import Collection
from http.client import responses
from http.server import BaseHTTPRequestHandler

MAX_HEAD_BYTES = 8192
"""Of a request with its headers."""
_PATHS = ("/metrics", "/")
_PAGE = "text/plain; charset=utf-8"


def end_of_head(data: bytes | bytearray) -> bool:
    """Is the empty line there that ends the headers?"""
    return b"\r\n\r\n" in data or b"\n\n" in data


class Request(BaseHTTPRequestHandler):
    """A whole request head, parsed as `http.server` does; no socket belongs to it.

    Attributes:
        status: why it is not answered with metrics; 200 when it is.
        reason: what the page of an error says.
    """

    def __init__(self, head: bytes, names: Collection[str] | None) -> None:
        self.status, self.reason = 200, ""
        self.headers = {}  # type: ignore[assignment]  # what a request that cannot be parsed has
        self.command = ""
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline(MAX_HEAD_BYTES)
        if self.parse_request():
            self._check(names)
        elif self.status == 200:
            self.status = 400

    @property
    def accept(self) -> str:
        """The Accept header on one line."""
        return " ".join(self.headers.get("Accept", "").split())

    @property
    def accept_encoding(self) -> str:
        return str(self.headers.get("Accept-Encoding", ""))

    @property
    def head_only(self) -> bool:
        """Is the body not wanted (HEAD)?"""
        return self.command == "HEAD"

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the parser."""
        del explain
        self.status, self.reason = int(code), message or ""

    def handle_expect_100(self) -> bool:
        """A scrape has no body that could be waited for."""
        return True

    def _check(self, names: Collection[str] | None) -> None:
        host = self.headers.get("Host")
        if self.command not in ("GET", "HEAD"):
            self.send_error(405, "GET and HEAD are answered")
        elif names is not None and host is not None and not _is_known(host, names):
            said = "this Host header names neither this machine nor sinks.prometheus.hosts; the endpoint listens on loopback"
            self.send_error(421, said)
        elif self.path.split("?", 1)[0] not in _PATHS:
            self.send_error(404, "metrics are at /metrics")


def known_names(address: str, bound: str, more: Collection[str]) -> frozenset[str] | None:
    """Names by which an endpoint on loopback is asked for, besides addresses of loopback; None: any, it is not on loopback.

    A page in a browser on this machine can have its own name resolved to 127.0.0.1 and then read what is served there (DNS rebinding).
    The name stays that of the page, so it is refused. Numeric addresses cannot be made to point elsewhere.
    """
    if not ipaddress.ip_address(bound.partition("%")[0]).is_loopback:
        return None
    host = socket.gethostname()
    return frozenset(name.lower().rstrip(".") for name in (address, "localhost", host, host.partition(".")[0], *more) if name)


def _is_known(host: str, names: Collection[str]) -> bool:
    text = host.strip().lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    name = name.rstrip(".")
    if name in names:
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def response_head(status: int, kind: str, size: int, *, compressed: bool = False) -> bytes:
    """Status line and headers; the connection ends after every answer, so that places are free again."""
    lines = [
        f"HTTP/1.1 {status} {responses.get(status, 'Error')}",
        f"Content-Type: {kind}",
        f"Content-Length: {size}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        "Vary: Accept, Accept-Encoding",
        *(("Content-Encoding: gzip",) if compressed else ()),
    ]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


def error_answer(status: int, reason: str, head_only: bool = False) -> tuple[bytes, bytes]:
    """Head and body of an answer without metrics."""
    body = f"{responses.get(status, 'Error')}: {reason or 'not possible'}\n".encode("utf-8", "replace")
    return response_head(status, _PAGE, len(body)), b"" if head_only else body
