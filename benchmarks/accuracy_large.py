"""What the pre-check of one large call takes: seconds and memory, one process and one thread for each.

    python benchmarks/accuracy_large.py [--only linear softmax embedding layer_norm gelu]

Calls are those of a large language model's layer, forward and backward, with tensors of random numbers. ``alone`` is the call itself in
its own types and in float64, as the check has to run it anyway; ``bench`` are the bytes of all its tensors in float64, ``peak`` is what the
process had at most beyond what it had before the check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "accuracy"))

CASES = ("linear", "softmax", "embedding", "layer_norm", "gelu")


def arguments(case: str) -> tuple[list[Any], dict[str, Any]]:
    """Of a call of torch.nn.functional."""
    import torch

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()

    if case == "linear":
        return [made(2048, 4096), made(4096, 4096)], {}
    if case == "softmax":
        return [made(32, 2048, 2048)], {"dim": -1}
    if case == "embedding":
        return [torch.randint(0, 50000, (2, 2048)), made(50000, 4096)], {}
    if case == "layer_norm":
        return [made(8, 2048, 4096), [4096], made(4096), made(4096)], {}
    return [made(8192, 4096, dtype=torch.float32)], {}


def alone(case: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[float, Any, Any]:
    """Seconds of the call itself, in its own types and in float64, its result and a gradient for it."""
    import torch

    function = getattr(torch.nn.functional, case)
    seconds = 0.0
    result: Any = None
    for kind in (torch.float64, None):
        given = [
            a.detach().to(kind or a.dtype).requires_grad_() if isinstance(a, torch.Tensor) and a.dtype.is_floating_point else a
            for a in args
        ]
        began = time.perf_counter()
        result = function(*given, **kwargs)
        result.backward(torch.ones_like(result))
        seconds += time.perf_counter() - began
        del given
    result = result.detach()
    return seconds, result, torch.randn(result.shape).to(result.dtype)


def one(case: str) -> dict[str, Any]:
    """Check it in this process."""
    import torch
    from call_records import Memory  # type: ignore[import-not-found, unused-ignore]

    from msprobe_integrations.torch.op_tools.accuracy.checker import Checker

    Path("/proc/self/oom_score_adj").write_text("1000")  # others on the machine are not to die of it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args, kwargs = arguments(case)
    memory = Memory()
    result = torch.empty(0)
    seconds, result, gradient = alone(case, args, kwargs)
    record = memory.record(args, kwargs, result)
    backward = memory.backward(gradient)
    elements = [t.numel() for t in (*args, result, gradient) if isinstance(t, torch.Tensor)]
    elements += [t.numel() for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    del args, result, gradient
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    began, cpu = time.perf_counter(), time.process_time()
    checked = Checker(memory).check(f"Functional.{case}.0", record, backward)
    return {
        "case": case, "status": [checked.result.forward, checked.result.backward], "message": checked.result.message,
        "elements": sum(elements), "alone_s": round(seconds, 1), "check_s": round(time.perf_counter() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1), "bench_gib": round(sum(elements) * 8 / 2**30, 2),
        "peak_gib": round((_status("VmHWM") - before) / 2**20, 2),
        "units": [t.units for t in checked.result.tensors],
        "metrics": [dict(t.metrics) for t in checked.result.tensors],
    }  # fmt: skip


def _status(key: str) -> int:
    """KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def main() -> None:
    """Print the figures as json, one line for each call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for case in options.only:
        done = subprocess.run(
            [sys.executable, __file__, "--one", case], env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1]
        )
        print(done.stdout.strip() or f"{case}: exit code {done.returncode}: {done.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main()
