"""A program that closes its tracker's run right after the loop: the last step, which ends with no next one, is in the run too."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tracker_files import swanlab_curves, wandb_rows

pytestmark = [pytest.mark.framework]
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
