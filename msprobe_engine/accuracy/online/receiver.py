"""The benchmark host's ear: takes messages of trainings into the spool, gives out what can be checked, and knows when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from msprobe_engine.accuracy.online.connect import tls_of
from msprobe_engine.accuracy.online.directory.server import DirectoryServer
from msprobe_engine.accuracy.online.events import Event, Peer
from msprobe_engine.accuracy.online.options import Address, ServerOptions
from msprobe_engine.accuracy.online.queue_dir.spool import Spool
from msprobe_engine.accuracy.online.queue_dir.step import SpoolCall
from msprobe_engine.accuracy.online.tcp.server import Server, SessionState
from msprobe_engine.accuracy.precheck.calls import why_not
from msprobe_engine.accuracy.precheck.pool import Feed
from msprobe_engine.accuracy.settings import PrecheckSettings
from msprobe_engine.core.errors import ProbeError, SettingsError
from msprobe_engine.core.log import get_logger, printable
from msprobe_engine.core.metrics_server.families import Family
from msprobe_engine.core.metrics_server.http import MetricsServer
from msprobe_engine.core.metrics_server.text import Exposition


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
    members = [messages, size]
    for name, (text, of) in _GAUGES.items():
        members.append(Family(f"msprobe_online_{name}", "gauge", text, []))
        members[-1].samples.extend(("", (("rank", str(rank)),), float(of(state))) for rank, state in newest.items())
    return members


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


LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.25
_SAY_SECONDS = 30.0
_PAUSE_SECONDS = 0.05
LATE_SECONDS = 3.0
"""After the last training has ended, with no list of ranks: how long another one is waited for."""
_log = get_logger()


class Ear(Protocol):
    """`Server` or `DirectoryServer`."""

    def sessions(self) -> list[SessionState]: ...

    def close(self, timeout: float = 10.0) -> None: ...


class Reception:
    """Receives until all trainings have ended; then the feed ends.

    Args:
        settings: with ``is_online``.
        spool: where messages are kept.
        feed: gets the calls that can be checked.
        found: calls that were in the spool already.

    Raises:
        SettingsError, TransportError: it cannot listen as the settings say.
    """

    def __init__(self, settings: PrecheckSettings, spool: Spool, feed: Feed, recovered: list[SpoolCall]) -> None:
        self._settings = settings
        self._spool = spool
        self._feed = feed
        self._limit = int(settings.spool_gb * 1e9)
        self._pressed = 0
        self.refused = self.missing = self.lost = 0
        """Messages: that could not be used, that never came, and that trainings say they have given up."""
        self._stop = threading.Event()
        self._said = time.monotonic()
        self._began = time.monotonic()
        self._last_end = 0.0
        self.gone: list[str] = []
        """Trainings that ended without a last word, and ranks that never came, in words."""
        feed.put(self._mark_skipped(recovered))
        self._ear = self._open_server()
        self._metrics = self._serve_metrics()
        self._thread = threading.Thread(target=self._watch, name="msprobe-online-end", daemon=True)
        self._thread.start()

    def _open_server(self) -> Ear:
        settings = self._settings
        host = settings.host or LOOPBACK
        options = ServerOptions(
            tls=None if settings.nfs_path else tls_of(settings.tls_path, host),
            plain=settings.plain_tcp,
            ranks=frozenset(settings.rank_list),
        )
        if settings.nfs_path:
            made: Ear = DirectoryServer(
                Path(settings.nfs_path).expanduser(), self._queue_message, options, self._log_event, self._spool.last
            )
            _log.info("online pre-check: waiting for trainings in %s", settings.nfs_path)
            return made
        if settings.port < 0:
            raise SettingsError(f"port: {settings.port} is not allowed; allowed: 0 to 65535 (0: a free one), the port to listen at")
        server = Server(Address(host, settings.port), self._queue_message, options, self._log_event, self._spool.last)
        how = "with TLS" if options.tls is not None else "without TLS"
        _log.info("online pre-check: waiting for trainings at %s, %s", Address(host, server.port), how)
        return server

    def _serve_metrics(self) -> ServerMetrics | None:
        if self._settings.metrics_port < 0:
            return None
        try:
            metrics = ServerMetrics(self._ear.sessions, self._settings.metrics_port)
        except ProbeError:
            self._ear.close()
            raise
        _log.info("online pre-check: counters for Prometheus at http://%s:%d/metrics", LOOPBACK, metrics.port)
        return metrics

    @property
    def pressed(self) -> int:
        """Calls that were checked without their gradients, because the spool was full."""
        return self._pressed

    def close(self) -> None:
        """Receive nothing more."""
        self._stop.set()
        self._ear.close()
        if self._metrics is not None:
            self._metrics.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    # ---- threads of the transport ----

    def _queue_message(self, peer: Peer, header: Mapping[str, Any], payload: memoryview) -> None:
        self._wait_for_room()
        self._feed.put(self._mark_skipped(self._spool.add(peer, header, payload)))

    def _wait_for_room(self) -> None:
        """The client waits meanwhile, since its messages are not acknowledged."""
        while self._limit and self._spool.bytes > self._limit and not self._stop.is_set():
            if not self._feed:
                time.sleep(_PAUSE_SECONDS)  # what is being checked now may make room
                if self._feed or self._spool.bytes <= self._limit:
                    continue
                calls = self._spool.press()
                if not calls:
                    return  # more must come before anything can go
                self._pressed += len(calls)
                self._feed.put(self._mark_skipped(calls))
            time.sleep(_PAUSE_SECONDS)

    def _mark_skipped(self, calls: list[SpoolCall]) -> list[SpoolCall]:
        return [replace(call, skip=why_not(call, self._settings) or "") for call in calls]

    def _log_event(self, event: Event) -> None:
        (_log.warning if event.bad else _log.info)("online pre-check: %s", printable(event.message))

    # ---- the thread that waits for the end ----

    def _watch(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                if self._over(self._ear.sessions()):
                    break
                self._log_progress()
        except Exception as error:
            _log.error("online pre-check: ends for a fault of its own: %s: %s", type(error).__name__, error)
            self.gone.append(f"a fault of this program: {error}")
        finally:
            self._feed.close()

    def _over(self, states: list[SessionState]) -> bool:
        """Note who has ended; True when that is all."""
        self.refused = sum(state.refused for state in states)
        self.missing = sum(state.missing for state in states)
        self.lost = sum(state.final.dropped + state.final.lost if state.final is not None else state.peer.lost for state in states)
        present = {state.peer.session for state in states}
        going = [state for state in states if not self._close_if_ended(state)]
        absent = [t for t in list(self._spool.trainings.values()) if not t.over and t.session not in present]
        for training in absent:  # of an earlier start of this host
            if time.monotonic() - self._began > self._settings.end_patience:
                self.gone.append(f"rank {training.rank} did not come back within {self._settings.end_patience:g} s")
                self._finish(training.session)
        if going or any(not t.over for t in absent) or not (states or absent or self._spool.trainings):
            self._last_end = 0.0
            return False
        self._last_end = self._last_end or time.monotonic()
        return self._complete(time.monotonic() - self._last_end)

    def _close_if_ended(self, state: SessionState) -> bool:
        if state.connected or (state.waiting and not self._stop.is_set()):
            return False
        training = self._spool.trainings.get(state.peer.session)
        if training is not None and training.over:
            return True
        if state.final is None:
            if state.seconds <= self._settings.end_patience:
                return False
            self.gone.append(f"rank {state.peer.rank} went away without a last word")
            _log.warning("online pre-check: %s; what came of it is checked", self.gone[-1])
        self._finish(state.peer.session)
        return True

    def _finish(self, session: str) -> None:
        self._feed.put(self._mark_skipped(self._spool.end_session(session)))

    def _complete(self, seconds: float) -> bool:
        """Everybody who came has ended `seconds` ago: does anybody else come?"""
        trainings = list(self._spool.trainings.values())
        came = {training.rank for training in trainings}
        wanted = set(self._settings.rank_list) or set(range(max((t.world for t in trainings), default=0)))
        missing = wanted - came
        if not missing:
            return True
        if self._settings.rank_list:
            if seconds <= self._settings.end_patience:
                return False
            self.gone += [f"rank {rank} of rank_list never came" for rank in sorted(missing)]
        return seconds > LATE_SECONDS

    def _log_progress(self) -> None:
        if time.monotonic() - self._said >= _SAY_SECONDS:
            self._said = time.monotonic()
            _log.info("online pre-check: %d calls wait to be checked, %.1f MB in the spool", self._spool.waiting, self._spool.bytes / 1e6)
