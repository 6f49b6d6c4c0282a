"""Pieces of one tensor, stages and experts, cut in different ways and held several times: the whole is found, with its names, order and
numbers, whatever the order of the ranks and the schedule."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel import experts, merge_records, merge_statistics, parameter_owner, stages
from msprobe_engine.align.parallel.merge_statistics import Floats
from msprobe_engine.find.coverage import other_ways
from msprobe_engine.formats.dump.dump_table import DumpTable


def side_of(records: list[tuple[str, str | None]], header: dict[str, object] | None = None) -> DumpTable:
    """A rank with records that have no rows; (name, record around it)."""
    side = DumpTable(Path("dump.json"), header=header or {})
    side.ops = [name for name, _ in records]
    side.offsets = array("q", [0] * (len(records) + 1))
    side.__dict__["construct"], side.__dict__["stacks"] = dict(records), {name: [f"line of {name}"] for name, _ in records}
    return side


class Program:
    """What one rank records of its layers, in any order of passes."""

    def __init__(self, layers: range, local: bool) -> None:
        self.layers, self.start = layers, layers.start if local else 0
        self.records: list[tuple[str, str | None]] = []
        self.calls: dict[tuple[int, int], int] = {}

    def forward(self, micro: int) -> None:
        for layer in self.layers:
            module = f"Module.net.layers.{layer - self.start}.Block.forward.{micro}"
            number = self.calls[layer, micro] = len(self.calls)
            self.records += [(f"Functional.linear.{number}.forward", module), (module, f"Module.net.Net.forward.{micro}")]
        self.records.append((f"Module.net.Net.forward.{micro}", None))

    def backward(self, micro: int) -> None:
        for layer in reversed(self.layers):
            module = f"Module.net.layers.{layer - self.start}.Block.backward.{micro}"
            number = self.calls[layer, micro]
            self.records += [(f"Functional.linear.{number}.backward", module), (module, f"Module.net.Net.backward.{micro}")]
        self.records.append((f"Module.net.Net.backward.{micro}", None))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 4), st.booleans(), st.data())
def test_joined(sizes: list[int], micros: int, local: bool, data: st.DataObject) -> None:
    """Whatever order each stage runs its passes in, the whole has the names, the order and the tree of one process."""
    one = Program(range(sum(sizes)), False)
    for micro in range(micros):
        one.forward(micro)
        one.backward(micro)
    ranks, start = {}, 0
    for rank, size in enumerate(sizes):
        program = Program(range(start, start + size), local)
        warm = data.draw(st.integers(1, micros), label="forward passes before the first backward pass")
        for micro in range(micros + warm):
            if micro < micros:
                program.forward(micro)
            if micro - warm >= 0:
                program.backward(micro - warm)
        ranks[rank] = side_of(program.records, {"parallel": {"rank": {"pp": rank, "tp": 0}, "size": {"pp": len(sizes)}}})
        start += size
    problems: list[str] = []
    whole = stages.merge_pipelines(ranks, {0: side_of(one.records)}, problems, problems)
    assert list(whole) == [0]
    assert not problems
    found = whole[0]
    assert found.ops == [name for name, _ in one.records]
    assert {name: found.parent(name) for name in found.ops} == dict(one.records)
    origins = [merge_records.origin_of(found, op) for op in range(len(found.ops))]
    inner = [origin for origin in origins if origin is not None and ".Net." not in origin[1]]
    assert sorted(inner) == sorted((rank, name) for rank, side in ranks.items() for name in side.ops if ".Net." not in name)
    assert all(found.stacks[name] for name in found.ops)


@given(st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4))
def test_updates_in_turns(lists: list[list[int]]) -> None:
    """Every call comes once, and those of one rank in their order."""
    found: dict[int, list[int]] = {}
    for at, places in parameter_owner.in_turns(lists):
        found.setdefault(at, []).extend(places)
    assert found == {at: list(range(len(some))) for at, some in enumerate(lists) if some}


def test_loops_are_joined() -> None:
    """What one process does for all parameters is done for those of one rank after the other."""
    ranks = [["zero", *["norm"] * count, "sqrt", *["mul", "add"] * count] for count in (3, 4)]
    told = [ranks[at][n] for at, places in parameter_owner.in_turns(ranks) for n in places]
    assert told == [*["zero"] * 2, *["norm"] * 7, *["sqrt"] * 2, *["mul", "add"] * 7]


def statistics(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.array((values.max(), values.min(), values.mean(), np.sqrt((values**2).sum()))) if values.size else np.full(4, np.nan)


@given(st.integers(2, 30), st.integers(1, 4), st.data())
def test_tokens(count: int, width: int, data: st.DataObject) -> None:
    """Tokens in any groups, some empty, have the statistics of all of them; another number of tokens has none."""
    seed = data.draw(st.integers(0, 99))
    values = np.random.default_rng(seed).normal(size=(count, width))

    def dealt() -> list[tuple[list[int], np.ndarray]]:
        cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
        order = np.random.default_rng(len(cuts)).permutation(count)
        return [(list(part.shape), statistics(part)) for part in np.split(values[order], cuts)]

    ours, theirs = dealt(), dealt()
    found = experts.tokens(ours, theirs)
    if all(len({tuple(shape) for shape, _ in some}) == 1 for some in (ours, theirs)):
        assert found is None  # all of one size: pieces as any others
        return
    assert found is not None
    assert found.shape == [count, width]
    assert found.target is not None
    assert found.golden is not None
    np.testing.assert_allclose(found.target, statistics(values), atol=1e-9)
    np.testing.assert_allclose(found.golden, statistics(values), atol=1e-9)
    other = experts.tokens([*ours, ([count + 1, width], statistics(values))], theirs)
    assert other is not None
    assert other.target is None


@given(st.integers(2, 4), st.integers(1, 3), st.sampled_from((None, "tp", "cp")))
def test_experts_are_gathered(ranks: int, local: int, shared: str | None) -> None:
    """The first rank has the experts of all under the numbers of the whole, in the order of one process; the others have what is around.
    `shared`: the axis by which the ranks share the rest of a layer, beside experts that have a tensor parallel size of their own."""

    def records(count: int) -> list[tuple[str, str | None]]:
        found: list[tuple[str, str | None]] = []
        for direction in ("forward", "backward"):
            around = f"Module.mlp.Experts.{direction}.0"
            numbers = range(count) if direction == "forward" else reversed(range(count))
            for number in numbers:
                module = f"Module.mlp.local_experts.{number}.MLP.{direction}.0"
                found += [(f"Functional.gelu.{number}.{direction}", module), (module, around)]
            found.append((around, None))
        return found

    def place(rank: int) -> dict[str, int]:
        return {"ep": rank, "tp": 0} | ({shared: rank, "etp": 0} if shared else {})

    sides = {rank: side_of(records(local), {"parallel": {"rank": place(rank)}}) for rank in range(ranks)}
    found = experts.gather_experts(sides)
    assert found[0].ops == [name for name, _ in records(ranks * local)]
    assert {name: found[0].parent(name) for name in found[0].ops} == dict(records(ranks * local))
    for rank in range(1, ranks):
        assert found[rank].ops == ["Module.mlp.Experts.forward.0", "Module.mlp.Experts.backward.0"]
    last = merge_records.origin_of(found[0], found[0].ops.index(f"Module.mlp.local_experts.{ranks * local - 1}.MLP.forward.0"))
    assert last == (ranks - 1, f"Module.mlp.local_experts.{local - 1}.MLP.forward.0")


def test_pieces_of_one_expert_are_not_gathered() -> None:
    """Ranks of one tensor parallel group of the experts hold pieces of the same ones; two such groups hold the experts of a model."""
    around = [("Module.mlp.local_experts.0.MLP.forward.0", "Module.mlp.Experts.forward.0"), ("Module.mlp.Experts.forward.0", None)]
    places = {rank: {"ep": rank // 2, "tp": rank, "cp": 0, "pp": 0, "etp": rank % 2} for rank in range(4)}
    assert experts.groups({rank: side_of(around, {"parallel": {"rank": place}}) for rank, place in places.items()}) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("gathers", "apart"), [(True, True), (False, False)], ids=["another exchange", "one exchange lacks a collective"])
def test_tokens_brought_by_other_collectives(gathers: bool, apart: bool) -> None:
    """Calls around experts are no pairs where each side has a collective of its own there; those of other modules stay."""

    def tree(*collectives: str) -> Tree:
        around, layer = "Module.mlp.MoE.forward.0", "Module.net.Net.forward.0"
        records = [(f"Distributed.{name}.0.forward", around) for name in collectives]
        records += [("Torch.arange.0.forward", around), ("Module.mlp.experts.0.MLP.forward.0", around), (around, layer)]
        return Tree(side_of([*records, ("Torch.add.0.forward", layer), (layer, None)]))

    target, golden = tree("all_gather_into_tensor") if gathers else tree(), tree("all_to_all_single")
    records = [{name: op for op, name in enumerate(side.side.ops)} for side in (target, golden)]
    shared = [name for name in target.side.ops if name in records[1]]
    structure = Structure(
        [(records[0][name], records[1][name]) for name in shared],
        [op for name, op in records[0].items() if name not in shared],
        [op for name, op in records[1].items() if name not in shared],
        {},
    )
    found = other_ways.without_other_exchange(structure, target, golden)
    kept = [target.side.ops[op] for op, _ in found.pairs]
    assert kept == [name for name in shared if name != "Torch.arange.0.forward" or not apart]
    assert (records[0]["Torch.arange.0.forward"] in found.only_target) is apart


def stats(array: np.ndarray) -> list[float]:
    return [array.max(), array.min(), array.mean(), float(np.sqrt((array**2).sum()))]


def pieces(whole: np.ndarray, rows: int, columns: int, copies: int, neighbours: bool) -> tuple[Floats, list[int]]:
    """Statistics of the pieces of all ranks, and the shape of one."""
    parts = [column for row in np.split(whole, rows, 0) for column in np.split(row, columns, 1)]
    held = [part for part in parts for _ in range(copies)] if neighbours else parts * copies
    return np.array([stats(part) for part in held]), list(parts[0].shape)


@given(*(st.sampled_from([1, 2, 4]) for _ in range(4)), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 99))
def test_wholes_agree(a: int, b: int, c: int, d: int, copies: int, others: int, neighbours: bool, seed: int) -> None:
    """Two ways to cut one tensor give the same whole, with the number of pieces that make it."""
    whole = np.random.default_rng(seed).standard_normal((8, 8))
    target, shape = pieces(whole, a, b, copies, neighbours)
    golden, there = pieces(whole, c, d, others, neighbours)
    made = merge_statistics.together(target, shape, golden, there)
    if made is None or made.value is None or made.golden is None:
        # pieces that cannot be told from parts of a sum: no shape and no replica says how they lie together
        assert min(a, c) > 1 or min(b, d) > 1
        return
    np.testing.assert_allclose(made.value, made.golden, rtol=1e-9, atol=1e-9)
    assert np.prod(made.shape) == made.need * np.prod(shape) == made.other * np.prod(there)


@given(st.integers(0, 99), st.integers(1, 8), st.sampled_from([1, 2]))
def test_filled_up(seed: int, extra: int, cut: int) -> None:
    """Rows of zeros at the end of a table, cut or not, are no difference; another element is."""
    table = np.random.default_rng(seed).standard_normal((30, 4))
    longer = np.concatenate([table, np.zeros((extra + (extra + 30) % cut, 4))])
    ranks = np.array([stats(part) for part in np.split(longer, cut)])
    found = merge_statistics.filled_up(ranks, [len(longer) // cut, 4], np.array([stats(table)]), [30, 4])
    assert found is not None
    assert found.value is not None
    assert found.golden is not None
    np.testing.assert_array_equal(found.value, found.golden)
    assert found.shape == [30, 4]
    other = np.array([stats(part) for part in np.split(longer * 0.9, cut)])
    found = merge_statistics.filled_up(other, [len(longer) // cut, 4], np.array([stats(table)]), [30, 4])
    assert found is None or found.value is None or found.golden is None or merge_statistics.distance(found.value, found.golden) > 0.05


def test_parts_of_a_sum_are_no_pieces() -> None:
    """Parts on one side and replicas on the other: the side that is known stands, the other has no whole."""
    whole = np.random.default_rng(1).standard_normal((4, 4))
    part = np.random.default_rng(2).standard_normal((4, 4))
    parts = np.array([stats(part), stats(whole - part)])
    made = merge_statistics.together(parts, [4, 4], np.array([stats(whole)] * 2), [4, 4])
    assert made is not None
    assert made.value is None
    assert made.sure


def test_pieces_that_are_unlike() -> None:
    """Pieces are unlike where no two of them, in whatever order, have the same statistics; one alone is not."""
    pieces = np.array([[1.0, -1.0, 0.0, 3.0], [2.0, -1.0, 0.0, 4.0], [1.0, -1.0, 0.0, 2.0]])
    assert merge_statistics.are_unlike(pieces)
    assert not merge_statistics.are_unlike(pieces[:1])
    assert not merge_statistics.are_unlike(pieces[[0, 1, 2, 0]])
