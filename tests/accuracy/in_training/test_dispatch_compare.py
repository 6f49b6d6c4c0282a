"""Dispatch compare: every ATen operator of a training against a benchmark, which the training does not notice."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from msprobe.pytorch.online_dispatch import PtdbgDispatch
from msprobe_engine.accuracy.dispatch_table import DETAIL_COLUMNS, OPERATOR_COLUMNS, RESULT_COLUMNS, difference
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.dispatch_compare import references
from msprobe_integrations.torch.op_tools.dispatch_compare.compare import Calls

Rows = list[dict[str, str]]


def table(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 4, d // 4).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.inner(x)


def training(dtype: torch.dtype, mode: PtdbgDispatch | None) -> tuple[list[torch.Tensor], bytes]:
    """Losses and weights of two steps, and the random state behind them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), Block(32), nn.Linear(32, 50)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for _ in range(2):
        x = torch.randint(0, 50, (2, 16))

        def step(x: torch.Tensor = x) -> torch.Tensor:
            loss = functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if mode is None:
            found.append(step())
        else:
            with mode:
                found.append(step())
    return [*found, *(p.detach() for p in model.parameters())], torch.get_rng_state().numpy().tobytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[PtdbgDispatch, Any, Any]:
    """Two steps of a transformer in bfloat16, without and with the mode."""
    plain = training(torch.bfloat16, None)
    mode = PtdbgDispatch(dump_path=tmp_path_factory.mktemp("dispatch"), tag="run", strict=True)
    return mode, plain, training(torch.bfloat16, mode)


@pytest.mark.slow
def test_training_has_the_same_bits(run: Any) -> None:
    """Losses, weights and random streams are those of the training alone."""
    _, plain, watched = run
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0]))
    assert plain[1] == watched[1]


def test_right_kernels_pass(run: Any) -> None:
    """Forward, backward and optimizer of a transformer in bfloat16 are compared without an alarm, operators with several results too."""
    rows = table(run[0].tables.details)
    assert {row["verdict"] for row in rows} == {"pass"}
    assert {"native_layer_norm_1_output.2", "nll_loss_forward_1_output.1"} <= {row["Npu Name"] for row in rows}
    assert {row["direction"] for row in rows} == {"forward", "backward"}


def test_files_have_the_names_and_columns_of_the_existing_tool(run: Any) -> None:
    """Directories, tables and their first columns are found by scripts for the existing tool; there is a header."""
    root = run[0].directory
    assert root.name.startswith("msprobe_run_rank0_")
    assert (root / "cpu").is_dir()
    assert (root / "npu").is_dir()
    results, details = next(root.glob("accuracy_checking_result_*.csv")), next(root.glob("accuracy_checking_details_*.csv"))
    assert tuple(table(results)[0]) == RESULT_COLUMNS
    assert tuple(table(details)[0]) == DETAIL_COLUMNS
    assert tuple(table(next(root.glob("operators_*.csv")))[0]) == OPERATOR_COLUMNS
    assert {row["Forward Test Success"] for row in table(results)} == {"True", "Nan", "SKIP"}
    assert oct(details.stat().st_mode & 0o777) == "0o640"


def test_backward_operators_name_the_line_of_their_forward(run: Any) -> None:
    """An operator of the backward pass is told by the line that called the forward one, not by ``loss.backward()``."""
    sources = {row["Npu Name"]: row["source"] for row in table(run[0].tables.details)}
    name = "_scaled_dot_product_flash_attention_for_cpu_backward_1_output.0"
    assert "in forward: x = x + self.out(functional.scaled_dot" in sources[name]


def test_what_is_not_compared_is_counted(run: Any) -> None:
    """Views, factories and random operators are in the table of operators with the reason."""
    reasons = {row["operator"]: row["not compared"] for row in table(run[0].tables.summary)}
    assert reasons["view"].startswith("changes the form of a tensor only: ")
    assert reasons["bernoulli_"] == "draws random numbers: 2"
    assert "not compared" in run[0].tables.text()


