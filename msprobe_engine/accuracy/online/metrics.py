"""The server's counters for Prometheus: an HTTP endpoint on loopback."""

from __future__ import annotations

from collections.abc import Callable

from msprobe_engine.accuracy.online.tcp.session import SessionState
from msprobe_engine.core.metrics_server.families import Family
from msprobe_engine.core.metrics_server.http import MetricsServer
from msprobe_engine.core.metrics_server.text import Exposition

LOOPBACK = "127.0.0.1"


def _given_up(state: SessionState) -> float:
    return state.final.dropped + state.final.lost if state.final is not None else state.peer.lost


_RESULTS: dict[str, Callable[[SessionState], float]] = {
    "received": lambda state: state.received,
    "refused": lambda state: state.refused,
    "missing": lambda state: state.missing,
    "given_up": _given_up,
}
_GAUGES: dict[str, tuple[str, Callable[[SessionState], float]]] = {
    "waiting": ("messages received and not stored yet", lambda state: state.waiting),
    "connected": ("1: the training is there", lambda state: state.connected),
    "ended": ("1: the training has said that this was all", lambda state: state.final is not None),
    "silence_seconds": ("since the last sign of life", lambda state: state.seconds),
}


def families(states: list[SessionState]) -> list[Family]:
    """One series per rank; restarts of one rank are added up, and the newest says whether it is there."""
    newest = {state.peer.rank: state for state in states}

    def total(rank: int, of: Callable[[SessionState], float]) -> float:
        return float(sum(of(state) for state in states if state.peer.rank == rank))

    messages = Family("msprobe_online_messages", "counter", "calls of trainings by what became of them; given_up: by the training", [])
    for name, of in _RESULTS.items():
        messages.samples.extend(("_total", (("rank", str(rank)), ("result", name)), total(rank, of)) for rank in newest)
    size = Family("msprobe_online_bytes", "counter", "headers and payloads received", [])
    size.samples.extend(("_total", (("rank", str(rank)),), total(rank, lambda state: state.bytes)) for rank in newest)
    found = [messages, size]
    for name, (text, of) in _GAUGES.items():
        found.append(Family(f"msprobe_online_{name}", "gauge", text, []))
        found[-1].samples.extend(("", (("rank", str(rank)),), float(of(state))) for rank, state in newest.items())
    return found


class ServerMetrics:
    """Answers scrapes until `close`.

    Args:
        sessions: of a `Server` or `DirectoryServer`.
        port: where to listen, on loopback; 0 takes a free one.

    Raises:
        MissingExtraError: the package prometheus_client is not installed.
        SinkError: the port is taken.
    """

    def __init__(self, sessions: Callable[[], list[SessionState]], port: int) -> None:
        exposition = Exposition(lambda: families(sessions()), "metrics_port: the metrics endpoint")
        self._server = MetricsServer(LOOPBACK, port, exposition.choose)

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()
