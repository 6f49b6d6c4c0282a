"""`ConfigChecker` on trainings of torch: what it collects, what it costs, and that it changes and stops nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from msprobe.core.config_check import ConfigChecker
from msprobe_engine.config.pack import file
from msprobe_engine.config.pack.reader import Pack, read_pack
from msprobe_engine.core.errors import DumpFormatError, MissingExtraError, UsageError
from msprobe_engine.core.statistics.digest import digest_array
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.formats.pack import entries
from msprobe_integrations.torch.config import checker as config_checker
from msprobe_integrations.torch.config.checker import TorchRandomCalls

SCRIPT = Path(__file__).parents[1] / "checked_training.py"


@pytest.fixture(autouse=True)
def _patches_off() -> Iterator[None]:
    yield
    ConfigChecker.undo_patches()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., str]) -> tuple[Pack, str]:
    path = tmp_path_factory.mktemp("trained") / "pack.zip"
    done = train(path, environment={"WANDB_API_KEY": "0123456789", "NCCL_ALGO": "Ring"})
    return read_pack(path), done


@pytest.mark.slow
def test_the_pack_has_all_entries_of_the_existing_tool_and_ours(trained: tuple[Pack, str]) -> None:
    """Environment, packages, settings, the first weights, inputs and random calls; one forward pass unless more are asked for."""
    pack, _ = trained
    assert pack.problems == []
    assert set(pack.names) == {
        "env", "pip", "hyperparameters/hyperparameters_dynamic.json", "dataset/step0/rank0/dataset.json", "weights/step0/rank0/weight.json",
        "random/rank0.json", "msprobe/meta.json",
        *(f"msprobe/{part}/rank0.json" for part in ("ranks", "env", "withheld", "system", "hyperparameters", "random")),
        "msprobe/weights/step0/rank0.json", "msprobe/dataset/step0/rank0.json",
    }  # fmt: skip
    assert pack.json("env")["NCCL_ALGO"] == "Ring"
    assert "WANDB_API_KEY" not in pack.text("env") + pack.text("msprobe/env/rank0.json") + pack.text("msprobe/system/rank0.json")
    assert pack.packages()["torch"][0].startswith(torch.__version__.partition("+")[0])
    settings = pack.json("msprobe/hyperparameters/rank0.json")
    assert settings["optimizer.lr"] == {"value": 0.01, "origin": "code", "where": "", "framework": "torch"}
    assert settings["optimizer.eps"]["origin"] == "default"
    system = pack.json("msprobe/system/rank0.json")
    assert system["flags"]["deterministic_algorithms"] is False
    assert system["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_digests_are_those_of_the_bits(trained: tuple[Pack, str]) -> None:
    """Weights, buffers and inputs by the definition of the digest, and each sample by its own."""
    pack, _ = trained
    weights = pack.json(entries.of_step("weights", 0, 0))
    assert set(weights) == {"embedding.weight", "linear.weight", "linear.bias", "scale"}
    assert weights["scale"] == {
        "shape": [3],
        "dtype": "float32",
        "kind": "buffer",
        "digest": f"{digest_array(np.ones(3, np.float32)):016x}",
    }
    tokens = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0)).numpy()
    data = pack.json(entries.of_step("dataset", 0, 0))
    assert data["args.0"]["digest"] == f"{digest_array(tokens):016x}"
    assert data["args.0"]["samples"] == [f"{digest_array(row):016x}" for row in tokens]
    assert data["kwargs.labels"]["digest"] == data["args.0"]["digest"]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, fork: Callable[..., Any]) -> Callable[..., str]:
    """``odd(pack, ...)``: the same training with odd inputs, in a forked process; the hash of what came out."""

    def run(*words: str) -> str:
        said = tmp_path_factory.mktemp("odd") / "said"
        process = fork([str(SCRIPT), *words, "odd=1"], os.environ, said)
        process.join(240)
        assert process.exitcode == 0, said.read_text()[-3000:]
        return said.read_text().split()[-1]

    return run


@pytest.fixture(scope="module")
def plain(odd: Callable[..., str]) -> str:
    return odd("")


@pytest.mark.parametrize("micro_steps", ["1", "all"])
def test_the_training_is_bit_for_bit_the_same_without_the_checker(
    tmp_path: Path, trained: tuple[Pack, str], plain: str, odd: Callable[..., str], micro_steps: str
) -> None:
    """Losses and weights, dropout included, with patches and hooks and without; odd inputs are no trouble either."""
    checked = odd(str(tmp_path / "pack.zip"), f"micro_steps={micro_steps}")
    assert checked == plain == trained[1]
    pack = read_pack(tmp_path / "pack.zip")
    assert list(pack.by_step("weights")) == [(step, 0) for step in range(1 if micro_steps == "1" else 3)]
    data = pack.json(entries.of_step("dataset", 0, 0))
    assert data["kwargs.none"] == {"value": None}
    assert data["kwargs.meta"]["digest"] is None
    assert data["kwargs.empty"]["shape"] == [0, 3]
    assert pack.json(entries.dataset(0, 0))["kwargs"]["empty"] == {"max": 0.0, "min": 0.0, "mean": 0.0, "norm": 0.0}


class Odd(nn.Module):
    """Everything that the existing hook stumbles over, and a few more."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.meta = nn.Parameter(torch.ones(2, device="meta"))
        self.nan = nn.Parameter(torch.tensor([float("nan"), 1.0]))
        self.whole = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.tied = self.whole
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("eight", torch.ones(4).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.whole.sum()


def test_odd_weights_and_inputs_are_described_and_never_raise(tmp_path: Path) -> None:
    """Empty, meta, NaN, complex, fp8 and bool tensors, sparse and nested inputs, arrays, cycles, objects."""
    cycle: list[Any] = []
    cycle.append(cycle)
    model = Odd()
    checker = ConfigChecker(model, None, str(tmp_path / "pack.zip"))
    inputs = (
        cycle,
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        np.arange(3),
        object(),
        "text",
        5,
    )
    model(*inputs, big=torch.tensor(2**40), deep={"a": [{"b": torch.ones(2, requires_grad=True)}]})
    checker.flush()
    pack = read_pack(tmp_path / "pack.zip")
    weights = pack.json(entries.of_step("weights", 0, 0))
    assert weights["meta"]["digest"] is None
    assert all(one["digest"] for name, one in weights.items() if name != "meta")
    assert set(pack.json(entries.weights(0, 0))) == {"empty", "nan", "whole", "complex"}
    data = pack.json(entries.of_step("dataset", 0, 0))
    assert data["args.5"] == {"value": "text"}
    assert data["args.4"] == {"class": "object"}
    assert data["args.3"]["dtype"] == "int64"
    assert data["kwargs.deep.a.0.b"]["shape"] == [2]
    assert model._forward_pre_hooks == {}


def test_evaluation_is_not_counted_unless_asked_for(tmp_path: Path) -> None:
    """A sanity check before training is not the first micro step; for inference it can be."""
    model = nn.Linear(2, 2)
    checker = ConfigChecker(model, None, tmp_path / "a.zip")
    other = ConfigChecker(model, None, tmp_path / "b.zip", evaluation=True)
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 2))
    model.train()
    model(torch.ones(1, 2))
    checker.flush()
    other.flush()
    first, second = (read_pack(tmp_path / name).json(entries.dataset(0, 0))["args"]["0"]["max"] for name in ("a.zip", "b.zip"))
    assert (first, second) == (1.0, 0.0)


