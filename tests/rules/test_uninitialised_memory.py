"""Uninitialised memory is no fault."""

from __future__ import annotations

import numpy as np
import pytest

from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.uninitialised import mask_computed


def layout(*names: str) -> Layout:
    n = len(names)
    return Layout(list(names), list(names), np.arange(n), np.zeros(n, np.int8), np.arange(n), True, 1)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("VF.empty.0.forward.output.0", False),
        ("Tensor.__getitem__.8.forward.input.0", False),
        ("Tensor.view.2.forward.output.0", False),
        ("Torch.baddbmm.0.forward.input.0", False),
        ("Torch.full.1.forward.output.0", False),
        ("Torch.minimum.0.forward.output.0", True),
        ("Torch.baddbmm.0.forward.output.0", True),
        ("Functional.linear.0.forward.output.0", True),
        ("Functional.linear.0.backward.input.0", True),
        ("Tensor.half.0.forward.output", True),
        ("Autograd.megatron.core.Sum.0.forward.output.0", True),
        ("Module.decoder.layers.0.view.Linear.forward.0.input.0", True),
        ("Distributed.all_reduce.0.forward.input.0", True),
        ("decoder.layers.0.mlp.linear_fc1.weight", True),
    ],
)
def test_what_counts(name: str, counts: bool) -> None:
    """Of API calls only the outputs of calls that compute count; modules, backward calls, collectives and samples count in full."""
    assert mask_computed(layout(name)).tolist() == [counts]
