"""Megatron's rerun machine: the second run of a step is captured, and does not count."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import EXAMPLES, launch, rows
from torch import nn

from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.observer import TrainingObserver
from msprobe_integrations.torch.monitor.probe import TorchProbe

CONFIG = """
output_dir: {output}
strict: true
monitor: {{gradients: true, unreduced_gradients: true, micro_batch_gradients: true}}
incident: {{level: "{level}"}}
"""
SCRIPT = """
import functools, os, sys
sys.path.insert(0, {examples!r})
import pretrain_loop
import torch
from megatron.training import get_args

times, planted = {times}, set()
step = pretrain_loop.forward_step

def faulty(forward, *args):
    global times
    output = forward(*args)
    if torch.is_grad_enabled() and get_args().curr_iteration == 2 and os.environ["RANK"] == "1" and times:
        times -= 1
        zeros = torch.zeros_like(output[0])
        return (output[0] + zeros / zeros, *output[1:])
    return output

def forward_step(data, model, **rest):
    for name, module in model.named_modules():
        if name.endswith("layers.1.mlp.linear_fc2") and name not in planted:
            planted.add(name)
            module.forward = functools.partial(faulty, module.forward)
    return step(data, model, **rest)

pretrain_loop.forward_step = forward_step
pretrain_loop.main(sys.argv[1:])
"""


def place() -> str:
    found = os.environ.get("MCORE19_ENVIRONMENT", "")
    if not found:
        pytest.skip("MCORE19_ENVIRONMENT does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    return found


def run(tmp_path: Path, level: str, times: int, arguments: list[str], code: int) -> tuple[str, Path]:
    """Train with the launcher and a NaN in iteration 2 of rank 1; what was printed, and the incident."""
    path = place()
    script, probe = tmp_path / "script.py", tmp_path / "probe.yaml"
    script.write_text(SCRIPT.format(examples=str(EXAMPLES), times=times))
    probe.write_text(CONFIG.format(output=tmp_path / "out", level=level))
    arguments = [*arguments, "--save", str(tmp_path / "checkpoint"), "--ckpt-format", "torch", "--save-interval", "1000"]
    done = launch(str(script), arguments, probe=probe, path=path)
    text = done.stdout + done.stderr
    # Megatron's own on the first rank to exit; the launcher may end the other one by a signal
    assert str(code) in re.findall(r"exitcode +: (\S+)", text), text[-6000:]
    found = list((tmp_path / "out" / "incidents").glob("step*"))
    assert [p.name for p in found] == ["step2-rerun"], text[-6000:]
    return text, found[0]


@pytest.mark.framework
@pytest.mark.slow
@pytest.mark.parametrize(("level", "arguments"), [("", ["--use-distributed-optimizer"]), ("mix", ["--tensor-model-parallel-size", "2"])])
def test_a_nan_that_reproduces(tmp_path: Path, level: str, arguments: list[str]) -> None:
    """In Megatron's own loop a NaN gradient makes the machine run the step again; with the monitor alone the second run's dump names
    step, rank, module and operator, and says that it reproduced; the samples of the step are those of one run."""
    text, directory = run(tmp_path, level, 1000, arguments, 16)
    assert "Need to rerun step" in text
    assert open_dump(directory / "rerun").ranks(2) == [0, 1]
    merged = json.loads((directory / "incident.json").read_text())
    assert merged["rerun"]["1"]["verdict"] == "reproduced", merged["rerun"]
    first = nan_analyze(directory).findings[0]
    assert (first["step"], first["rank"], first["cause"]) == (2, 1, "operator")
    assert first["module"].endswith("layers.1.mlp.linear_fc2"), first["module"]
    assert "div" in first["operator"]
    for rank in (0, 1):
        found = rows(tmp_path, "grad_unreduced", rank)
        of = {step: sorted((row["name"], row["phase"], row["micro_step"]) for row in found if row["step"] == step) for step in "012"}
        assert of["1"] == of["2"]


@pytest.mark.slow
@pytest.mark.framework
def test_a_nan_that_does_not(tmp_path: Path) -> None:
    """A NaN of the first run only is called transient."""
    _, directory = run(tmp_path, "", 1, [], 17)
    merged = json.loads((directory / "incident.json").read_text())
    assert merged["rerun"]["1"]["verdict"] == "transient", merged["rerun"]
    assert "transient" in (directory / "summary.md").read_text()


class Machine:
    """Drives the real state machine around a one-layer model, as `train_step` does it."""

    def __init__(self, mode: str) -> None:
        from megatron.core import rerun_state_machine as module

        self.mode = module.RerunMode(mode)
        self.machine = module.RerunStateMachine(mode=self.mode)
        # the machine asks all ranks on the accelerator; here there is one rank and none
        self.machine._reduce_any = lambda value: tuple(value) if isinstance(value, list) else value  # type: ignore[method-assign]
        self.machine._save_state = self.machine._restore_state = lambda: None  # type: ignore[method-assign]
        self.machine._maybe_report_stats = lambda: None  # type: ignore[method-assign]  # raises in 0.16.1


@pytest.mark.parametrize("mode", ["validate_results", "report_determinism_stats"])
def test_second_runs_do_not_count(tmp_path: Path, mode: str) -> None:
    """Driven by the real machine, a step that runs twice has the samples of one run and micro batches from 0; only a failed
    validation makes an incident, a statistics run makes none."""
    driver = Machine(mode)
    sink = MemorySink()
    settings = ProbeSettings(
        output_dir=str(tmp_path),
        strict=True,
        monitor=MonitorSettings(activations=True),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(),
    )
    observer = TrainingObserver(settings, lambda s: TorchProbe(s, extra_sinks=[sink]))
    patches.observe(lambda: observer, whole_loop=False)
    model = nn.Sequential(nn.Linear(2, 2))
    observer.setup([model])
    assert patches.current() is observer
    passes = []

    def forward_backward(**_: Any) -> list[dict[str, torch.Tensor]]:
        out = []
        for number in range(2):
            observer.micro_batch(number)
            value = model(torch.full((1, 2), float("nan") if bad else 1.0)).sum()
            value.backward()
            driver.machine.validate_result(value, torch.isnan, message="loss", fatal=False)
            out.append({"loss": value.detach()})
        passes.append(step)
        return out

    for step in range(4):
        bad = step == 2
        with observer.driven(step):
            while driver.machine.should_run_forward_backward(None):
                observer.forward_backward(forward_backward, (), {})
            driver.machine.should_checkpoint_and_exit()
    observer.close()
    patches.observe(None)
    twice = [2] if mode == "validate_results" else [0, 1, 2, 3]
    assert passes == sorted([0, 1, 2, 3, *twice])
    for frame in sink.frames:
        inner = [(s.name, s.micro_step) for s in frame.samples if s.name.startswith("0.")]  # the model itself is seen, too
        assert inner == [(f"0.{at}", n) for n in (0, 1) for at in ("input", "output")]
    found = [p.name for p in (tmp_path / "incidents").glob("step*")]
    assert found == (["step2-rerun"] if mode == "validate_results" else ["step2-nan_inf"])
    if mode == "validate_results":
        merged = json.loads((tmp_path / "incidents" / "step2-rerun" / "incident.json").read_text())
        assert merged["rerun"]["0"]["verdict"] == "reproduced"
        dump = open_dump(tmp_path / "incidents" / "step2-rerun" / "rerun").load(2, 0)
        assert sum(name.startswith("Module.0.Linear.forward") for name in dump.entries) == 2
