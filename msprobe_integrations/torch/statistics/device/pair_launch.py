"""Starts the kernels that write rows of values made of two tensors (`msprobe_engine.core.statistics.pairs`): both are read once, the
values exist in registers only."""

# mypy: allow-untyped-calls
# Triton has no types.

from __future__ import annotations

import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics.device import kernel as _kernel
from msprobe_integrations.torch.statistics.device.launch import BITS, Launcher, Numbers
from msprobe_integrations.torch.statistics.pair_kernels import PAIR_LAUNCHERS, PairKey


class PairLauncher(Launcher):
    """For the pairs of an operation on two types."""

    kernel = _kernel._pair_kernel
    many = _kernel._many_pairs_kernel
    whole = 3
    fusion = False  # the values are those of torch's operators, bit for bit

    def __init__(self, key: PairKey) -> None:
        device, op, first, second, step, want = key
        constants = _kernel.pair_constants(first, second, op, step, want & _kernel.WORDS_WANTED)
        flags = _rows.WRITTEN | host_kernel.wanted_flags(want)
        super().__init__(device, int(constants["SIZE"]), flags, want, constants)
        self.op = op
        self.dtypes = first, second
        self.step = step

    def numbers(self, line: Numbers) -> Numbers:
        """The limit, c0, c1, c2 and the address of the step."""
        return (self.limit, *line[4:])

    def reduce(self, a: torch.Tensor, b: torch.Tensor, row: torch.Tensor, factors: Numbers) -> None:
        """Write the row of two contiguous tensors to `row` ([16] float64), through Triton's own call; `factors` as `pair_kernels.factors`
        makes them."""
        data = [one.detach().view(BITS[one.element_size()]) for one in (a, b)]
        self.launch(data, row, (self.limit, *factors))


def launcher(key: PairKey) -> PairLauncher:
    return PAIR_LAUNCHERS.get(key) or PAIR_LAUNCHERS.setdefault(key, PairLauncher(key))
