"""What a process of the pre-check does with torch: the device, the checker of a dump, and the files of calls that do not pass."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from msprobe_engine.accuracy.precheck.options import About, Check, Work
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.common.op_tools.accuracy.checking import keep_failures
from msprobe_integrations.torch.op_tools.accuracy.as_existing import CheckerAsExisting
from msprobe_integrations.torch.op_tools.accuracy.checker import Bench, Checker, Target
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import list_registered_names, load_operators
from msprobe_integrations.torch.tensors.byte_forms import TensorBytes
from msprobe_integrations.torch.tensors.devices import accelerator


def make_check(work: Work) -> Check:
    """See `msprobe_engine.accuracy.precheck.options.Check`.

    Raises:
        UsageError: there is no such device or type here, or a file of operators cannot be loaded.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(work.threads)
    load_operators(*work.operators)
    device, bench = resolve_device(work.device, work.jit_compile), resolve_device(work.bench, work.jit_compile)
    directory = work.rank_directory
    files = TensorFiles(directory) if (directory / layout.TENSORS).is_dir() else None
    if work.dtype is not None and not getattr(getattr(torch, work.dtype, None), "is_floating_point", False):
        raise UsageError(f"--dtype {work.dtype}: is no floating type of torch; allowed are float64, float32, bfloat16, float16, ...")
    checker: Checker | CheckerAsExisting
    if work.compat:
        checker = CheckerAsExisting(files, device, seed=work.seed, version=work.compat, quantized=work.quantized)
    else:
        target = Target(device, work.dtype, work.compiled)
        against = Bench(bench, work.bench_dtype)
        checker = Checker(files, target, against, seed=work.seed, condition=work.condition, quantized=work.quantized)
    _load()
    remark = "there is no accelerator here: the CPU's own kernels are checked (-d names a device)" if work.device == "auto" else ""
    about = About(
        device=device,
        sides=work.sides(f"torch {torch.__version__}"),
        remark=remark if device == "cpu" else "",
        operators=list_registered_names() if work.operators else (),
    )
    return Check(keep_failures(checker.check, work, _file_of), about)


def _file_of(value: Any) -> tuple[str, bytes] | None:
    return (".pt", TensorBytes().to_bytes(value.detach().contiguous().cpu())) if isinstance(value, torch.Tensor) else None


def _load() -> None:
    """Have torch import what its first call takes (500 modules, 0.3 s), before a call is timed."""
    number = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 1.0}
    record = {"input_args": [{**number, "requires_grad": True}], "input_kwargs": {}, "output": [number]}
    Checker(None).check("Torch.exp.0", record, {"input": [number], "output": [number]})


def resolve_device(device: str, jit_compile: bool = False) -> str:
    """A device of this machine; ``auto`` is the accelerator, or the CPU where there is none. It is made the current one.

    Raises:
        UsageError: there is no such device.
    """
    default = accelerator()
    kind, _, number = device.partition(":")
    if kind == "auto" and number and default is None:
        raise UsageError(f"-d {number}: there is no accelerator here; -d cpu checks the CPU's kernels")
    if kind == "auto":
        kind = "cpu" if default is None else default.type
    if kind == "cpu":
        if number not in ("", "0"):
            raise UsageError(f"device {number}: there is no accelerator here; -d cpu checks the CPU")
        return "cpu"
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401
        except ImportError:
            raise UsageError(f"device {device}: torch_npu is not installed here") from None
        torch.npu.set_compile_mode(jit_compile=jit_compile)  # type: ignore[attr-defined]
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if hasattr(module, "device_count") and module.is_available() else 0
    if int(number or 0) >= count:
        available = f"there are {count} devices of this type" if count else "there is no device of this type here"
        raise UsageError(f"device {device}: {available}; name another one with --device (cpu works everywhere)")
    module.set_device(int(number or 0))
    return f"{kind}:{number or 0}"
