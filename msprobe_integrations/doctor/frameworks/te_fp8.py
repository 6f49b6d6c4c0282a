"""E1: Transformer Engine with fp8 weights: the training has the bits it has without the probe, and rows are of values, never of codes."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.statistics.rows import read_row
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe, records
from msprobe_integrations.torch.backend import TorchBackend

_STEPS = 3
_WIDTH = 256
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
"""Of ``transformer_engine.common.recipe``; which of them run depends on the GPU."""


def run(device: Device) -> Iterator[Line]:
    """One line per recipe, without and with weights in fp8."""
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipes = importlib.import_module("transformer_engine.common.recipe")
    except Exception as error:
        yield Line("Transformer Engine", "skipped", why=f"it cannot be imported: {type(error).__name__}: {str(error)[:100]}")
        return
    if device.type != "cuda":
        yield Line("Transformer Engine", "skipped", why="needs a CUDA GPU")
        return
    for name in _RECIPES:
        if not hasattr(recipes, name):
            yield Line(f"Transformer Engine, {name}", "skipped", why="this version does not have it")
            continue
        for weights in (False, True):
            yield _recipe(lambda weights=weights, name=name: _Fp8(device, te, getattr(recipes, name)(), weights), name, weights)  # type: ignore[misc]


class _Fp8(Job):
    """Two layers of Transformer Engine, their calls in fp8, on request their weights, too."""

    def __init__(self, device: Device, te: Any, recipe: Any, weights: bool) -> None:
        super().__init__("tiny", str(device.device))
        self._te, self._recipe = te, recipe
        make = getattr(te, "quantized_model_init", None) or te.fp8_model_init
        torch.manual_seed(0)
        with make(enabled=weights, recipe=recipe):
            layers = [te.LayerNormLinear(_WIDTH, 2 * _WIDTH, params_dtype=torch.bfloat16, device=str(device.device))]
            layers.append(te.Linear(2 * _WIDTH, _WIDTH, params_dtype=torch.bfloat16, device=str(device.device)))
        self.model = nn.Sequential(*layers)
        self.batch = torch.randn(128, _WIDTH, device=str(device.device), dtype=torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)  # of which every kind of weight knows the update

    def forward(self) -> torch.Tensor:
        if hasattr(self._te, "autocast"):
            context = self._te.autocast(enabled=True, recipe=self._recipe)
        else:
            context = self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)
        with context:
            made: torch.Tensor = self.model(self.batch)
        return made.float().square().mean()


def _recipe(make: Callable[[], Job], recipe: str, weights: bool) -> Line:
    name = f"Transformer Engine, {recipe}, weights in {'fp8' if weights else 'bf16'}"
    try:
        plain, again = (_train(make(), "off")[0] for _ in range(2))
    except Exception as error:
        return Line(name, "skipped", why=f"fails without the probe: {type(error).__name__}: {str(error)[:200]}")
    wrong = []
    for mode in ("gradients", "activations", "parameters", "L0", "mix"):
        try:
            losses, data = _train(make(), mode)
        except Exception as error:
            wrong.append(f"{mode}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if torch.equal(plain, again) and not torch.equal(losses, plain):
            wrong.append(f"{mode}: other losses")
        without = [key for key, record in data.items() if ".forward." in key and _blank(record)]
        if without:
            wrong.append(f"{mode}: {len(without)} records without numbers, the first is {without[0]}")
    looked_at, off = compare_values(make().model.named_parameters())
    wrong += off
    remark = [] if torch.equal(plain, again) else ["two runs without the probe differ: bits were not compared"]
    return Line(name, "WRONG" if wrong else "ok", f"{looked_at} quantized weights", why="; ".join([*wrong[:5], *remark]))


def _train(job: Job, mode: str) -> tuple[torch.Tensor, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        with attach_probe(job, mode, Path(directory)) as step:
            losses = torch.stack([step() for _ in range(_STEPS)]).cpu()
        return losses, records(Path(directory)).get(_STEPS - 1, {})


def _blank(record: Any) -> bool:
    """Has a floating tensor of the output of a call no numbers?"""
    tensors = [tensor for tensor in record.get("output") or () if isinstance(tensor, dict) and "float" in str(tensor.get("dtype"))]
    return any(tensor.get("Max") is None for tensor in tensors)


def compare_values(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, list[str]]:
    """How many tensors are quantized, and those whose row is not that of their values."""
    backend, wrong, refs = TorchBackend(), [], []
    for name, tensor in named:
        if hasattr(tensor, "dequantize") and type(tensor) not in (torch.Tensor, nn.Parameter):
            refs.append((name, backend.reduce(tensor).row, tensor.detach().dequantize().double()))
    rows = backend.finish_step().rows()
    for name, row, values in refs:
        if row < 0:
            wrong.append(f"{name} has no row: {backend.unsupported}")
            continue
        statistics = read_row(rows[row])
        expected = [float(number) for number in (values.min(), values.max(), values.norm())]
        got = [statistics.min, statistics.max, statistics.norm]
        if any(target is None or abs(target - golden) > 1e-6 * abs(golden) for target, golden in zip(got, expected)):
            wrong.append(f"{name}: min, max, norm {got}, of its values {expected}")
    return len(refs), wrong
