"""Task free_benchmark on torch: what it finds, what it leaves alone, and that the training stays bit for bit what it was."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.op_tools.free_benchmark import second as sliced

MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu")


@pytest.fixture(autouse=True)
def _one_debugger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test has its own."""
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    yield
    if PrecisionDebugger._instance is not None and PrecisionDebugger._instance._run is not None:
        PrecisionDebugger._instance._run.extras.close()


def debugger(tmp_path: Path, step: tuple[int, ...] = (), **section: Any) -> PrecisionDebugger:
    """With task free_benchmark, writing into ``tmp_path / "out"``."""
    if section.get("pert_mode") == "to_cpu":
        section["fuzz_device"] = "cpu"
    settings = {"task": "free_benchmark", "dump_path": str(tmp_path / "out"), "step": list(step), "level": "L1", "free_benchmark": section}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return PrecisionDebugger(str(tmp_path / "config.json"))


def rows(tmp_path: Path) -> list[dict[str, str]]:
    """Of all files free_benchmark.csv, in the order of steps."""
    files = sorted((tmp_path / "out").glob("step*/*/free_benchmark.csv"))
    return [row for path in files for row in csv.DictReader(path.open(newline=""))]


def operators(found: PrecisionDebugger, tmp_path: Path) -> dict[str, dict[str, str]]:
    """Of the summary, which closing writes."""
    found.run.extras.close()
    return {row["api"]: row for row in csv.DictReader((tmp_path / "out" / "free_benchmark_summary.csv").open(newline=""))}


def one_step(found: PrecisionDebugger, call: Callable[[], Any]) -> Any:
    """A training step around a call."""
    found.start()
    result = call()
    found.stop()
    found.step()
    return result


class Scale(torch.autograd.Function):
    """A custom function, whose calls are counted."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        Scale.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004
        return gradients[0] * 2


def _policy(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


class Small(nn.Module):
    """Random, in place, several outputs, integers, running statistics, recomputation, a tensor that is used twice."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(20, 16, max_norm=3.0)
        self.fc, self.head = nn.Linear(16, 16), nn.Linear(16, 20)
        self.norm, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.count = nn.Buffer(torch.zeros(1)) if hasattr(nn, "Buffer") else torch.zeros(1)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(self.fc(x)), 0.2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        x = x + checkpoint(self.inner, x, use_reentrant=False, context_fn=_contexts)
        x = x + checkpoint(self.inner, x, use_reentrant=self.reentrant)
        x = self.batch(x.flatten(0, 1)).view_as(x)
        self.count += 1
        a, b = x.chunk(2, -1)
        a = F.relu(a.clone(), inplace=True) * 1
        a[:, 0] = 0.5
        top = x.topk(3, -1).values
        x = torch.cat([torch.add(a, b, out=None), Scale.apply(b).mul_(2).softmax(-1)], -1)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1)[:, 0]
        return self.head(x) + top.sum() * 0.01


