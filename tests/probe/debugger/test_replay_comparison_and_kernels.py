"""Replay, comparison while dumping and kernel dumps through `PrecisionDebugger`, on a tiny GPT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = pytest.mark.framework

CALL = "Module.blocks.1.mlp.Mlp.forward.0"


@pytest.fixture(autouse=True)
def _no_debugger() -> Any:
    PrecisionDebugger._instance = None
    yield
    PrecisionDebugger._instance = None


def config(directory: Path, level: str = "L0", **keys: Any) -> Path:
    """A config.json of task tensor; keys of the task's section are recognised."""
    section = {k: keys.pop(k) for k in ("bench_path", "diff_nums", "summary_mode", "tensor_format", "list") if k in keys}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps({"task": "tensor", "dump_path": str(directory / "dump"), "level": level, "tensor": section, **keys}))
    return path


def train(file: Path, steps: int = 2, seed: int = 0, spoil: int = -1) -> dict[str, Any]:
    """Train under the debugger.

    Args:
        seed: of data and weights.
        spoil: step in which the second block's first linear layer gives a slightly wrong output.
    """
    debugger = PrecisionDebugger(str(file))
    torch.manual_seed(seed)
    job = pr.gpt.Job(pr.TINY)
    with torch.no_grad():
        for p in job.model.parameters():
            p.add_(0.01 * seed)
    losses = []

    def wrong(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output + 1e-3 if debugger.run.step_number == spoil else None

    job.model.blocks[1].mlp.fc1.register_forward_hook(wrong)
    for _ in range(steps):
        debugger.start(job.model)
        losses.append(job.step())
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    left = [m for m in job.model.modules() if len(m._forward_pre_hooks)]
    return {"state": pr.state(job.model, losses), "left": len(left)}


def saved(root: Path, name: str, step: int = 0, rank: Any = None) -> torch.Tensor:
    """A saved tensor of a dump."""
    tensor = TensorFiles(open_dump(root).path(step, rank)).load(name, TorchBackend())
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.fixture(scope="module", params=["files", "packed"])
def earlier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump with tensors and checksums, in both formats."""
    directory = tmp_path_factory.mktemp(str(request.param))
    pr.run(train, config(directory, "mix", tensor_format=request.param, summary_mode="md5"), directory=directory)
    return directory / "dump"


@pytest.mark.fast_cells("files-L0")
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_replay_while_dumping(tmp_path: Path, earlier: Path, level: str) -> None:
    """Another training gets the saved input at the listed call, and its dump shows it. The dump has no record of the replay itself."""
    load = {"path": str(earlier), "modules": [CALL], "dump_after_load": True}
    (told,) = pr.run(train, config(tmp_path, level, load=load), 2, 3, directory=tmp_path)
    assert told.value["left"] == 0
    ours, theirs = open_dump(tmp_path / "dump").load(1), open_dump(earlier).load(1)
    assert [n for n in theirs.entries if level == "mix" or n.startswith("Module.") == (level == "L0")] == list(ours.entries)
    if level == "L1":
        name = "Functional.linear.6.forward"  # the first layer of the replayed module
        assert torch.equal(saved(tmp_path / "dump", f"{name}.input.0.pt", 1), saved(earlier, f"{name}.input.0.pt", 1))
    else:
        assert torch.equal(saved(tmp_path / "dump", f"{CALL}.input.0.pt", 1), saved(earlier, f"{CALL}.input.0.pt", 1))
        other = CALL.replace("blocks.1", "blocks.0")
        assert not torch.equal(saved(tmp_path / "dump", f"{other}.input.0.pt", 1), saved(earlier, f"{other}.input.0.pt", 1))


def test_replay_alone(tmp_path: Path, earlier: Path) -> None:
    """Without dump_after_load nothing is written and nothing is missed; a step list that begins later works; of the same training
    nothing changes."""
    load = {"path": str(earlier), "modules": [CALL], "step": [1]}
    (plain,) = pr.run(train, config(tmp_path / "plain", step=[7]), 3, directory=tmp_path)
    (same,) = pr.run(train, config(tmp_path / "same", load=load), 3, directory=tmp_path)
    assert same.value == plain.value
    assert "empty" not in same.log
    assert same.lines("inputs of 1 module calls are replaced in step 1")
    (plain,) = pr.run(train, config(tmp_path / "other", step=[7]), 3, 3, directory=tmp_path)
    (moved,) = pr.run(train, config(tmp_path / "moved", load=load), 3, 3, directory=tmp_path)
    assert moved.value["state"]["losses"][:4] == plain.value["state"]["losses"][:4]
    assert moved.value["state"]["losses"][4:] != plain.value["state"]["losses"][4:]
    assert not (tmp_path / "moved/dump").exists()
    assert moved.value["left"] == 0


def test_replay_on_two_ranks(tmp_path: Path) -> None:
    """Every rank gets the tensors of its own rank, where ``rank`` lists it."""
    pr.run(two, config(tmp_path / "first"), 0, ranks=2, directory=tmp_path)
    load = {"path": str(tmp_path / "first/dump"), "modules": [CALL], "rank": [1], "dump_after_load": True}
    pr.run(two, config(tmp_path / "second", load=load), 5, ranks=2, directory=tmp_path)
    for rank in range(2):
        one, other = (saved(tmp_path / d / "dump", f"{CALL}.input.0.pt", 0, rank) for d in ("first", "second"))
        assert torch.equal(one, other) == (rank == 1)


def two(file: Path, seed: int) -> None:
    """A training whose ranks differ."""
    train(file, 1, seed + torch.distributed.get_rank())


def test_replay_of_distributed_tensors(tmp_path: Path) -> None:
    """The parts of a DTensor are replaced, placement and gradient stay."""
    pr.run(_distributed, tmp_path, ranks=2, directory=tmp_path)


def _distributed(directory: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from msprobe_engine.core.guard import Faults
    from msprobe_engine.core.settings.schema import LoadSettings
    from msprobe_integrations.torch.dump.replay import Replay

    rank = torch.distributed.get_rank()
    data = directory / f"d/step0/rank{rank}/dump_tensor_data"
    data.mkdir(parents=True)
    (data.parent / "dump.json").write_text('{"data": {}}')
    name = "Module.0.Identity.forward.0"
    torch.save(torch.full((2, 3), float(rank)), data / f"{name}.input.0.pt")
    net = torch.nn.Sequential(torch.nn.Identity())
    session = Replay(LoadSettings(path=str(directory / "d"), modules=(name,)), Faults(strict=True))
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_()
    session.begin(net, 0, rank)
    y = net(x)
    session.close()
    assert y.placements == x.placements
    assert torch.equal(y.full_tensor(), torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2))
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.ones(4, 3))


@pytest.mark.fast_cells("packed")
def test_comparison(tmp_path: Path, earlier: Path) -> None:
    """Against an equal earlier run nothing is written but the account of it; where a layer gives another output, this record and its
    tensors are."""
    keys: dict[str, Any] = {"bench_path": str(earlier), "summary_mode": "md5", "diff_nums": -1}
    formats = {"tensor_format": "packed"} if earlier.parent.name.startswith("packed") else {}
    pr.run(train, config(tmp_path / "same", "mix", **keys, **formats), directory=tmp_path)
    for step in range(2):
        read = open_dump(tmp_path / "same/dump").load(step)
        assert read.complete
        assert read.entries == {}
        account = json.loads((read.directory / "bench.json").read_text())
        assert account["equal"] > 100
        assert account["differing"] == account["inherited"] == account["undecided"] == account["absent"] == 0
        assert TensorFiles(read.directory).names() == []
        assert not list(read.directory.glob("dump_tensor_data/*.*t*"))
    pr.run(train, config(tmp_path / "other", "mix", **keys, **formats), 2, 0, 1, directory=tmp_path)
    first, second = (open_dump(tmp_path / "other/dump").load(step) for step in range(2))
    assert first.entries == {}
    name = "Module.blocks.1.mlp.fc1.Linear.forward.0"
    assert next(iter(second.entries)) == name
    assert set(second.entries) == {name, CALL, CALL.replace(".mlp.Mlp", ".Block")}
    named = {t.data_name for e in second.entries.values() for _, t in e.tensors()}
    assert set(TensorFiles(second.directory).names()) == named
    assert not torch.equal(saved(tmp_path / "other/dump", f"{name}.output.0.pt", 1), saved(earlier, f"{name}.output.0.pt", 1))
    assert torch.equal(saved(tmp_path / "other/dump", f"{name}.input.0.pt", 1), saved(earlier, f"{name}.input.0.pt", 1))


def test_comparison_ends(tmp_path: Path, earlier: Path) -> None:
    """After diff_nums records the run ends with a line, and no directory of a later step is left."""
    keys: dict[str, Any] = {"bench_path": str(earlier), "summary_mode": "md5"}
    (told,) = pr.run(train, config(tmp_path, "L0", **keys), 6, 0, 0, directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0]
    assert list(dump.load(0).entries) == ["Module.blocks.1.mlp.fc1.Linear.forward.0"]
    assert told.lines("diff_nums")
    assert told.lines("msprobe ends successfully")


def test_kernels_need_an_npu(tmp_path: Path) -> None:
    """Level L2 without the NPU's software is one clear error at construction."""
    with pytest.raises(UsageError, match="needs the package torch_npu"):
        PrecisionDebugger(str(config(tmp_path, "L2", list=["Functional.linear.0.forward"])))


def test_kernels_through_the_debugger(tmp_path: Path) -> None:
    """With an NPU the debugger's calls drive its tool; nothing else is written."""
    pr.run(_kernels, tmp_path, directory=tmp_path)
    assert [str(p.relative_to(tmp_path / "dump")) for p in (tmp_path / "dump").rglob("*.json")] == ["step1/kernel_config_" + _pid(tmp_path)]


def _pid(tmp_path: Path) -> str:
    return (tmp_path / "pid").read_text() + ".json"


def _kernels(directory: Path) -> None:
    import os
    from unittest.mock import Mock

    from msprobe_integrations.torch.ascend import kernel_dump

    (directory / "pid").write_text(str(os.getpid()))
    tool = Mock(spec=["synchronize", "init_dump", "set_dump", "finalize_dump"])
    kernel_dump.npu_tool = lambda: tool
    train(config(directory, "L2", list=["Functional.linear.0.forward"], step=[1]), 3)
    assert [c[0] for c in tool.method_calls] == [
        *("synchronize", "init_dump", "set_dump", "synchronize", "synchronize", "finalize_dump", "synchronize"),
    ]


def test_replay_needs_the_model(tmp_path: Path) -> None:
    """At level L1 too, which otherwise works without."""
    PrecisionDebugger(str(config(tmp_path, "L1", load={"path": str(tmp_path), "modules": [CALL]})))
    with pytest.raises(UsageError, match="'load' replaces inputs of modules and needs the model"):
        PrecisionDebugger.start()


def test_the_probe_says_what_it_does_not_follow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """TorchProbe follows the dump settings except replay, comparison, save() and kernels; one line names what is set of them."""
    from msprobe.pytorch import TorchProbe

    load = {"path": str(tmp_path), "modules": [CALL]}
    dump = {"task": "tensor", "level": "debug", "load": load, "bench_path": str(tmp_path), "summary_mode": "md5"}
    TorchProbe(load_settings({"output_dir": str(tmp_path), "dump": dump})).close()
    assert "load and bench_path and level 'debug' have no effect here" in capsys.readouterr().err


def test_the_probe_makes_no_free_benchmark(tmp_path: Path) -> None:
    """TorchProbe leaves this task to PrecisionDebugger, and everything else of the settings works."""
    from msprobe.pytorch import TorchProbe

    settings = {"output_dir": str(tmp_path), "strict": True, "monitor": {"gradients": True}, "dump": {"task": "free_benchmark"}}
    TorchProbe(load_settings(settings)).close()
    assert not (tmp_path / "dump").exists()


def test_the_probe_writes_no_dump_in_place_of_the_online_pre_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that are meant for a benchmark host do not fill the disk: nothing is dumped, and the message says so."""
    from msprobe.pytorch import TorchProbe

    dump = {"task": "tensor", "level": "L1", "step": [0], "online": {"host": "127.0.0.1", "port": 6000}}
    probe = TorchProbe(load_settings({"output_dir": str(tmp_path), "strict": True, "dump": dump}))
    model = torch.nn.Linear(2, 2)
    probe.attach(model)
    model(torch.ones(1, 2))
    probe.close()
    assert "online have no effect here, and no dump is written; PrecisionDebugger follows them" in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()
