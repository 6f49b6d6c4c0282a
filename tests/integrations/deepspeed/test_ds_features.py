"""Grad probe and incidents of a followed engine, in every layout."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import pytest
import torch
from forkpool import run_ranks

from msprobe_engine.settings.schema import GradProbeSettings, IncidentSettings, MonitorSettings

pytestmark = pytest.mark.framework
Batch = Callable[[int, bool], None]


def zero(stage: int) -> tuple[Any, Batch]:
    """An engine, and what makes its step of a number; with True the input is not finite on rank 1."""
    engine = harness.engine_of(harness.config(stage, "fp32"))
    data = harness.batches("fp32", 4)

    def batch(number: int, bad: bool) -> None:
        if bad and harness.deepspeed.comm.get_rank() == 1:
            data[number][0, 0] = float("nan")
        engine.backward(engine(data[number]))
        engine.step()

    return engine, batch


def pipeline(_: int) -> tuple[Any, Batch]:
    import test_ds_pipeline as stages

    engine, batches = stages.pipeline(), stages.data()

    def batch(_number: int, bad: bool) -> None:
        def source() -> Any:
            for x, y in batches:
                yield (x * float("nan") if bad else x), y

        engine.train_batch(data_iter=source())

    return engine, batch


def experts(_: int) -> tuple[Any, Batch]:
    import test_ds_moe as moe

    harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = moe.Net()
    groups = moe.split([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}])
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=groups, config=harness.config(1, "bf16"))

    def batch(_number: int, bad: bool) -> None:
        x = torch.randn(8, moe.SIZE).bfloat16()
        engine.backward(engine(x) * (float("nan") if bad else 1.0))
        engine.step()

    return engine, batch


LAYOUTS: dict[str, tuple[Callable[[int], tuple[Any, Batch]], int]] = {
    **{f"ZeRO {stage}, 2 ranks": (zero, stage) for stage in range(4)},
    "PP 2, 2 ranks": (pipeline, 0),
    "EP 2 (MoE), ZeRO 1, 2 ranks": (experts, 1),
}


def followed(layout: str, directory: str, sections: dict[str, Any], steps: int, bad: int) -> None:
    make, stage = LAYOUTS[layout]
    engine, batch = make(stage)
    callback = jobs.follow(engine, jobs.settings(directory, **sections))
    for step in range(steps):
        batch(step, step == bad)
    assert callback is not None
    callback.close()


def grad_rows(directory: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for file in Path(directory).rglob("grad_summary_*.csv"):
        with file.open(encoding="utf-8-sig") as stream:
            rank = int(next(part for part in file.parts if part.startswith("rank")).removeprefix("rank"))
            rows = list(csv.DictReader(stream))
            assert rows, file
            found[rank] = {row["param_name"]: float(row["norm"]) for row in rows}
    return found


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_incident(layout: str, cells: Any) -> None:
    """Gradients that are not finite start an incident on every rank that follows, which says the step."""
    with tempfile.TemporaryDirectory() as directory:
        sections = {
            "monitor": MonitorSettings(activations=True),
            "incident": IncidentSettings(enabled=True, capture_level="L0"),
        }
        run_ranks(2, followed, layout, directory, sections, 3, 1)
        incidents = sorted(Path(directory).glob("incidents/*"))
        assert incidents
        assert any("step1" in place.name or "step_1" in place.name for place in incidents), incidents
        written = {file.name for place in incidents for file in place.iterdir()}
        assert {"rank0.json", "rank1.json", "samples_rank0.jsonl", "samples_rank1.jsonl"} <= written, written
    cells.ran("DeepSpeed", layout, "incident capture")


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_grad_probe(layout: str, cells: Any) -> None:
    """A section grad_probe writes the gradients of every parameter that this rank has a piece of."""
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(2, followed, layout, directory, {"grad_probe": GradProbeSettings()}, 2, -1)
        rows = grad_rows(directory)
        assert set(rows) == {0, 1}, sorted(str(p) for p in Path(directory).rglob("*"))[:30]
        names = set(rows[0]) | set(rows[1])
        if layout.startswith("ZeRO"):
            assert {"a.weight", "a.bias", "b.weight", "c.weight", "c.bias"} <= names
            if layout.startswith("ZeRO 0"):
                assert rows[0] == rows[1]
        elif layout.startswith("PP"):
            assert {"0.weight", "2.weight"} <= set(rows[0])
            assert "4.weight" in rows[1]
        else:
            assert any("deepspeed_experts" in name for name in names)
    cells.ran("DeepSpeed", layout, "grad probe")
