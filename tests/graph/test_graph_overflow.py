"""Overflow levels of the nodes of a graph; the number inf of a limit or a mask, given as an argument, is no NaN or Inf that went into a
call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from existing_graph import VERSIONS, cases, outcome, unpack
from graph_dumps import Record, call, graph, nan, number, tensor

from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.existing import overflow
from msprobe_engine.report.graph.existing.items import items
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.page.flow import producers
from msprobe_engine.report.graph.page.page_data import NONFINITE_IN, NONFINITE_OUT, Order, columns

INF = float("inf")


@pytest.mark.parametrize("version", VERSIONS)
def test_levels_are_those_of_the_existing_tool(version: str, tmp_path: Path) -> None:
    """Of every node of a run with NaN."""
    levels = set()
    for case in cases(version):
        if case.name not in ("statistics_mix-nan", "statistics_L0-nan", "statistics_mix-inf", "nan-after"):
            continue
        target, _ = unpack(case, tmp_path)
        for pair in outcome(case).pairs:
            place = Path("dump.json") if (target / "dump.json").exists() else Path(f"rank{pair.rank}/dump.json")
            made = build(read_side(target / place))
            overflow.mark(made, exact=True)
            for name, node in pair.npu.items():
                assert made.overflow[made.index[name]] == node["overflow_level"], (case.name, name)
                levels.add(node["overflow_level"])
    assert levels == {None, "medium", "high", "critical"}


@pytest.mark.parametrize(
    ("name", "record", "exact", "ours"),
    [
        ("Torch.add.0.forward", call([tensor()], [tensor()]), None, None),
        ("Torch.add.0.forward", call([tensor()], [nan()]), "critical", "critical"),
        ("Torch.add.0.forward", call([nan()], [nan()]), "high", "high"),
        ("Torch.add.0.forward", call([tensor(high=INF)], [tensor()]), "medium", "medium"),
        ("Torch.add.0.forward", call([tensor()], [tensor()], mask=tensor(low=-INF)), "medium", "medium"),
        ("Torch.add.0.forward", call([[tensor(), nan()]], [tensor()]), "medium", "medium"),
        ("Torch.add.0.forward", call([number(-INF)], [tensor()]), None, None),  # an argument, no tensor
        ("Torch.add.0.forward", call([tensor(4.0)], [tensor(400.0)]), None, None),
        ("Torch.add.0.forward", call([tensor(4.0)], [tensor(401.0)]), "high", "high"),
        ("Torch.add.0.forward", call([tensor(0.0)], [tensor(101.0)]), "high", "high"),
        ("Torch.add.0.forward", call([], [tensor(1e30)]), None, None),
        ("Torch.add.0.backward", {"input": [tensor()], "output": [nan()]}, "critical", "critical"),
        ("Torch.empty.0.forward", call([number(4)], [nan()]), None, None),
        ("Torch.empty.0.forward", call([number(4)], [tensor(), nan()]), "critical", "critical"),
        ("Tensor.masked_fill_.0.forward", call([nan(), tensor()], [nan()]), None, None),
        ("Tensor.masked_fill_.0.forward", call([tensor(), nan()], [nan()]), "high", "high"),
        ("Distributed.recv.0.forward", call([nan()], [tensor()]), None, None),
        ("Distributed.recv.0.forward", call([tensor()], [nan()]), None, "high"),
        ("Distributed.irecv.0.forward", call([tensor()], [nan()]), "critical", "high"),
        ("Distributed.batch_isend_irecv.0.forward", call([tensor()], [{"tensor": nan(), "peer": number(1)}]), None, "high"),
        ("Distributed.all_gather_into_tensor.0.forward", call([nan(), tensor()], [nan()]), None, "high"),
        ("Distributed.all_gather_into_tensor.0.forward", call([nan(), nan()], [nan()]), "high", "high"),
        ("Torch.cat.0.forward", call([{"a": nan()}], [tensor()]), None, "medium"),  # inside of a dictionary
    ],
)
def test_levels(name: str, record: Record, exact: str | None, ours: str | None, tmp_path: Path) -> None:
    """The first rule that holds; what the existing tool loses is not lost here."""
    made = graph(tmp_path, {name: record})
    for word, wanted in ((True, exact), (False, ours)):
        overflow.mark(made, word)
        assert made.overflow[made.index[name]] == wanted


@pytest.mark.parametrize("value", ["NaN", "-inf", INF, -INF])
def test_what_a_file_says_of_nan(value: Any, tmp_path: Path) -> None:
    """As a number of json, and as text."""
    made = graph(tmp_path, {"Torch.add.0.forward": call([tensor()], [tensor(Mean=value)])})
    overflow.mark(made)
    assert made.overflow[made.index["Torch.add.0.forward"]] == "critical"


def test_a_graph_without_rows_has_no_levels(tmp_path: Path) -> None:
    """Nothing is known, nothing is marked."""
    made = graph(tmp_path, {"Torch.add.0.forward": call([], [])})
    overflow.mark(made)
    assert set(made.overflow) == {None}


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
