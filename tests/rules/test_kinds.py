"""Which kind of tensor a record is."""

from __future__ import annotations

import pytest
from frames_of_lists import TENSOR

from msprobe_engine.core.records import FAMILIES, Entry, Sample, TensorRef
from msprobe_engine.probe.rules.kinds import KINDS, entry_kind, sample_kind, scalar_kind


@pytest.mark.parametrize(
    ("name", "section", "kind"),
    [
        ("Module.fc.Linear.forward.0", "input_args", "activation"),
        ("Module.fc.Linear.forward.0", "output", "activation"),
        ("Module.fc.Linear.forward.0", "parameters", "param"),
        ("Module.fc.Linear.backward.0", "input", "activation_grad"),
        ("Module.backward.Linear.forward.0", "output", "activation"),
        ("Module.fc.Linear.parameters_grad", "weight", "grad"),
        ("Module.fc.Linear.parameters_grad.0", "weight", "grad"),
        ("Functional.linear.0.forward", "output", "activation"),
        ("Functional.linear.12.backward", "output", "activation_grad"),
        ("Distributed.all_reduce.3.forward", "output", "collective"),
    ],
)
def test_entries(name: str, section: str, kind: str) -> None:
    """The last words of a record name and the section decide, not the names of modules."""
    assert entry_kind(Entry(name, {}), section) == kind


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_kind(family: str) -> None:
    """Every family of the monitor has a kind, and `extra` may name another one."""
    assert sample_kind(Sample(family, "a", TensorRef(0, TENSOR))) in KINDS
    assert sample_kind(Sample(family, "a", TensorRef(0, TENSOR), extra={"kind": "param"})) == "param"


@pytest.mark.parametrize(("name", "kind"), [("loss", "loss"), ("lm_loss", "loss"), ("loss_scale", "step"), ("grad_norm", "step")])
def test_scalars(name: str, kind: str) -> None:
    """A loss is of kind loss, every other number of kind step."""
    assert scalar_kind(name) == kind
