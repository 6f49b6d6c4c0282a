"""Rows are matched by structure: one call more, another order of the backward pass, other names and other versions shift nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.match import Matching, match
from msprobe_engine.align.calls.structure import match_structure
from msprobe_engine.align.parallel.micro_batches import count_reordered
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.mapping_file import write_mapping
from msprobe_engine.measure.options import CompareOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=12)


def tensor(*shape: int, value: float = 1.0, dtype: str = "torch.float32") -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": dtype, "shape": list(shape), "Max": value, "Min": -value, "Mean": 0.0, "Norm": value}


def side(directory: Path, records: dict[str, Any], construct: dict[str, str | None] | None = None, framework: str = "pytorch") -> DumpTable:
    directory.mkdir(parents=True, exist_ok=True)
    document = {"task": "statistics", "level": "mix", "framework": framework, "dump_data_dir": None, "data": records}
    (directory / "dump.json").write_text(json.dumps(document))
    (directory / "construct.json").write_text(json.dumps(construct or {}))
    return read_side(directory / "dump.json")


def call(*shapes: int, out: int = 4) -> dict[str, Any]:
    return {"input_args": [tensor(n) for n in shapes], "input_kwargs": {}, "output": [tensor(out)]}


def calls(sequence: list[tuple[str, int]], backward: list[int] | None = None) -> dict[str, Any]:
    """Records of function calls (name, size of the input), then of their backward calls in the order given."""
    counts: dict[str, int] = {}
    names = []
    for name, _ in sequence:
        names.append(f"Functional.{name}.{counts.get(name, 0)}")
        counts[name] = counts.get(name, 0) + 1
    records = {f"{name}.forward": call(size, out=size) for name, (_, size) in zip(names, sequence)}
    for at in backward or ():
        size = sequence[at][1]
        records[f"{names[at]}.backward"] = {"input": [tensor(size)], "output": [tensor(size)]}
    return records


def names(a: DumpTable, b: DumpTable, found: Matching) -> list[tuple[str, str]]:
    return [(a.name[i] if i >= 0 else "", b.name[j] if j >= 0 else "") for i, j in zip(found.target, found.golden)]


def whole(a: DumpTable, b: DumpTable, found: Matching) -> None:
    """Every row of both sides is in the table once."""
    assert sorted(i for i in found.target.tolist() if i >= 0) == list(range(len(a)))
    assert sorted(j for j in found.golden.tolist() if j >= 0) == list(range(len(b)))
    assert not ((found.target < 0) & (found.golden < 0)).any()


@given(CALLS, CALLS)
def test_nothing_is_lost(tmp_path_factory: Any, first: list[tuple[str, int]], second: list[tuple[str, int]]) -> None:
    """Each row of either side stands in the table once, whatever the other side is; rows of the target keep their order."""
    path = tmp_path_factory.mktemp("pair")
    a, b = side(path / "a", calls(first)), side(path / "b", calls(second))
    found = match(a, b, CompareOptions())
    whole(a, b, found)
    order = [i for i in found.target.tolist() if i >= 0]
    assert order == sorted(order)
    same = match(a, a, CompareOptions())
    assert (same.target == same.golden).all()


def test_one_call_more(tmp_path: Path) -> None:
    """A call that only one side has is unmatched; those behind it keep their partners though their numbers differ."""
    plain = [("a", 2), ("b", 3), ("a", 2), ("b", 3)]
    a, b = side(tmp_path / "a", calls([*plain[:2], ("b", 3), ("c", 1), *plain[2:]])), side(tmp_path / "b", calls(plain))
    found = match(a, b, CompareOptions())
    whole(a, b, found)
    assert ("Functional.a.1.forward.input.0", "Functional.a.1.forward.input.0") in names(a, b, found)
    assert [x for x, y in names(a, b, found) if not y and ".output" in x] == [
        "Functional.b.1.forward.output.0",
        "Functional.c.0.forward.output.0",
    ]
    assert names(a, b, found)[-1] == ("Functional.b.2.forward.output.0", "Functional.b.1.forward.output.0")


def test_half_of_many_calls_lack_results(tmp_path: Path) -> None:
    """Of 2,000 calls of one function half have no result on one side: partners are looked for among all of them at once (each with each by
    itself took more than a minute)."""

    def calls_of_f(given: int) -> dict[str, Any]:
        return {
            f"Torch.f.{n}.forward": {
                "input_args": [tensor(4, value=n)],
                "input_kwargs": {},
                "output": [None if n % given else tensor(4, value=n)],
            }
            for n in range(1, 2001)
        }

    a, b = side(tmp_path / "a", calls_of_f(2)), side(tmp_path / "b", calls_of_f(1))
    start = time.process_time()
    found = match_structure(a, b)
    assert time.process_time() - start < 20
    assert len(found.pairs) >= 1000


def test_calls_of_one_shape_between_calls_of_one_side(tmp_path: Path) -> None:
    """Of matrices that are all of one size, the numbers say which products belong together where the calls around them do not (an iteration
    that one side writes with a fused product)."""

    def product(value: float) -> dict[str, Any]:
        return {"input_args": [tensor(4, value=value)], "input_kwargs": {}, "output": [tensor(4, value=7 * value)]}

    a, b = (
        side(tmp_path / name, {f"Torch.{function}.{n}.forward": product(value) for n, (function, value) in enumerate(sequence)})
        for name, sequence in (
            ("a", [("f", 1.0), ("g", 1.6), ("f", 2.5), ("g", 4.0), ("f", 6.3)]),
            ("b", [("f", 1.0), ("f", 1.6), ("h", 1.7), ("f", 2.501), ("f", 4.0), ("h", 4.1), ("f", 6.31), ("f", 10.0)]),
        )
    )
    assert match_structure(a, b).pairs == [(0, 0), (2, 3), (4, 6)]


@given(st.permutations(range(6)))
def test_backward_in_another_order(tmp_path_factory: Any, order: list[int]) -> None:
    """Backward calls belong to the partners of their forward calls, in whatever order autograd ran them."""
    path = tmp_path_factory.mktemp("pair")
    sequence = [("a", 2)] * 6
    a, b = side(path / "a", calls(sequence, order)), side(path / "b", calls(sequence, list(range(6))))
    assert all(a.ops[i] == b.ops[j] for i, j in match_structure(a, b).pairs)
    assert len(match_structure(a, b).pairs) == 12


def model(prefix: str, layers: list[str], around: str | None = None) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Records and construct.json of a model of linear layers, perhaps inside of a wrapper."""
    records: dict[str, Any] = {}
    construct: dict[str, str | None] = {}
    top = f"Module.{prefix}Net.forward.0"
    for n, layer in enumerate(layers):
        module = f"Module.{prefix}{layer}.Linear.forward.0"
        inner = f"Functional.linear.{n}.forward"
        records[inner], records[module] = call(4, 4), call(4)
        construct |= {inner: module, module: top}
    records[top] = call(4)
    construct[top] = None
    if around:
        records[around], construct[top], construct[around] = call(4), around, None
    return records, construct


