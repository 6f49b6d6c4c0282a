"""PrecisionChecker: compiled modules against themselves uncompiled and in float64."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msprobe.pytorch.compile_accuracy_checker import PrecisionChecker
from msprobe.pytorch.compile_accuracy_checker.precision_checker import CompareResult
from msprobe_engine.accuracy.compile_report import COLUMNS, text
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.compile_check.checker import first_failing
from msprobe_integrations.torch.op_tools.compile_check.verdict import verdict

X = torch.linspace(-1, 1, 64).view(8, 8)


class Slope(torch.autograd.Function):
    """``x * 2`` whose gradient is three times too large in compiled code."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * (6 if torch.compiler.is_compiling() else 2)


class Block(nn.Module):
    """A residual block; `wrong` says what compiled code does wrong."""

    def __init__(self, wrong: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(dropout)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        if self.wrong == "gradient":
            y = Slope.apply(y)
        elif torch.compiler.is_compiling():
            if self.wrong == "scale":
                y = y * 1.01
            elif self.wrong == "nan":
                y = y.masked_fill(y == y.max(), math.nan)
        return x + self.drop(y)


def model(wrong: str = "", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(dropout=dropout), Block(wrong, dropout)).to(dtype)


def small_loss(net: nn.Module) -> torch.Tensor:
    """Gradients are as small as those of large models."""
    return net(X.to(next(net.parameters()).dtype)).square().mean() * 1e-4


def check(net: nn.Module, loss: Callable[[nn.Module], torch.Tensor] = small_loss, **options: Any) -> CompareResult:
    checker = PrecisionChecker(**{"strict": True, **options})
    checker.wrap_by_policy(net, (Block,))
    return checker.compare(loss, net)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.fast_cells("dtype1-True")
def test_right_code_passes(dtype: torch.dtype, single: bool) -> None:
    """Compiled code that is right passes, in one pass and in two, in both precisions, with dropout."""
    result = check(model("", dtype, 0.2), single_pass=single)
    assert result.all_pass, text(result)
    blocks = {diff.name: diff for diff in result.diffs}
    assert {"1", "2"} <= set(blocks)
    assert blocks["2"].fwd_output
    assert blocks["2"].grad_input
    assert {diff.name for diff in result.diffs if diff.note == "SKIP_inside_compiled"} == (set() if single else {
        f"{block}.{part}" for block in (1, 2) for part in ("norm", "up", "down", "drop")
    })  # fmt: skip


@pytest.mark.fast_cells("scale-fwd_output-True")
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(("wrong", "kind"), [("scale", "fwd_output"), ("gradient", "grad_"), ("nan", "fwd_output")])
def test_planted_faults_are_found(wrong: str, kind: str, single: bool) -> None:
    """A result scaled by 1.01, gradients of 1e-6 that are three times too large, and a NaN are failures of the module that has them."""
    result = check(model(wrong), single_pass=single)
    assert not result.all_pass
    assert result.first_failure.startswith(f"2 {kind}")
    assert next(diff for diff in result.diffs if diff.name == "1").of("fwd_output")[0].status == "PASS"


@pytest.mark.parametrize(
    ("dtypes", "cast", "unit"),
    [
        ([torch.float32], None, torch.float32),
        ([torch.float32, torch.float16], None, torch.float16),
        ([torch.float32], torch.bfloat16, torch.bfloat16),
        ([torch.int8], None, None),
    ],
)
def test_round_off_is_that_of_the_coarsest_type(dtypes: list[torch.dtype], cast: torch.dtype | None, unit: torch.dtype | None) -> None:
    """Of parameters in real numbers, and of autocast."""
    net = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False) for dtype in dtypes)
    assert PrecisionChecker(cast_dtype=cast)._unit(net) == unit


@pytest.mark.slow
def test_graphs_pass_where_python_went_another_way() -> None:
    """A branch on `is_compiling` is no fault of the compiler: the graphs pass while the module fails."""
    result = check(model("scale"))
    graphs = [diff for diff in result.diffs if diff.name.startswith("graph ")]
    assert {diff.name for diff in graphs} == {"graph 0 of 1", "graph 1 of 2"}
    assert {diff.status for diff in graphs} == {"PASS"}


