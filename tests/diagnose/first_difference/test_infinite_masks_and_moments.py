"""`diagnose` and verdicts on trainings whose attention is masked with -inf or a large number, and on what an optimizer makes of gradients
that are round-off."""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from msprobe_engine.align.calls.match import match
from msprobe_engine.align.parallel.merge_statistics import snap
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.columns import MESSAGE, RESULT, TARGET_NAME
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.pairs import compare_pair


class Scores(nn.Module):
    """Ends in the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        s = q @ k.transpose(-2, -1) * (self.factor / math.sqrt(q.shape[-1]))
        return s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)


class Attention(nn.Module):
    """Two heads, one projection for queries, keys and values: the keys' part of its bias has no gradient in mathematics."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scores, self.out = nn.Linear(16, 48), Scores(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = self.scores(q, k).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(b, t, 16))
        return out


class Given(nn.Module):
    """Attention that is given a mask, which it adds; `cut`: queries and keys get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out, self.cut = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), False

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        shares = (q @ k.transpose(-2, -1) / 4 + mask).softmax(-1)
        out: Tensor = self.out((shares.detach() if self.cut else shares) @ v)
        return out


class Masked(nn.Module):
    """A block with a mask of `number`; `factor`: of what goes in."""

    def __init__(self, number: float, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.embed, self.norm, self.attention, self.last = nn.Embedding(50, 16), nn.LayerNorm(16), Given(), nn.Linear(16, 50)
        self.register_buffer("mask", torch.full((8, 8), number).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.factor
        out: Tensor = self.last(x + self.attention(self.norm(x), self.mask))
        return out


class Block(nn.Module):
    """Attention and a small network, each around a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.last = nn.LayerNorm(16), Attention(), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.last(x)
        return out


