"""What runs write by themselves: one pack beside the probe's other files, from settings that frameworks have resolved."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from forkpool import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from msprobe_engine.config.collect import resolved
from msprobe_engine.config.pack.reader import Pack, read_pack
from msprobe_engine.config.settings.pack_settings import PackSettings, Setting
from msprobe_engine.config.severity import CHANGES
from msprobe_engine.core.settings.schema import (
    ConfigCheckSettings,
    CsvSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    SinkSettings,
)
from msprobe_engine.find.config.compare_settings import compare_settings
from msprobe_engine.formats.pack import entries
from msprobe_integrations.config_checker import ConfigChecker
from msprobe_integrations.torch.config import run as run_config
from msprobe_integrations.torch.config import start as config_start
from msprobe_integrations.torch.config.sources import Reach, collect, of_torch
from msprobe_integrations.torch.monitor.probe import TorchProbe


def train(output: Path, *, steps: int = 2, lr: float = 1e-2, probe: bool = True, **sections: Any) -> list[float]:
    """A loop of one's own, with a scheduler."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    watch = None
    if probe:
        watch = TorchProbe(ProbeSettings(output_dir=str(output), **{"strict": True, "monitor": MonitorSettings(), **sections}))
        watch.attach(model, optimizer)
    losses = []
    for step in range(steps):
        if watch is not None:
            watch.begin_step(step)
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.end_step({"loss": loss})
    if watch is not None:
        watch.close()
    return losses


def settings_of(pack: Pack, rank: int = 0) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = pack.json(entries.of_rank("hyperparameters", rank))
    return found


def test_a_loop_of_ones_own_leaves_a_pack_and_trains_as_without(tmp_path: Path) -> None:
    """Optimizer, scheduler, model, switches, environment, packages and weights; the training has the same losses."""
    assert train(tmp_path) == train(tmp_path, probe=False)
    pack = read_pack(tmp_path / run_config.NAME)
    assert pack.problems == []
    found = settings_of(pack)
    assert found["optimizer.class"]["value"] == "AdamW"
    assert (found["optimizer.lr"]["value"], found["optimizer.lr"]["origin"]) == (0.01, "code")
    assert (found["optimizer.betas"]["value"], found["optimizer.betas"]["origin"]) == ([0.9, 0.95], "code")
    assert (found["optimizer.eps"]["value"], found["optimizer.eps"]["origin"]) == (1e-8, "default")
    assert found["lr_scheduler.class"]["value"] == "CosineAnnealingLR"
    assert found["lr_scheduler.T_max"]["value"] == 10
    assert set(pack.json(entries.of_step("weights", 0, 0))) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {"env", "pip", entries.DYNAMIC, entries.of_rank("system", 0)} <= set(pack.names)
    assert (tmp_path / run_config.NAME).stat().st_size < 50_000


def test_the_pack_of_the_run_before_is_kept_and_the_two_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has changed since the last start is one command away: exactly that."""
    for run, lr in (("first", 1e-2), ("second", 2e-2)):
        monkeypatch.setattr(config_start, "run_token", lambda run=run: run)  # another process, else
        train(tmp_path, lr=lr)
    found = ConfigChecker.compare(tmp_path / "config_check_pack.previous.zip", tmp_path / run_config.NAME, tmp_path / "out")
    assert [(one["name"], one["bench_value"], one["cmp_value"]) for one in found.as_json()["differences"]] == [
        ("optimizer.lr", "0.01", "0.02")
    ]


def test_a_run_says_its_program_and_its_job_beside_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.json has command, commit and versions as the pack has them, with secrets masked, and the job's id."""
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b")
    monkeypatch.setattr(sys, "argv", [str(Path(__file__)), "--lr", "1e-3", "--hf-token", "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"])
    train(tmp_path)
    told = json.loads(next(tmp_path.rglob("run.json")).read_text())
    of_pack = read_pack(tmp_path / "config_check_pack.zip").json(entries.of_rank("system", 0))
    assert told["job"]["SLURM_JOB_ID"] == "1234"
    assert told["program"]["command"][1:4] == ["--lr", "1e-3", "--hf-token"]
    assert "aB3dE5gH7" not in json.dumps(told)
    assert told["program"].get("git", {}).get("commit") == of_pack["program"].get("git", {}).get("commit")
    assert told["program"]["versions"]["torch"] == of_pack["versions"]["torch"]


