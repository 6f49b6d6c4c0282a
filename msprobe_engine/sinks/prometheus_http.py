"""The HTTP endpoint: a small threaded server that answers ``/metrics``.

Not `prometheus_client.start_http_server`: that one does the TLS handshake while accepting, so a client that connects and says
nothing stops everybody else, and it has no time-out.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from msprobe_engine.errors import SinkError

Render = Callable[[str], tuple[str, bytes]]
"""From the Accept header to content type and body."""

_TIMEOUT_SECONDS = 10.0


class MetricsServer:
    """Answers scrapes on its own daemon threads until `close`.

    Args:
        address, port: where to listen; port 0 takes a free one.
        render: called once per scrape.
        cert, key: PEM files; both given: TLS 1.2 or newer.

    Raises:
        SinkError: the port is taken, the address is not of this machine, or the certificate cannot be used.
    """

    def __init__(self, address: str, port: int, render: Render, *, cert: str = "", key: str = "") -> None:
        if not 0 <= port <= 65535:
            raise SinkError(f"prometheus sink: port {port} is not a port (0 to 65535); sinks.prometheus.port + local rank must stay below")
        context = _tls(cert, key)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_SECONDS
            server_version = "msprobe"
            sys_version = ""

            def do_GET(self) -> None:  # the name is the protocol of BaseHTTPRequestHandler
                if self.path.split("?", 1)[0] not in ("/metrics", "/"):
                    self.send_error(404)
                    return
                try:
                    kind, body = render(self.headers.get("Accept", ""))
                except Exception:
                    self.send_error(500)
                    return
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args  # a scrape every few seconds is no news

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = _family(address, port)

            def get_request(self) -> tuple[socket.socket, Any]:
                connection, peer = super().get_request()
                connection.settimeout(_TIMEOUT_SECONDS)
                if context is not None:
                    # The handshake happens at the first read, on the connection's own thread.
                    connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                return connection, peer

            def handle_error(self, request: Any, client_address: Any) -> None:
                del request, client_address  # a client that went away

        try:
            self._server = Server((address, port), Handler)
        except OSError as error:
            raise _why(address, port, error) from error
        self.port: int = self._server.server_address[1]
        """The port in use."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="msprobe-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


def _family(address: str, port: int) -> socket.AddressFamily:
    with contextlib.suppress(OSError):
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.AF_INET


def _tls(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert and not key:
        return None
    if not (cert and key):
        raise SinkError("prometheus sink: TLS needs both sinks.prometheus.tls_cert and sinks.prometheus.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SinkError(f"prometheus sink: cannot use tls_cert {cert} with tls_key {key}: {error}; give two PEM files") from error
    return context


def _why(address: str, port: int, error: OSError) -> SinkError:
    if error.errno == errno.EADDRINUSE:
        hint = (
            "set sinks.prometheus.port to a free one (0 takes any) or end what holds it (an earlier probe of this process? close() it); "
            "training goes on without metrics"
        )
        return SinkError(f"prometheus sink: port {port} on {address} is taken; {hint}")
    if error.errno == errno.EACCES:
        return SinkError(f"prometheus sink: no permission to listen on port {port}; choose one above 1023")
    reason = error.strerror or error
    return SinkError(f"prometheus sink: cannot listen on {address} port {port}: {reason}; sinks.prometheus.address must be of this machine")
