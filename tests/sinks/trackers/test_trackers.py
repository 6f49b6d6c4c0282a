"""The sink ``tracker`` in real offline runs of W&B, SwanLab and MLflow (extra ``trackers``), read back from what they leave; also where the
program closes the tracker's run right after the loop."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from frames_of_lists import frame_of
from tracker_files import Curves, swanlab_curves, wandb_rows

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.settings.schema import TrackerSettings
from msprobe_engine.probe.sinks.tracker.sink import TrackerSink

LAYERS = {"decoder.layers.0.a.weight": [3.0, 4.0], "decoder.layers.0.b.weight": [12.0], "decoder.layers.1.a.weight": [1.0]}
NAN = Alert("nan_inf", "critical", "loss", "loss", 3, 0, math.nan, "a number", "loss is NaN in step 3")


def train(sink: TrackerSink, log: Callable[[int], object], steps: int = 4) -> None:
    """A program that logs its own loss, and a probe beside it."""
    for step in range(steps):
        log(step)
        sink.prepare()
        loss = math.nan if step == 3 else 1.0 / (step + 1)
        sink.write(frame_of(LAYERS, step=step, scalars={"loss": loss}), [NAN] if step == 3 else [])
    sink.flush()


def check(curves: Curves) -> None:
    """Scalars, the fold of a layer and the count of alerts, at their steps."""
    losses = curves["msprobe/loss"]
    assert [step for step, _ in losses] == [0, 1, 2, 3]
    assert [value for _, value in losses[:3]] == [1.0, 0.5, 1 / 3]
    assert math.isnan(losses[3][1])
    assert curves["msprobe/layer_grad_norm/decoder.layers.0"] == [(step, 13.0) for step in range(4)]
    assert curves["msprobe/layer_grad_norm/decoder.layers.1"] == [(step, 1.0) for step in range(4)]
    assert curves["msprobe/alerts/nan_inf"][:1] == [(3, 1.0)]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed (extra trackers)")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()


@pytest.mark.parametrize("named", [False, True], ids=["counted", "named steps"])
@pytest.mark.slow
def test_wandb(wandb: Any, tmp_path: Path, named: bool) -> None:
    """The program's rows and their steps are those it would have without the sink; ours lie in them, with an axis of their own."""
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p", settings={"console": "off"})  # else it keeps stderr for good
    sink = TrackerSink(TrackerSettings(), rank=0)

    def log(step: int) -> None:
        sink.flush()
        run.log({"loss": float(step)}, **({"step": step * 10} if named else {}))

    train(sink, log)
    log(4)
    directory = run.dir
    run.finish()
    sink.close()
    wandb.teardown()  # its service has written everything when it has ended
    rows, summary = wandb_rows(directory)
    users = [(row["_step"], row["loss"]) for row in rows if "loss" in row]
    assert users == [(step * 10 if named else step, float(step)) for step in range(5)]
    curves: Curves = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("msprobe/"):
                curves.setdefault(name, []).append((row["msprobe/step"], float(value)))
    check(curves)
    assert summary["msprobe/last_alert"] == NAN.message


@pytest.mark.slow
def test_swanlab(tmp_path: Path) -> None:
    """Each series has steps of its own: those of the training."""
    swanlab = pytest.importorskip("swanlab", reason="SwanLab is not installed (extra trackers)")
    run = swanlab.init(mode="offline", log_dir=str(tmp_path), project="p")
    sink = TrackerSink(TrackerSettings(), rank=0)
    train(sink, lambda step: run.log({"loss": float(step)}))
    sink.close()
    swanlab.finish()
    curves = swanlab_curves(tmp_path)
    check(curves)
    assert curves["loss"] == [(step, float(step)) for step in range(4)]
    assert [step for step, _ in curves["msprobe/last_alert"]] == [3]


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    """Also where characters of a name are none of MLflow's."""
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed (extra trackers)")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        sink = TrackerSink(TrackerSettings(), rank=0)
        train(sink, lambda step: mlflow.log_metric("loss", float(step), step=step))
        sink.prepare()
        sink.write(frame_of({}, step=4, scalars={"odd[name]": 2.0}), [])
        sink.close()
    client = mlflow.MlflowClient()
    done = client.get_run(run.info.run_id)
    names = done.data.metrics
    check({name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names})
    assert names["msprobe/odd_name_"] == 2.0
    assert done.data.tags["msprobe/last_alert"] == NAN.message
    assert [m.value for m in client.get_metric_history(run.info.run_id, "loss")] == [0.0, 1.0, 2.0, 3.0]


