"""Pushing to a gateway, for short jobs that nobody can scrape. Opt-in: a gateway never forgets what it was told, so the series
are deleted when the run ends."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

_LOG = logging.getLogger("msprobe.prometheus")
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
            self._failed(error, "its last values stay there until they are deleted by hand")

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
                self._failed(error, "training goes on, later steps are tried again")
            self._stop.wait(_INTERVAL_SECONDS)

    def _failed(self, error: Exception, hint: str) -> None:
        self.errors += 1
        if not self._said:
            self._said = True
            from msprobe_engine.config.secrets.masking import masked_shapes  # a gateway may have a password in its address

            said = masked_shapes(f"push to {self._target['gateway']} failed ({error})")
            _LOG.warning("prometheus sink: %s; %s", said, hint)