def test_renamed_layers(tmp_path: Path) -> None:
    """Modules of another name with the same insides belong together; the proposal, saved, is read as a cell mapping and a data mapping."""
    a, b = side(tmp_path / "a", *model("net.", ["fc1", "fc2"])), side(tmp_path / "b", *model("net.", ["up", "down"]))
    found = match(a, b, CompareOptions())
    assert (found.golden >= 0).all()
    assert found.renamed == {"net.fc1.Linear": "net.up.Linear", "net.fc2.Linear": "net.down.Linear"}
    file = tmp_path / "mapping.yaml"
    write_mapping(file, found.renamed)
    for options in (CompareOptions(match="name", cell_mapping=str(file)), CompareOptions(match="name", data_mapping=file)):
        assert (match(a, b, options).golden == found.golden).all()


def test_wrapper_on_one_side(tmp_path: Path) -> None:
    """A module around all others, as DistributedDataParallel has one, is unmatched, and all that is inside of it is matched."""
    a = side(tmp_path / "a", *model("module.", ["fc1", "fc2", "fc3"]))
    records, construct = model("", ["fc1", "fc2", "fc3"])
    del records["Module.Net.forward.0"]
    b = side(tmp_path / "b", records, {key: None if value == "Module.Net.forward.0" else value for key, value in construct.items()})
    for x, y in ((a, b), (b, a)):
        found = match_structure(x, y)
        assert [x.ops[i] for i in found.only_target] + [y.ops[j] for j in found.only_golden] == ["Module.module.Net.forward.0"]
        assert all(x.ops[i].replace("module.", "") == y.ops[j].replace("module.", "") for i, j in found.pairs)