@torch.library.custom_op("dispatchtest::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor if x.dtype == torch.float64 else x * factor * 1.001


@torch.library.custom_op("dispatchtest::mean", mutates_args=())
def mean_of_rows(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[:, 0])
    for n in range(x.shape[1]):
        total = total + x[:, n]  # in the type of the input
    return total / x.shape[1]


@torch.library.custom_op("dispatchtest::largest", mutates_args=())
def largest(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(-1e30).amax(-1) if x.dtype == torch.float32 else x.amax(-1)


@torch.library.custom_op("dispatchtest::take", mutates_args=())
def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index if x.dtype == torch.float64 else (index + 1).clamp(max=x.shape[0] - 1)]


@torch.library.custom_op("dispatchtest::add_into", mutates_args=("x",))
def add_into(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y if x.dtype == torch.float64 else y * 1.01)


@torch.library.custom_op("dispatchtest::fine", mutates_args=())
def fine(x: torch.Tensor) -> torch.Tensor:
    return x.float().softmax(-1).to(x.dtype) if x.dtype != torch.float64 else x.softmax(-1)


def one(tmp_path: Path, call: Callable[[], Any], **options: Any) -> tuple[PtdbgDispatch, Rows]:
    with PtdbgDispatch(dump_path=tmp_path, **{"strict": True, **options}) as mode:
        call()
    return mode, table(mode.tables.details)


def with_nan() -> torch.Tensor:
    x = torch.randn(4, 8)
    x[1, 2] = float("nan")
    return x


PLANTED = {
    "scaled": lambda: scaled(torch.randn(64), 2.0),
    "mean": lambda: mean_of_rows(torch.rand(2, 2048).bfloat16()),
    "largest": lambda: largest(with_nan()),
    "take": lambda: take(torch.randn(8, 4), torch.tensor([0, 3, 5])),
    "add_into": lambda: add_into(torch.zeros(32), torch.randn(32)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_flagged(name: str, tmp_path: Path) -> None:
    """A wrong scale, a sum in bfloat16, a maximum that swallows NaN, a gather that is off by one and a wrong write are errors."""
    torch.manual_seed(0)
    _, rows = one(tmp_path, PLANTED[name])
    assert "error" in {row["verdict"] for row in rows if row["Npu Name"].startswith(f"{name}_1")}
    assert "False" in {row["Status"] for row in rows}


def test_right_custom_operator_passes(tmp_path: Path) -> None:
    """An operator of somebody else is compared as well, and passes when it is right."""
    mode, rows = one(tmp_path, lambda: fine(torch.randn(4, 64).bfloat16()))
    assert [(row["Npu Name"], row["verdict"]) for row in rows if row["Npu Name"].startswith("fine")] == [("fine_1_output", "pass")]
    assert mode.tables.operators["fine"].compared == 1


def test_in_place_operators_are_judged_from_what_was_there_before(tmp_path: Path) -> None:
    """The benchmark of an in-place operator starts from copies of what it writes into, views and lists of tensors included."""
    x, many = torch.arange(12.0).view(3, 4), [torch.ones(3), torch.arange(3.0)]

    def call() -> None:
        x[1:].mul_(x[1:])
        x.add_(x)
        torch._foreach_mul_(many, 3.0)
        torch.add(x, 1.0, out=x)

    expected = x.clone()
    expected[1:].mul_(expected[1:].clone())
    _, rows = one(tmp_path, call)
    assert {row["verdict"] for row in rows} == {"pass"}
    assert {"mul__1_output", "add__1_output", "_foreach_mul__1_output.1", "add_1_output"} <= {row["Npu Name"] for row in rows}
    assert torch.equal(x, expected * 2 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_are_updated_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """What an operator writes without saying so is not written by the benchmark, in float64 neither; and it is compared."""
    torch.manual_seed(0)
    x, norms = torch.randn(4, 3, 5, dtype=dtype), [nn.BatchNorm1d(3).to(dtype) for _ in range(2)]
    norms[0](x)
    _, rows = one(tmp_path, lambda: norms[1](x))
    assert torch.equal(norms[0].running_mean, norms[1].running_mean)  # type: ignore[arg-type]
    assert torch.equal(norms[0].running_var, norms[1].running_var)  # type: ignore[arg-type]
    if dtype is torch.float32:
        assert [row["verdict"] for row in rows if row["Npu Name"].startswith("native_batch_norm_1")] == ["pass"] * 5


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_formulas_of_fused_attention(heads: int, causal: bool) -> None:
    """What stands for attention kernels that only accelerators have is attention and its gradient, with shared heads and a bias."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = None if causal else torch.randn(2, 4, 6, 6, dtype=torch.float64)
    out = functional.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, enable_gqa=True)
    gradient = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), gradient)
    aten, q, k, v = torch.ops.aten, q.detach(), k.detach(), v.detach()
    forward = aten._scaled_dot_product_efficient_attention.default
    found = references.formula(forward, [q, k, v, bias, True], {"is_causal": causal})
    torch.testing.assert_close(found, out)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    rest = [None, None, None, 0.0, [True, True, True, False]]
    gradients = references.formula(backward, [gradient, q, k, v, bias, out, *rest], {"is_causal": causal})
    for a, b in zip(gradients, expected):
        torch.testing.assert_close(a, b)


def test_formulas_of_other_fused_operators() -> None:
    """RMS norm, batch norm and scaled products by formula are what torch has."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    found = references.formula(torch.ops.aten._fused_rms_norm.default, [x, [8], weight, 1e-6], {})
    torch.testing.assert_close(found[0], functional.rms_norm(x, [8], weight, 1e-6))
    mean, var = torch.zeros(8).double(), torch.ones(8).double()
    found = references.formula(torch.ops.aten.cudnn_batch_norm.default, [x, weight, weight, mean, var, True, 0.1, 1e-5], {})
    torch.testing.assert_close(found[0], functional.batch_norm(x, None, None, weight, weight, True))
    scale = torch.tensor(0.5, dtype=torch.float64)
    product = references.formula(torch.ops.aten._scaled_mm.default, [x, x.t(), scale, scale], {})
    torch.testing.assert_close(product, x @ x.t() * 0.25)


def test_dropout_is_judged_by_its_mask(tmp_path: Path) -> None:
    """What a random operator drew is given to the benchmark where the result says it; random streams are untouched."""
    torch.manual_seed(3)
    expected = torch.native_dropout(torch.ones(100), 0.3, True)[0]
    torch.manual_seed(3)
    kept: list[torch.Tensor] = []
    _, rows = one(tmp_path, lambda: kept.append(torch.native_dropout(torch.ones(100), 0.3, True)[0]))
    assert torch.equal(kept[0], expected)
    assert [row["verdict"] for row in rows if row["Npu Name"].startswith("native_dropout")] == ["pass", "pass"]


def test_equal_values_may_be_in_any_order(tmp_path: Path) -> None:
    """Indices of ties are right in any order; masks with -inf and NaN on both sides are no errors."""

    def call() -> None:
        torch.tensor([1.0, 2.0, 2.0, 1.0] * 64).topk(100)
        torch.full((4, 4), -torch.inf).triu(1).softmax(-1)
        torch.tensor([float("nan"), 1.0]).exp()

    _, rows = one(tmp_path, call)
    assert {row["verdict"] for row in rows} == {"pass"}


def saved(mode: PtdbgDispatch) -> set[str]:
    return {f"{file.parent.name}/{file.name}" for file in mode.directory.glob("*/*.npy")}


def test_dump_modes(tmp_path: Path) -> None:
    """``OFF`` saves nothing, ``all`` everything compared, ``list`` what is listed, ``auto`` what is no pass, with inputs of before."""

    def call() -> None:
        add_into(torch.zeros(4), torch.ones(4))
        torch.ones(2, 2) @ torch.ones(2, 2)

    torch.manual_seed(0)
    assert saved(one(tmp_path, call)[0]) == set()
    wrong = {"npu/add_into_1_input.0.npy", "npu/add_into_1_input.1.npy", "npu/add_into_1_output.npy", "cpu/add_into_1_output.npy"}
    product = {"npu/mm_1_input.0.npy", "npu/mm_1_input.1.npy", "npu/mm_1_output.npy", "cpu/mm_1_output.npy"}
    assert saved(one(tmp_path, call, dump_mode="list", api_list=["mm"])[0]) == product
    assert wrong | product <= saved(one(tmp_path, call, dump_mode="all")[0])
    mode, _ = one(tmp_path, call, dump_mode="auto")
    assert saved(mode) == wrong
    assert np.load(mode.directory / "npu" / "add_into_1_input.0.npy").tolist() == [0.0] * 4
    assert np.load(mode.directory / "cpu" / "add_into_1_output.npy").tolist() == [1.0] * 4


def test_two_settings_of_one_device(tmp_path: Path) -> None:
    """With a context of its own the benchmark may run in the same types: MKL-DNN against the plain convolution."""
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)

    def call() -> None:
        functional.conv2d(x, weight)

    options = {"bench_dtype": "same", "bench_context": lambda: torch.backends.mkldnn.flags(enabled=False)}
    _, rows = one(tmp_path, call, **options)
    assert [(row["verdict"], row["Bench Dtype"], row["bench"]) for row in rows] == [("pass", "torch.float32", "cpu same types")]
    mode, rows = one(tmp_path, call, bench_dtype="same")
    assert not rows
    assert "the benchmark would be the same run: 1" in mode.tables.text()


@pytest.mark.slow
def test_other_processes_give_the_same_verdicts(tmp_path: Path) -> None:
    """With `process_num` the tables have the same verdicts."""

    def call() -> None:
        scaled(torch.linspace(0, 1, 64), 2.0)
        torch.ones(2, 2) @ torch.ones(2, 2)

    def shown(rows: Rows) -> list[tuple[str, str]]:
        return [(row["Npu Name"], row["verdict"]) for row in rows if "scaled" in row["Npu Name"] or "mm" in row["Npu Name"]]

    alone, others = one(tmp_path, call)[1], one(tmp_path, call, process_num=1)[1]
    assert shown(alone) == shown(others)
    assert len(shown(alone)) == 2


def test_mode_is_entered_again(tmp_path: Path) -> None:
    """One mode may be entered for every step; rows are appended."""
    mode = PtdbgDispatch(dump_path=tmp_path, strict=True)
    for _ in range(2):
        with mode:
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert [row["API name"] for row in table(mode.tables.results)] == ["mm_1_output", "mm_2_output"]


def test_full_disk_or_deleted_directory_does_not_stop_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """When files cannot be written the comparison is switched off with one message, and the training goes on."""
    with PtdbgDispatch(dump_path=tmp_path, dump_mode="all") as mode:
        shutil.rmtree(mode.directory)
        first = torch.ones(2, 2) @ torch.ones(2, 2)
        second = first @ first
    assert second.tolist() == [[8.0, 8.0], [8.0, 8.0]]
    assert capfd.readouterr().err.count("is switched off, training goes on") == 1


def test_operators_that_were_switched_off_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the comparison costs one operator; the summary and the table have its name, the fault, and how many calls were lost."""
    add = Calls.add

    def broken(self: Calls, seen: Any, *rest: Any) -> None:
        if seen.operator.name == "mul":
            raise KeyError("standard")
        add(self, seen, *rest)

    monkeypatch.setattr(Calls, "add", broken)
    with PtdbgDispatch(dump_path=tmp_path) as dispatch:
        for _ in range(3):
            (torch.ones(4) * 2 + 1).sum()
    shown = dispatch.tables.text()
    assert "6 calls of operators compared" in shown.splitlines()[0]
    assert "; switched off after a fault: mul (" in shown.splitlines()[0]
    assert "switched off after a fault (KeyError: 'standard'): 3" in shown
    assert "mul,0,0,0,0,,,switched off after a fault (KeyError: 'standard'): 3" in dispatch.tables.summary.read_text()


def test_error_of_the_training_is_raised_as_it_is(tmp_path: Path) -> None:
    """What an operator of the training raises is not caught."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"), PtdbgDispatch(dump_path=tmp_path, strict=True):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_memory_of_live_tensors_stays_the_trainings_own(tmp_path: Path) -> None:
    """Storages can be resized afterwards, as sharded training does it."""
    x = torch.ones(4)
    one(tmp_path, lambda: x.mul_(2.0))
    x.untyped_storage().resize_(0)


def test_compiled_functions_stay_compiled(tmp_path: Path) -> None:
    """Inside of the mode a compiled function runs compiled, with the same bits."""
    ran: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return x * 2
        ran.append(True)
        return x * 3

    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(function, backend="aot_eager")
    results: list[torch.Tensor] = []
    one(tmp_path, lambda: results.append(compiled(torch.ones(2))))
    assert not ran
    assert results[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dump_mode": "some"}, "dump_mode='some'; allowed is one of 'OFF', 'all', 'list', 'auto'"),
        ({"api_list": "mm"}, "api_list='mm'"),
        ({"debug": 1}, "debug=1; allowed is True or False"),
        ({"tag": "../x"}, "tag='../x'"),
        ({"process_num": 99}, "process_num=99; allowed is 0 to"),
        ({"bench": "cuda:77"}, "bench='cuda:77' cannot be used"),
        ({"bench_dtype": "fp64"}, "bench_dtype='fp64' is not known; allowed: 'float64', 'raised', 'same'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    """A wrong argument is an error with its value and what is allowed, before anything is written."""
    with pytest.raises(UsageError) as error:
        PtdbgDispatch(dump_path=tmp_path, **options)
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


def test_difference_of_arrays() -> None:
    """Differences are over what is finite on both sides, signed errors relative from 1 on; without such elements there are none."""
    bench, device = np.array([0.5, 4.0, np.inf, np.nan]), np.array([0.75, 3.0, np.inf, 1.0])
    found = difference(bench, device)
    assert found.max_abs == 1.0
    assert found.max_abs_at == 1
    assert found.max_rel_at == 0
    assert found.balance == pytest.approx((0.25 - 0.25) / 2, abs=1e-6)
    assert difference(np.array([np.nan]), np.array([np.nan])).max_abs is None
    assert difference(np.zeros(2), np.zeros(3)).max_abs is None
