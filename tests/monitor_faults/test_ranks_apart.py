"""Ranks that do not do the same with the monitor: the training does not notice, and what is written says so."""

from __future__ import annotations

import csv
import functools
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import parameter_cases as pc
import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

from msprobe.pytorch import TrainerMon
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
STEPS = 10
FLAGS = (
    "xy_distribution",
    "wg_distribution",
    "monitor_mbs_grad",
    "param_distribution",
    "mv_distribution",
    "mg_direction",
    "ur_distribution",
)


def different(how: str, rank: int) -> dict[str, Any]:
    """Monitor settings of one rank."""
    return {
        "families": {**pc.EVERYTHING, "updates": rank == 0, "parameters": rank == 0, "histograms": ("exp_avg",) if rank else ()},
        "interval": {**pc.EVERYTHING, "interval": 1 + rank},
        "targets": {**pc.EVERYTHING, "targets": ("a",) if rank else ()},
    }.get(how, pc.EVERYTHING)


def train(directory: str, how: str) -> tuple[list[bytes], bytes]:
    """Weights and random state after a training whose ranks differ in `how`; empty: without a probe."""
    rank = dist.get_rank()
    model = pc.wrapped("fsdp2", pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    probe = None
    if how:
        monitor = MonitorSettings(activations=True, **different(how, rank))
        sinks = SinkSettings(csv=CsvSettings(path=directory))
        incident = IncidentSettings(enabled=False)
        probe = TorchProbe(ProbeSettings(output_dir=directory, strict=how != "interval", monitor=monitor, sinks=sinks, incident=incident))
        probe.attach(model, optimizer)
    for step in range(STEPS):
        if probe is not None:
            probe.begin_step(step)
        model(pc.data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step()
            if how == "paused" and rank and step in (3, 6):
                probe.pause() if step == 3 else probe.resume()
    if probe is not None:
        dist.barrier()
        probe.close()
    return [pc.whole(p).tobytes() for p in model.parameters()], torch.get_rng_state().numpy().tobytes()


@functools.cache
def unwatched() -> list[Any]:
    return run_ranks(2, train, "", "")


@pytest.mark.fast_cells("families", "paused")
@pytest.mark.parametrize("how", ["families", "interval", "targets", "paused"])
@pytest.mark.slow
def test_ranks_that_differ(tmp_path: Path, how: str) -> None:
    """Shards of which not all ranks have rows: same bits, no rank ends (messages of different lengths end a gloo process), and a
    step whose rows could not be merged has none of the parameter, rather than those of a shard."""
    assert run_ranks(2, train, str(tmp_path), how) == unwatched()
    shapes: dict[int, set[str]] = {}
    for path in tmp_path.glob("*-rank0-*/exp_avg_sq_*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["name"] == "a.weight":
                    shapes.setdefault(int(row["step"]), set()).add(row["shape"])
    apart = {"families": range(STEPS), "interval": range(1, STEPS, 2), "targets": range(STEPS), "paused": range(4, 7)}[how]
    assert shapes == {step: {"[13, 8]"} for step in range(STEPS) if step not in apart}


def wild(path: Path, rng: random.Random) -> None:
    """Something else in the place of the settings file."""
    if path.is_dir():
        path.rmdir()
    elif path.exists():
        path.unlink()
    what = rng.randrange(10)
    keys = {"targets": {}, "dynamic_on": rng.random() < 0.8, "collect_times": rng.choice([1, 2, 1000]), "step_interval": rng.choice([1, 2])}
    content = json.dumps({**keys, **{flag: rng.random() < 0.5 for flag in FLAGS}})
    if what == 0:
        path.mkdir()
    elif what == 1:
        os.mkfifo(path)
    elif what > 2:
        path.write_text({3: content[: len(content) // 2], 4: '{"a":' * 10_000, 5: content.replace("{}", "3")}.get(what, content))


def dynamic(directory: str, on: bool) -> tuple[list[bytes], list[int]]:
    """Weights after a training whose settings file changes before every step."""
    os.environ.update(DYNAMIC_MONITOR="True", MONITOR_OUTPUT_DIR=f"{directory}/out")
    path, rng = Path(directory) / "monitor_config.json", random.Random(1)
    if dist.get_rank() == 0 and on:
        path.write_text('{"targets": {}, "dynamic_on": false, "wg_distribution": true}')
    dist.barrier()
    model = pc.wrapped("fsdp2", pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    if on:
        monitor = TrainerMon(path)
        monitor.set_monitor(model, optimizer)
    dist.barrier()  # both ranks have read the file before the first one changes it
    for step in range(40):
        if dist.get_rank() == 0 and on:
            wild(path, rng)
        dist.barrier()
        model(pc.data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    if on:
        monitor.stop()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [pc.whole(p).tobytes() for p in model.parameters()], hooks


@pytest.mark.slow
def test_a_settings_file_that_changes_at_every_step() -> None:
    """Two ranks of FSDP2, families on and off, broken files, none, a directory, a pipe: same bits, no hook is left, and both ranks have
    rows of the same families in the same steps."""
    with tempfile.TemporaryDirectory() as directory:
        assert run_ranks(2, dynamic, directory, True) == run_ranks(2, dynamic, directory, False)
        run = open_run(f"{directory}/out")
        first, second = (
            {f: {tuple(s.steps) for s in run.series(rank, f, "norm").values()} for f in run.families(rank)} for rank in run.ranks
        )
        assert first == second
        assert {"grad_reduced", "actv", "exp_avg", "param_origin"} <= set(first)
        assert run.problems == {}


def two_monitors(directory: str) -> list[list[int]]:
    """In which steps each of two monitors, one after the other, was on."""
    os.environ.update(DYNAMIC_MONITOR="True", MONITOR_OUTPUT_DIR=f"{directory}/out")
    path = Path(directory) / "monitor_config.json"

    def switch(on: bool) -> None:
        if dist.get_rank() == 0:
            path.write_text(json.dumps({"targets": {}, "dynamic_on": on, "wg_distribution": True}))
        dist.barrier()

    out = []
    for changes in ({2: True, 5: False}, {}):
        switch(False)
        model = pc.wrapped("ddp", pc.net())
        optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
        monitor = TrainerMon(path)
        monitor.set_monitor(model, optimizer)
        seen = []
        for step in range(9):
            if step in changes:
                switch(changes[step])
            model(pc.data(step)).square().mean().backward()
            seen += [step] if monitor._probe.monitor is not None and monitor._probe.monitor.enabled else []
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
        monitor.stop()
        out.append(seen)
    return out


def test_the_changes_of_an_earlier_monitor_are_over(tmp_path: Path) -> None:
    """The second monitor of a job does not follow on one rank what was announced in the time of the first."""
    assert run_ranks(2, two_monitors, str(tmp_path)) == [[[4, 5, 6], []]] * 2
