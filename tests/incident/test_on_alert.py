"""``on_alert``: a command and a webhook, once per incident, and never in the way of the training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.settings.schema import IncidentSettings, OnAlertSettings
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.manager import IncidentManager
from msprobe_engine.probe.incident.notify import SilentNotifier, StoreNotifier
from msprobe_engine.probe.incident.on_alert import act_once

EVENT = Event("step5-nan_inf", 5, "nan_inf", 0, 7, "loss is NaN; $(touch never)")


def act(settings: OnAlertSettings, directory: Path) -> bool:
    thread = act_once(settings, EVENT, directory)
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()
    return thread is not None


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server, and what it was sent."""
    found: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", found
    server.shutdown()


def test_a_command_and_a_webhook(tmp_path: Path, posted: tuple[str, list[dict[str, Any]]]) -> None:
    """Both get the facts, texts of the training are no shell words, and who comes second does nothing."""
    script = tmp_path / "tell.py"
    script.write_text(f"import json, os\nopen({str(tmp_path / 'told')!r}, 'a').write(json.dumps(dict(os.environ)) + '\\n')\n")
    settings = OnAlertSettings(command=f"{sys.executable} {script}", webhook=posted[0])
    assert act(settings, tmp_path)
    assert not act(settings, tmp_path)
    (line,) = (tmp_path / "told").read_text().splitlines()
    told = json.loads(line)
    assert (told["MSPROBE_ALERT_RULE"], told["MSPROBE_ALERT_STEP"], told["MSPROBE_AUTOLOAD"]) == ("nan_inf", "5", "0")
    assert told["MSPROBE_ALERT_MESSAGE"] == EVENT.message
    (body,) = posted[1]
    assert (body["step"], body["rank"], body["text"]) == (5, 0, f"msprobe: {EVENT.message}")


def test_what_fails_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The address is a password in most services: it is in no message."""
    for number, settings in enumerate(
        (
            OnAlertSettings(command="/no/such/program"),
            OnAlertSettings(command=f"{sys.executable} -c 'raise SystemExit(3)'"),
            OnAlertSettings(webhook="http://127.0.0.1:9/T0/secret"),
            OnAlertSettings(webhook="file:///etc/secret"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        with caplog.at_level(logging.ERROR, "msprobe"):
            assert act(settings, tmp_path / str(number))
    assert len(caplog.messages) == 4
    assert "ended with 3" in caplog.messages[1]
    assert "secret" not in caplog.text


def test_nothing_by_default(tmp_path: Path) -> None:
    assert not act(OnAlertSettings(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_once_for_all_ranks(tmp_path: Path, store: Any, frame: Any, alert: Any) -> None:
    """Two ranks that begin an incident in the same step run the command once; the next incident runs it again."""
    count = tmp_path / "count"
    wanted = OnAlertSettings(command=f"""{sys.executable} -c "open('{count}', 'a').write('x')" """)
    settings = IncidentSettings(cooldown_steps=2)
    stores = [StoreNotifier(store, patience=5) for _ in range(2)]
    managers = [IncidentManager(settings, output_dir=tmp_path, rank=r, world_size=2, notifier=stores[r], on_alert=wanted) for r in range(2)]
    for step in (5, 50):
        for rank, manager in enumerate(managers):
            manager.on_frame(frame(step, rank, bad=True), [alert(step, rank)])
        for thread in [one for one in threading.enumerate() if one.name == "msprobe-on-alert"]:
            thread.join(30)
        assert count.read_text() == "x" * (1 if step == 5 else 2)
    for manager in managers:
        manager.close()


def test_the_training_ends_when_what_was_captured_is_over(tmp_path: Path) -> None:
    """Only where it is wanted, after the last captured step, which is the same on all ranks whenever they hear of the incident."""
    event = Event("step5-nan_inf", 5, "nan_inf", 0, 7, "loss is NaN")
    for stop, last in ((False, None), (True, 8)):
        settings = IncidentSettings(capture_level="mix", capture_steps=2)
        manager = IncidentManager(
            settings, output_dir=tmp_path, rank=1, world_size=2, notifier=SilentNotifier(), on_alert=OnAlertSettings(stop=stop)
        )
        assert manager.stops_after(100) is None
        manager.incidents[event.id] = event
        stops = [step for step in range(5, 10) if manager.stops_after(step) is not None]
        assert (stops[0] if stops else None) == last


PLAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    x = torch.randn(8, 4)
    if step == 10:
        x[0] = float("nan")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("went on")
"""
TRAINER = """
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

data = [{"x": torch.randn(8) * (float("nan") if n == 20 else 1.0), "labels": torch.randn(())} for n in range(32)]
arguments = TrainingArguments("saved", per_device_train_batch_size=4, max_steps=30, report_to=[], use_cpu=True, save_strategy="no")
Trainer(Model(), arguments, train_dataset=data).train()
print("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "saved"), [(PLAIN, 0), (TRAINER, 1)], ids=["plain", "transformers"])
def test_a_training_is_ended(program: str, saved: int, tmp_path: Path) -> None:
    """Exit code 86, the incident is written, and the Trainer has saved a checkpoint."""
    (tmp_path / "train.py").write_text(program)
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    words = ["run", "--output-dir", "out", "--set", "on_alert.stop=true", "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "msprobe_engine.cli", *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 86, done.stderr
    assert "went on" not in done.stdout
    assert "on_alert.stop: the training ends after step" in done.stderr
    (incident,) = (tmp_path / "out" / "incidents").glob("step*")
    assert list(incident.rglob("dump.json"))
    assert len(list(tmp_path.glob("saved/checkpoint-*"))) == saved
