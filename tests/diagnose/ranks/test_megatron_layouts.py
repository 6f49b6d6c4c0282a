"""Real trainings with megatron-core in different layouts beside each other: the layout is no difference, a defect in one of them is named,
and dumps say which parameters are pieces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from megatron_dumps import FAMILIES, LAYOUTS, Plant, dump_megatron, missing_sum, wrong_eps
from megatron_faults import FAULTS

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel.placements import Placements
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import PARAMETERS
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps

pytestmark = pytest.mark.framework
pytest.importorskip("megatron.core")
ONE, TP, SP, DP, PADDED = "one process", "TP 2", "SP 2", "DP 2, distributed optimizer", "TP 2, padded vocabulary"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


def made(dumps: Path, layout: str, family: str = "mean loss", fault: str = "") -> Path:
    path = dumps / re.sub(r"\W", "-", f"{layout} {family} {fault}")
    dump_megatron(path, f"{LAYOUTS[layout]} {FAMILIES[family]}", *((FAULTS[fault].plant,) if fault else ()))
    return path


def merged(found: Diagnosis) -> int:
    """How many tensors were put together."""
    (line,) = [line for line in found.evidence if "different layouts" in line]
    return int(re.sub(r"\D", "", line.split("layouts: ")[1].split(" tensors")[0]))


@pytest.mark.fast_cells("SP 2-one process")
@pytest.mark.parametrize(("target", "golden"), [(SP, ONE), (ONE, DP), (TP, SP), (TP, DP), (PADDED, DP)])
@pytest.mark.slow
def test_layout_is_no_difference(target: str, golden: str, dumps: Path) -> None:
    """Two layouts of one training agree up to round-off in both steps, and most tensors could be put together. (`benchmarks/layouts.py
    --megatron` has every layout beside every other.)"""
    found = diagnose(made(dumps, target), made(dumps, golden))
    assert found.finding == "none", found.headline()
    assert found.looked_at["steps"] == "0, 1"
    assert merged(found) > 500


@pytest.mark.parametrize(("target", "golden"), [("recomputation of attention", ONE), (TP, "TP 2, recomputation")])
@pytest.mark.slow
def test_what_is_recomputed_is_no_difference(target: str, golden: str, dumps: Path) -> None:
    """Whether a call requires gradients is no difference where it is made again, nor within a backward pass; collectives are made again,
    too."""
    for one, other in ((target, golden), (golden, target)):
        found = diagnose(made(dumps, one), made(dumps, other))
        assert found.finding == "none", found.headline()


@pytest.mark.parametrize(
    ("plant", "golden", "truth"),
    [
        (wrong_eps, ONE, r"Functional\.layer_norm\.3\.forward|Module\..*layers\.1\.pre_mlp_layernorm\.\w+\.forward\.0"),
        (
            missing_sum,
            DP,
            r".*layers\.1\.mlp\.linear_fc2.*|Torch\.matmul\.\d+\.forward|Autograd\.LinearWithGrad.*|Tensor\.view_as\.\d+\.forward",
        ),
    ],
)
@pytest.mark.slow
def test_defect_is_named(plant: Plant, golden: str, truth: str, dumps: Path) -> None:
    """A defect in a tensor-parallel training is named first, beside one process and beside data parallelism."""
    path = dumps / plant.__name__
    dump_megatron(path, LAYOUTS[TP], plant)
    first = diagnose(path, made(dumps, golden)).first_suspect
    assert first is not None
    assert first.step == 0
    assert re.fullmatch(truth, first.record), first


BF16 = "grouped queries, bf16"


@pytest.mark.fast_cells(f"{TP}-DP 2-{BF16}", "DP 2-two micro batches-loss per token")
@pytest.mark.parametrize(
    ("target", "golden", "family"),
    [
        (TP, "DP 2", BF16),
        (SP, "two micro batches", BF16),
        ("DP 2", DP, BF16),
        (TP, "DP 2", "Megatron's own loss"),
        ("DP 2", "two micro batches", "loss per token"),
        (SP, ONE, "grouped queries"),
        (ONE, "TP 2, recomputation", BF16),
        ("recomputation of attention", "TP 2, recomputation", BF16),
        ("recomputation", "recomputation of attention", BF16),
    ],
)
@pytest.mark.fast_cells("DP 2-two micro batches-loss per token")
def test_layout_of_what_people_train_is_no_difference(target: str, golden: str, family: str, dumps: Path) -> None:
    """Losses that are sums of shares, groups of queries, bf16: the first step of two layouts agrees up to round-off, and nobody says that
    all is well where a quarter of the records are as large as their noise."""
    found = diagnose(made(dumps, target, family), made(dumps, golden, family))
    assert found.finding == "none", found.headline()
    assert (target.startswith("recomputation") and golden.startswith("recomputation")) or merged(found) > 500


@pytest.mark.fast_cells(f"{TP}-DP 2-branch 3 % too large-{BF16}", f"{TP}-DP 2-learning rate 2 % too large-{BF16}")
@pytest.mark.parametrize(
    ("target", "golden", "fault", "family"),
    [
        (TP, "DP 2", "branch 3 % too large", BF16),
        (TP, "DP 2", "learning rate 2 % too large", BF16),
        ("DP 2", TP, "gradient 5 % too large", BF16),
        ("DP 2", ONE, "rotary angles 3 % too small", BF16),
        ("DP 2", ONE, "gradients not averaged", "Megatron's own loss"),
        (SP, ONE, "norm gradients not summed", "Megatron's own loss"),
    ],
)
@pytest.mark.slow
def test_defect_of_what_people_train_is_named(target: str, golden: str, fault: str, family: str, dumps: Path) -> None:
    """A defect of a few per cent is named first across layouts, in bf16, too."""
    first = diagnose(made(dumps, target, family, fault), made(dumps, golden, family)).first_suspect
    assert first is not None
    assert first.step == 0
    assert re.fullmatch(FAULTS[fault].truth, first.record), first


@pytest.mark.slow
def test_placements_are_recorded(dumps: Path) -> None:
    """The header says where the rank is and which parameters are pieces; the shape of every whole follows, and one process has them."""
    side, whole = (read_side(made(dumps, layout) / "step0" / "rank0" / "dump.json") for layout in (SP, ONE))
    parallel = side.header["parallel"]
    assert parallel["rank"]["tp"] == 0
    assert parallel["size"]["tp"] == 2
    assert parallel["size"]["dp"] == 1
    assert any(
        "module.decoder.final_layernorm.weight" in group["names"] for group in parallel["parameters"] if "sequence_parallel" in group
    )
    placed = Placements(Tree(side))
    shapes = {name: shape for name, shape, role in zip(whole.name, whole.shape, whole.role) if role == PARAMETERS}
    known = {side.name[row]: placed.whole(row) for row in range(len(side)) if side.role[row] == PARAMETERS}
    told = {name: shape for name, shape in known.items() if shape is not None}
    assert len(told) > 20  # equal tensors (zeros) with other marks are told by nobody
    assert told == {name: shapes[name] for name in told}


@pytest.mark.slow
def test_tables_are_of_the_wholes(dumps: Path, tmp_path: Path) -> None:
    """`msprobe compare` of two layouts writes one table per step, of what the ranks make together: all of it passes, a defect does not;
    with --compat ranks are compared by their numbers."""
    same = compare_dumps(made(dumps, SP), made(dumps, ONE), tmp_path / "same")
    assert same.exit_code == 0
    assert [Path(name).name.rsplit("_", 1)[0] for result in same.results for name in result.files] == ["compare_result_whole"] * 2
    assert sum(result.rows for result in same.results) > 4000
    assert any("different layouts" in note for note in same.notes)
    path = dumps / wrong_eps.__name__
    dump_megatron(path, LAYOUTS[TP], wrong_eps)
    assert compare_dumps(path, made(dumps, ONE), tmp_path / "other").exit_code == 1
    ranks = compare_dumps(made(dumps, TP), made(dumps, ONE), tmp_path / "compat", CompareOptions(compat=True))
    assert all("rank0" in name for result in ranks.results for name in result.files)
