"""Numbers that are arguments: the number inf of a limit or a mask is no NaN or Inf that went into a call."""

from __future__ import annotations

from pathlib import Path

import pytest
from graph_dumps import call, graph, nan, number, tensor

from msprobe_engine.report.graph.existing.items import items
from msprobe_engine.report.graph.page.flow import producers
from msprobe_engine.report.graph.page.page_data import NONFINITE_IN, NONFINITE_OUT, Order, columns


def test_a_number_that_is_infinite_did_not_go_in(tmp_path: Path) -> None:
    """The page says of a call that a tensor with NaN or Inf went in; the number inf says nothing, and came from no other call."""
    bad = nan(shape=[], nan_count=1)
    records = {
        "Torch.clamp.0.forward": call([tensor(), number(float("inf"))], [tensor(3.0)]),
        "Torch.sum.0.forward": call([tensor(3.0)], [bad]),
        "Torch.mul.0.forward": call([tensor(5.0), number(float("inf"))], [tensor(float("inf"), mean=0.0)]),
        "Torch.add.0.forward": call([bad, number(1.0)], [bad]),
    }
    made = graph(tmp_path, records)
    order = Order(made)
    flags = columns(made, order)[1]
    said = {made.names[node]: int(flags[place]) & (NONFINITE_IN | NONFINITE_OUT) for place, node in enumerate(order.nodes.tolist())}
    assert {name: said[name] for name in records} == {
        "Torch.clamp.0.forward": 0,
        "Torch.sum.0.forward": NONFINITE_OUT,
        "Torch.mul.0.forward": NONFINITE_OUT,
        "Torch.add.0.forward": NONFINITE_IN | NONFINITE_OUT,
    }
    assert made.side is not None
    sources = producers(made)
    assert sources[made.side.name.index("Torch.mul.0.forward.input.1")] == -1
    assert sources[made.side.name.index("Torch.add.0.forward.input.0")] == made.index["Torch.sum.0.forward"]


@pytest.mark.parametrize("old", [False, True])
def test_counts_of_nan_are_in_the_files(tmp_path: Path, old: bool) -> None:
    """How many elements are NaN, which our dumps say, stands among the fields of a row, as the existing tool shows it."""
    made = graph(tmp_path, {"Torch.sum.0.forward": call([tensor()], [nan(nan_count=3)])})
    (row,) = items(made, made.index["Torch.sum.0.forward"], old=old)[1].values()
    assert row["nan_count"] == "3"