def broken(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """A backend that gives every result a little too large."""

    def run(*args: Any) -> Any:
        return tuple(value * 1.001 if isinstance(value, torch.Tensor) else value for value in graph(*args))

    return run


@pytest.mark.slow
def test_first_failing_layer_of_the_compiler() -> None:
    """With one backend after the other the layer that brings the fault is named; a broken backend fails in its graphs."""
    checker = PrecisionChecker(strict=True)
    net = model()
    checker.wrap_by_policy(net, (Block,))
    results = checker.compare_backends(small_loss, net, ("eager", "aot_eager", broken))
    assert first_failing(results) == "broken"
    assert {diff.name for diff in results["broken"].diffs if diff.name.startswith("graph") and diff.status == "FAIL"}
    assert first_failing({"eager": check(model("scale"), backend="eager")}) == "eager"


@pytest.mark.parametrize(("threshold", "passes"), [(0.1, True), (1e-3, False)])
@pytest.mark.slow
def test_threshold_is_respected(threshold: float, passes: bool) -> None:
    """With a threshold the largest difference by the largest value decides, and nothing else."""
    assert check(model("scale"), threshold=threshold).all_pass is passes


def train(net: nn.Module, checker: PrecisionChecker | None) -> tuple[list[torch.Tensor], torch.Tensor, CompareResult | None]:
    """Two steps; the first one is checked."""
    optimizer, result = torch.optim.SGD(net.parameters(), 0.1), None
    torch.manual_seed(1)
    if checker is None:
        for part in (net[1], net[2]):  # type: ignore[index]
            part.compile(backend="aot_eager")
    else:
        checker.wrap_by_policy(net, (Block,))
        checker.install(net)
    for step in range(2):
        loss = net(X).square().mean()
        loss.backward()
        if step == 0 and checker is not None:
            result = checker.collect(loss)
            for part in (net[1], net[2]):  # type: ignore[index]
                part.compile(backend="aot_eager")
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], torch.get_rng_state(), result


@pytest.mark.slow
def test_compiled_training_has_the_same_bits() -> None:
    """Between `install` and `collect` the training runs as it does compiled: same weights, same random streams, same names."""
    net = model(dropout=0.2)
    names = list(net.state_dict())
    weights, state, result = train(net, PrecisionChecker(strict=True))
    expected, expected_state, _ = train(model(dropout=0.2), None)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected))
    assert torch.equal(state, expected_state)
    assert list(net.state_dict()) == names
    assert result is not None
    assert result.all_pass
    assert not math.isnan(result.loss_compiled)
    assert math.isnan(result.loss_eager)


@pytest.mark.slow
def test_buffers_and_gradients_stay() -> None:
    """Running statistics, gradients that were there and inputs that a module writes into are none of the checker's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 2))
    net(X).sum().backward()
    buffers, gradients = [b.clone() for b in net.buffers()], [p.grad.clone() for p in net.parameters() if p.grad is not None]
    for single in (True, False):
        result = PrecisionChecker(single_pass=single, strict=True).compare(lambda m: m(X.clone()).square().mean(), net)
        assert result.all_pass, text(result)
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers()))
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, net.parameters()) if p.grad is not None)


class Nested(nn.Module):
    """Takes a list and keywords, gives a dict with a value that nobody uses, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, parts: list[torch.Tensor], *, factor: float) -> dict[str, Any]:
        used = parts[0] * self.weight * factor
        return {"used": used, "others": [used + 1, parts[1].sum()], "n": 3, "index": used.argmax()}


@pytest.mark.slow
def test_nested_arguments_and_results() -> None:
    """Lists and keywords of arguments, dicts of results, and results that the loss does not use are compared."""
    checker = PrecisionChecker(strict=True)
    result = checker.compare(lambda net: net([X.clone().requires_grad_(), X], factor=2.0)["used"].sum(), Nested())
    assert result.all_pass, text(result)
    assert [diff.status for diff in result.diffs[0].of("fwd_output")] == ["PASS"] * 5
    assert len(result.diffs[0].of("grad_input")) == 1