def test_arguments_of_a_schedule_are_settings_that_change_the_training() -> None:
    """Milestones that differ are one difference with both lists; the scheduler counts them as a multiset."""
    sides = []
    for milestones in ([3, 6, 6], [3, 8]):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        settings = of_torch(Reach(optimizers=[optimizer], objects=[schedule]))
        sides.append(PackSettings([Setting(name, one.value, one.origin, framework=one.framework) for name, one in settings.items()]))
    found = compare_settings(*sides, "file").differences
    assert [(one.name, *one.both, one.severity) for one in found] == [("lr_scheduler.milestones", "[3, 8]", "[3, 6, 6]", CHANGES)]


def test_a_schedule_of_schedules_says_what_it_is_made_of() -> None:
    """A warmup of another length inside of a sequence is named, with the place where one ends; its parts are no schedules of their own."""
    sides = []
    for warmup, milestone in ((4, 4), (8, 6)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        schedules = torch.optim.lr_scheduler
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=warmup), schedules.CosineAnnealingLR(optimizer, 20)]
        schedule = schedules.SequentialLR(optimizer, parts, milestones=[milestone])
        settings = of_torch(Reach(optimizers=[optimizer], objects=[*parts, schedule]))
        assert settings["lr_scheduler.class"].value == "SequentialLR"
        sides.append(PackSettings([Setting(name, one.value, one.origin, framework=one.framework) for name, one in settings.items()]))
    found = compare_settings(*sides, "file").differences
    assert {(one.name, *one.both, one.severity) for one in found} == {
        ("lr_scheduler.0.total_iters", "8", "4", CHANGES),
        ("lr_scheduler.milestones", "[6]", "[4]", CHANGES),
    }


def test_it_is_a_setting_and_off_where_nothing_else_is_written(tmp_path: Path) -> None:
    """enabled: false; a probe that leaves no files; a path of one's own; without weights."""
    train(tmp_path / "a", config_check=ConfigCheckSettings(enabled=False))
    assert not (tmp_path / "a" / run_config.NAME).exists()
    nothing = {"sinks": SinkSettings(csv=CsvSettings(enabled=False)), "incident": IncidentSettings(enabled=False)}
    train(tmp_path / "b", **nothing)
    assert not (tmp_path / "b").exists()
    train(tmp_path / "c", **nothing, config_check=ConfigCheckSettings(path=str(tmp_path / "own.zip"), weights=False))
    assert not read_pack(tmp_path / "own.zip").by_step("weights")


def test_a_pack_that_cannot_be_written_is_said_and_the_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A directory in its place, a path that is none: one line each, the losses are the same."""
    (tmp_path / run_config.NAME).mkdir()
    assert train(tmp_path, strict=False) == train(tmp_path, probe=False)
    assert train(tmp_path, strict=False, config_check=ConfigCheckSettings(path="pack.tar")) == train(tmp_path, probe=False)
    said = capfd.readouterr().err
    assert said.count("config check: nothing more is collected, the training goes on") == 1
    assert "must end in .zip" in said


def _rank(output: str) -> list[str]:
    rank = torch.distributed.get_rank()
    os.environ["NCCL_ONLY_HERE"] = str(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(ProbeSettings(output_dir=output, strict=True, monitor=MonitorSettings()))
    probe.attach(model, optimizer)
    checker = ConfigChecker(model, None, Path(output) / "by_hand.zip")
    for step in range(2):
        probe.begin_step(step)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        probe.end_step()
    checker.close()
    probe.close()
    return sorted(os.listdir(output))


def test_all_ranks_write_one_pack_with_what_is_theirs() -> None:
    """FSDP2 on two ranks: shards by rank, the environment of each, mixed precision; the existing tool's entries once."""
    with tempfile.TemporaryDirectory() as output:
        run_ranks(2, _rank, output)
        for name, entry in ((run_config.NAME, "weights"), ("by_hand.zip", "dataset")):
            pack = read_pack(Path(output) / name)
            assert pack.problems == []
            assert pack.ranks == [0, 1]
            assert pack.meta["world_size"] == 2
            assert list(pack.by_step(entry)) == [(0, 0), (0, 1)]
            assert pack.json(entries.of_rank("env", 1))["NCCL_ONLY_HERE"] == "1"
            for rank in range(2):
                found = settings_of(pack, rank)
                assert found["fsdp.mp_policy.param_dtype"]["value"] == "torch.bfloat16"
                assert found["fsdp.mp_policy.reduce_dtype"]["value"] == "torch.float32"
                assert found["world_size"]["value"] == 2
        shards = [pack.json(entries.of_step("weights", 0, rank))["0.weight"] for rank in range(2)]
        assert [one["local_shape"] for one in shards] == [[4, 8], [4, 8]]
        assert shards[0]["digest"] != shards[1]["digest"]


