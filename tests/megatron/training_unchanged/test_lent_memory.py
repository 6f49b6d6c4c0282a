"""Megatron lends memory again and again: what a step finds in it is garbage of an earlier one, and no two runs have the same."""

from __future__ import annotations

import sys
from pathlib import Path

import cpu_shim
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "torch"))

from capturing import capture, entries, stat

pytestmark = pytest.mark.framework


def test_lent_memory_has_no_values_until_it_is_written_in_the_step() -> None:
    """Attention asks for a buffer that `baddbmm(beta=0)` never reads; the step in which it was allocated is not in the dump."""
    cpu_shim.install()
    from megatron.core import parallel_state

    parallel_state._set_global_memory_buffer()
    try:
        lent = parallel_state.get_global_memory_buffer()
        lent.get_tensor((2, 4, 4), torch.float32, "mpu").fill_(float("nan"))

        def work() -> None:
            buffer = lent.get_tensor((2, 4, 4), torch.float32, "mpu")
            torch.baddbmm(buffer, torch.ones(2, 4, 4), torch.ones(2, 4, 4), beta=0.0)
            buffer.fill_(1.0)
            torch.relu(lent.get_tensor((2, 4, 4), torch.float32, "mpu"))

        for frame in capture(None, work, "L1", steps=2):
            found = entries(frame)
            rows = {name: [ref.row for ref in found[name].sections["output"]] for name in found}
            assert rows["Tensor.__getitem__.0.forward"] == rows["Tensor.view.0.forward"] == [-1]
            assert stat(frame, found["Torch.relu.0.forward"].sections["output"][0]).max == 1.0
    finally:
        parallel_state._GLOBAL_MEMORY_BUFFER = None
