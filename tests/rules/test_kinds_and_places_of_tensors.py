"""Which kind of tensor a record is, and where the tensors of a frame are, worked out once."""

from __future__ import annotations

import dataclasses

import pytest
from frames_of_lists import TENSOR, frame_of

from msprobe_engine.core.records import FAMILIES, Entry, Opaque, Sample, TensorRef
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.tensor_kinds import KINDS, entry_kind, sample_kind, scalar_kind


def test_same_object_while_frames_look_alike() -> None:
    """Equal entries and samples give the very same layout object, also when a plain argument value changes."""
    cache = LayoutCache()
    frames = [frame_of({"w": [1.0]}, entries={"Functional.relu.0.forward": [2.0]}, step=s) for s in range(3)]
    for s, frame in enumerate(frames):
        frame.entries[0].sections["input_kwargs"] = {"n": Opaque({"type": "int", "value": s})}
    layouts = [cache.of(frame) for frame in frames]
    assert layouts[0] is layouts[1] is layouts[2]
    assert layouts[0].names == ["Functional.relu.0.forward.output.0", "w"]
    assert layouts[0].order.tolist() == [0, 1]


def test_new_object_when_rows_move() -> None:
    """A record that comes, goes or gets another row gives another layout with the right rows."""
    cache = LayoutCache()
    first = cache.of(frame_of({"a": [1.0], "b": [2.0]}))
    assert cache.of(frame_of({"a": [1.0]})) is not first
    swapped = frame_of({"a": [1.0], "b": [2.0]})
    swapped.samples[0], swapped.samples[1] = (
        swapped.samples[0]._replace(ref=TensorRef(1, TENSOR)),
        swapped.samples[1]._replace(ref=TensorRef(0, TENSOR)),
    )
    moved = cache.of(swapped)
    assert moved.rows.tolist() == [1, 0]
    assert moved.order_rows(swapped)[0].tobytes() == swapped.rows[1].tobytes()


def test_shared_and_missing_rows() -> None:
    """Two records may share one row; a record without statistics is not in the layout."""
    frame = frame_of({"a": [1.0]})
    frame.entries.append(Entry("Module.m.M.forward.0", {"output": [TensorRef(0, TENSOR), TensorRef(-1, TENSOR)]}))
    layout = LayoutCache().of(frame)
    assert layout.names == ["Module.m.M.forward.0.output.0", "a"]
    assert layout.rows.tolist() == [0, 0]
    assert layout.source(frame, 1) is frame.samples[0]


def test_row_count_changes_under_an_equal_layout() -> None:
    """Rows that nobody refers to do not shift what others refer to."""
    cache = LayoutCache()
    frame = frame_of({"a": [1.0]})
    assert cache.of(frame).plain
    import numpy as np

    longer = dataclasses.replace(frame, rows=np.concatenate([frame.rows, frame.rows]))
    assert len(cache.of(longer).order_rows(longer)) == 1


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