def _summed(_state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, and takes no text for them
    return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def _hook_of_ddp() -> list[Any]:
    wrapped, found = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), []
    for hook in (None, _summed):
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        known = of_torch(Reach(models=[wrapped])).get("ddp.comm_hook")
        found.append(known and known.value)
    return found


def test_what_sums_gradients_in_place_of_ddp_is_collected() -> None:
    """A sum that is no mean is in no record of modules."""
    ((before, hook),) = run_ranks(1, _hook_of_ddp)
    assert before is None
    assert hook.endswith(f"{Path(__file__).stem}._summed")


def test_settings_are_plain_data_without_addresses() -> None:
    """Types, functions, enumerations, dataclasses, configurations and objects; numbers of arrays are numbers."""
    import enum
    from dataclasses import dataclass

    class Color(enum.IntEnum):
        RED = 1

    @dataclass
    class Inner:
        n: int = 3
        f: Any = torch.nn.functional.gelu

    class Other:
        pass

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"a": torch.bfloat16}

    given = {
        "dtype": torch.bfloat16, "function": torch.nn.functional.silu, "type": nn.LayerNorm, "enum": Color.RED, "inner": Inner(),
        "other": Other(), "config": Config(), "path": Path("/x"), "set": {2, 1}, "tensor": torch.tensor(2.5), "nan": float("nan"),
        "tuple": (0.9, 0.95), "long": "x" * 9999, "rate": torch.tensor([0.001]), "rate in 64": torch.tensor(0.1, dtype=torch.float64),
    }  # fmt: skip
    plain = resolved.plain_data(given)
    text = json.dumps(plain)
    assert "0x" not in text
    assert plain["dtype"] == "torch.bfloat16"
    assert plain["function"] == "torch.nn.functional.silu"
    assert plain["enum"] == "RED"
    assert plain["inner"] == {"n": 3, "f": plain["inner"]["f"]}
    assert plain["config"] == {"a": "torch.bfloat16"}
    assert plain["set"] == [1, 2]
    assert (plain["tensor"], plain["rate"], plain["rate in 64"]) == (2.5, 0.001, 0.1)
    assert plain["tuple"] == [0.9, 0.95]
    assert len(plain["long"]) < 2100
    endless: dict[str, Any] = {}
    endless["me"] = endless
    json.dumps(resolved.plain_data(endless))


def test_origins_flag_before_file_before_environment_before_default() -> None:
    """Where several say a value, the command line counts; what equals the default and nobody named is the default; True is not 1."""
    values = {"a": 1, "b": 2, "c": 3, "d": 4, "e": True, "micro_batch_size": 2, "bias": False}
    line = ["--a=1", "--micro-batch-size", "2", "--no-bias", "-1"]
    found = resolved.resolve_settings(
        values,
        "x",
        defaults={"a": 1, "d": 4, "e": 1},
        flags=resolved.flags_of(line, values),
        files={"a": "f", "b": "f"},
        variables={"c": "C"},
    )
    assert {name: one.origin for name, one in found.items()} == {
        "a": "flag", "b": "file", "c": "environment", "d": "default", "e": "code", "micro_batch_size": "flag", "bias": "flag",
    }  # fmt: skip
    assert found["micro_batch_size"].where == "--micro-batch-size"


def test_names_of_two_frameworks_are_both_kept() -> None:
    """The second is found under its framework."""
    one, two = (resolved.resolve_settings({"seed": n}, framework) for n, framework in ((1, "transformers"), (2, "deepspeed")))
    found = resolved.merge_settings([one, two])
    assert found["seed"].value == 1
    assert found["deepspeed:seed"].value == 2


