"""A call made on the CPU in a wider type: does the result of the training agree with it?"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import torch

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.reference import Agreement
from msprobe_integrations.torch.op_tools.free_benchmark.second import Change, Seen, find_autocast_type, runs
from msprobe_integrations.torch.op_tools.free_benchmark.values import kind, parts
from msprobe_integrations.torch.tensors.arrays import as_array


def agreement(seen: Seen, results: list[torch.Tensor]) -> list[tuple[int, Agreement]]:
    """(number of the result, how it agrees) for every result of floats. Waits for the device.

    Raises:
        Unperturbed: the CPU cannot make the call.
    """
    found: dict[int, Agreement] = {}
    with closing(runs(seen, perturb.TO_CPU, results, Change(perturb.TO_CPU, find_autocast_type(seen.autocast, results)))) as pieces:
        for pairs in pieces:
            for at, old, new in pairs:
                compare(found.setdefault(at, Agreement(kind(results[at]) or "", 0.0)), old, new)
    return list(found.items())


def compare(found: Agreement, device: torch.Tensor, cpu: torch.Tensor) -> None:
    """Add a tensor of a device and that of the CPU, in parts."""
    device, cpu = device.detach().to("cpu"), cpu.detach()
    finite = cpu[cpu.isfinite()].abs()
    found.largest = max(found.largest, float(finite.max()) if finite.numel() else 0.0)
    for a, b in parts(device, cpu):
        found.add(as_array(a).astype(np.float64), as_array(b).astype(np.float64))
