"""Checks of the device check with a defect planted in what they watch: each has to find it. Run as a program, in an environment that makes
Triton interpret its kernels, it prints what the checks said of the cases named, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from msprobe_engine.core.statistics import rows
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.numbers import special_tensors
from msprobe_integrations.torch import backend
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.tensors import describe

REDUCED: dict[str, dict[str, Any]] = {
    "numbers.reduction": {"FAMILIES": {"floats": ("bfloat16",), "integers": ("uint64",)}, "_MAIN": ()},
    "numbers.derived_values": {"TYPES": (("bfloat16", "float32"),), "HISTOGRAMS": ("bfloat16",)},
    "effects.bits": {"_STEPS": 3, "_DUMPED": [1], "MONITOR": {"gradients": {}}, "DUMP": {"mix": {}}},
    "numbers.special_tensors": {"CASES": {key: one for key, one in special_tensors.CASES.items() if "nested" not in key}},
}
"""What the checks leave out in tests: enough of each remains to find a defect."""
Patch = Callable[[Any, str, Any], None]
"""Sets an attribute of an object for one case."""


class Case(NamedTuple):
    """A check, a defect, and what is in the text of a line that finds it."""

    module: str
    plant: Callable[[Patch], None]
    found: str


def _kernel_sum(patch: Patch) -> None:
    from msprobe_integrations.torch.statistics.device import check as device_check
    from msprobe_integrations.torch.statistics.device import launch as device_launch

    right = device_launch.RowLauncher.reduce

    def wrong(self: Any, tensor: torch.Tensor, row: torch.Tensor, *rest: Any) -> None:
        right(self, tensor, row, *rest)
        if tensor.numel() != device_check.ELEMENTS:
            words = row.view(torch.float64)
            words[rows.SUM] += 0.5 * abs(words[rows.SUMSQ])

    patch(device_launch.RowLauncher, "reduce", wrong)


def _known_numbers(patch: Patch) -> None:
    from msprobe_integrations.torch.statistics.device import check as device_check

    patch(device_check, "compare", lambda *_: "word 5 of the known row is 1 instead of 2")


def _order(patch: Patch) -> None:
    from msprobe_integrations.torch.statistics.device import launch as device_launch

    right = device_launch.collapse
    patch(device_launch, "collapse", lambda shape, strides, **_: right(shape, strides, in_order=False))


def _operator(module: str, name: str, wrong: Callable[..., Any]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        owner = importlib.import_module(f"msprobe_integrations.torch.{module}")
        right = getattr(owner, name)
        patch(owner, name, lambda *args: wrong(right, *args))

    return plant


def _random_numbers(patch: Patch) -> None:
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    right = TorchProbe.begin_step

    def wrong(self: Any, *args: Any) -> Any:
        torch.rand(1)
        return right(self, *args)

    patch(TorchProbe, "begin_step", wrong)


def _other_weights(patch: Patch) -> None:
    from msprobe_integrations.torch.dump.run import TorchDumpRun

    right = TorchDumpRun.start

    def wrong(self: Any, model: torch.nn.Module, *args: Any) -> Any:
        with torch.no_grad():
            next(model.parameters()).mul_(1.01)
        return right(self, model, *args)

    patch(TorchDumpRun, "start", wrong)


def _early_read(right: Callable[..., Any], flat: torch.Tensor, *rest: Any) -> Any:
    flat.sum().item()
    return right(flat, *rest)


def _old_row(patch: Patch) -> None:
    right, known = TorchBackend.reduce, {}

    def wrong(self: TorchBackend, tensor: torch.Tensor) -> Any:
        key = id(self), tensor.shape
        return known.setdefault(key, right(self, tensor)) if key not in known else known[key]

    patch(TorchBackend, "reduce", wrong)


def _codes(patch: Patch) -> None:
    from msprobe_integrations.torch.tensors import quantized

    patch(quantized, "is_quantized", lambda _: False)
    right = describe.resolve
    patch(describe, "resolve", lambda tensor: right(vars(tensor).get("_data", tensor)))


def _no_launch(patch: Patch) -> None:
    from msprobe_integrations.torch.capture.triton_launches import TritonLaunches

    patch(TritonLaunches, "install", lambda _: None)
    patch(backend, "_is_unwritten", lambda *_: True)
    patch(backend, "_sample", lambda *_: 0)


def _no_listener(patch: Patch) -> None:
    import socket

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no interface")

    patch(socket, "create_server", fails)


CASES = {
    "a sum of a kernel": Case("numbers.reduction", _kernel_sum, "sum (word 8) is"),
    "known numbers": Case("numbers.reduction", _known_numbers, "word 5 of the known row"),
    "the order of a digest": Case("numbers.reduction", _order, "digest is"),
    "rounding of uint64": Case(
        "numbers.reduction", _operator("statistics.rows", "unsigned_real", lambda _, bits: bits.double() + (bits < 0) * 2.0**64), "uint64"
    ),
    "an operator": Case(
        "numbers.derived_values", _operator("statistics.pair_kernels", "_values", lambda right, *a: right(*a) * 1.001), "agreement of"
    ),
    "a bin": Case(
        "numbers.derived_values", _operator("statistics.pair_kernels", "_bins", lambda right, *a: (right(*a) + 1).clamp(max=a[2])), "bin "
    ),
    "a feature": Case(
        "numbers.derived_values",
        _operator("monitor.feature_math", "token_entropy", lambda right, *a: right(*a) * 1.01),
        "entropy of tokens",
    ),
    "codes in place of values": Case("numbers.special_tensors", _codes, "codes with one scale"),
    "the old row of a tensor that a kernel wrote to": Case("numbers.unseen_kernels", _no_launch, "has the maximum 1.0, not 6.0"),
    "random numbers": Case("effects.bits", _random_numbers, "gradients differs in losses"),
    "weights": Case("effects.bits", _other_weights, "mix differs in losses"),
    "a read that waits": Case("effects.waits", _operator("statistics.rows", "_piece", _early_read), "before the end of the step"),
    "no group of ranks": Case("environment", _no_listener, "cannot be compared over ranks: OSError: no interface"),
    "rows of what was there before": Case("effects.streams", _old_row, "2 was seen as 1 to 1"),
}
RIGHT = (
    *("numbers.reduction", "numbers.derived_values", "numbers.special_tensors", "numbers.unseen_kernels"),
    *("effects.bits", "effects.waits", "effects.streams", "environment"),
)
"""Checks that find nothing where nothing is planted."""


def lines(module: str, plant: Callable[[Patch], None] | None) -> list[dict[str, str]]:
    """What a check says, in its reduced form."""
    kept: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, value: Any) -> None:
        kept.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        check = importlib.import_module(f"msprobe_integrations.doctor.{module}")
        for name, value in REDUCED.get(module, {}).items():
            patch(check, name, value)
        if plant is not None:
            plant(patch)
        return [asdict(line) for line in check.run(Device())]
    except Exception:
        return [{"name": "error", "verdict": "WRONG", "why": traceback.format_exc()[-2000:]}]
    finally:
        for owner, name, value in reversed(kept):
            setattr(owner, name, value)


def main() -> None:
    """Each case in a process of its own: what was decided of a kernel in one is unknown in the next."""
    for name in sys.argv[1:]:
        read, write = os.pipe()
        if os.fork() == 0:
            case = CASES.get(name)
            found = lines(name, None) if case is None else lines(case.module, case.plant)
            with os.fdopen(write, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            print(json.dumps({name: json.loads(pipe.read() or "[]")}), flush=True)


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
