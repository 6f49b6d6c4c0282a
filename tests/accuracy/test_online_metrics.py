"""Counters of the online path for Prometheus."""

from __future__ import annotations

import urllib.request

import pytest
from online_ends import Kept, sending, serving, until

from msprobe_engine.accuracy.online.metrics import ServerMetrics


def test_a_scrape_says_what_became_of_the_messages_of_every_rank() -> None:
    """Two restarts of one rank are added up; what the training gave up is there too."""
    pytest.importorskip("prometheus_client")
    kept = Kept()
    with serving(kept) as server:
        metrics = ServerMetrics(server.sessions, 0)
        for _restart in range(2):
            client = sending(server.port, [], message_bytes=100, rank=3)
            for size in (10, 10, 1000):
                client.send({"i": 0}, [b"x" * size])
            client.close(5.0)
            assert until(lambda: not server.sessions()[-1].connected)
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5.0).read().decode()
        metrics.close()
    assert 'msprobe_online_messages_total{rank="3",result="received"} 4.0' in text
    assert 'msprobe_online_messages_total{rank="3",result="given_up"} 2.0' in text
    assert 'msprobe_online_ended{rank="3"} 1.0' in text
    assert 'msprobe_online_connected{rank="3"} 0.0' in text