def test_passes_of_tracers_and_exporters_are_none(tmp_path: Path) -> None:
    """The graph that they make has nothing of ours, and the first real pass is collected."""
    model = Dropped()
    checker = ConfigChecker(model, None, tmp_path / "pack.zip")
    traced = torch.jit.trace(model.eval(), torch.ones(1, 4))
    exported = torch.export.export(model.train(), (torch.ones(1, 4),))
    assert "digest" not in str(traced.inlined_graph) + str(exported.graph)
    assert len(list(traced.inlined_graph.nodes())) < 20
    model(torch.full((1, 4), 3.0))
    checker.flush()
    assert read_pack(tmp_path / "pack.zip").json(entries.dataset(0, 0))["args"]["0"]["max"] == 3.0


def test_a_model_that_never_trained_is_said_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The pack has no weights then, and nobody should have to guess why."""
    ConfigChecker(nn.Linear(1, 1), None, tmp_path / "pack.zip").close()
    assert "has had no forward pass in training" in capfd.readouterr().err


def test_the_end_of_a_process_waits_for_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is off after the pass; what it has collected is written all the same before the process ends."""
    from msprobe_engine.config.pack.writer import PackWriter

    model, add = nn.Linear(2, 2), PackWriter.add
    checker = ConfigChecker(model, None, tmp_path / "pack.zip")

    def slow(self: PackWriter, contents: Any) -> None:
        time.sleep(0.3)
        add(self, contents)

    monkeypatch.setattr(PackWriter, "add", slow)
    model(torch.ones(1, 2))
    assert model._forward_pre_hooks == {}
    checker.close()
    assert read_pack(tmp_path / "pack.zip").by_step("weights")


