"""Runs of other parallel layouts beside one process: the layout is no difference, a defect is, and calibration says what round-off is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_dumps import dump as dump_of_calls
from driver_dumps import tensor
from fault_cases import ACCUMULATED, CASES, DP, HARMLESS, SINGLE, TP, Case
from fault_dumps import directory_name, dump
from fault_model import Shape
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.structure import Matcher
from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.cli.main import main
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find import config_and_checkpoint
from msprobe_engine.find.collectives import replicas
from msprobe_engine.find.difference import layouts
from msprobe_engine.find.difference.noise.carried import CarriedNoise
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.formats.dump.replicas.shared_columns import own_columns

_ROWS = ("forward.0.input.0", "forward.0.parameters.weight", "parameters_grad.0.weight")
LAYOUTS = {"tp": TP, "dp": DP, "micro": ACCUMULATED}
DEFECTS = ("missing sum of gradients before a column-parallel product", "a gradient not averaged over data-parallel ranks")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    dump(path / "golden", SINGLE, lambda _: None)
    return path


def right(dumps: Path, layout: str) -> Path:
    dump(dumps / layout, LAYOUTS[layout], lambda _: None)
    return dumps / layout


@pytest.mark.slow
def test_gradients_of_16_bits_averaged_over_ranks(tmp_path: Path) -> None:
    """An average that rounds each element anew is no difference, also where the norm of the gradient hardly shows it and what is computed
    of it in float32 (the squares of a norm that clips) does."""
    for name, shape in (("dp", DP), ("golden", SINGLE)):
        dump(tmp_path / name, replace(shape, dtype=torch.bfloat16), lambda _: None)
    found = diagnose(tmp_path / "dp", tmp_path / "golden")
    assert found.finding == "none", found.headline()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_no_difference(layout: str, dumps: Path) -> None:
    """Pieces are put together, the factor of half batches is taken out, and nothing is found, whichever of the two is called golden."""
    found = diagnose(right(dumps, layout), dumps / "golden")
    assert found.finding == "none", found.headline()
    (line,) = [line for line in found.evidence if "different layouts" in line]
    assert int(re.sub(r"\D", "", line.split("layouts: ")[1].split(" tensors")[0])) > 400
    assert any("taken out" in line for line in found.evidence) == (layout == "dp")
    turned = diagnose(dumps / "golden", right(dumps, layout))
    assert turned.finding == "none", turned.headline()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in DEFECTS], ids=lambda case: directory_name(case.name))
@pytest.mark.fast_cells("missing-sum-of-gradients-before-a-column-parallel-product")
def test_defect_beside_one_process(case: Case, dumps: Path) -> None:
    """A sum over ranks that is missing is found from the numbers, against a run that has no such sum."""
    path = dumps / directory_name(case.name)
    dump(path, case.shape, case.plant)
    first = diagnose(path, dumps / "golden").first_suspect
    assert first is not None
    assert any(re.fullmatch(pattern, first.record) for pattern in case.truth), first
    assert first.step == case.step


@pytest.mark.slow
def test_calibration(dumps: Path, tmp_path: Path) -> None:
    """With what one rounding unit moves each record, noise of that size is none, and a defect is counted in it."""
    plants = {case.name: case.plant for case in (*CASES, *HARMLESS)}
    for name in ("weights off by one rounding unit", "products summed in another order", "softmax in bf16"):
        dump(tmp_path / directory_name(name), Shape(), plants[name])
    moved = [tmp_path / "weights-off-by-one-rounding-unit"]
    quiet = diagnose(tmp_path / "products-summed-in-another-order", dumps / "golden", calibration=moved)
    assert quiet.finding == "none", quiet.headline()
    assert any(line.startswith("The largest difference is ") for line in quiet.evidence)
    first = diagnose(tmp_path / "softmax-in-bf16", dumps / "golden", calibration=moved).first_suspect
    assert first is not None
    assert re.fullmatch(r"Torch\.softmax\.1\.forward|Tensor\.(bfloat16|float)\..*", first.record)
    with pytest.raises(UsageError, match="golden"):
        diagnose(dumps / "golden", calibration=moved)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_merged(values: list[list[float]]) -> None:
    """Statistics of pieces of one size make those of the whole."""
    pieces = np.array(values)
    stats = np.stack([pieces.max(1), pieces.min(1), pieces.mean(1), np.sqrt((pieces**2).sum(1))], 1)
    whole = merge_statistics.merge_pieces(stats)
    expected = (pieces.max(), pieces.min(), pieces.mean(), np.sqrt((pieces**2).sum()))
    np.testing.assert_allclose(whole, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("digits", [("dp", "tp", "micro"), ("tp", "dp", "micro"), ("dp", "micro", "tp")])
def test_pieces_and_replicas_in_any_order(digits: tuple[str, ...]) -> None:
    """Tensor-parallel ranks of data-parallel ones that each have several micro batches: the pieces of one replica are found."""
    parts = np.array([[0.3, -0.2, 0.01, 3.0], [0.2, -0.4, 0.03, 4.0]])
    places = [dict(zip(digits, (n >> 2, n >> 1 & 1, n & 1))) for n in range(8)]
    whole = merge_statistics.merge_replicas(np.stack([parts[place["tp"]] for place in places]), 2)
    assert whole is not None
    np.testing.assert_allclose(whole, (0.3, -0.4, 0.02, 5.0))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_whole_shape(shape: list[int], data: st.DataObject) -> None:
    """A tensor cut along any dimensions is a piece of it, and so many pieces make the whole."""
    cuts = [data.draw(st.integers(1, 3)) for _ in shape]
    whole = [size * n for size, n in zip(shape, cuts)]
    assert merge_statistics.whole_shape(shape, whole) == merge_statistics.whole_shape(whole, shape) == whole
    assert merge_statistics.count_pieces(shape, whole) == int(np.prod(cuts))
    assert merge_statistics.whole_shape([2, 3], [3, 2]) is None


def test_padded_vocabulary() -> None:
    """A vocabulary filled up to a round number is not taken for a cut one."""
    assert merge_statistics.whole_shape([33, 8], [64, 8]) is None
    assert merge_statistics.is_padded([33, 8], [64, 8], 2)
    assert not merge_statistics.is_padded([33, 8], [64, 9], 2)


def _row_of(values: np.ndarray, dtype: str = "torch.bfloat16", trained: bool = True) -> dict[str, object]:
    """A tensor of 16 columns, as a dump has it."""
    four = {"Max": values.max(), "Min": values.min(), "Mean": values.mean(), "Norm": np.linalg.norm(values)}
    known = {"type": "torch.Tensor", "dtype": dtype, "shape": [values.size // 16, 16], "requires_grad": trained}
    return {**known, **{key: float(value) for key, value in four.items()}}


def _write_rank(path: Path, rank: int, level: str, data: dict[str, object]) -> None:
    place = path / "step0" / f"rank{rank}"
    place.mkdir(parents=True)
    document = {"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None, "data": data}
    (place / "dump.json").write_text(json.dumps(document))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
    (place / "stack.json").write_text("{}")


def _micro_batches(
    path: Path,
    ranks: int,
    micro: int = 4,
    off: float = 1.0,
    wrapper: str = "",
    rate: float = 1e-3,
    decay: float = 1.0,
    unsummed: bool = False,
    adds: bool = False,
    fetches: int = 0,
    positions: float = 0.0,
    late: bool = False,
    backwards: bool = False,
) -> Path:
    """A dump of micro batches over the ranks, whose gradients are divided by how many each rank has, and of an update.

    Args:
        path: of the dump.
        ranks: that have a part of the micro batches each.
        micro: batches that one and the same step is cut into, at most four.
        off: the gradient of one weight is times this.
        wrapper: before the names of modules.
        rate: of the update.
        decay: what weights are multiplied by before it; 1.0: no such call.
        unsummed: each rank updates one weight by the gradient of its own micro batches.
        adds: a gradient is that of all micro batches so far, of one rank.
        fetches: calls that fetch the next micro batch, between two of them and behind the update.
        positions: a module gives the same to all rows of a batch, and its gradient is times this; 0.0: there is none.
        late: gradients of weights are there with the last micro batch alone.
        backwards: the last micro batch comes first.
    """
    number = np.random.default_rng(0)
    made = {(micro, name): number.normal(size=256) for micro in range(4) for name in "abcdef"}
    weights = {name: number.normal(size=256) for name in "abcdef"}

    for rank in range(ranks):
        data: dict[str, object] = {}

        def fetch(data: dict[str, object] = data) -> None:
            for call in range(fetches):
                data[f"Torch.stack.{len(data)}.forward"] = {
                    "input_args": [],
                    "input_kwargs": {},
                    "output": [_row_of(np.arange(16.0) + call)],
                }

        firsts = range(rank * 4 // micro, 4, ranks * 4 // micro)
        for call, first in enumerate(reversed(firsts) if backwards else firsts):
            part = range(first, first + 4 // micro)
            if call:
                fetch()
            if positions:
                tokens = _row_of(np.concatenate([np.arange(16.0) + 16 * one for one in part]), "torch.int64", False)
                known = {"input_args": [tokens], "input_kwargs": {}, "output": [_row_of(weights["a"])]}
                data[f"Module.{wrapper}p.Positions.forward.{call}"] = known
            for name in "abcdef":
                x, weight = _row_of(np.concatenate([made[one, name] for one in part])), _row_of(weights[name], "torch.float32")
                known = {"input_args": [x], "input_kwargs": {}, "output": [x], "parameters": {"weight": weight}}
                data[f"Module.{wrapper}{name}.Linear.forward.{call}"] = known
            for name in reversed("abcdef"):
                gradient = sum(made[one, name] for one in (range(part.stop) if adds else part)) * ranks
                x = _row_of(np.concatenate([made[one, name] * ranks for one in part]))
                data[f"Module.{wrapper}{name}.Linear.backward.{call}"] = {"input": [x], "output": [x]}
                own = _row_of(gradient * (off if name == "c" else 1.0), "torch.float32")
                if not late or part.stop == 4:
                    data[f"Module.{wrapper}{name}.Linear.parameters_grad.{0 if late else call}"] = {"weight": [own]}
            if positions:
                x = _row_of(sum(made[one, "a"] for one in part) * ranks * positions)
                data[f"Module.{wrapper}p.Positions.backward.{call}"] = {"input": [x], "output": []}
        for call, name in enumerate("abcdef"):
            own = range(rank * 4 // ranks, (rank + 1) * 4 // ranks) if unsummed and name == "c" else range(4)
            whole, weight = sum(made[micro, name] for micro in own), weights[name]
            if decay != 1.0:
                taken = [_row_of(weight, "torch.float32"), {"type": "float", "value": decay}]
                weight = weight * decay
                given = [_row_of(weight, "torch.float32")]
                data[f"Tensor.mul_.{call}.forward"] = {"input_args": taken, "input_kwargs": {}, "output": given}
            scale = {"value": {"type": "float", "value": -rate}}
            taken = [_row_of(weight, "torch.float32"), _row_of(whole, "torch.float32", False), _row_of(whole**2, "torch.float32", False)]
            given = [_row_of(weight - rate / whole, "torch.float32")]
            data[f"Tensor.addcdiv_.{call}.forward"] = {"input_args": taken, "input_kwargs": scale, "output": given}
        fetch()
        _write_rank(path, rank, "mix", data)
    return path


@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.5, "Module.c.Linear.parameters_grad.0")], ids=["right", "a gradient"])
def test_a_batch_that_is_fetched_behind_the_update_belongs_to_no_micro_batch(off: float, record: str | None, tmp_path: Path) -> None:
    """Accelerate fetches the next batch early: behind the last micro batch its calls follow the update, and are no partners of those
    between two micro batches, however many they are."""
    run = _micro_batches(tmp_path / "run", 1, 4, off=off, fetches=40)
    found = diagnose(run, _micro_batches(tmp_path / "golden", 1, 1, fetches=40))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()


@pytest.mark.parametrize("micro", [(4, 4), (2, 1), (4, 1)], ids=["as many", "of the whole batch", "two on each rank"])
@pytest.mark.parametrize(
    ("fault", "record"),
    [
        ({}, None),
        ({"off": 1.5}, "Module.module.c.Linear.parameters_grad.0"),
        ({"rate": 1.1e-3}, "Tensor.addcdiv_.0.forward"),
        ({"decay": 0.9999}, "Tensor.mul_.0.forward"),
        ({"unsummed": True}, "Tensor.addcdiv_.2.forward"),
    ],
    ids=["right", "a gradient", "the learning rate", "the decay", "a gradient that is not summed"],
)
def test_gradients_and_updates_of_two_ranks(micro: tuple[int, int], fault: dict[str, float], record: str | None, tmp_path: Path) -> None:
    """Gradients that each micro batch has by itself are held against those of the same micro batches on other ranks, and the sum of their
    means against that of a whole batch; calls of the update belong to the same parameter with a wrapper around the model."""
    run = _micro_batches(tmp_path / "run", 2, micro[0], wrapper="module.", **fault)
    found = diagnose(run, _micro_batches(tmp_path / "golden", 1, micro[1]))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()
    assert (found.finding == "none") == (record is None)


def test_a_table_with_columns_of_its_own_is_no_mapped_one(tmp_path: Path) -> None:
    """Runs of two layouts without a mapping are not told that theirs was lost."""
    table = read_side(_micro_batches(tmp_path, 1, 1) / "step0" / "rank0" / "dump.json")
    assert table.aliases is table.ops
    own_columns(table)
    assert table.aliases is table.ops


def test_the_plan_says_of_each_tensor_how_it_was_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line per row, from how many pieces of either run, whichever of the two is golden; the command writes it beside its page, and
    writes none for one layout."""
    run, golden = _micro_batches(tmp_path / "run", 2, 2, wrapper="module."), _micro_batches(tmp_path / "golden", 1, 1)
    plan = {line.target: line for line in diagnose(run, golden).layout}
    turned = {line.golden: line for line in diagnose(golden, run).layout}
    assert plan.keys() == turned.keys()
    for name, line in plan.items():
        other = turned[name]
        assert (line.golden, line.what, line.shape) == (other.target, other.what, other.shape)
        assert (line.target_pieces, line.golden_pieces) == (other.golden_pieces, other.target_pieces)
    x, weight, gradient = (plan[f"Module.module.a.Linear.{part}"] for part in _ROWS)
    assert (x.what, x.target_pieces, x.golden_pieces, x.shape) == ("put together from pieces", 2, 1, "64x16")
    assert (weight.what, weight.target_pieces, weight.shape) == ("the same on all ranks", 1, "16x16")
    assert gradient.what == "mean of shares"
    assert main(["diagnose", str(run), str(golden), "-o", str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "layout_plan.csv").read_text().splitlines()
    assert written[0].split(",") == list(x._fields)
    assert len(written) == 1 + len(plan)
    assert "layout_plan.csv" in capsys.readouterr().out
    assert main(["diagnose", str(golden), str(golden), "-o", str(tmp_path / "one")]) == 0
    assert not (tmp_path / "one" / "layout_plan.csv").exists()


@pytest.mark.parametrize("cut", [(2, 2), (1, 4)], ids=["by two ranks", "into micro batches"])
@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.5, "p.Positions.backward.0")], ids=["right", "a gradient"])
def test_the_gradient_of_what_all_rows_of_a_batch_share(cut: tuple[int, int], off: float, record: str | None, tmp_path: Path) -> None:
    """Positions that are looked up once for all rows, whose number is in no shape: each part of the batch has its share of the gradient."""
    run = _micro_batches(tmp_path / "run", *cut, positions=off)
    found = diagnose(run, _micro_batches(tmp_path / "golden", 1, 1, positions=1.0))
    first = found.first_suspect
    assert (first and first.record.removeprefix("Module.")) == record, found.text()


