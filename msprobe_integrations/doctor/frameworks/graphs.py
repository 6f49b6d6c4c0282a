"""C1: graphs of a device are captured and replayed beside the probe, and modules that are graphed have their records."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe, records

_REPLAYS = 100
_BLOCK = "Module.blocks.0.Block.forward.0"
_INSIDE = "Module.blocks.0.attention"
Make = Callable[[nn.Module, tuple[torch.Tensor, ...]], Any]


def run(device: Device) -> Iterator[Line]:
    """On the CPU only what torch itself refuses before it captures."""
    if device.full:
        yield from _captures(device)
        yield from _check_graphed_blocks(device)
        return
    yield refused_hooks()
    yield Line("graphs", "skipped", why="needs a GPU or NPU")


class _Graphing(Job):
    """Makes a graph of its first block at the beginning of its step number `at`, inside of the window of a dump."""

    def __init__(self, device: str, make: Callable[[nn.Module], Any], at: int) -> None:
        super().__init__("tiny", device)
        self._make, self._left = make, at

    def forward(self) -> torch.Tensor:
        if self._left == 0:
            self._make(self.model.get_submodule("blocks.0"))
        self._left -= 1
        return super().forward()


def refused_hooks() -> Line:
    """`make_graphed_callables` refuses modules that bear hooks, before it touches a device."""
    wrong: list[str] = []

    def make_graphed(module: nn.Module) -> None:
        try:
            torch.cuda.make_graphed_callables(module, (torch.ones(2, 16, 64, requires_grad=True),))
        except Exception as error:  # without a device it cannot go on
            if "hook" in str(error):
                wrong.append(str(error))

    for mode in ("activations", "L0", "mix"):
        with tempfile.TemporaryDirectory() as directory, attach_probe(_Graphing("cpu", make_graphed, at=1), mode, Path(directory)) as step:
            step()
            step()
    return Line("no hooks where graphs are made", "WRONG" if wrong else "ok", why="; ".join(dict.fromkeys(wrong)))


def _captures(device: Device) -> Iterator[Line]:
    """Graphs are captured right behind a dumped step, while threads of the probe wait for the device, and inside of the window."""
    module: Any = device.module
    if not hasattr(module, "graph"):
        yield Line("capture of a graph", "skipped", why=f"torch.{device.type} has no graphs")
        return
    place = str(device.device)
    source = torch.randn(256, 256, device=place)
    weight = torch.randn(256, 256, device=place)
    expected: dict[str, torch.Tensor] = {}

    def capture(mode: str) -> int:
        """How many of the replays gave other bits than the first one without the probe."""
        graph, static = (getattr(module, "CUDAGraph", None) or module.NPUGraph)(), torch.zeros_like(source)
        with module.graph(graph, capture_error_mode=mode):
            made = torch.relu(static @ weight)
        static.copy_(source)
        different = torch.zeros((), dtype=torch.int64, device=place)
        for _ in range(_REPLAYS):
            graph.replay()
            different += (made != expected.setdefault(mode, made.clone())).any()
        return int(different.item())

    for mode in ("global", "thread_local"):
        try:
            capture(mode)
        except Exception as error:
            yield Line(f"capture, mode {mode}", "skipped", why=f"fails without the probe: {error}")
            continue
        bad, wrong = 0, ""
        try:
            for probe in ("tensor", "md5", "mix", "monitor"):
                job = _Graphing(place, lambda _, mode=mode: capture(mode), at=2)  # type: ignore[misc]
                with tempfile.TemporaryDirectory() as directory, attach_probe(job, probe, Path(directory)) as step:
                    for _ in range(4):
                        step()
                        bad += capture(mode)
        except Exception as error:
            wrong = f"{probe}: {type(error).__name__}: {error}"
        yield Line(f"capture, mode {mode}", "WRONG" if wrong or bad else "ok", f"{bad} replays with other bits", "0", wrong)


def _makers(device: Device) -> Iterator[tuple[str, Make]]:
    module: Any = device.module
    if hasattr(module, "make_graphed_callables"):
        yield f"torch.{device.type}", lambda block, sample: module.make_graphed_callables(block, sample)
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except Exception:
        return
    yield "Transformer Engine", lambda block, sample: te.make_graphed_callables(block, sample)


def _check_graphed_blocks(device: Device) -> Iterator[Line]:
    """Steps of a model with a graphed block: bits, records of the block, none from its inside."""
    place = str(device.device)
    for name, make in _makers(device):

        def graph(block: nn.Module, make: Make = make) -> None:
            make(block, (torch.randn(2, 16, 64, device=place, requires_grad=True),))

        name = f"make_graphed_callables of {name}"
        try:
            plain, again = (_losses(_Graphing(place, graph, at=2), "off")[0] for _ in range(2))
        except Exception as error:
            yield Line(name, "skipped", why=f"fails without the probe: {error}")
            continue
        eager = _losses(Job("tiny", place), "mix")[1]
        wrong: list[str] = []
        for mode in ("activations", "L0", "mix"):
            try:
                losses, steps = _losses(_Graphing(place, graph, at=2), mode)
            except Exception as error:
                wrong.append(f"{mode}: {type(error).__name__}: {error}")
                continue
            if torch.equal(plain, again) and not torch.equal(losses, plain):
                wrong.append(f"{mode}: other losses")
            if mode != "activations":
                wrong += [f"{mode}: {text}" for text in _misses(steps, eager)]
        remark = "" if torch.equal(plain, again) else "two runs without the probe differ: bits were not compared"
        yield Line(name, "WRONG" if wrong else "ok", f"{_REPLAYS} steps", why="; ".join([*wrong, remark]).strip("; "))


def _losses(job: Job, mode: str) -> tuple[torch.Tensor, dict[int, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as directory:
        with attach_probe(job, mode, Path(directory)) as step:
            losses = torch.stack([step() for _ in range(_REPLAYS)]).cpu()
        return losses, records(Path(directory))


def _misses(steps: dict[int, dict[str, Any]], eager: dict[int, dict[str, Any]]) -> Iterator[str]:
    """What is missing, or not as without graphs, in the records of the first and of the last step that is replayed."""
    for step in (2, _REPLAYS - 1):
        data = steps[step]
        if inside := [name for name in data if name.startswith(_INSIDE) and ".forward" in name]:
            yield f"step {step} has a record of a replay: {inside[0]}"
        norm, expected = (_norm(steps_of_run[step].get(_BLOCK)) for steps_of_run in (steps, eager))
        if norm is None or expected is None or abs(norm - expected) > 1e-2 * abs(expected):
            yield f"step {step}: norm of the output of the block {norm}, without graphs {expected}"


def _norm(record: Any) -> float | None:
    output = (record or {}).get("output") or [{}]
    norm = output[0].get("Norm")
    return None if norm is None else float(norm)