def test_chunks_of_a_virtual_pipeline_are_all_there(tmp_path: Path) -> None:
    """Of a list of modules the first has its own names, the others their number in front; a tuple is fine as well."""
    chunks = nn.Linear(2, 2), nn.Linear(2, 3)
    checker = ConfigChecker(chunks, None, tmp_path / "pack.zip", micro_steps=[1])
    for _ in range(3):
        chunks[0](torch.ones(1, 2))
    checker.flush()
    pack = read_pack(tmp_path / "pack.zip")
    assert list(pack.by_step("weights")) == [(1, 0)]
    assert set(pack.json(entries.of_step("weights", 1, 0))) == {"weight", "bias", "1:weight", "1:bias"}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.5)


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_compiled_models_are_collected_and_compiled_once(tmp_path: Path, way: str) -> None:
    """The hook is no part of the compiled code, and its going away compiles nothing again."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    inner = Dropped()
    ConfigChecker.apply_patches()
    model: Any = inner
    if way == "torch.compile":
        model = torch.compile(inner, backend=counted, fullgraph=True)
    else:
        inner.compile(backend=counted, fullgraph=True)
    checker = ConfigChecker(model, None, tmp_path / "pack.zip")
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
    checker.flush()
    assert counted.frame_count == 1
    assert read_pack(tmp_path / "pack.zip").by_step("weights")


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    """Wrong ones raise with what is allowed; the framework's name too, with a model or without."""
    pack = tmp_path / "pack.zip"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model": "net"}, "model is str"),
        ({"model": [nn.Linear(1, 1), 3]}, "a list with int"),
        ({"fmk": "jax"}, r"fmk is 'jax'.*'pytorch', 'mindspore'"),
        ({"shell_path": "run.sh"}, "a list of paths"),
        ({"output_zip_path": str(tmp_path / "pack.tar")}, r"must end in \.zip"),
        ({"micro_steps": "some"}, "micro_steps"),
        ({"micro_steps": [-1]}, "micro_steps"),
        ({"micro_steps": True}, "micro_steps"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UsageError, match=message):
            ConfigChecker(**{"output_zip_path": str(pack), **arguments})
    with pytest.raises((UsageError, DumpFormatError)):
        ConfigChecker(None, [tmp_path / "absent.sh"], pack)
    with pytest.raises(UsageError, match="fmk is"):
        ConfigChecker.apply_patches("tf")
    assert not pack.exists()


def test_a_pack_that_cannot_be_written_at_the_start_does_not_end_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a directory that cannot be made, a file that is no pack (kept as it is): one warning each, and no hook."""
    model = nn.Linear(2, 2)
    (tmp_path / "file").write_text("")
    (tmp_path / "notes.zip").write_text("mine")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for path in (tmp_path / "file" / "pack.zip", tmp_path / "notes.zip", tmp_path / "full.zip"):
        if path.name == "full.zip":
            monkeypatch.setattr(file, "append", full)
        ConfigChecker.apply_patches()
        checker = ConfigChecker(model, None, path)
        model(torch.ones(1, 2))
        checker.flush()
        checker.close()
        assert capfd.readouterr().err.count("the training goes on") == 1
        assert model._forward_pre_hooks == {}
    assert (tmp_path / "notes.zip").read_text() == "mine"


def test_without_the_framework_the_error_says_what_to_install(tmp_path: Path) -> None:
    """mindspore is not installed here; torch packs do not need it."""
    pytest.importorskip("torch")
    try:
        import mindspore  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="mindspore"):
            ConfigChecker(None, None, tmp_path / "pack.zip", fmk="mindspore")


def test_a_disk_that_fails_while_training_is_said_once_and_the_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The pack is taken away under the checker: one line, no exception, hooks off."""
    model = nn.Linear(2, 2)
    checker = ConfigChecker(model, None, tmp_path / "out" / "pack.zip", micro_steps=2)
    (tmp_path / "out" / "pack.zip").unlink()
    (tmp_path / "out" / "pack.zip").mkdir()
    for _ in range(4):
        model(torch.ones(1, 2))
    checker.flush()
    err = capfd.readouterr().err
    assert err.count("the training goes on") == 1
    assert model._forward_pre_hooks == {}