@pytest.mark.slow
def test_modules_that_are_not_compiled_are_no_pass() -> None:
    """What dynamo leaves alone is told, and a result in which nothing was compared is no pass."""

    class Alone(nn.Linear):
        @torch.compiler.disable
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    result = PrecisionChecker(strict=True).compare(lambda net: net(X).sum(), nn.Sequential(Alone(8, 2))[0])
    assert result.diffs[0].note == "SKIP: no part of it was compiled"
    assert not result.all_pass
    assert "NOTHING COMPARED" in text(result)


@pytest.mark.slow
def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is printed and written with the columns of the existing tool first; graphs are saved as text."""
    net = model("scale")
    checker = PrecisionChecker(dump_graphs=True, graph_dir=tmp_path / "graphs", strict=True)
    checker.wrap_by_policy(net, (Block,))
    checker.ignore(net[0])
    checker.report(checker.compare(small_loss, net), tmp_path / "report.csv")
    rows = list(csv.DictReader((tmp_path / "report.csv").open(encoding="utf-8", newline="")))
    assert tuple(rows[0]) == COLUMNS
    assert (rows[0]["check_type"], rows[0]["status"]) == ("loss", "FAIL")
    found = {(row["module_name"], row["check_type"], row["status"]) for row in rows}
    assert {("1", "fwd_output", "PASS"), ("2", "fwd_output", "FAIL"), ("0", "note", "SKIP")} <= found
    assert {row["tensor_name"] for row in rows if row["check_type"] == "grad_parameter"} >= {"norm.weight", "up.bias"}
    assert "FAILED, first: 2 fwd_output" in capsys.readouterr().out
    kinds = {file.name.split(".")[1] for file in (tmp_path / "graphs").glob("__compiled_fn_*.py")}
    assert kinds == {"Captured_Graph", "Forward_Graph", "Backward_Graph"}


def test_verdict_of_single_tensors() -> None:
    """NaN on both sides is no failure; on one side it is, unless float64 has it too; what is closer to the truth than uncompiled code
    passes; other shapes and integers fail."""
    nan = torch.tensor([1.0, math.nan] * 16)
    assert verdict(nan, nan.clone(), None).status == "PASS"
    assert verdict(nan, nan.nan_to_num(2.0), nan.double()).status == "FAIL"
    x = torch.linspace(0.1, 1, 64)
    coarse = (x.bfloat16() * 3).bfloat16()
    truth = x.bfloat16().double() * 3
    worse = (coarse.float() * (1 + 0.01 * torch.tensor([-1.0, 1.0]).repeat(32))).bfloat16()
    assert verdict(worse, coarse, truth).status == "PASS"
    assert verdict(coarse, worse, truth).status != "PASS"
    assert verdict(x, x[:32], None).status == "FAIL"
    assert verdict(torch.tensor([1, 2]), torch.tensor([1, 3]), None).message == "1 of 2 elements differ"
    assert verdict(x, x * (1 + 1e-6), None, threshold=1e-9).status == "FAIL"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "inductr"}, "backend='inductr' is not known; allowed: "),
        ({"threshold": -1}, "threshold=-1; allowed is a number from 0"),
        ({"cast_dtype": "bf16"}, "cast_dtype='bf16'; allowed is a floating type"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    """A wrong argument is an error with its value and what is allowed."""
    with pytest.raises(UsageError) as error:
        PrecisionChecker(**options)
    assert message in str(error.value)


def test_calls_in_a_wrong_order_are_named() -> None:
    """`collect` without `install`, and modules of another model, are errors of the caller."""
    checker = PrecisionChecker()
    with pytest.raises(UsageError, match=r"collect\(\) without install"):
        checker.collect()
    checker.wrap(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="none of the wrapped modules is a part of this model"):
        checker.install(nn.Linear(2, 2))


class Dropped(nn.Module):
    """As little code to generate as a residual dropout needs: every kernel is a run of the C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(x * self.weight, 0.3, self.training)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_with_dropout() -> None:
    """Generated code drops the same elements as uncompiled code, and passes."""
    checker = PrecisionChecker(strict=True, backend="inductor")
    net = nn.Sequential(Dropped())
    checker.wrap_by_policy(net, (Dropped,))
    result = checker.compare(lambda net: net(X).square().mean(), net)
    assert result.all_pass, text(result)
    assert next(diff for diff in result.diffs if diff.name == "0").fwd_output
