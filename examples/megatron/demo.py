"""The whole story in half a minute: a real Megatron-core GPT on two ranks, a planted fault, and everything the probe says about it.

    python examples/megatron/demo.py [--seed N] [--output DIR]

The fault's rank, step, module and kind follow from the seed. The probe knows nothing of it; what it found is compared with the
truth at the end. Exit code 0: found.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[1] / "deploy" / "prometheus" / "msprobe.rules.yml"
STEPS = 12
COUNTER = "msprobe_nonfinite_elements_total"


def main() -> int:
    parser = argparse.ArgumentParser(description="Megatron under the probe, with a planted fault.")
    parser.add_argument("--seed", type=int, default=None, help="which fault (default: a new one each time)")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="directory for everything that is written")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if arguments.seed is None else arguments.seed
    output: Path = arguments.output.resolve() / f"seed{seed}"
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    metrics, web = free_port(), free_port()
    config = yaml.safe_load((HERE / "probe.yaml").read_text())
    config["output_dir"] = str(output)
    config["sinks"]["prometheus"]["port"] = metrics
    (output / "probe.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    say(f"1. Training on 2 ranks with a fault planted by seed {seed} (python examples/megatron/demo.py --seed {seed} repeats it)")
    with Server(metrics, web, output) as server:
        seen, firing = watch_training(train_command(output, seed), metrics, server)
    say("2. The metrics endpoint, while the training ran")
    print("\n".join(f"   {line}" for line in seen) or "   nothing seen")
    say("3. Prometheus")
    print(f"   {server.explain(firing)}")
    say("4. Where the first NaN or Inf was born: msprobe nan_analyze")
    incidents = sorted((output / "incidents").glob("step*"))
    if not incidents:
        print("   no incident was written")
        return 1
    analyzed = subprocess.run(
        [sys.executable, "-m", "msprobe_engine.cli", "nan_analyze", "-i", str(incidents[0]), "-o", str(output / "analysis")],
        capture_output=True,
        text=True,
        check=False,
    )
    print("".join(f"   {line}\n" for line in (analyzed.stdout + analyzed.stderr).splitlines()))
    truth = json.loads((output / "truth.json").read_text())
    first = analyzed.stdout.splitlines()[0] if analyzed.stdout else ""
    found = f"step {truth['step']}, rank {truth['rank']}," in first and f"module {truth['module']}," in first
    print(f"   planted: step {truth['step']}, rank {truth['rank']}, module {truth['module']} ({truth['kind']}); named correctly: {found}")
    say("5. Where to look")
    shown = Path(os.path.relpath(output))
    print(f"   what happened    {shown / 'incidents' / incidents[0].name / 'summary.md'}")
    print(f"   dumps            {shown / 'incidents' / incidents[0].name}/step*/rank*/dump.json")
    print(f"   gradient tables  {shown / 'monitor'}/*/grad_reduced_*.csv")
    print(f"   curves           tensorboard --logdir {shown / 'tensorboard'}")
    print(f"   settings         {shown / 'probe.yaml'} (docs/frameworks/megatron.md, docs/reference/settings.md)")
    return 0 if found else 1


def train_command(output: Path, seed: int) -> list[str]:
    """What a user would type; everything after the script is the script's own."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "msprobe_integrations.megatron",
    ]
    script = [str(HERE / "train_gpt.py"), "--msprobe-config", str(output / "probe.yaml")]
    own = ["--steps", str(STEPS), "--distopt", "--pace", "0.3", "--linger", "5", "--fault-seed", str(seed)]
    return [*launcher, *script, *own, "--fault-truth", str(output / "truth.json")]


def watch_training(command: list[str], metrics: int, server: Server) -> tuple[list[str], list[dict[str, Any]]]:
    """Run the training, show its console, and look at the endpoints meanwhile."""
    print(f"   {' '.join([Path(command[0]).name, *command[1:]])}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seen: list[str] = []
    firing: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        reader = threading.Thread(target=show, args=(run.stdout,), daemon=True)
        reader.start()
        while run.poll() is None:
            seen = ask(lambda: scrape(metrics)) or seen
            firing = ask(server.firing) or firing
            time.sleep(0.4)
        reader.join(5)
    return seen, firing


def show(stream: Any) -> None:
    """The training's console, without launcher chatter."""
    for line in stream:
        if "OMP_NUM_THREADS" not in line and not line.startswith("*****"):
            print(f"   {line.rstrip()}", flush=True)


def scrape(port: int) -> list[str]:
    """The lines of the metrics endpoint that tell of the fault; none while all is well."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
        lines = answer.read().decode().splitlines()
    bad = [line for line in lines if line.startswith(COUNTER) and not line.endswith((" 0", " 0.0"))]
    rest = [line for line in lines if line.startswith(("msprobe_first_nonfinite_step", "msprobe_step{", "msprobe_grad_norm"))]
    return [*bad[:6], *rest[:6]] if bad else []


def ask(question: Callable[[], Any]) -> Any:
    """The answer, None while nobody listens yet."""
    try:
        return question()
    except (OSError, ValueError):
        return None


class Server:
    """A real Prometheus server next to the training, when one is installed."""

    def __init__(self, metrics: int, web: int, output: Path) -> None:
        self.program = shutil.which("prometheus")
        self.web = web
        self.metrics = metrics
        self.output = output
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        if self.program is None:
            return self
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "msprobe", "static_configs": [{"targets": [f"127.0.0.1:{self.metrics}"]}]}],
        }
        home = self.output / "server"
        home.mkdir()
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [self.program, f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}"]
        with (home / "log").open("wb") as log:
            self._process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{self.web}"], stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def firing(self) -> list[dict[str, Any]]:
        """Labels of the alerts that are firing."""
        if self._process is None:
            return []
        with urllib.request.urlopen(f"http://127.0.0.1:{self.web}/api/v1/alerts", timeout=2) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return [alert["labels"] for alert in alerts if alert["state"] == "firing"]

    def explain(self, firing: list[dict[str, Any]]) -> str:
        """What the server says, or how to get one."""
        if self.program is None:
            place = os.path.relpath(RULES.parent)
            return f"no server is installed (Debian: apt install prometheus); rules and a scrape example are in {place}"
        if not firing:
            return f"the server saw no alert; its log is {os.path.relpath(self.output / 'server' / 'log')}"
        ranks: dict[str, set[str]] = {}
        for labels in firing:
            ranks.setdefault(labels["alertname"], set()).add(labels.get("rank", ""))
        return "firing: " + "; ".join(f"{name} (ranks {', '.join(sorted(found))})" for name, found in sorted(ranks.items()))


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