def test_random_calls_are_counted_with_place_and_arguments(tmp_path: Path) -> None:
    """Seeds with their arguments, functions that were imported by name before, initialisation, dropout only where it drops; the calls of
    an evaluation and the functions' own results are untouched."""
    name = "imported_early"
    space: dict[str, Any] = {"__name__": name}
    module = type(random)(name)
    module.__dict__.update(space, randint=random.randint)
    import sys

    sys.modules[name] = module
    try:
        ConfigChecker.apply_patches()
        ConfigChecker.apply_patches()
        random.seed(5)
        expected = random.Random(5).randint(0, 9)
        assert module.randint(0, 9) == expected
        torch.manual_seed(7)
        np.random.shuffle([1, 2, 3])
        torch.empty(3).normal_()
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        model.eval()(torch.ones(1, 2))
        model.train()
        for _ in range(3):
            torch.rand(1)
        checker = ConfigChecker(model, None, tmp_path / "pack.zip")
        model(torch.ones(1, 2))
        checker.flush()
        assert module.randint is random.randint
        assert not hasattr(random.random, "__wrapped__")
    finally:
        del sys.modules[name]
    calls = {
        (one["name"], one["where"].rpartition(" ")[2]): one
        for one in read_pack(tmp_path / "pack.zip").json("msprobe/random/rank0.json")["calls"]
    }
    here = "test_random_calls_are_counted_with_place_and_arguments"
    assert calls["random.seed", here]["seeds"] == ["5"]
    assert calls["torch.manual_seed", here]["seeds"] == ["7"]
    assert calls["random.randint", here]["arguments"] == "0, 9"
    assert calls["torch.rand", here]["count"] == 3
    assert calls["torch.Tensor.normal_", here]["arguments"] == "Tensor((3,), torch.float32)"
    assert ("np.random.shuffle", here) in calls
    assert any(name == "torch.Tensor.uniform_" for name, _ in calls)
    assert not any("dropout" in name for name, _ in calls)


def test_states_of_streams_are_digests_at_fixed_points(trained: tuple[Pack, str]) -> None:
    """After construction and before the pass: equal states are equal digests; streams that nobody has touched say nothing."""
    found = trained[0].json("msprobe/random/rank0.json")["states"]
    assert list(found) == ["constructed", "step0"]
    assert set(found["step0"]) == {"python", "numpy", "torch"}
    random.seed(2)
    from msprobe_integrations.torch.config.checker import states

    assert states()["python"] == found["step0"]["python"]


def test_a_counted_call_costs_microseconds_and_nothing_afterwards() -> None:
    """The existing tool takes 100 us to 3 ms. A bound that a loaded machine keeps; measured here: 1 to 2 us at any depth."""
    calls = TorchRandomCalls()

    def timed() -> float:
        start = time.perf_counter()
        for _ in range(5000):
            random.random()
        return (time.perf_counter() - start) / 5000

    def deep(n: int) -> float:
        return timed() if n == 0 else deep(n - 1)

    plain = min(timed() for _ in range(3))
    calls.start()
    try:
        cost = min(deep(60) for _ in range(5))
    finally:
        calls.stop()
    assert cost < 30e-6
    assert min(timed() for _ in range(5)) < 20 * plain
    counted = [one for one in calls.record.calls() if one["name"] == "random.random"]
    assert sum(one["count"] for one in counted) == 5 * 5000
    assert len(counted) == 1


def test_the_record_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls from more places than it keeps are counted together."""
    from msprobe_engine.config.collect import random_calls

    monkeypatch.setattr(random_calls, "MOST_STACKS", 3)
    calls = TorchRandomCalls()
    calls.start()
    try:
        for n in range(10):
            exec(compile(f"random.random()\n#{n}", f"<generated {n}>", "exec"), {"random": random})
    finally:
        calls.stop()
    assert len(calls.record) == 3
    assert calls.record.left_out == 7


def test_nested_modules_hold_no_reference_to_the_checker(tmp_path: Path) -> None:
    """A model that is saved whole while the checker waits for its pass does not take the checker along."""
    model = nn.Linear(2, 2)
    checker = ConfigChecker(model, None, tmp_path / "pack.zip")
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    loaded(torch.ones(1, 2))
    checker.close()
    assert json.dumps(sorted(config_checker._points)) is not None


def test_weights_of_a_wrapped_model_meet_those_of_the_model_itself(tmp_path: Path) -> None:
    """DDP and torch.compile put words before the names of parameters; one process is held against several all the same."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name, model in (
            ("plain", plain),
            ("ddp", nn.parallel.DistributedDataParallel(plain)),
            ("compiled", torch.compile(plain, backend="eager")),
        ):
            checker = ConfigChecker(model, None, tmp_path / f"{name}.zip")
            checker._checker._before_forward(model, (torch.ones(2, 2),), {})
            checker.close()
        with torch.no_grad():
            plain[0].weight[0, 0] += 1
        changed = ConfigChecker(nn.parallel.DistributedDataParallel(plain), None, tmp_path / "changed.zip")
        changed._checker._before_forward(plain, (torch.ones(2, 2),), {})
        changed.close()
    finally:
        torch.distributed.destroy_process_group()
    for name in ("ddp", "compiled"):
        sheet = compare_packs(tmp_path / "plain.zip", tmp_path / f"{name}.zip", only=("weights",)).sheets["weights"]
        assert (sheet.differences, sheet.compared) == ([], 7)
        assert [row["equal"] for row in sheet.rows] == [True] * 7
    (one,) = compare_packs(tmp_path / "plain.zip", tmp_path / "changed.zip", only=("weights",)).differences
    assert one.name == "0.weight"