def bits_of_training(around: PrecisionDebugger | None, dtype: torch.dtype, model: Any = None) -> list[bytes]:
    """Losses, weights, statistics and random numbers of two steps, the optimizer inside of what is looked at."""
    torch.manual_seed(5)
    net = (Small() if model is None else model()).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    ids = torch.randint(0, 20, (3, 6))
    found = []
    for _ in range(2):
        if around is not None:
            around.start(net)
        loss = F.cross_entropy(net(ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if around is not None:
            around.stop()
            around.step()
        state = [getattr(tensor, "full_tensor", tensor.detach)() for tensor in net.state_dict().values()]
        found += [tensor.detach().float().numpy().tobytes() for tensor in (loss, *state, torch.rand(3))]
    return found


@pytest.fixture(scope="module")
def plain() -> list[bytes]:
    """Without a debugger."""
    return bits_of_training(None, torch.bfloat16)


@pytest.mark.fast_cells("improve_precision-forward", "improve_precision-backward")
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_the_training_has_the_same_bits(mode: str, stage: str, plain: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every mode and stage, over random operators, recomputation and such as change their input; no_change finds nothing; large calls
    are run in pieces."""
    monkeypatch.setattr(sliced, "LARGE", 200)
    monkeypatch.setattr(sliced, "_PIECE", 64)
    around = debugger(tmp_path, pert_mode=mode, fuzz_stage=stage)
    Scale.calls = 0
    assert bits_of_training(around, torch.bfloat16) == plain
    assert Scale.calls == 2
    assert not around.faults.disabled
    found = operators(around, tmp_path)
    assert sum(int(row["checked"]) for row in found.values()) > 40
    assert "random" in found["Functional.dropout"]["skipped"]
    assert "random" in found["Functional.scaled_dot_product_attention"]["skipped"]
    assert "custom" in found["Autograd.Scale"]["skipped"]
    assert mode != "no_change" or not rows(tmp_path)
    if stage == "forward":
        for inplace in ("Tensor.add_", "Functional.relu", "Tensor.__setitem__", "Functional.batch_norm", "Functional.embedding"):
            assert int(found[inplace]["checked"]) >= 1
    for hook in ("linear", "softmax", "relu"):
        assert not hasattr(getattr(F, hook), "__wrapped__")


def composite_softmax(x: torch.Tensor, dim: int | None = None, **_: Any) -> torch.Tensor:
    """Every step is rounded."""
    e = torch.exp(x)
    return e / e.sum(-1 if dim is None else dim, keepdim=True)


def known_to_type_checkers(x: OnlyThere, *args: Any, **_: Any) -> torch.Tensor:  # type: ignore[name-defined]  # noqa: F821
    """A function of a program whose annotations cannot be resolved while it runs."""
    del args
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def test_annotations_that_do_not_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may put a function in the place of one of torch whose annotations name what is imported for type checkers alone."""
    monkeypatch.setattr(F, "softmax", known_to_type_checkers)
    run = debugger(tmp_path, pert_mode="improve_precision")
    run.start()
    F.softmax(torch.linspace(-2, 2, 8, dtype=torch.bfloat16), -1)
    run.stop()
    run.step()
    assert [row["api_name"] for row in rows(tmp_path)] == ["Functional.softmax.0.forward"]
    assert F.softmax is known_to_type_checkers


@pytest.mark.slow
def test_a_composite_softmax_is_found_and_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where the program has it in the place of torch's, which is not reported; fix gives the result of the good kernel."""
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=torch.bfloat16) * 3
    one_step(debugger(tmp_path), lambda: F.softmax(x, -1))
    assert rows(tmp_path) == []
    good = F.softmax(x, -1)
    monkeypatch.setattr(F, "softmax", composite_softmax)
    bad = one_step(PrecisionDebugger(), lambda: F.softmax(x, dim=-1))
    (row,) = rows(tmp_path)
    assert (row["api_name"], row["pert_mode"], row["stage"], row["step"]) == (
        "Functional.softmax.0.forward",
        "improve_precision",
        "forward",
        "1",
    )
    assert (row["dtype"], row["shape"]) == ("torch.bfloat16", "torch.Size([64, 128])")
    assert float(row["max_rel"]) > 0.004
    assert F.softmax is composite_softmax
    monkeypatch.setattr(PrecisionDebugger, "_instance", None)
    x.requires_grad_()
    fixed = one_step(debugger(tmp_path, handler_type="fix"), lambda: F.softmax(x, -1))
    assert (fixed.float() - good.float()).abs().max() < (bad.float() - good.float()).abs().max() / 4
    (gradient,) = torch.autograd.grad(fixed[:, 0].sum(), x)
    assert gradient.dtype == torch.bfloat16
    assert gradient.isfinite().all()


def test_registered_functions_are_calls(tmp_path: Path) -> None:
    """A function of the program that is registered is looked at as a whole, and fixed."""

    class Owner:
        softmax = staticmethod(composite_softmax)

    around = debugger(tmp_path, pert_mode="improve_precision")
    around.register_custom_api(Owner, "softmax")
    x = torch.linspace(0, 4, 400, dtype=torch.bfloat16).reshape(4, 100)
    one_step(around, lambda: Owner.softmax(x))
    assert [row["api_name"] for row in rows(tmp_path)] == ["Owner.softmax.0.forward"]
    assert "Torch.exp" not in operators(around, tmp_path)


def test_noise_finds_the_ill_conditioned_operator(tmp_path: Path) -> None:
    """Cancellation and a variance of shifted values are found; a product, a normalisation and an identity are not."""
    torch.manual_seed(0)
    x, w = torch.randn(32, 32), torch.randn(32, 32)
    a, shifted = torch.full((4, 4), 1.5), torch.randn(4, 64) + 1e5
    around = debugger(tmp_path, pert_mode="bit_noise")
    one_step(around, lambda: (a - 1.4995, torch.var(shifted, -1), x @ w, F.layer_norm(x, (32,)), x.clone(), torch.softmax(x, -1)))
    assert {row["api_name"] for row in rows(tmp_path)} == {"Tensor.__sub__.0.forward", "Torch.var.0.forward"}
    found = operators(around, tmp_path)
    assert float(found["Tensor.__sub__"]["amplification"]) > 1000 > 5 > float(found["Tensor.__matmul__"]["amplification"])
    assert next(iter(found)) in ("Tensor.__sub__", "Torch.var")


def test_gradients_for_the_gradient_that_arrives(tmp_path: Path) -> None:
    """However small it is, and for each call alone: the sum over the uses of a tensor plays no part."""
    x = torch.full((2, 2), 1.5, requires_grad=True)
    around = debugger(tmp_path, pert_mode="bit_noise", fuzz_stage="backward")
    one_step(around, lambda: ((torch.pow(x, 30000.0 / 500) / 1e12 + torch.mul(x, 2.0)).sum() * 1e-9).backward())
    found = operators(around, tmp_path)
    assert float(found["Torch.pow"]["amplification"]) > 10
    assert float(found["Torch.mul"]["max_rel"]) == 0.0
    assert {row["api_name"] for row in rows(tmp_path)} <= {"Torch.pow.0.backward"}


def test_a_wrong_kernel_is_found_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """to_cpu: ten times too large, however small; a right one is not found."""
    x = torch.linspace(-1e-5, 1e-5, 64)
    around = debugger(tmp_path, pert_mode="to_cpu")
    right = F.gelu
    monkeypatch.setattr(F, "silu", lambda t: right(t) * (10 if t.dtype == torch.float32 else 1))
    one_step(around, lambda: (F.gelu(x), F.silu(x)))
    assert [(row["api_name"], row["max_rel"]) for row in rows(tmp_path)] == [("Functional.silu.0.forward", "")]


def test_preheat_learns(tmp_path: Path) -> None:
    """The first step counts; then a result that differs, and with which the CPU agrees, is reported less than without."""
    x = torch.full((4, 4), 1.5)
    around = debugger(tmp_path, pert_mode="bit_noise", if_preheat=True, preheat_step=3)
    for _ in range(6):
        one_step(around, lambda: [x - 1.4995 for _ in range(3)])
    found = operators(around, tmp_path)["Tensor.__sub__"]
    assert (found["checked"], found["differ"]) == ("15", "0")


def test_selections(tmp_path: Path) -> None:
    """Steps, names in part, ranges; numbers count all calls of a step."""
    x = torch.tensor([1.0, 12.0], dtype=torch.float16)

    def calls() -> None:
        torch.exp(x), torch.exp(x), x.exp2()

    around = debugger(tmp_path, step=(1,), list=["Torch.exp.1", "exp2"])
    for _ in range(3):
        one_step(around, calls)
    assert [row["api_name"] for row in rows(tmp_path)] == ["Torch.exp.1.forward"]
    assert set(operators(around, tmp_path)) == {"Torch.exp", "Tensor.exp2"}
    PrecisionDebugger._instance = None
    around = debugger(tmp_path, scope=["Torch.exp.1.forward", "Tensor.exp2.0.forward"])
    one_step(around, calls)
    assert operators(around, tmp_path)["Torch.exp"]["checked"] == "1"


def test_what_is_not_run_again_is_said(tmp_path: Path) -> None:
    """Tensors of other classes, transformations, sparse tensors, own generators; autocast has its say; errors stay the program's."""
    x = torch.rand(3, 3)
    around = debugger(tmp_path, pert_mode="bit_noise")

    def calls() -> None:
        torch.func.vmap(lambda t: torch.sin(t))(x)
        torch.tanh(x.to_sparse())
        torch.relu(torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]))
        torch.normal(x, x, generator=torch.Generator())
        with torch.inference_mode():
            torch.exp(x)
        with pytest.raises(RuntimeError, match="shapes"):
            torch.mm(x, x[:2])

    one_step(around, calls)
    found = operators(around, tmp_path)
    assert "transformation" in found["Torch.sin"]["skipped"]
    assert "sparse" in found["Torch.tanh"]["skipped"]
    assert "nested" in found["Torch.relu"]["skipped"]
    assert "random" in found["Torch.normal"]["skipped"]
    assert found["Torch.exp"]["checked"] == "1"
    assert not around.faults.disabled
    PrecisionDebugger._instance = None
    around = debugger(tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        one_step(around, lambda: (F.linear(x - 0.5, x - 0.5), torch.sin(x)))
    assert operators(around, tmp_path)["Functional.linear"]["checked"] == "1"
    assert rows(tmp_path) == []  # what autocast rounds before is no fault of the operator


def test_custom_functions_are_run_again_when_they_are_named(tmp_path: Path) -> None:
    """Not otherwise: they may communicate."""
    Scale.calls = 0
    around = debugger(tmp_path, pert_mode="no_change", list=["Autograd.Scale"])
    one_step(around, lambda: Scale.apply(torch.ones(2, requires_grad=True)))
    assert Scale.calls == 2
    assert operators(around, tmp_path)["Autograd.Scale"]["checked"] == "1"


def work(rank: int, port: int, directory: str) -> None:
    """A training of two ranks, replicated and sharded, without and with the benchmark in every mode of `section`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def replicated() -> Any:
        return nn.parallel.DistributedDataParallel(Small(reentrant=False), broadcast_buffers=False)

    def sharded() -> Any:
        made = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 20))
        for layer in (made[1], made[3]):
            fully_shard(layer, reshard_after_forward=True)
        return fully_shard(made)

    for name, model in (("replicated", replicated), ("sharded", sharded)):
        plain = bits_of_training(None, torch.float32, model)
        for stage in ("forward", "backward"):
            PrecisionDebugger._instance = None
            out = Path(directory) / f"{name}_{stage}_{rank}"
            out.mkdir()
            around = debugger(out, pert_mode="bit_noise", fuzz_stage=stage)
            assert bits_of_training(around, torch.float32, model) == plain, (name, stage)
            assert not around.faults.disabled
            around.run.extras.close()
            with (out / "out" / f"free_benchmark_summary_rank{rank}.csv").open(newline="") as file:
                assert sum(int(row["checked"]) for row in csv.DictReader(file)) >= 8
    dist.destroy_process_group()


@pytest.mark.framework
@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Replicated and sharded training have the same bits, no collective is repeated, each rank has its files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, (port, str(tmp_path)), nprocs=2, start_method="fork")