def test_a_framework_that_is_not_what_it_should_be_costs_only_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error in one source is said once, and the others are collected."""
    from msprobe_integrations.torch.config import sources as config_sources

    monkeypatch.setitem(config_sources.OURS, "argparse", "msprobe_integrations.absent")
    model = nn.Linear(1, 1)
    for _ in range(2):
        found = collect(Reach.of([model], torch.optim.SGD(model.parameters(), lr=0.5)))
        assert found["optimizer.lr"].value == 0.5
    assert capfd.readouterr().err.count("settings of argparse are left out") == 1


def test_megatron_arguments_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parser of the loaded Megatron: defaults, flags, variables and what was computed; of a script's own options the flag."""
    from types import ModuleType

    from msprobe_integrations.megatron import config

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--lr", type=float)
        parser.add_argument("--clip-grad", type=float, default=1.0)
        parser.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
        parser.add_argument("--params-dtype", default=None)
        return parser

    module: Any = ModuleType("megatron.training.arguments")
    module.add_megatron_arguments = add_megatron_arguments
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", module)
    monkeypatch.setenv("RANK", "3")
    config._parser.cache_clear()
    args = {"lr": 1e-3, "clip_grad": 1.0, "add_bias_linear": False, "params_dtype": torch.bfloat16, "rank": 3, "own_option": 5}
    try:
        found = config.of_arguments(args, ["--lr", "1e-3", "--disable-bias-linear", "--own-option", "5"])
    finally:
        config._parser.cache_clear()
    assert {name: (one.origin, one.where) for name, one in found.items()} == {
        "lr": ("flag", "--lr"),
        "clip_grad": ("default", ""),
        "add_bias_linear": ("flag", "--disable-bias-linear"),
        "params_dtype": ("code", ""),
        "rank": ("environment", "RANK"),
        "own_option": ("flag", "--own-option"),
    }
    assert found["params_dtype"].value == "torch.bfloat16"


def test_objects_that_answer_for_others_are_not_asked() -> None:
    """Proxies and mocks among the variables of a program raise or say anything when they are asked for their class."""

    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not bound")

    class Loop:
        def run(self) -> dict[str, Any]:
            proxy, trainer = Proxy(), Proxy()
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            found = collect(Reach.of([model], None, sys._getframe()))
            assert type(proxy) is type(trainer) is Proxy
            assert optimizer is not None
            return dict(found)

    assert Loop().run()["optimizer.lr"].value == 0.25


class Tied(nn.Module):
    """An embedding and an output layer, of a configuration that ties them."""

    def __init__(self, tied: bool, named: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
        self.layers[1].load_state_dict(self.layers[0].state_dict())  # copies of one layer are meant
        self.config = argparse.Namespace(tie_word_embeddings=named)
        if tied:
            self.head.weight = self.tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](self.tokens(x))))


@pytest.mark.parametrize(
    ("tied", "named", "loaded", "said"),
    [
        (True, True, False, {}),
        (False, False, False, {}),
        (False, False, True, {"head.weight": "holds the same bits as tokens.weight"}),
        (False, True, False, {"head.weight": "tie_word_embeddings is true"}),
        (True, True, True, {"tokens.weight": "4 of 28 elements are NaN or Inf"}),
    ],
)
def test_weights_that_are_doubtful_before_the_first_step(
    tied: bool, named: bool, loaded: bool, said: dict[str, str], tmp_path: Path
) -> None:
    """A row that is NaN and that no batch uses; an output layer that was tied to the embedding, or should be. In the first step's frame."""
    model = Tied(tied, named)
    with torch.no_grad():
        if loaded and tied:
            model.tokens.weight[6] = float("nan")
        elif loaded:
            model.head.weight.copy_(model.tokens.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sinks = SinkSettings(memory=True)
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings(), sinks=sinks))
    probe.attach(model, optimizer)
    for step in range(2):
        probe.begin_step(step)
        model(torch.tensor([step, 1])).square().mean().backward()
        optimizer.step()
        probe.end_step()
    probe.close()
    first, second = probe.frames
    assert second.doubtful == {}
    assert first.doubtful.keys() == said.keys()
    assert all(words in first.doubtful[name] for name, words in said.items())
