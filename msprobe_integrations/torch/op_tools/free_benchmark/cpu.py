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
    by_position: dict[int, Agreement] = {}
    with closing(runs(seen, perturb.TO_CPU, results, Change(perturb.TO_CPU, find_autocast_type(seen.autocast, results)))) as pieces:
        for pairs in pieces:
            for position, old, new in pairs:
                compare(by_position.setdefault(position, Agreement(kind(results[position]) or "", 0.0)), old, new)
    return list(by_position.items())


def compare(agreed: Agreement, device: torch.Tensor, cpu: torch.Tensor) -> None:
    """Add a tensor of a device and that of the CPU, in parts."""
    device, cpu = device.detach().to("cpu"), cpu.detach()
    finite = cpu[cpu.isfinite()].abs()
    agreed.largest = max(agreed.largest, float(finite.max()) if finite.numel() else 0.0)
    for target, golden in parts(device, cpu):
        agreed.add(as_array(target).astype(np.float64), as_array(golden).astype(np.float64))