@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.5, "Module.c.Linear.parameters_grad.0")], ids=["right", "a gradient"])
def test_micro_batches_in_another_order(off: float, record: str | None, tmp_path: Path) -> None:
    """What they make together is the same; the order is a note."""
    run = _micro_batches(tmp_path / "run", 1, 4, positions=1.0, off=off, backwards=True)
    found = diagnose(run, _micro_batches(tmp_path / "golden", 1, 4, positions=1.0))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()
    assert any("come in another order" in line for line in found.evidence) == (record is None)


@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.5, "Functional.linear.0.forward")], ids=["right", "a product"])
def test_micro_batches_in_another_order_by_functions_alone(off: float, record: str | None, tmp_path: Path) -> None:
    """Level L1: the integers that a function takes in tell."""
    number = np.random.default_rng(0)
    made = {(micro, part): number.normal(size=256) for micro in range(3) for part in "xyg"}
    for name, order in (("run", (2, 1, 0)), ("golden", (0, 1, 2))):
        data: dict[str, object] = {}
        for call, micro in enumerate(order):
            x, y, gradient = (_row_of(made[micro, part]) for part in "xyg")
            y = _row_of(made[micro, "y"] * off) if name == "run" and micro == 1 else y
            tokens = _row_of(np.arange(16.0) + 16 * micro, "torch.int64", False)
            data[f"Functional.embedding.{call}.forward"] = {"input_args": [tokens], "input_kwargs": {}, "output": [x]}
            data[f"Functional.linear.{call}.forward"] = {"input_args": [x], "input_kwargs": {}, "output": [y]}
            data[f"Functional.linear.{call}.backward"] = {"input": [gradient], "output": [gradient]}
        _write_rank(tmp_path / name, 0, "L1", data)
    found = diagnose(tmp_path / "run", tmp_path / "golden")
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()
    assert any("come in another order" in line for line in found.evidence) == (record is None)