def test_one_layer_more(tmp_path: Path) -> None:
    """A layer more in the middle leaves the others with partners."""
    a, b = side(tmp_path / "a", *model("", ["0", "1", "2"])), side(tmp_path / "b", *model("", ["0", "1"]))
    found = match(a, b, CompareOptions())
    whole(a, b, found)
    assert (found.golden >= 0).sum() == len(b)


def test_versions_mixed() -> None:
    """A dump of 8.1.1 against one of 26.2.0: parameter gradients belong together with and without number, and stand behind the backward
    call of their module."""
    a = read_side(next((FIXTURES / "8.1.1/L0").glob("step0/*/dump.json")))
    b = read_side(next((FIXTURES / "26.2.0/L0").glob("step0/*/dump.json")))
    found = match(a, b, CompareOptions())
    whole(a, b, found)
    assert (found.golden >= 0).all()
    assert any(a.name[i] != b.name[j] and "parameters_grad" in a.name[i] for i, j in zip(found.target, found.golden))
    order = [a.ops[op] for op, _ in found.ops.tolist()]
    gradients = [at for at, name in enumerate(order) if "parameters_grad" in name]
    assert gradients
    for at in gradients:
        module = order[at].split(".parameters_grad")[0]
        assert order.index(f"{module}.backward.0") < at


def test_argument_by_name(tmp_path: Path) -> None:
    """An argument given by position on one side and by name on the other is the same argument, and the row says so."""
    a = side(tmp_path / "a", {"Functional.f.0.forward": call(4, 2)})
    b = side(tmp_path / "b", {"Functional.f.0.forward": {**call(4), "input_kwargs": {"weight": tensor(2)}}})
    found = match(a, b, CompareOptions())
    assert names(a, b, found)[1] == ("Functional.f.0.forward.input.1", "Functional.f.0.forward.input.weight")
    assert "by name" in found.messages[1]


def test_who_made_a_tensor(tmp_path: Path) -> None:
    """It has the numbers and the dimensions of what was given out, turned or not: ``x.mT`` is no call. Another number is another tensor."""
    taken = {"same": ((8, 4), 2.0), "turned": ((4, 8), 2.0), "other": ((4, 8), 3.0), "longer": ((32,), 2.0)}
    records: dict[str, Any] = {"Torch.matmul.0.forward": {"input_args": [], "input_kwargs": {}, "output": [tensor(8, 4, value=2.0)]}}
    for at, (shape, value) in enumerate(taken.values()):
        records[f"Tensor.to.{at}.forward"] = {"input_args": [tensor(*shape, value=value)], "input_kwargs": {}, "output": []}
    tree = Tree(side(tmp_path, records))
    made = {name: tree.producers.get(tree.tensors_in(at + 1)[0]) for at, name in enumerate(taken)}
    assert made == {"same": 0, "turned": 0, "other": None, "longer": None}


def test_constants_belong_together_by_their_numbers(tmp_path: Path) -> None:
    """One side makes one of several of one shape (another micro batch makes only some of them again)."""

    def records(*values: float) -> dict[str, Any]:
        made = {"input_args": [], "input_kwargs": {}}
        return {f"Torch.tensor.{k}.forward": {**made, "output": [tensor(3, value=value)]} for k, value in enumerate(values)}

    a, b = side(tmp_path / "a", records(2.0, 3.0)), side(tmp_path / "b", records(1.0, 2.0, 4.0, 3.0))
    found = match_structure(a, b).pairs
    assert found == [(0, 1), (1, 3)]


def test_micro_batches_of_pictures_in_another_order(tmp_path: Path) -> None:
    """A model that is given no integers: the numbers that it takes in say that the batches are the same, in another order."""

    def records(*norms: float) -> dict[str, Any]:
        made = ({"input_args": [tensor(2, 3, value=norm)], "input_kwargs": {}, "output": [tensor(2)]} for norm in norms)
        return {f"Module.vit.ViT.forward.{k}": call_of_module for k, call_of_module in enumerate(made)}

    golden = {0: side(tmp_path / "golden", records(1.0, 2.0))}
    counts = [count_reordered({0: side(tmp_path / str(norms), records(*norms))}, golden) for norms in ((2.0, 1.0), (1.0, 2.0), (2.0, 3.0))]
    assert counts == [2, 0, 0]