def test_no_open_run(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is opened, and rank 0 says that nothing was sent."""
    sink = TrackerSink(TrackerSettings(), rank=0)
    with caplog.at_level(logging.WARNING, "msprobe"):
        train(sink, int)
        sink.close()
    assert "no run of W&B, SwanLab or MLflow was open in this process" in caplog.text


class OpenRun:
    """What the sink asks of an open run of W&B, without its service; the real one is in the slow tests above."""

    def __init__(self) -> None:
        self.summary: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []

    def define_metric(self, name: str, **axis: Any) -> None:
        """Our numbers have a step of their own."""
        assert axis == ({"hidden": True} if name == "msprobe/step" else {"step_metric": "msprobe/step"})

    def log(self, row: dict[str, float], commit: bool) -> None:
        assert not commit, "a row of ours would count up the program's own step"
        self.rows.append(row)


@pytest.fixture
def open_run(monkeypatch: pytest.MonkeyPatch) -> OpenRun:
    run = OpenRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    return run


def test_an_open_run(open_run: OpenRun) -> None:
    """Rows of ours wait for the program's next row, with the training's step beside them."""
    sink = TrackerSink(TrackerSettings(), rank=0)
    train(sink, int)
    sink.close()
    check({name: [(int(row["msprobe/step"]), row[name]) for row in open_run.rows if name in row] for name in open_run.rows[-1]})
    assert open_run.summary == {"msprobe/last_alert": NAN.message}


def test_a_tracker_that_fails(open_run: OpenRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error in the log; the training and the other sinks know nothing of it."""
    sink = TrackerSink(TrackerSettings(), rank=0)

    def refuse(*_: object, **__: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(open_run, "log", refuse)
    with caplog.at_level(logging.ERROR, "msprobe"):
        train(sink, int)
        sink.close()
    assert caplog.text.count("W&B takes no more from step 0 on: OSError: disk is full") == 1


@pytest.mark.usefixtures("open_run")
def test_series_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    sink = TrackerSink(TrackerSettings(max_series=2), rank=0)
    with caplog.at_level(logging.WARNING, "msprobe"):
        train(sink, int)
        sink.close()
    assert "sinks.tracker.max_series (2): " in caplog.text


ROOT = Path(__file__).parents[3]
STEPS = 3
LOOP = f"""
def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range({STEPS}):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        log()
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
"""
WITHOUT_EVALUATION = LOOP.partition("    with torch.no_grad")[0]
ON_A_THREAD = "closing = threading.Thread(target=wandb.finish)\nclosing.start()\nclosing.join()"
WANDB = """
import torch, wandb
log = lambda: wandb.log({'lr': 0.1})
run = wandb.init(mode='offline', dir='.', project='p', settings={'console': 'off'})
print(run.dir)
"""
SWANLAB = "import torch, swanlab\nlog = int\nswanlab.init(project='p', mode='offline', logdir='.', log_level='error')"
MLFLOW = "import torch, mlflow\nlog = int\nmlflow.set_tracking_uri('sqlite:///mlflow.db')"
PROGRAMS = {
    "wandb.finish": f"{WANDB}\n{LOOP}\ntrain()\nwandb.finish()",
    "wandb with": f"{WANDB}\n{LOOP}\nwith run:\n    train()",
    "mlflow.end_run": f"{MLFLOW}\n{LOOP}\nmlflow.start_run()\ntrain()\nmlflow.end_run()",
    "mlflow with": f"{MLFLOW}\n{LOOP}\nwith mlflow.start_run():\n    train()",
    "mlflow by name": f"{MLFLOW}\nfrom mlflow import end_run\n{LOOP}\nmlflow.start_run()\ntrain()\nend_run()",
    "wandb.finish elsewhere": f"{WANDB}\nimport threading\n{WITHOUT_EVALUATION}\ntrain()\n{ON_A_THREAD}",
    "swanlab.finish": f"{SWANLAB}\n{LOOP}\ntrain()\nswanlab.finish()",
}


def steps_of(tracker: str, directory: Path, said: str) -> list[int]:
    """The steps whose loss the run has."""
    if tracker == "wandb":
        rows, _ = wandb_rows(str(directory / said.split()[0]))
        return [row["msprobe/step"] for row in rows if "msprobe/loss" in row]
    if tracker == "swanlab":
        return [step for step, _ in swanlab_curves(directory)["msprobe/loss"]]
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
    (run,) = client.search_runs(["0"])
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "msprobe/loss")]


@pytest.mark.framework
@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.slow
def test_the_last_step_is_in_the_run(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever way the program closes it on the training's thread; on another one that is said."""
    tracker = case.partition(" ")[0].partition(".")[0]
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed (extra trackers)")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "train.py").write_text(PROGRAMS[case])
    command = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--set", "sinks.tracker=true", "--", sys.executable, "train.py"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    steps = steps_of(tracker, tmp_path, done.stdout)
    if case.endswith("elsewhere"):  # the training might be in the midst of a step
        assert STEPS - 1 not in steps
        assert done.stderr.count("the run is closed on another thread than the training's") == 1
        return
    if tracker == "wandb":  # ours lie in the program's rows, and a loop of microseconds has several steps of ours in one row of its own
        assert steps[-1:] == [STEPS - 1], done.stderr
    else:
        assert steps == list(range(STEPS)), done.stderr
