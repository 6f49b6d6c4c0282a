"""Metrics for Prometheus: an HTTP endpoint, a text file for the node exporter, or (opt-in) a push gateway.

The writer thread only changes plain numbers; text is made when somebody scrapes. What goes over a network runs on threads of
its own with time-outs.

Pushing to a gateway, for short jobs that nobody can scrape. Opt-in: a gateway never forgets what it was told, so the series
are deleted when the run ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import make_directory, replace_file
from msprobe_engine.core.metrics_server.families import Family
from msprobe_engine.core.metrics_server.http import MetricsServer
from msprobe_engine.core.metrics_server.text import Exposition
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import PrometheusSettings
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.prometheus.metrics import RankMetrics
from msprobe_engine.probe.sinks.prometheus.node import NodeDirectory, fold_ranks, node_families, snapshot_path, write_snapshot

_TIMEOUT_SECONDS = 5.0
_INTERVAL_SECONDS = 1.0


class Pusher:
    """Pushes on a daemon thread whenever there is news, at most once a second; slow or dead gateways hold up nobody else.

    Args:
        url: the gateway, with ``user:password@`` before the host where it wants these (HTTP basic authentication).
        job: job label.
        rank: becomes a label of the group.
    """

    def __init__(self, url: str, job: str, rank: int, registry: Any) -> None:
        from prometheus_client.exposition import basic_auth_handler

        address = urlsplit(url)
        self._target = {
            "gateway": urlunsplit(address._replace(netloc=address.netloc.rpartition("@")[2])),
            "job": job,
            "grouping_key": {"rank": str(rank)},
            "timeout": _TIMEOUT_SECONDS,
        }
        if address.username is not None:
            user, password = unquote(address.username), unquote(address.password or "")
            self._target["handler"] = partial(basic_auth_handler, username=user, password=password)
        self._registry = registry
        self._news = threading.Event()
        self._stop = threading.Event()
        self._said = False
        self.errors = 0
        """Pushes that failed."""
        self._thread = threading.Thread(target=self._run, name="msprobe-push", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something new. Returns at once."""
        self._news.set()

    def close(self) -> None:
        """Stop, and delete the series from the gateway. Waits two time-outs at most."""
        from prometheus_client import delete_from_gateway

        self._stop.set()
        self._news.set()
        self._thread.join(timeout=_TIMEOUT_SECONDS + 1.0)
        try:
            delete_from_gateway(**self._target)  # type: ignore[arg-type]
        except Exception as error:
            self._log_failure(error, "its last values stay there until they are deleted by hand")

    def _run(self) -> None:
        from prometheus_client import push_to_gateway

        while not self._stop.is_set():
            self._news.wait()
            self._news.clear()
            if self._stop.is_set():
                return
            try:
                push_to_gateway(registry=self._registry, **self._target)  # type: ignore[arg-type]
            except Exception as error:
                self._log_failure(error, "training goes on, later steps are tried again")
            self._stop.wait(_INTERVAL_SECONDS)

    def _log_failure(self, error: Exception, hint: str) -> None:
        self.errors += 1
        if not self._said:
            self._said = True
            from msprobe_engine.config.secrets.masking import masked_shapes  # a gateway may have a password in its address

            said = masked_shapes(f"push to {self._target['gateway']} failed ({error})")
            _LOG.warning("prometheus sink: %s; %s", said, hint)


_LOG = logging.getLogger("msprobe.prometheus")
_FILE_SECONDS = 1.0
"""Files are replaced at most this often, except after an alert."""
_TEXTFILE_MODE = 0o644
"""The node exporter runs as another user; metrics hold no secrets."""