def test_a_module_that_one_side_calls_part_by_part(tmp_path: Path) -> None:
    """Its calls are no partners, nor are those of functions inside; those of one shape on both sides are."""

    def records(module: str, *sizes: int) -> tuple[dict[str, Any], dict[str, str | None]]:
        data: dict[str, Any] = {}
        block = "Module.block.Block.forward.0"
        inside: dict[str, str | None] = {block: None}
        for k, size in enumerate(sizes):
            name = f"Module.{module}.Act.forward.{k}"
            data |= {f"Functional.silu.{k}.forward": call(size, out=size), name: call(size, out=size)}
            inside |= {f"Functional.silu.{k}.forward": name, name: block}
        return data | {block: call(12)}, inside

    whole, parts = side(tmp_path / "a", *records("act", 12)), side(tmp_path / "b", *records("act", 5, 7))
    assert match_structure(whole, parts).pairs == [(2, 4)]
    assert len(match_structure(whole, side(tmp_path / "c", *records("act", 12, 12))).pairs) == 3


def test_a_module_of_another_class_at_the_same_place(tmp_path: Path) -> None:
    """A norm that was replaced by a fused one belongs to it, call by call, and what is called in both does, too; a module that takes in
    tensors of another shape does not."""
    sides = []
    for norm, classes in (("target", ("FusedNorm", "Wide")), ("golden", ("Norm", "Linear"))):
        records: dict[str, Any] = {}
        construct: dict[str, str | None] = {}
        for turn in range(2):
            for place, kind, size in (("norm", classes[0], 4), ("up", classes[1], 4 if norm == "golden" else 8)):
                module = f"Module.{place}.{kind}.forward.{turn}"
                inner = f"Functional.{place}.{turn}.forward"
                records[inner], records[module] = call(size), call(size)
                construct |= {inner: module, module: None}
        sides.append(side(tmp_path / norm, records, construct))
    found = match_structure(*sides)
    paired = {(sides[0].ops[i], sides[1].ops[j]) for i, j in found.pairs}
    for turn in range(2):
        assert (f"Module.norm.FusedNorm.forward.{turn}", f"Module.norm.Norm.forward.{turn}") in paired
        assert (f"Functional.norm.{turn}.forward",) * 2 in paired
    assert not any(target.startswith("Module.up") for target, _ in paired)


def test_calls_of_one_class_at_the_same_place_that_do_not_belong_together(tmp_path: Path) -> None:
    """What the backward pass makes again is no partner of a call that the other side makes on the way forward."""
    sides = []
    for name, again in (("target", True), ("golden", False)):
        records = {f"Module.norm.Norm.forward.{turn}": call(4) for turn in range(2)}
        if again:
            records["Module.norm.Norm.forward.1"] |= {"is_recompute": True}
        sides.append(side(tmp_path / name, records))
    assert match_structure(*sides).pairs == [(0, 0)]


def test_calls_of_one_number_in_modules_at_other_places(tmp_path: Path) -> None:
    """Calls of functions with one name and the same shapes, inside of calls of two modules that have no partner, do not belong together."""

    def called(directory: Path, paths: list[str]) -> DumpTable:
        records: dict[str, Any] = {}
        construct: dict[str, str | None] = {}
        for number, path in enumerate(paths):
            function, module = f"Functional.attend.{number}.forward", f"Module.{path}.Block.forward.{paths[:number].count(path)}"
            records |= {function: call(4), module: call(4)}
            construct |= {function: module, module: None}
        for path in ("one", "two"):
            records[f"Module.{path}.Block.backward.0"], construct[f"Module.{path}.Block.backward.0"] = call(4), None
        return side(directory, records, construct)

    target, golden = called(tmp_path / "target", ["two", "one"]), called(tmp_path / "golden", ["two", "two"])
    structure = match_structure(target, golden)
    assert [target.ops[i] for i in structure.only_target] == ["Functional.attend.1.forward", "Module.one.Block.forward.0"]
    assert [golden.ops[j] for j in structure.only_golden] == ["Functional.attend.1.forward", "Module.two.Block.forward.1"]
