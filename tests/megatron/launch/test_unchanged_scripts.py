"""The launcher on unchanged scripts: one with its own loop, and Megatron's own `pretrain`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launches import EXAMPLES, ROOT, launch, rows

from msprobe_engine.core.errors import UsageError
from msprobe_integrations.megatron.flags import Flags
from msprobe_integrations.megatron.launch import prepare, split_command_line

CONFIG = """
output_dir: {output}
strict: true
monitor: {{gradients: true, parameters: true}}
incident: {{level: mix}}
sinks: {{tensorboard: {{enabled: true}}}}
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["s.py", "--msprobe-config", "p.yaml", "--lr", "1"], ("s.py", False, ["--lr", "1"], Flags("p.yaml"))),
        (["s.py", "--lr", "1", "--msprobe-config=p.yaml"], ("s.py", False, ["--lr", "1"], Flags("p.yaml"))),
        (["--msprobe-config", "p.yaml", "-m", "pkg.mod", "x"], ("pkg.mod", True, ["x"], Flags("p.yaml"))),
        (["s.py", "--msprobe-strict", "y", "--msprobe-set", "a=1"], ("s.py", False, ["y"], Flags("", ("a=1", "strict=true")))),
        (["s.py", "--msprobe-output-dir=o", "--msprobe-set=a=1"], ("s.py", False, [], Flags("", ("a=1", "output_dir=o")))),
    ],
)
def test_command_line(arguments: list[str], expected: Any) -> None:
    """The flag may stand anywhere and is taken off; everything else stays, in order."""
    assert split_command_line(arguments) == expected


@pytest.mark.parametrize("arguments", [[], ["--msprobe-config", "p.yaml"], ["s.py"], ["s.py", "--msprobe-config"]])
def test_command_line_mistakes(arguments: list[str]) -> None:
    """A missing script or settings file is an error that says what to add."""
    with pytest.raises(UsageError, match=r"script|--msprobe-config"):
        prepare(split_command_line(arguments)[3])


def config(tmp_path: Path) -> Path:
    file = tmp_path / "probe.yaml"
    file.write_text(CONFIG.format(output=tmp_path / "out"))
    return file


def scalars(tmp_path: Path, rank: int, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "out" / "tensorboard" / f"rank{rank}"))
    reader.Reload()
    (name,) = [t for t in reader.Tags()["scalars"] if t.rpartition("/")[2] == tag]
    return {event.step: event.value for event in reader.Scalars(name)}


@pytest.mark.slow
@pytest.mark.framework
def test_own_loop(tmp_path: Path) -> None:
    """A script with its own argument parser and loop runs unchanged: every step is there on every rank, numbered from 0, with the
    loss the script prints, and the printed numbers are those of a run without the probe."""
    arguments = ["--steps", "3", "--distopt"]
    plain = launch(str(EXAMPLES / "train_gpt.py"), arguments)
    probed = launch(str(EXAMPLES / "train_gpt.py"), arguments, probe=config(tmp_path))
    assert probed.returncode == 0, probed.stdout + probed.stderr
    lines = [line for line in probed.stdout.splitlines() if line.startswith("step ")]
    assert lines == [line for line in plain.stdout.splitlines() if line.startswith("step ")]
    for rank in (0, 1):
        found = rows(tmp_path, "grad_reduced", rank)
        assert {row["step"] for row in found} == {"0", "1", "2"}
        assert {row["phase"] for row in found} == {"reduced"}
    assert [row["norm"] for row in rows(tmp_path, "grad_reduced", 0)] == [row["norm"] for row in rows(tmp_path, "grad_reduced", 1)]
    loss = scalars(tmp_path, 0, "loss")
    printed = {int(m[1]): float(m[2]) for m in (re.match(r"step (\d+) loss (\S+)", line) for line in lines) if m}
    assert {step: round(value, 5) for step, value in loss.items()} == pytest.approx(printed, abs=2e-5)