class PrometheusSink(Sink):
    """Exports the metrics of this rank, or of all ranks of the node.

    Args:
        settings: section ``sinks.prometheus``.
        output_dir: root of the run's output; ranks of a node exchange their numbers in ``prometheus/`` below it.

    Raises:
        MissingExtraError: the package prometheus_client is not installed.
        SinkError: the port is taken, a directory or certificate cannot be used, a setting is missing.
    """

    name = "prometheus"

    def __init__(
        self,
        settings: PrometheusSettings,
        *,
        output_dir: Path,
        rank: int,
        local_rank: int = 0,
        local_world_size: int = 1,
    ) -> None:
        self._exposition = Exposition(self.families, "prometheus sink: the metrics endpoint")
        self._rank = rank
        labels = {"local_rank": str(local_rank)}
        self._metrics = RankMetrics(rank, max_series=settings.max_series, layers=settings.layers, info=labels, clock=time.time)
        self._server: MetricsServer | None = None
        self._pusher: Pusher | None = None
        self._textfile: Path | None = None
        self._node: NodeDirectory | None = None
        self._others = range(0)
        self._serves_node = False
        self._folded = settings.aggregate == "node"
        self._first_rank = rank - local_rank
        self._written = 0.0
        self._lock = threading.Lock()

        if settings.mode == "textfile":
            if not settings.textfile_dir:
                raise SinkError("prometheus sink: mode textfile needs sinks.prometheus.textfile_dir (what the node exporter reads)")
            make_directory(Path(settings.textfile_dir), "prometheus sink")
            self._textfile = Path(settings.textfile_dir) / f"msprobe_rank{rank}.prom"
            self._write_files()
        elif settings.mode == "push":
            if not settings.push_url:
                raise SinkError("prometheus sink: mode push needs sinks.prometheus.push_url, for example http://127.0.0.1:9091")
            self._pusher = Pusher(settings.push_url, settings.job, rank, self._exposition.registry)
        else:
            self._open_endpoint(settings, output_dir, local_rank, local_world_size)

    @property
    def port(self) -> int | None:
        """The port of the endpoint, None when this rank has none."""
        return self._server.port if self._server is not None else None

    def watch_info(self, info: Mapping[str, Any]) -> None:
        """Labels of ``msprobe_rank_info`` (tp, pp, dp, ...); a mapping that its owner fills when they are known."""
        self._metrics.watch_info(info)

    def watch_remark(self, key: str, facts: Mapping[str, Any]) -> None:
        """Export what is ``missing`` of a framework; other remarks are no numbers."""
        if key == "missing":
            self._metrics.watch_missing(facts)

    def watch_cost(self, cost: Mapping[str, float]) -> None:
        """Export ``cost["seconds"]``, the time spent at step boundaries; a mapping that the pipeline goes on changing."""
        self._metrics.watch_cost(cost)

    def watch_losses(self, losses: Mapping[str, int]) -> None:
        """Export `losses` (sink or queue name to frames lost), a mapping that the writer goes on changing."""
        self._metrics.watch_losses(losses)

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Take one frame in. Never waits for a network.

        Raises:
            SinkError: the file of mode textfile, or for the other ranks of the node, cannot be written.
        """
        self._metrics.update(frame, alerts)
        if self._pusher is not None:
            self._pusher.wake()
        if alerts or time.monotonic() - self._written >= _FILE_SECONDS:
            self._write_files()

    def flush(self) -> None:
        """What a scraper would see now is what was written last."""
        self._write_files()

    def close(self) -> None:
        """Stop serving; take away what would otherwise stand there as if the run went on."""
        for name, part in (("endpoint", self._server), ("push", self._pusher)):
            try:
                if part is not None:
                    part.close()
            except Exception as error:
                _LOG.warning("prometheus sink: closing the %s: %s", name, error)
        self._server = self._pusher = None
        node = self._node
        snapshots = [snapshot_path(place, self._rank) for place in node.sources()] if node is not None else []
        for path in (self._textfile, *snapshots):
            try:
                if path is not None:
                    path.unlink(missing_ok=True)
            except OSError as error:
                _LOG.warning("prometheus sink: cannot remove %s: %s", path, error)
        if node is not None and self._serves_node:
            try:
                node.remove()
            except OSError as error:
                _LOG.warning("prometheus sink: cannot remove %s: %s", node.memory, error)
        self._textfile = self._node = None

    def families(self) -> list[Family]:
        """What a scrape gets: this rank, and the others of the node where this rank serves them."""
        families = self._metrics.families()
        if self._serves_node and self._node is not None:
            families = node_families(families, self._node.sources(), self._others, time.time())
        return fold_ranks(families, self._first_rank) if self._folded else families

    def _open_endpoint(self, settings: PrometheusSettings, output_dir: Path, local_rank: int, local_world_size: int) -> None:
        port = settings.port
        if settings.per_node and local_world_size > 1:
            # Ranks of a node are consecutive (torchrun); the directory is named by the first, as output_dir may be shared by nodes.
            first = self._first_rank
            self._node = NodeDirectory(output_dir, first)
            if local_rank > 0:
                self._write_files()
                return
            self._node.create_memory()
            self._serves_node = True
            self._others = range(first + 1, first + local_world_size)
        elif port:
            port += local_rank
        self._server = MetricsServer(
            settings.address, port, self._exposition.choose, cert=settings.tls_cert, key=settings.tls_key, hosts=settings.hosts
        )

    def _write_files(self) -> None:
        with self._lock:
            self._written = time.monotonic()
            if self._textfile is not None:
                replace_file(self._textfile, self._exposition.text(), _TEXTFILE_MODE)
            elif self._node is not None and not self._serves_node:
                write_snapshot(self._node.target(), self._rank, self._metrics.families(), time.time())
