"""The shipped Alertmanager file with the real amtool and a real server: one message for one cause, whatever the number of ranks."""

from __future__ import annotations

import http.server
import json
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy" / "prometheus"
FILE = DEPLOY / "alertmanager.yml"
RANKS = 2000


def _of_rules() -> dict[str, str]:
    """Alert -> severity."""
    groups = yaml.safe_load((DEPLOY / "msprobe.rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"] if "alert" in rule}


def test_amtool_takes_the_file_and_sends_each_alert_where_it_belongs(binary: Callable[[str], str]) -> None:
    amtool = binary("amtool")
    done = subprocess.run([amtool, "check-config", str(FILE)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for alert, severity in _of_rules().items():
        labels = [f"alertname={alert}", f"severity={severity}", "job=msprobe", "rank=3"]
        said = subprocess.run([amtool, "config", "routes", "test", "--config.file", str(FILE), *labels], capture_output=True, text=True)
        assert said.stdout.strip() == ("on_call" if severity == "critical" else "training"), alert


def test_every_alert_that_is_inhibited_exists() -> None:
    """Names in the file are those of the shipped rules, and no label that only one rank has keeps messages apart."""
    document = yaml.safe_load(FILE.read_text())
    named = " ".join(matcher for rule in document["inhibit_rules"] for side in ("source", "target") for matcher in rule[f"{side}_matchers"])
    words = {name for name in named.replace('"', " ").replace("|", " ").split() if name.startswith("Msprobe")}
    assert words <= set(_of_rules())
    assert document["route"]["group_by"] == ["job", "alertname"]
    assert all(rule["equal"] == ["job"] for rule in document["inhibit_rules"])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_one_nan_of_all_ranks_is_one_message(binary: Callable[[str], str], tmp_path: Path) -> None:
    """A NaN behind an all-reduce: every rank counts it, starts an incident and sees its norms jump. A real server sends one message for it,
    and one for another job; what follows from the NaN is not sent."""
    messages: list[dict[str, Any]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    text = FILE.read_text().replace("127.0.0.1:9099", f"127.0.0.1:{receiver.server_port}").replace("group_wait: 30s", "group_wait: 5s")
    (tmp_path / "alertmanager.yml").write_text(text)
    port = _free_port()
    command = [binary("prometheus-alertmanager"), f"--config.file={tmp_path / 'alertmanager.yml'}", f"--storage.path={tmp_path}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address="]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        alerts = [
            {"labels": {"alertname": name, "severity": severity, "job": job, "rank": str(rank), "instance": f"node{rank // 8}:9464"}}
            for job in ("msprobe", "msprobe_other")
            for name, severity in (("MsprobeNonFinite", "critical"), ("MsprobeIncident", "critical"), ("MsprobeGradNormSpike", "warning"))
            for rank in range(RANKS)
        ]
        _post(f"http://127.0.0.1:{port}/api/v2/alerts", alerts)
        until = time.monotonic() + 60
        while len(messages) < 2 and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(3)
    finally:
        server.terminate()
        server.wait(20)
        receiver.shutdown()
    assert sorted(message["groupLabels"]["job"] for message in messages) == ["msprobe", "msprobe_other"]
    assert {message["groupLabels"]["alertname"] for message in messages} == {"MsprobeNonFinite"}
    assert [len(message["alerts"]) + message["truncatedAlerts"] for message in messages] == [RANKS, RANKS]
    assert all(len(message["alerts"]) == 20 for message in messages)


def _post(url: str, alerts: list[Any]) -> None:
    request = urllib.request.Request(url, json.dumps(alerts).encode(), {"Content-Type": "application/json"})
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=240):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