@pytest.mark.slow
@pytest.mark.framework
def test_the_settings_file_is_followed(tmp_path: Path) -> None:
    """With `monitor.hot` a family that is switched on in the file while the training runs is there from one step on, the same on both
    ranks, with the rows of shards merged."""
    file = config(tmp_path)
    text = file.read_text().replace("parameters: true", "hot: true")
    file.write_text(text)

    def edit() -> None:
        for _ in range(1000):
            if list((tmp_path / "out" / "monitor").glob("*/grad_reduced_*.csv")):
                file.write_text(text.replace("hot: true", "hot: true, parameters: true"))
                return
            time.sleep(0.1)

    editor = threading.Thread(target=edit)
    editor.start()
    probed = launch(str(EXAMPLES / "train_gpt.py"), ["--steps", "12", "--distopt", "--pace", "0.3"], probe=file)
    editor.join()
    assert probed.returncode == 0, probed.stdout + probed.stderr
    both = [rows(tmp_path, "param_updated", rank) for rank in (0, 1)]
    steps = [sorted({int(row["step"]) for row in found}) for found in both]
    assert steps[0] == steps[1] == list(range(steps[0][0], 12))
    assert steps[0][0] > 0
    assert {int(row["step"]) for row in rows(tmp_path, "grad_reduced", 0)} == set(range(12))
    assert [row["norm"] for row in both[0]] == [row["norm"] for row in both[1]]


SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
import pretrain_loop
pretrain_loop.main(sys.argv[1:])
from megatron.training import get_args
sys.stdout.write("ARGS " + str(getattr(get_args(), "msprobe_config", "not known")) + "\\n")  # at once: ranks write to one pipe
sys.stdout.flush()
import torch.distributed as dist
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.framework
@pytest.mark.parametrize(
    "arguments", [pytest.param(["--use-distributed-optimizer"], marks=pytest.mark.slow), ["--tensor-model-parallel-size", "2"]]
)
def test_megatron_training(tmp_path: Path, arguments: list[str]) -> None:
    """Megatron's `pretrain` runs unchanged: its parser knows the flag, iterations are the steps, evaluation leaves no trace, and what
    it logs is what it logs without the probe."""
    place = os.environ.get("MCORE19_ENVIRONMENT", "")
    if not place:
        pytest.skip("MCORE19_ENVIRONMENT does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(examples=str(EXAMPLES)))
    plain = launch(str(script), arguments, path=place)
    assert plain.returncode == 0, plain.stderr[-3000:]
    probed = launch(str(script), arguments, probe=config(tmp_path), path=place)
    assert probed.returncode == 0, probed.stderr[-3000:]
    assert f"ARGS {tmp_path / 'probe.yaml'}" in probed.stdout
    assert "ARGS not known" in plain.stdout

    def logged(text: str) -> list[tuple[str, str]]:
        return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", text)

    assert len(logged(plain.stdout + plain.stderr)) == 4
    assert logged(probed.stdout + probed.stderr) == logged(plain.stdout + plain.stderr)
    for rank in (0, 1):
        found = rows(tmp_path, "grad_reduced", rank)
        names = [row["name"] for row in found if row["step"] == "0"]
        assert len(names) == len(set(names)) > 10
        assert [row["step"] for row in found] == [str(step) for step in range(4) for _ in names]
    ours = scalars(tmp_path, 0, "loss")
    printed = [float(value) for value, _ in logged(plain.stdout + plain.stderr)]
    # what Megatron logs at iteration 2 is the mean of iterations 1 and 2: the first line does not reset its sum
    assert [ours[0], (ours[0] + ours[1]) / 2, ours[2], ours[3]] == pytest.approx(printed, rel=1e-6)


def test_wrong_settings_stop_before_the_script(tmp_path: Path) -> None:
    """A settings file with a mistake ends the launch with exit code 2 and the name of the key; the script does not run."""
    bad = tmp_path / "probe.yaml"
    bad.write_text("monitor: {gradient: true}\n")
    script = tmp_path / "script.py"
    script.write_text("print('ran')\n")
    command = [sys.executable, "-m", "msprobe_integrations.megatron", str(script), "--msprobe-config", str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert "gradient" in done.stderr
    assert "ran" not in done.stdout


def test_a_script_without_megatron_runs_as_ever(tmp_path: Path) -> None:
    """The launcher changes neither `sys.argv` nor `__name__` nor the exit code of a script, and imports no torch into it."""
    good = config(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import sys; print(__name__, sys.argv[1:], 'torch' in sys.modules); sys.exit(7)\n")
    command = [sys.executable, "-m", "msprobe_integrations.megatron", str(script), "--msprobe-config", str(good), "a", "--b=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 7, done.stderr
    assert done.stdout.split("\n")[0] == "__main__ ['a', '--b=1'] False"
