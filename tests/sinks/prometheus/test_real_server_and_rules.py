"""The shipped rules with the real promtool and a real Prometheus server that scrapes a real process."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from msprobe_engine.probe.sinks.prometheus.names import METRICS, format_exported_name

DEPLOY = Path(__file__).parents[3] / "deploy" / "prometheus"

RUN = """
import sys, time, math
from pathlib import Path
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.core.settings.schema import PrometheusSettings
from msprobe_engine.probe.sinks.prometheus.sink import PrometheusSink
from frames_of_lists import frame_of
sink = PrometheusSink(PrometheusSettings(port=0), output_dir=Path(sys.argv[1]), rank=0)
rule = NanInfRule()
print(sink.port, flush=True)
for step in range(10**9):
    value = math.nan if step == 30 else 1.0 + step % 3
    frame = frame_of({"decoder.layers.0.mlp.weight": [value]}, step=step, scalars={"loss": value, "grad_norm": 1.0})
    sink.write(frame, rule.check(frame))
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    "command", [("check", "rules", "msprobe.rules.yml"), ("test", "rules", "msprobe.rules.test.yml"), ("check", "config", "prometheus.yml")]
)
def test_promtool(binary: Callable[[str], str], command: tuple[str, ...]) -> None:
    """promtool accepts the shipped rules and configuration, and the rules do in its simulation what their tests say."""
    done = subprocess.run([binary("promtool"), *command], cwd=DEPLOY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_every_metric_exists() -> None:
    """Each alert has a test that sees it fire, and no rule uses a metric that the sink does not export."""
    rules = [rule for group in yaml.safe_load((DEPLOY / "msprobe.rules.yml").read_text())["groups"] for rule in group["rules"]]
    tests = yaml.safe_load((DEPLOY / "msprobe.rules.test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert {rule["alert"] for rule in rules if "alert" in rule} == fired
    used = {name for rule in rules for name in re.findall(r"\bmsprobe_(\w+)", rule["expr"])}
    known = {
        f"{format_exported_name(name)}{suffix}".removeprefix("msprobe_") for name in METRICS for suffix in ("", "_sum", "_count", "_bucket")
    }
    assert used - known == set()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(port: int, path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.load(answer)["data"]


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            found = what()
        except OSError:
            found = None
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError("not seen in time")


@pytest.mark.slow
def test_a_real_server_fires_the_alert(binary: Callable[[str], str], tmp_path: Path) -> None:
    """A Prometheus server that scrapes a process whose step 30 is NaN has MsprobeNonFinite and MsprobeIncident firing, and knows
    the step."""
    port = free_port()
    path = os.pathsep.join([str(Path(__file__).parents[2] / "engine"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as run:
        try:
            assert run.stdout is not None
            target = f"127.0.0.1:{int(run.stdout.readline())}"
            config = {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(DEPLOY / "msprobe.rules.yml")],
                "scrape_configs": [{"job_name": "msprobe", "static_configs": [{"targets": [target]}]}],
            }
            (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
            command = [binary("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
            command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
            with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
                try:
                    firing = wait_for(
                        lambda: {
                            a["labels"]["alertname"]: a["labels"]
                            for a in ask(port, "alerts")["alerts"]
                            if a["state"] == "firing" and a["labels"]["alertname"] == "MsprobeNonFinite"
                        }
                    )
                    assert firing["MsprobeNonFinite"]["rank"] == "0"
                    assert firing["MsprobeNonFinite"]["instance"] == target
                    wait_for(lambda: [a for a in ask(port, "alerts")["alerts"] if a["labels"]["alertname"] == "MsprobeIncident"])
                    (step,) = ask(port, "query", query='msprobe_first_nonfinite_step{kind="grad"}')["result"]
                    assert step["value"][1] == "30"
                    (health,) = {t["health"] for t in ask(port, "targets")["activeTargets"]}
                    assert health == "up"
                finally:
                    server.terminate()
        finally:
            run.terminate()