@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.02, "Module.c.Linear.parameters_grad.0")])
def test_a_gradient_that_is_summed_over_micro_batches_is_no_share(off: float, record: str | None, tmp_path: Path) -> None:
    """The last micro batch leaves the gradient of the whole step: where those of other weights are right, one that is not is a fault, and
    no share of a sum whose mean happens to be near."""
    found = diagnose(_micro_batches(tmp_path / "run", 1, off=off, adds=True), _micro_batches(tmp_path / "golden", 1, 1))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()


@pytest.mark.parametrize(("off", "record"), [(1.0, None), (1.02, "Module.c.Linear.parameters_grad.0")])
def test_gradients_that_come_with_the_last_micro_batch(off: float, record: str | None, tmp_path: Path) -> None:
    """FSDP2 that sums up over ranks once a step: it is the last of the sums so far that they are held against."""
    found = diagnose(_micro_batches(tmp_path / "run", 1, off=off, adds=True, late=True), _micro_batches(tmp_path / "golden", 1, adds=True))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()


def _modules(path: Path, ranks: int, gradient: Callable[[int, np.ndarray], np.ndarray], tokens: bool = False) -> Path:
    """A dump of level L0 of rows of a batch over the ranks, each of which takes the mean over its own; `gradient`: of a rank and what the
    gradient of a weight is in one process, what the rank has for it; `tokens`: the first module takes in whole numbers."""
    number = np.random.default_rng(0)
    made = {name: number.normal(size=(32, 16)) for name in "abcdef"}
    weights = {name: number.normal(size=(16, 16)) for name in "abcdef"}
    words = np.arange(64.0).reshape(32, 2)
    for rank in range(ranks):
        data: dict[str, object] = {}
        if tokens:
            own = [
                _row_of(x[rank * 32 // ranks : (rank + 1) * 32 // ranks], kind)
                for x, kind in ((words, "torch.int64"), (made["a"], "torch.float32"))
            ]
            data["Module.words.Embedding.forward.0"] = {"input_args": own[:1], "input_kwargs": {}, "output": own[1:]}
        for direction, names in (("forward", "abcdef"), ("backward", "fedcba")):
            for name in names:
                times = ranks if direction == "backward" else 1
                part = _row_of(made[name][rank * 32 // ranks : (rank + 1) * 32 // ranks] * times, "torch.float32")
                record = {"input_args": [part], "input_kwargs": {}} if direction == "forward" else {"input": [part]}
                data[f"Module.{name}.Linear.{direction}.0"] = {**record, "output": [part]}
                if direction == "backward":
                    own = _row_of(gradient(rank, weights[name]), "torch.float32")
                    data[f"Module.{name}.Linear.parameters_grad.0"] = {"weight": [own]}
        _write_rank(path, rank, "L0", data)
    return path


@pytest.mark.parametrize(("factor", "finding"), [(1.0, "none"), (2.0, "divergence")], ids=["a mean", "a sum"])
def test_gradients_of_parts_of_a_parameter_are_averaged(factor: float, finding: str, tmp_path: Path) -> None:
    """Each rank holds one part of a parameter: its gradient is that of all ranks, and what their means were too large by is no excuse."""
    run = _modules(tmp_path / "run", 2, lambda rank, whole: factor * whole[rank * 8 : rank * 8 + 8])
    golden = _modules(tmp_path / "golden", 1, lambda _, whole: whole)
    for sides in ((run, golden), (golden, run)):
        assert diagnose(*sides).finding == finding


@pytest.mark.parametrize(("share", "record"), [(0.0, None), (0.7, "Module.f.Linear.parameters_grad.0")], ids=["summed", "not summed"])
def test_a_gradient_of_a_whole_parameter_beside_those_of_parts(share: float, record: str | None, tmp_path: Path) -> None:
    """FSDP sums gradients of parts of parameters up before they are recorded. A parameter that each rank has all of (left out of FSDP), and
    whose gradient is another one on each, was not summed; that the means of both make that of the whole is no excuse."""

    def gradient(rank: int, whole: np.ndarray) -> np.ndarray:
        if next(names) != "f":
            return whole[rank * 8 : rank * 8 + 8]
        of_rank = np.random.default_rng(1).normal(size=whole.shape) * (share if rank else -share)
        return np.asarray(whole + of_rank - of_rank.mean())

    names = iter("fedcba" * 2)
    run = _modules(tmp_path / "run", 2, gradient, tokens=True)
    found = diagnose(run, _modules(tmp_path / "golden", 1, lambda _, whole: whole, tokens=True))
    assert (found.first_suspect and found.first_suspect.record) == record, found.text()


def test_shares_of_gradients_whose_means_are_next_to_nothing(tmp_path: Path) -> None:
    """Behind a layer norm the mean says nothing of what sums of shares are divided by; the nearest number is the right one."""

    def gradient(rank: int, whole: np.ndarray, ranks: int = 2) -> np.ndarray:
        noise = np.random.default_rng(int(1e6 * abs(whole[0, 0]))).normal(size=whole.shape)
        near_zero = whole - whole.mean() + 3e-6 * whole[0, 0]
        return near_zero if ranks == 1 else near_zero + (noise - noise.mean()) * (1 - 2 * rank)

    found = diagnose(
        _modules(tmp_path / "run", 2, gradient), _modules(tmp_path / "golden", 1, lambda rank, whole: gradient(rank, whole, 1))
    )
    assert found.finding == "none", found.text()
    assert any("the mean alone was compared" in line for line in found.evidence)


def test_the_largest_logit_of_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    """A part where the numbers of one rank happen to be near those of the whole too: the other rank is no copy that is off. The logits
    themselves are compared."""
    logits = np.random.default_rng(0).normal(size=(8, 16))
    logits[:, 8:] -= 4.0  # the largest are on rank 0

    def written(name: str, ranks: int, off: float = 1.0) -> Path:
        for rank in range(ranks):
            part = logits[:, rank * 16 // ranks : (rank + 1) * 16 // ranks] * (off if rank else 1.0)
            taken, least = ({**_row_of(some), "shape": list(some.shape)} for some in (part, part.max(1)))
            data = {
                "Torch.max.0.forward": {"input_args": [taken], "input_kwargs": {"dim": {"type": "int", "value": -1}}, "output": [least]}
            }
            data["Functional.linear.0.forward"] = {"input_args": [taken], "input_kwargs": {}, "output": [taken]}
            _write_rank(tmp_path / name, rank, "L1", data)
        return tmp_path / name

    golden, run = written("golden", 1), written("run", 2)
    assert [diagnose(*sides).finding for sides in ((run, golden), (golden, run))] == ["none", "none"]
    assert diagnose(written("broken", 2, 1.5), golden).finding == "divergence"


@pytest.mark.parametrize(
    ("names", "shapes", "copies"),
    [
        (("norm", "head"), ("[4]", "[8, 4]"), ["norm", "head"]),
        (("norm", "head"), ("[4]", "[4, 4]"), ["norm"]),
        (("norm",), ("[4]",), []),
    ],
    ids=["all of both", "a part", "a stage of a pipeline"],
)
def test_what_one_process_has_in_the_same_shape_are_copies(names: tuple[str, ...], shapes: tuple[str, ...], copies: list[str]) -> None:
    """Where each rank has all parameters of the one process, whatever is around the model."""
    whole = {
        f"Module.{name}.Linear.forward.0.parameters.weight": {0: (shape, 1.0)} for name, shape in (("norm", "[4]"), ("head", "[8, 4]"))
    }
    rows = {
        f"Module.module.{name}.Linear.forward.0.parameters.weight": {0: (shape, 1.0), 1: (shape, 2.0)} for name, shape in zip(names, shapes)
    }
    found = replicas.of_the_whole(rows, whole)
    assert [name.split(".")[2] for name in found] == copies
    assert len(replicas.find_differing_copies(1, found, Sentence("they are copies"))) == len(copies)


@pytest.mark.parametrize(("last", "parted"), [(2.0, False), (2.5, True)])
def test_a_weight_that_two_stages_hold(last: float, parted: bool) -> None:
    """One process has it under both names; the stages update copies of their own, which stay the same."""
    names = ["Module.embed.Embedding.forward.1.parameters.weight", "Module.head.Linear.forward.0.parameters.weight"]
    whole = {name: {0: ("[8, 4]", 2.0)} for name in names}
    stages = {names[0]: {0: ("[8, 4]", 2.0)}, names[1]: {1: ("[8, 4]", last)}}
    found = replicas.of_tied(stages, whole)
    assert list(found) == names[:1]
    assert len(replicas.find_differing_copies(1, found, Sentence("they are copies"))) == parted


@pytest.mark.parametrize(
    ("factor", "ranks", "said"),
    [(1.0, (2, 1), True), (2.0, (2, 1), False), (1.0, (1, 1), False), (1.0, (4, 4), False), (None, (2, 1), False)],
)
def test_gradients_that_a_wrapper_averages(
    factor: float | None, ranks: tuple[int, int], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's gradients must be as many times the whole's as their sum is divided by, where no update shows what comes of it."""
    packs = Path("target.zip"), Path("golden.zip")
    monkeypatch.setattr(config_and_checkpoint, "averaged_over", dict(zip(packs, ranks)).__getitem__)
    problems = config_and_checkpoint.gradients_averaged_otherwise(Diagnosis(gradients=factor), *packs)
    assert any("0.5 times the golden run's" in line for line in problems) == bool(problems) == said


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"data_parallel_size": 2, "context_parallel_size": 2, "calculate_per_token_loss": False}, 4),
        ({"data_parallel_size": 2, "calculate_per_token_loss": True}, 1),
        ({"ddp.find_unused_parameters": False}, 8),
        ({"gradient_allreduce_op": "mean"}, 8),
        ({}, 1),
    ],
    ids=["megatron", "megatron, loss per token", "ddp", "deepspeed", "nothing"],
)
def test_over_how_many_ranks_gradients_are_averaged(settings: dict[str, object], ranks: int, tmp_path: Path) -> None:
    """As the pack of a run of eight ranks says it."""
    entry = {name: {"value": value, "origin": "code"} for name, value in settings.items()}
    PackWriter(tmp_path / "a.zip", rank=0, world_size=8, framework="pytorch").add({"msprobe/hyperparameters/rank0.json": entry})
    assert config_and_checkpoint.averaged_over(tmp_path / "a.zip") == ranks


@pytest.mark.parametrize(("hooks", "said"), [(("train.hook", ""), True), (("torch.distributed.hook", ""), False), (("a.b", "a.b"), False)])
def test_gradients_that_the_program_itself_puts_together(hooks: tuple[str, str], said: bool, tmp_path: Path) -> None:
    """Whether it takes the sum or the mean is in no record of modules; hooks of torch take the mean."""
    packs = []
    for number, hook in enumerate(hooks):
        packs.append(tmp_path / f"{number}.zip")
        entry = {"ddp.comm_hook": {"value": hook, "origin": "code"}} if hook else {}
        PackWriter(packs[-1], rank=0, world_size=2, framework="pytorch").add({"msprobe/hyperparameters/rank0.json": entry})
    problems = config_and_checkpoint.gradients_averaged_otherwise(Diagnosis(gradients=1.0), *packs)
    assert any("put together by train.hook" in line for line in problems) == said, problems


def test_what_was_put_together_comes_from_the_result_with_its_extremes(tmp_path: Path) -> None:
    """The norm of pieces is a sum, whose last digit differs from call to call; of two results it is not the first that has made it."""
    calls = {
        "Torch.aminmax.0.forward": {"input_args": [tensor(3.0)], "input_kwargs": {}, "output": [tensor(7.0), tensor(9.0)]},
        "Torch.abs.0.forward": {"input_args": [tensor(9.0)], "input_kwargs": {}, "output": [tensor(5.0)]},
    }
    side, golden = (read_side(dump_of_calls(tmp_path / name, 1, extra=calls) / "dump.json") for name in ("target", "golden"))
    trees = Tree(side), Tree(golden)
    taken, given = (side.name.index(name) for name in ("Torch.abs.0.forward.input.0", "Torch.aminmax.0.forward.output.1"))
    source = trees[0].producers.get(taken)
    assert source is not None
    side.numbers[4 * taken + 3] *= 1 + 1e-15
    noise = CarriedNoise(DifferenceWalk(*trees, Matcher(*trees).run()), None, 0.0)
    assert noise._row_of(source, taken) == given


def test_one_more_call_of_a_function_is_no_other_layout(tmp_path: Path, rank_dump: Any) -> None:
    """It gives all calls behind it other numbers; what modules hold and take in says that both runs are cut alike."""
    sides = []
    for name, more in (("target", True), ("golden", False)):
        made = rank_dump()
        made.module("up.Linear", [tensor(1.0)], [tensor(2.0)], params={"weight": tensor(3.0)})
        for shape in ([8], [16], [32], [64])[0 if more else 1 :]:
            made.api("Torch.arange", [4], [{**tensor(float(shape[0])), "shape": [*shape, 2]}])
        made.write(tmp_path / name / "step0" / "rank0")
        side = read_side(tmp_path / name / "step0" / "rank0" / "dump.json")
        sides.append({0: side, 1: side})
    assert not layouts.differ(*sides)


@pytest.mark.parametrize(("header", "other"), [({}, True), ({"complete": False}, False)])
def test_a_step_that_was_cut_off_is_no_other_layout(header: dict[str, object], other: bool, tmp_path: Path) -> None:
    """It has half of the calls, as one micro batch of two has; both runs say that their layout is the same."""
    parallel = {"rank": {"dp": 0}, "size": {"dp": 2, "tp": 1}}
    sides = []
    for name, calls, more in (("target", 3, header), ("golden", 6, {})):
        file = dump_of_calls(tmp_path / name, calls) / "dump.json"
        document = json.loads(file.read_text())
        file.write_text(json.dumps({"parallel": parallel, **more, **document}))
        sides.append({0: read_side(file)})
    assert layouts.differ(*sides) == other
