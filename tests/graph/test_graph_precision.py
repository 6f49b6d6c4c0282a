"""Two graphs held against each other: which nodes belong together, and how far they are apart in the numbers of both versions and ours."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from existing_graph import VERSIONS, cases, outcome, unpack
from graph_dumps import Record, call, graph, nan, number, tensor

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.compare_graphs import compare
from msprobe_engine.report.graph.existing.vis_db import TARGET, partner_path
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import API_COLLECTION, Comparison, Graph
from msprobe_engine.report.graph.nodes.rows import pair_rows, told_rows
from msprobe_engine.report.graph.options import NEW, OLD, VIS, GraphOptions

CASES = {
    "statistics_mix-nan", "statistics_mix-fewer", "statistics_mix-grad_flag", "statistics_L0-bf16", "md5_mix-arguments",
    "tensor_mix-bf16", "statistics_mix-shape-fuzzy", "md5_mix-more-fuzzy", "nan-before",
}  # fmt: skip
TOP, LAYER, ADD = "Module.model.Net.forward.0", "Module.model.fc.Linear.forward.0", "Torch.add.0.forward"


def _options(generation: str = NEW, match: str = "exact", **more: Any) -> GraphOptions:
    return GraphOptions(generation=generation, match=match, formats=(VIS,), **more)


def _both(tmp_path: Path, target: dict[str, Record], golden: dict[str, Record], options: GraphOptions, **parents: Any) -> Comparison:
    first = graph(tmp_path / "target", target, parents.get("parents"))
    second = graph(tmp_path / "golden", golden, parents.get("golden_parents", parents.get("parents")))
    return compare(first, second, options)


def _index(made: Comparison, name: str, old: bool) -> float | None:
    return (made.index_811 if old else made.index)[made.target.index[name]]


def _partner(made: Comparison, name: str) -> str:
    other = made.partners[made.target.index[name]]
    return made.golden.names[other] if other >= 0 else ""


@pytest.mark.fast_cells("26.2.0")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.slow
def test_partners_and_numbers_are_those_of_the_existing_tool(version: str, tmp_path: Path) -> None:
    """Of every node that it has; but the number of a collection of saved tensors, which it makes before those of the members."""
    held = 0
    for case in cases(version):
        if case.name not in CASES:
            continue
        target, golden = unpack(case, tmp_path)
        assert golden is not None
        for pair in outcome(case).pairs:
            place = Path("dump.json") if (target / "dump.json").exists() else Path(f"rank{pair.rank}/dump.json")
            sides = read_side(target / place), read_side(golden / place)
            made = compare(build(sides[0]), build(sides[1]), _options(version, fuzzy="-fm" in case.flags))
            numbers = made.index_811 if version == OLD else made.index
            for name, node in pair.npu.items():
                at = made.target.index[name]
                assert partner_path(made, TARGET, at) == (node["matched_node_link"] or []), (case.name, name)
                if case.name.startswith("tensor") and made.target.types[at] == API_COLLECTION:
                    continue
                theirs = node["precision_index"]
                assert numbers[at] == (None if theirs is None else pytest.approx(float(theirs), abs=1e-12)), (case.name, name)
                held += 1
    assert held > 500


def test_nodes_match_by_name_below_the_same_names(tmp_path: Path) -> None:
    """A call that runs in another module has no partner, though its name is the same."""
    records = {ADD: call([tensor()], [tensor()]), LAYER: call([tensor()], [tensor()]), TOP: call([tensor()], [tensor()])}
    made = _both(tmp_path, records, records, _options(), parents={ADD: LAYER, LAYER: TOP}, golden_parents={ADD: TOP, LAYER: TOP})
    assert [_partner(made, name) for name in (TOP, LAYER, ADD)] == [TOP, LAYER, ""]


@pytest.mark.parametrize("generation", [OLD, NEW])
def test_only_8_1_1_asks_for_equal_shapes(generation: str, tmp_path: Path) -> None:
    """26.2.0 matches a call with an argument of another shape, and says that it is off."""
    made = _both(tmp_path, {ADD: call([tensor(shape=[2, 8])], [tensor()])}, {ADD: call([tensor()], [tensor()])}, _options(generation))
    assert _partner(made, ADD) == ("" if generation == OLD else ADD)
    assert _index(made, ADD, False) == (None if generation == OLD else 1)


def test_fuzzy_pairs_calls_in_order_inside_of_matched_modules(tmp_path: Path) -> None:
    """The numbers of calls do not count."""
    first = {f"Torch.add.{n}.forward": call([tensor()], [tensor()]) for n in (3, 5)} | {TOP: call([tensor()], [tensor()])}
    second = {f"Torch.add.{n}.forward": call([tensor()], [tensor()]) for n in (0, 1)} | {TOP: call([tensor()], [tensor()])}
    parents = {"parents": dict.fromkeys([name for name in first if name != TOP], TOP)}
    parents["golden_parents"] = dict.fromkeys([name for name in second if name != TOP], TOP)
    made = _both(tmp_path, first, second, _options(fuzzy=True), **parents)
    assert [_partner(made, f"Torch.add.{n}.forward") for n in (3, 5)] == ["Torch.add.0.forward", "Torch.add.1.forward"]
    assert made.by_structure == set()


def test_one_call_more_shifts_nothing_by_structure(tmp_path: Path) -> None:
    """By name the calls behind the new one are held against others; by structure against their own, and they are marked."""
    steps = [call([tensor(n)], [tensor(n + 1)]) for n in range(1, 6)]
    golden = {f"Torch.add.{n}.forward": step for n, step in enumerate(steps)}
    more = [steps[0], call([tensor(2)], [tensor(2, shape=[16])]), *steps[1:]]
    target = {f"Torch.add.{n}.forward": step for n, step in enumerate(more)}
    by_name = _both(tmp_path / "name", target, golden, _options())
    assert by_name.units[by_name.target.index["Torch.add.2.forward"]] > 1
    assert not by_name.by_structure
    made = _both(tmp_path / "structure", target, golden, _options(match="structure"))
    assert [_partner(made, name) for name in target] == ["Torch.add.0.forward", "", *[f"Torch.add.{n}.forward" for n in range(1, 5)]]
    assert {made.target.names[node] for node in made.by_structure} == {f"Torch.add.{n}.forward" for n in range(2, 6)}
    assert [_index(made, name, False) for name in target] == [0, None, 0, 0, 0, 0]
    assert np.nanmax(made.units) == 0


def test_layer_mapping_matches_by_the_mapping_and_else_by_name(tmp_path: Path) -> None:
    """Names of children are replaced class by class; shapes do not count."""
    inner, other = "Module.model.h.0.Block.forward.0", "Module.model.layers.0.Block.forward.0"
    first = {inner: call([tensor()], [tensor(shape=[16])]), TOP: call([tensor()], [tensor()])}
    second = {other: call([tensor()], [tensor()]), TOP: call([tensor()], [tensor()])}
    options = _options(OLD, layer_mapping={"Net": {"h": "layers"}})
    made = _both(tmp_path, first, second, options, parents={inner: TOP}, golden_parents={other: TOP})
    assert [_partner(made, name) for name in first] == [other, TOP]


def test_two_frameworks_need_a_mapping_or_the_structure(tmp_path: Path) -> None:
    """Exact matching refuses what it cannot do, and says what to do."""
    first, second = (graph(tmp_path / name, {ADD: call([tensor()], [tensor()])}) for name in ("a", "b"))
    assert first.side is not None
    first.side.header["framework"] = "mindspore"
    with pytest.raises(UsageError, match="-lm"):
        compare(first, second, _options())
    assert compare(first, second, _options(match="structure")).task == "summary"


@pytest.mark.parametrize(
    ("output", "golden", "old", "new"),
    [
        (tensor(), tensor(), 0, 0),
        (tensor(4.4), tensor(4.0), 0.1, 0.5),  # 0.1 of inputs that are equal
        (tensor(4.0, 2.5), tensor(4.0, 2.0), 0.25, 0),  # 26.2.0 looks at the norm alone
        (tensor(90.0), tensor(4.0), 1, 1),  # never more than 1
        (nan(), tensor(), 1, 1),
        (nan(), nan(), 1, 0),  # 26.2.0: the golden side has it too
        (tensor(4.0, mean=1.0), tensor(4.0, mean=0.0), 0, 0),  # nothing can be divided by 0
        (tensor(4.0, float("inf")), tensor(4.0, 2.0), 1, 1),
        (tensor(dtype="torch.float16"), tensor(), 0, 1),
        (tensor(requires_grad=False), tensor(), 0, 1),
    ],
)
def test_numbers_of_both_versions_from_statistics(output: Record, golden: Record, old: float, new: float, tmp_path: Path) -> None:
    """8.1.1: the largest relative error of the results; 26.2.0: 0, 0.5 or 1 by its checks."""
    made = _both(tmp_path, {ADD: call([tensor()], [output])}, {ADD: call([tensor()], [golden])}, _options())
    assert _index(made, ADD, True) == pytest.approx(old)
    assert _index(made, ADD, False) == new


def test_checksums_are_the_other_way_round_in_8_1_1(tmp_path: Path) -> None:
    """1 means equal there; memory without values counts as equal, in 26.2.0 as off."""
    empty = "Torch.empty.0.forward"
    target = {ADD: call([tensor(md5="a")], [tensor(md5="b")]), empty: call([number(4)], [tensor(md5="x")])}
    golden = {ADD: call([tensor(md5="a")], [tensor(md5="c")]), empty: call([number(4)], [tensor(md5="y")])}
    made = _both(tmp_path, target, golden, _options())
    assert made.task == "md5"
    assert [_index(made, name, True) for name in (ADD, empty, "Apis_Between_Modules.0")] == [0, 1, 0]
    assert [_index(made, name, False) for name in (ADD, empty, "Apis_Between_Modules.0")] == [1, 1, 1]


def test_what_the_target_has_more_of_is_off_in_26_2_0(tmp_path: Path) -> None:
    """An argument that the partner does not have stands beside nothing."""
    made = _both(tmp_path, {ADD: call([tensor(), tensor()], [tensor()])}, {ADD: call([tensor()], [tensor()])}, _options())
    cells = made.metrics(made.target.index[ADD])
    assert _index(made, ADD, False) == 1
    assert cells[f"{ADD}.input.1"]["Result"] == "error"
    assert cells[f"{ADD}.input.0"]["Result"] == "pass"


def test_metrics_have_the_columns_of_the_version(tmp_path: Path) -> None:
    """8.1.1: differences and relative errors; 26.2.0 adds a verdict per row; both of arguments that are numbers too."""
    target, golden = {ADD: call([number(3)], [tensor(5.0)])}, {ADD: call([number(2)], [tensor(4.0)])}
    old, new = (_both(tmp_path / one, target, golden, _options(one)) for one in (OLD, NEW))
    row, argument = f"{ADD}.output.0", f"{ADD}.input.0"
    first, second = old.metrics(old.target.index[ADD]), new.metrics(new.target.index[ADD])
    assert first[row]["L2norm diff"] == 1.0
    assert first[row]["NormRelativeErr"] == "25.0%"
    assert (first[argument]["Max diff"], first[argument]["MaxRelativeErr"]) == (1, "50.0%")
    assert "Result" not in first[row]
    assert second[row].keys() - first[row].keys() == {"Requires_grad Consistent", "Result", "Err_message"}
    assert second[argument]["Result"] == "error"


def test_units_count_in_round_off(tmp_path: Path) -> None:
    """A difference in the last bits is less than 1, one in the third digit is hundreds, NaN on one side infinitely many."""
    names = [f"Torch.op{n}.0.forward" for n in range(4)]
    outputs = [tensor(4 * (1 + 1e-7)), tensor(4.01), nan(), nan()]
    others = [tensor(4), tensor(4), tensor(4), nan()]
    target = {name: call([tensor()], [one]) for name, one in zip(names, outputs)}
    made = _both(tmp_path, target, {name: call([tensor()], [one]) for name, one in zip(names, others)}, _options())
    units = [float(made.units[made.target.index[name]]) for name in names]
    assert 0 < units[0] < 1 < 100 < units[1] < math.inf
    assert units[2] == math.inf
    assert math.isnan(units[3])
    assert made.units[made.target.index["Apis_Between_Modules.0"]] == math.inf


def test_integers_that_differ_are_far_apart_and_no_nan(tmp_path: Path) -> None:
    """Another batch gives integers that no rounding explains: many units, but not infinitely many, which a page shows as NaN."""
    name = "Tensor.roll.0.forward"
    ids = {side: tensor(norm, 9, 0, mean, dtype="torch.int64") for side, norm, mean in (("a", 40.0, 4.5), ("b", 41.0, 4.75))}
    made = _both(tmp_path, {name: call([ids["a"]], [ids["a"]])}, {name: call([ids["b"]], [ids["b"]])}, _options())
    assert 1e6 < made.units[made.target.index[name]] < math.inf


def test_suspect_is_where_the_difference_begins(tmp_path: Path) -> None:
    """Not the first record that differs in the file, nor the worst one, but the call that made it; the sentence names it."""
    names = [f"Torch.op{n}.0.forward" for n in range(4)]
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    golden = {name: call([tensor(values[n])], [tensor(values[n + 1])]) for n, name in enumerate(names)}
    off = [1.0, 2.0, 3.3, 9.9, 99.0]
    target = {name: call([tensor(off[n])], [tensor(off[n + 1])]) for n, name in enumerate(names)}
    made = _both(tmp_path, target, golden, _options())
    assert made.suspect == made.target.index[names[1]]
    assert names[1] in made.suspect_text


def test_equal_runs_have_no_suspect(tmp_path: Path) -> None:
    """Nothing is made up; and all of a comparison can go from one process to another."""
    records = {ADD: call([tensor()], [tensor()])}
    made = _both(tmp_path, records, records, _options(OLD))
    again: Comparison = pickle.loads(pickle.dumps(made))
    assert (again.suspect, again.suspect_text) == (None, "")
    assert again.index_811 == made.index_811
    assert again.metrics(again.target.index[ADD]) == made.metrics(made.target.index[ADD])


@pytest.mark.parametrize("side", ["target", "golden"])
def test_a_side_without_rows_is_compared(side: str, tmp_path: Path) -> None:
    """Calls without arguments or results have partners and no numbers."""
    full, bare = {ADD: call([tensor()], [tensor()])}, {ADD: call([], [])}
    target, golden = (bare, full) if side == "target" else (full, bare)
    made = _both(tmp_path, target, golden, _options())
    assert _partner(made, ADD) == ADD
    assert _index(made, ADD, False) == (None if side == "target" else 1)


def test_golden_micro_steps_follow_the_target(tmp_path: Path) -> None:
    """Nodes of one micro step are shown together on both sides."""
    names = ["Module.a.Net.forward.0", "Module.a.Net.backward.0", "Module.a.Net.forward.1", "Module.a.Net.backward.1"]
    records: dict[str, Record] = {
        name: call([tensor()], [tensor()]) if "forward" in name else {"input": [tensor()], "output": [tensor()]} for name in names
    }
    first: Graph = graph(tmp_path / "a", records)
    second: Graph = graph(tmp_path / "b", {name: records[name] for name in names[2:]})
    made = compare(first, second, _options())
    assert [made.golden.micro_steps[made.golden.index[name]] for name in names[2:]] == [1, 1]


def test_fuzzy_goes_before_a_layer_mapping_and_says_so(tmp_path: Path) -> None:
    """The existing tool leaves the mapping out without a word."""
    records = {ADD: call([tensor()], [tensor()])}
    made = _both(tmp_path, records, records, _options(fuzzy=True, layer_mapping=True))
    assert any("layer mapping" in problem for problem in made.target.problems)


def test_saved_tensors_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    """Their numbers are missing, which is no agreement; the node is compared by what else there is."""
    records = {ADD: call([tensor()], [tensor(data_name="Torch.add.0.forward.output.0.npy")])}
    first, second = (graph(tmp_path / name, records) for name in ("a", "b"))
    for one in (first, second):
        assert one.side is not None
        one.side.header["task"] = "tensor"
    made = compare(first, second, _options())
    assert made.task == "all"
    assert first.side is not None
    assert any("could not be read" in problem for problem in first.side.problems)


@pytest.mark.parametrize("value", [10**299, -(10**299), True, "text", None, [1, 2]])
def test_odd_numbers_in_a_dump_are_compared(value: Any, tmp_path: Path) -> None:
    """Statistics that no dump should have break nothing and make no numbers. Integers of more than 300 digits are refused by the reader."""
    odd = tensor(Max=value, Norm=value)
    made = _both(tmp_path, {ADD: call([number(value)], [odd])}, {ADD: call([number(3)], [tensor()])}, _options())
    made.metrics(made.target.index[ADD])
    assert _index(made, ADD, True) is not None
    assert _index(made, ADD, False) is not None


def test_dtypes_of_two_frameworks_are_what_they_mean(tmp_path: Path) -> None:
    """``Float32`` against ``torch.float32`` is no error, a shape with the same elements neither; by the rules of 26.2.0 both are."""
    cell, module, softmax = "Cell.net.Net.forward.0", "Module.net.Net.forward.0", "Functional.softmax.0.forward"
    more: dict[str, Any] = {"dtype": "Float32", "type": "mindspore.Tensor", "requires_grad": None}
    mine = {softmax: call([tensor(**more)], [tensor(3.0, shape=[16], **more)]), cell: call([tensor(**more)], [tensor(3.0, **more)])}
    theirs = {softmax: call([tensor()], [tensor(3.0)]), module: call([tensor()], [tensor(3.0)])}
    indices = []
    for match, mapping in (("structure", None), ("exact", True)):
        first = graph(tmp_path / match / "a", mine, {softmax: cell})
        second = graph(tmp_path / match / "b", theirs, {softmax: module})
        assert first.side is not None
        first.side.header["framework"] = "mindspore"
        made = compare(first, second, _options(match=match, layer_mapping=mapping))
        assert [_partner(made, name) for name in (cell, softmax)] == [module, softmax]
        indices.append([_index(made, name, False) for name in (cell, softmax)])
    assert indices == [[0, 0], [1, 1]]


def test_a_view_that_one_framework_alone_takes_needs_no_partner(tmp_path: Path) -> None:
    """It computes nothing; it is not among what only one run has."""
    cell, module, view, softmax = (
        "Cell.net.Net.forward.0",
        "Module.net.Net.forward.0",
        "Tensor.reshape.0.forward",
        "Functional.softmax.0.forward",
    )
    mine = {
        view: call([tensor()], [tensor(shape=[16])]),
        softmax: call([tensor(shape=[16])], [tensor(3.0)]),
        cell: call([tensor()], [tensor(3.0)]),
    }
    first = graph(tmp_path / "a", mine, {view: cell, softmax: cell})
    second = graph(tmp_path / "b", {softmax: call([tensor()], [tensor(3.0)]), module: call([tensor()], [tensor(3.0)])}, {softmax: module})
    assert first.side is not None
    first.side.header["framework"] = "mindspore"
    made = compare(first, second, _options(match="structure"))
    assert made.needless == ({made.target.index[view]}, set())
    assert made.partners[made.target.index[view]] == -1


def test_rows_that_are_told_stand_beside_others(tmp_path: Path) -> None:
    """Of a node of which a row is told only what is told stays, wherever its place says it belongs; other nodes keep theirs."""
    records = {
        "Torch.add.0.forward": call([tensor(1.0), tensor(2.0)], [tensor(3.0)]),
        "Torch.mul.0.forward": call([tensor(4.0)], [tensor(5.0)]),
    }
    first, second = (graph(tmp_path / side, records) for side in ("target", "golden"))
    partners = [second.index[name] for name in first.names]
    told = told_rows(first, pair_rows(first, second, partners), {0: 1, 1: 0})
    assert list(zip(told.target_rows.tolist(), told.golden_rows.tolist())) == [(0, 1), (1, 0), (3, 3), (4, 4)]
    assert [first.names[node] for node in told.nodes] == ["Torch.add.0.forward", "Torch.mul.0.forward"]
    assert told.starts.tolist() == [0, 2]
