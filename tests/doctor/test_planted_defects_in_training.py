"""Checks that train a model: each says ok here, and WRONG or slow when the product is broken on purpose in the way that it watches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp

from msprobe_engine.report.table.summary import Comparison
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor import noise, precheck
from msprobe_integrations.doctor.costs import bandwidth, checkpoints, memory, overhead
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.frameworks import compiled, graphs, ranks, te_fp8, zero
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump import run as dump_run
from msprobe_integrations.torch.hooks import compiled as compiled_code
from msprobe_integrations.torch.hooks import graphed
from msprobe_integrations.torch.monitor import probe
from msprobe_integrations.torch.ranks import merge
from msprobe_integrations.torch.statistics import rows as statistics

DEVICE = Device("cpu")
Patch = pytest.MonkeyPatch


def spoil_weights(patch: Patch) -> None:
    """The probe changes the training."""
    for owner, name in ((probe.TorchProbe, "begin_step"), (dump_run.TorchDumpRun, "start")):
        real = getattr(owner, name)

        def call(self: Any, *args: Any, real: Any = real) -> Any:
            model = args[0] if isinstance(args[0], torch.nn.Module) else self._models[0]
            with torch.no_grad():
                for parameter in model.parameters():
                    getattr(parameter, "_local_tensor", parameter).mul_(1.01)
            return real(self, *args)

        patch.setattr(owner, name, call)


def leave_hooks(patch: Patch) -> None:
    """Hooks are on modules while graphs are made of them."""
    patch.setattr(graphed.GraphedModules, "_make_graphed", lambda _, make, *args, **kwargs: make(*args, **kwargs))


def compile_hooks(patch: Patch) -> None:
    """Hooks and modes get into compiled code."""
    patch.setattr(compiled_code.CompiledCode, "install", lambda _: None)


def merge_nothing(patch: Patch) -> None:
    """Rows of shards are left as they are on this rank."""
    patch.setattr(merge.RowExchange, "__init__", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no group")))


def one_piece(patch: Patch) -> None:
    """A tensor is read in one piece."""
    patch.setattr(statistics, "PIECE", 1 << 40)


class Clock:
    """Stands still but for a billionth of a second per look."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9
        return self.now

    def delay(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, and a second goes by."""

        def call(*args: Any) -> Any:
            self.now += 1.0
            return real(*args)

        return call


def wait_in_dumps(patch: Patch) -> None:
    clock = Clock()
    patch.setattr(overhead, "time", clock)
    patch.setattr(dump_run.TorchDumpRun, "start", clock.delay(dump_run.TorchDumpRun.start))


def wait_per_tensor(patch: Patch) -> None:
    clock = Clock()
    patch.setattr(bandwidth, "time", clock)
    patch.setattr(TorchBackend, "reduce", clock.delay(TorchBackend.reduce))


def read_nothing(patch: Patch) -> None:
    patch.setattr(TorchBackend, "_unfit", lambda *_: "planted: no kernel")


def compare_with_itself(patch: Patch) -> None:
    real = checkpoints.diff
    patch.setattr(checkpoints, "diff", lambda a, _, options: real(a, a, options))


def find_no_difference(patch: Patch) -> None:
    patch.setattr(Comparison, "exit_code", 0)


def find_differences(patch: Patch) -> None:
    patch.setattr(Comparison, "exit_code", 1)


def wrong_operator(patch: Patch) -> None:
    """What checks calls, a process of its own, has a GELU that is wrong by a hundredth."""
    place = Path(os.environ["PLANTED"])
    place.joinpath("sitecustomize.py").write_text(
        "import torch\nfrom torch.nn import functional as F\nreal = F.gelu\n"
        "F.gelu = lambda x, *a, **k: real(x, *a, **k) * (1.01 if x.dtype == torch.float32 else 1)\n"
    )
    patch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def one_stage() -> Iterator[Line]:
    zero.STAGES, zero.KINDS = (1,), ("fp32",)
    yield from zero.run(DEVICE)


def one_layout() -> Iterator[memory.Case]:
    tensor = torch.zeros(5 << 9, 8192)
    yield "whole", lambda backend: backend.reduce(tensor)


def temporaries() -> Iterator[Line]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "cases", lambda _: one_layout())
        yield from memory.temporaries(DEVICE, "operators")


def small_tensors() -> Iterator[Line]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bandwidth, "SMALL", 20)
        yield next(bandwidth.small(DEVICE))


def two_files() -> Iterator[Line]:
    folder = Path(os.environ["PLANTED"])
    yield checkpoints.compare(folder, folder, 8 << 20, False)


CHECKS: dict[str, Callable[[], Iterator[Line]]] = {
    "C1": lambda: iter([graphs.refused_hooks()]),
    "C2": lambda: iter([compiled.compare(DEVICE, "block", {"backend": "aot_eager"}, "mix")]),
    "C3": lambda: iter([ranks.compare(DEVICE, "FSDP2", "gloo", 2)]),
    "D1": temporaries,
    "D2": lambda: overhead.measure(DEVICE, "tiny", torch.float32, {"mix": 2.0}, 1, 0.0),
    "D3": small_tensors,
    "D3, numbers": lambda: iter([bandwidth.measure_reading(DEVICE, torch.ones(2048), {4096: 1.0, 64 << 20: 1.0}, False)]),
    "E2": one_stage,
    "F1": two_files,
    "F2": lambda: precheck.run(DEVICE),
    "G": lambda: noise.run(DEVICE),
}
DEFECTS: list[tuple[str, Callable[[Patch], None], str]] = [
    ("C1", leave_hooks, "WRONG"),
    ("C2", compile_hooks, "WRONG"),
    ("C2", spoil_weights, "WRONG"),
    ("C3", spoil_weights, "WRONG"),
    ("C3", merge_nothing, "WRONG"),
    ("D1", one_piece, "WRONG"),
    ("D2", wait_in_dumps, "slow"),
    ("D3", wait_per_tensor, "slow"),
    ("D3, numbers", read_nothing, "WRONG"),
    ("E2", spoil_weights, "WRONG"),
    ("F1", compare_with_itself, "WRONG"),
    ("F2", wrong_operator, "WRONG"),
    ("G", find_differences, "WRONG"),
    ("G", find_no_difference, "WRONG"),
]


def in_child(work: Callable[[], Iterator[Line]], plant: Callable[[Patch], None] | None) -> list[Line]:
    """What a check says in a forked process, whose state ends with it."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            ranks.START = "fork"
            if plant is not None:
                plant(pytest.MonkeyPatch())
            with os.fdopen(writing, "w") as file:
                for line in work():
                    file.write(json.dumps(asdict(line)) + "\n")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        lines = [Line(**json.loads(text)) for text in file]
    os.waitpid(child, 0)
    return lines


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("PLANTED", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def imported(name: str) -> None:
    """What the children would import one after the other."""
    if name == "E2":
        pytest.importorskip("deepspeed")


FAST = ("C1", "D1", "D3, numbers", "F1", "C3-spoil_weights")


def marks(name: str) -> Any:
    """The others take seconds each."""
    return () if name in FAST or name.partition("-")[0] in FAST else pytest.mark.slow


@pytest.mark.fast_cells("C1-leave_hooks", "C3-spoil_weights")
@pytest.mark.parametrize(
    ("name", "plant", "verdict"),
    [pytest.param(*one, marks=marks(f"{one[0]}-{one[1].__name__}"), id=f"{one[0]}-{one[1].__name__}") for one in DEFECTS],
)
def test_planted_defects_are_found(name: str, plant: Callable[[Patch], None], verdict: str) -> None:
    """With a defect in what a check watches, one of its lines says so."""
    imported(name)
    lines = in_child(CHECKS[name], plant)
    assert verdict in [line.verdict for line in lines], lines


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CHECKS])
def test_nothing_is_found_without(name: str) -> None:
    """Without it no line is WRONG, and something was checked."""
    imported(name)
    lines = in_child(CHECKS[name], None)
    assert {line.verdict for line in lines} & {"ok", "slow"}
    assert [line for line in lines if line.verdict == "WRONG"] == []


class Scaled(torch.Tensor):
    """A quantized wrapper, as Transformer Engine has them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _data: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return make_scaled(args[0]._data)

    def dequantize(self) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() / 512).to(self.dtype)


def make_scaled(codes: torch.Tensor) -> Scaled:
    made: Scaled = torch.Tensor._make_wrapper_subclass(Scaled, codes.shape, dtype=torch.bfloat16)
    made._data = codes
    return made


def test_codes_taken_for_values_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """E1: rows of quantized weights are held against their values."""
    weight = make_scaled(torch.tensor([256.0, -128.0, 64.0]).to(torch.float8_e4m3fn).view(torch.uint8))
    assert te_fp8.compare_values([("weight", weight), ("bias", torch.ones(2))]) == (1, [])
    real = TorchBackend.reduce
    monkeypatch.setattr(TorchBackend, "reduce", lambda self, tensor: real(self, tensor._data))
    assert len(te_fp8.compare_values([("weight", weight)])[1]) == 1