def _train(path: Path, fault: str, level: str) -> None:
    import atexit

    from msprobe.pytorch import PrecisionDebugger

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(50, 16), Block(), Block(), nn.Linear(16, 50))
    if fault.startswith("-"):
        cut = fault.endswith("cut")
        model = Masked(float(fault.split()[0]), 1 + 2e-7 if cut else 1.0)  # round-off, of which runs with the same bits have none
        model.attention.cut = cut
    if fault == "scale":
        model.get_submodule("2.attention.scores").factor = 1.5  # type: ignore[assignment]
    if fault.startswith("moved"):
        generator = torch.Generator().manual_seed(len(fault))
        with torch.no_grad():
            for weight in model.parameters():
                way = torch.rand(weight.shape, generator=generator) < 0.5
                weight.copy_(torch.nextafter(weight, torch.where(way, math.inf, -math.inf)) if weight.dim() > 1 else weight)
    optimizer, batches = torch.optim.Adam(model.parameters(), 1.5e-3 if fault == "rate" else 1e-3), torch.Generator().manual_seed(4)
    debugger = PrecisionDebugger(dump_path=str(path), task="statistics", level=level, step=[0, 1])
    for _ in range(2):
        tokens = torch.randint(0, 50, (3, 9), generator=batches)
        debugger.start(model=model)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        debugger.stop()
        if fault == "frozen":
            model.get_submodule("1.attention.out").weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps by level and fault: ``mix/scale``."""
    import torch._dynamo  # noqa: F401 - what an optimizer imports: once, and not in each child

    import msprobe.pytorch  # noqa: F401

    root = tmp_path_factory.mktemp("infinite")
    faults = {"mix": ("golden", "scale", "rate", "frozen", "moved", "moved again"), "L0": ("golden", "scale")}
    for level, fault in ((level, fault) for level, some in faults.items() for fault in some):
        _dump(root, level, fault)
    return root


def _dump(root: Path, level: str, fault: str) -> Path:
    process = multiprocessing.get_context("fork").Process(target=_train, args=(root / level / fault, fault, level))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return root / level / fault


def _found(dumps: Path, level: str, fault: str, *further: str) -> Diagnosis:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return diagnose(dumps / level / fault, dumps / level / "golden", calibration=[dumps / level / name for name in further])


def _side(path: Path) -> DumpTable:
    return read_side(next(path.glob("step0/*/dump.json")))


def _table(target: DumpTable, golden: DumpTable) -> list[dict[str, Any]]:
    asked = CompareOptions(workers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks = list(compare_pair(target, golden, match(target, golden, asked), asked))
    return [dict(zip(block, row)) for block in blocks for row in zip(*block.values())]


@pytest.mark.parametrize(("level", "record"), [("mix", "Tensor.__mul__.1.forward"), ("L0", "Module.2.attention.scores.Scores.forward.0")])
@pytest.mark.slow
def test_a_mask_hides_no_difference(level: str, record: str, dumps: Path) -> None:
    """The maximum beside -inf tells that scores were scaled: the call, or the module that ends in the mask, is the only suspect, and the
    only error of the table is there; what follows from it, the results of the modules around it too, is a warning."""
    found = _found(dumps, level, "scale")
    assert found.finding == "divergence"
    assert [suspect.record for suspect in found.suspects] == [record], found.text()
    table = _table(_side(dumps / level / "scale"), _side(dumps / level / "golden"))
    wrong = [row for row in table if row[RESULT] == "error"]
    assert wrong
    assert {str(row[TARGET_NAME]).partition(".forward")[0] for row in wrong} == {record.partition(".forward")[0]}, wrong


@pytest.mark.fast_cells("-1e9")
@pytest.mark.parametrize("number", ["-1e4", "-1e9", "-3.4e38"])
def test_a_mask_that_is_given_hides_no_gradient(number: str, tmp_path: Path) -> None:
    """What a module is given may hold the large number of a mask, which says nothing of how far round-off goes in its backward pass: the
    module whose gradient lacks what comes back through the mask is named, not what takes that gradient in."""
    found = diagnose(_dump(tmp_path, "L0", f"{number} cut"), _dump(tmp_path, "L0", number))
    assert found.finding == "divergence"
    assert found.first_suspect is not None
    assert found.first_suspect.record == "Module.attention.Given.backward.0", found.text()


@pytest.mark.slow
def test_a_parameter_behind_an_optimizer(dumps: Path) -> None:
    """A parameter that differs at the beginning of a step, by no more than an update, is said to lie behind the step before, with the
    calibration as what to do next. Noise of one unit of the weights, of which Adam makes such a difference in the bias of the keys, is
    nothing with it; another learning rate is."""
    found = _found(dumps, "mix", "rate")
    first = found.first_suspect
    assert first is not None
    assert first.step == 1
    assert "no call of this step makes that difference: step 0 or its optimizer did" in first.why
    assert any("the optimizer of the step before moved it by" in line for line in found.evidence)
    assert found.next[-1].endswith("mix/golden --calibration MOVED")
    assert _found(dumps, "mix", "rate", "moved", "moved again").finding == "divergence"
    assert _found(dumps, "mix", "moved", "moved again").finding == "none"


def test_a_parameter_that_the_optimizer_left_out(dumps: Path) -> None:
    """What did not move in one run alone is no round-off, and said to have stayed."""
    found = _found(dumps, "mix", "frozen")
    assert found.first_suspect is not None
    assert found.first_suspect.tensor == "Functional.linear.1.forward.input.1"
    assert "The step before has not moved the parameter in this run; in the other one it has." in found.evidence
    assert not found.next


def _of(path: Path, *rows: tuple[float, float, int, int]) -> DumpTable:
    """One call that gives out tensors of these (Max, Min, count of NaN, count of Inf), and takes in one of ones."""
    known = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], "requires_grad": False}
    given = []
    for top, low, nans, infs in rows:
        counts = {key: n for key, n in (("nan_count", nans), ("inf_count", infs)) if n}
        given.append(known | {"Max": top, "Min": low, "Mean": low - top, "Norm": math.nan if nans else math.inf} | counts)
    ones = known | {"Max": 1.0, "Min": 1.0, "Mean": 1.0, "Norm": 4.0}
    data = {
        "Tensor.f.0.forward": {"input_args": [ones], "input_kwargs": {}, "output": given},
        "Tensor.g.0.forward": {"input_args": [ones], "output": [ones]},
    }
    path.mkdir(parents=True)
    (path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "framework": "pytorch", "data": data}))
    return read_side(path / "dump.json")


@pytest.mark.parametrize(
    ("target", "golden", "verdict", "says"),
    [
        ((2.0, -math.inf, 0, 6), (2.0, -math.inf, 0, 6), "pass", ""),
        ((2.0 + 1e-7, -math.inf, 0, 6), (2.0, -math.inf, 0, 6), "pass", ""),
        ((3.0, -math.inf, 0, 6), (2.0, -math.inf, 0, 6), "error", "off by 0.33"),
        ((2.0, -math.inf, 0, 8), (2.0, -math.inf, 0, 6), "error", "off by 0.25"),
        ((math.inf, -math.inf, 0, 6), (2.0, -math.inf, 0, 6), "error", "NaN or Inf on one side only"),
        ((1e-7, -math.inf, 0, 6), (2e-8, -math.inf, 0, 6), "pass", ""),  # round-off of numbers that are as large as what goes in
        ((-math.inf, -math.inf, 0, 16), (-math.inf, -math.inf, 0, 16), "pass", ""),
        ((math.inf, -math.inf, 0, 6), (math.inf, -math.inf, 0, 6), "warning", "cannot be compared"),
        ((math.nan, math.nan, 3, 0), (math.nan, math.nan, 3, 0), "warning", "cannot be compared"),
        ((math.nan, math.nan, 4, 0), (math.nan, math.nan, 3, 0), "error", "off by 0.25"),
    ],
)
def test_what_is_left_beside_infinities(
    target: tuple[float, float, int, int], golden: tuple[float, float, int, int], verdict: str, says: str, tmp_path: Path
) -> None:
    """Finite extremes, counts and the places of infinities are compared; where nothing is left the row is no pass, and counted."""
    _of(tmp_path / "target" / "step0" / "rank0", target)
    _of(tmp_path / "golden" / "step0" / "rank0", golden)
    sides = [read_side(tmp_path / name / "step0" / "rank0" / "dump.json") for name in ("target", "golden")]
    row = _table(*sides)[1]
    assert (row[RESULT], says in str(row[MESSAGE])) == (verdict, True), row
    found = diagnose(tmp_path / "target", tmp_path / "golden")
    assert (found.finding == "none") == (verdict != "error"), found.text()
    said = any("1 tensor holds NaN or Inf on both sides and cannot be compared" in line for line in found.problems)
    assert said == (verdict == "warning")


def test_infinities_of_pieces_give_no_warning() -> None:
    """Numbers that were put together of several ranks may be infinite on both sides."""
    mine, theirs = np.array([2.0, -math.inf, -math.inf, math.inf]), np.array([2.0 + 1e-15, -math.inf, -math.inf, math.inf])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(snap(mine, theirs), theirs)
