"""torch's distributed checkpoints: what two ranks of FSDP2 wrote is one model, bit by bit, however it was saved."""

import argparse
import dataclasses
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forkpool import run_ranks
from stored_arrays import array_of
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.model import Checkpoint
from msprobe_engine.formats.checkpoint.open import open_checkpoint


def _train(target: Path) -> None:
    """Two steps of AdamW over two ranks; saved in every way, and gathered on rank 0. 33 rows lie as 17 and 16, 1 row on one rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Linear(33, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    model[1].to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decay = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(2):
        torch.manual_seed(step)
        hidden = model[1](model[0](torch.randn(4, 8)).to(torch.bfloat16)).float()
        model[3](model[2](hidden)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    rest = {"step": 2, "lr_scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()}
    for name, flat in (("nested", False), ("flat", True)):
        weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
        dcp.save({"model": weights, "optim": states, **rest}, checkpoint_id=target / name)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": weights, "optimizer": states}}, checkpoint_id=target / "app")
    dcp.save(get_model_state_dict(model), checkpoint_id=target / "model only")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=target / "weights")
    full, gathered = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": full, "optimizer": gathered, **rest}, target / "full.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp")
    run_ranks(2, _train, path)
    return path


def holds(found: Checkpoint, path: Path, states: bool = True) -> None:
    """All that rank 0 gathered, and nothing else."""
    full = torch.load(path / "full.pt", weights_only=False)
    wanted = dict(full["model"])
    if states:
        for name, state in full["optimizer"]["state"].items():
            wanted |= {f"optimizer.{what}.{name}": value for what, value in state.items()}
    mine = {key: tensor for key, tensor in found.tensors.items() if tensor.group in ("model", "optimizer")}
    assert mine.keys() == wanted.keys()
    for key, tensor in mine.items():
        assert f"torch.{tensor.dtype}" == str(wanted[key].dtype)
        np.testing.assert_array_equal(array_of(tensor), wanted[key].float().numpy(), err_msg=key)


@pytest.mark.fast_cells("nested")
@pytest.mark.parametrize("name", ["nested", "flat", "app"])
def test_weights_and_states_of_two_ranks(saved: Path, name: str) -> None:
    """Bit by bit what the run gathered itself; optimizer states are named by parameter, whether the run flattened them or not."""
    found = open_checkpoint(saved / name)
    assert (found.format, found.problems) == ("torch DCP", [])
    holds(found, saved)
    assert [box.sizes for box in found.tensors["0.weight"].boxes] == [(17, 8), (16, 8)]
    assert len(found.files) == 3
    groups = {found.values[f"optimizer.param_groups.{n}.weight_decay"]: found.values[f"optimizer.param_groups.{n}.params"] for n in (0, 1)}
    assert groups == {0.01: 3, 0.0: 5}
    if name != "app":
        assert found.values["step"] == 2
        assert found.values["lr_scheduler.last_epoch"] == 2
        assert found.tensors["rng"].group == "random"


@pytest.mark.parametrize("name", ["model only", "weights"])
def test_weights_alone(saved: Path, name: str) -> None:
    """With and without a word before their names."""
    found = open_checkpoint(saved / name)
    assert not found.problems
    holds(found, saved, states=False)


def test_the_gathered_file_is_the_same_checkpoint(saved: Path) -> None:
    """Keys and values of the directory and of the one file agree."""
    one, many = open_checkpoint(saved / "full.pt"), open_checkpoint(saved / "flat")
    assert one.tensors.keys() == many.tensors.keys()
    assert one.values == many.values


def test_ways_to_name_it(saved: Path) -> None:
    """The directory, its .metadata and one of its files mean the checkpoint."""
    for name in ("flat", "flat/.metadata", "flat/__0_0.distcp"):
        assert open_checkpoint(saved / name).path == saved / "flat"


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "flat", tmp_path / "x"))


def test_a_missing_file(saved: Path, tmp_path: Path) -> None:
    """The other rank's pieces are read; what was lost is said once."""
    path = copied(saved, tmp_path)
    (path / "__0_0.distcp").unlink()
    found = open_checkpoint(path)
    assert all(part in found.problems[0] for part in ("__0_0.distcp", "is not there", "pieces"))
    assert len(found.problems) <= 2  # of tensors, of objects
    assert [box.offsets for box in found.tensors["0.weight"].boxes] == [(17, 0)]


def test_a_file_that_was_cut_off(saved: Path, tmp_path: Path) -> None:
    """Pieces behind the end are missing, those before it are there."""
    path = copied(saved, tmp_path)
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    found = open_checkpoint(path)
    assert "__0_0.distcp" in found.problems[0]
    assert "cannot be read" in found.problems[0]
    assert 0 < sum(box.file.name == "__0_0.distcp" for t in found.tensors.values() for box in t.boxes) < len(found.tensors)


def test_no_metadata(saved: Path, tmp_path: Path) -> None:
    """Without .metadata (a save that was killed) the error names it."""
    path = copied(saved, tmp_path)
    (path / ".metadata").unlink()
    with pytest.raises(DumpFormatError, match=r"\.metadata: is not there"):
        open_checkpoint(path)


def changed(path: Path, change: Callable[[Metadata], Any]) -> Checkpoint:
    """The checkpoint with other metadata, written by torch's own classes."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return open_checkpoint(path)


def _moved(metadata: Metadata, **fields: Any) -> None:
    index = next(i for i in metadata.storage_data if i.fqn == "model.0.weight")
    for name, value in fields.items():
        setattr(metadata.storage_data[index], name, value)


def _chunk(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    entry = metadata.state_dict_metadata["model.0.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks[0].offsets, entry.chunks[0].sizes = torch.Size(offsets), torch.Size(sizes)


LIES: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "another item's place": (lambda m: _moved(m, offset=0, length=64), "cannot|damaged|holds"),
    "behind the end": (lambda m: _moved(m, offset=1 << 40), "cut off"),
    "negative offset": (lambda m: _moved(m, offset=-5), "cut off"),
    "length of 2**60": (lambda m: _moved(m, length=1 << 60), "cut off"),
    "no number": (lambda m: _moved(m, offset="0"), "do not say where"),
    "compressed": (lambda m: _moved(m, transform_descriptors=["zstd"]), "compressed"),
    "a file that is not there": (lambda m: _moved(m, relative_path="gone.distcp"), r"gone\.distcp: is not there"),
    "a piece outside": (lambda m: _chunk(m, (30, 0), (17, 8)), "outside its shape"),
    "a piece of other sizes": (lambda m: _chunk(m, (0, 0), (16, 8)), r"holds float32 \[17, 8\]"),
    "pieces over each other": (
        lambda m: m.state_dict_metadata["model.0.weight"].chunks.append(m.state_dict_metadata["model.0.weight"].chunks[0]),
        "over each other",
    ),
    "another dtype": (lambda m: setattr(m.state_dict_metadata["model.0.weight"].properties, "dtype", torch.int32), "holds float32"),
    "a type that is none": (lambda m: setattr(m.state_dict_metadata["model.0.weight"].properties, "dtype", "x"), "of no type"),
    "no chunks at all": (lambda m: m.state_dict_metadata["model.0.weight"].chunks.clear(), ""),
    "nowhere": (lambda m: [m.storage_data.pop(i) for i in list(m.storage_data) if i.fqn == "model.0.weight"], "does not say where"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lie(saved: Path, tmp_path: Path, name: str) -> None:
    """The tensor is incomplete and the problem says why; all others are read."""
    change, message = LIES[name]
    found = changed(copied(saved, tmp_path), change)
    whole = open_checkpoint(saved / "flat")
    others = whole.tensors.keys() - {"0.weight"}
    assert others <= found.tensors.keys()
    for key in others:
        np.testing.assert_array_equal(array_of(found.tensors[key]), array_of(whole.tensors[key]))
    if message:
        assert 1 <= len(found.problems) <= 2
        assert re.search(message, found.problems[0]), found.problems[0]
    elif "0.weight" in found.tensors:
        assert not found.tensors["0.weight"].boxes


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b"])
def test_metadata_that_name_files_elsewhere(saved: Path, tmp_path: Path, name: str) -> None:
    """Nothing outside the checkpoint is opened."""
    with pytest.raises(DumpFormatError, match="not inside the checkpoint"):
        changed(copied(saved, tmp_path), lambda m: _moved(m, relative_path=name))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile",)


def test_code_in_metadata_and_items(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name and does not run, in .metadata as in an object that was saved."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpFormatError, match=r"\.metadata: names posix\.system"):
        changed(copied(saved, tmp_path), lambda m: setattr(m, "planner_data", {"x": Evil()}))
    dcp.save({"model": {"w": torch.ones(2)}, "extra": Evil()}, checkpoint_id=tmp_path / "y", no_dist=True)
    with pytest.raises(DumpFormatError, match=r"distcp: names posix\.system.*--trust posix\.system"):
        open_checkpoint(tmp_path / "y")
    assert open_checkpoint(tmp_path / "y", trust=["posix.system"]).values["extra"] == "posix.system('touch hostile')"
    assert not (tmp_path / "hostile").exists()


def test_metadata_of_something_else(tmp_path: Path) -> None:
    """A pickle that describes no checkpoint."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DumpFormatError, match="no description of a distributed checkpoint"):
        open_checkpoint(tmp_path)


def test_names_without_paths(tmp_path: Path) -> None:
    """Where the writer kept no paths, the keys themselves are taken apart; `model.` of Hugging Face's names stays."""
    states = {f"optim.state.model.embed.weight.{s}": torch.randn(3, 2) for s in ("exp_avg", "exp_avg_sq")}
    dcp.save({"model.model.embed.weight": torch.ones(3, 2), **states}, checkpoint_id=tmp_path / "both", no_dist=True)
    dcp.save({"model.embed.weight": torch.ones(3, 2), "lm_head.weight": torch.ones(2)}, checkpoint_id=tmp_path / "alone", no_dist=True)
    for name in ("both", "alone"):
        file = tmp_path / name / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = None
        file.write_bytes(pickle.dumps(metadata))
    assert set(open_checkpoint(tmp_path / "both").tensors) == {
        "model.embed.weight",
        "optimizer.exp_avg.model.embed.weight",
        "optimizer.exp_avg_sq.model.embed.weight",
    }
    assert set(open_checkpoint(tmp_path / "alone").tensors) == {"model.embed.weight", "lm_head.weight"}


def test_what_megatron_fsdp_stores(tmp_path: Path) -> None:
    """Gate and up of a gated layer, stored apart, are one parameter; the arguments tell heads and sizes."""
    fc1, moments = torch.randn(12, 4), torch.randn(12, 4)
    name = "module.decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = torch.chunk(fc1, 2)
    gate_moments, up_moments = torch.chunk(moments, 2)
    states = {f"{name}_{half}": {"exp_avg": part, "step": torch.tensor(3.0)} for half, part in (("w", gate_moments), ("v", up_moments))}
    args = argparse.Namespace(num_attention_heads=4, hidden_size=16, num_layers=1, swiglu=True, group_query_attention=False)
    content = {
        "model": {f"{name}_w": gate.clone(), f"{name}_v": up.clone(), "module.decoder.final_layernorm.weight": torch.ones(4)},
        "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(states)}]},
        "args": args,
        "iteration": 5,
    }
    dcp.save(content, checkpoint_id=tmp_path / "x", no_dist=True)
    found = open_checkpoint(tmp_path / "x")
    assert not found.problems
    np.testing.assert_array_equal(array_of(found.tensors[name]), fc1.numpy())
    np.testing.assert_array_equal(array_of(found.tensors[f"optimizer.exp_avg.{name}"]), moments.numpy())
    assert len(found.tensors[f"optimizer.step.{name}"].copies) == 1
    assert len(found.tensors) == 4
    assert (found.naming, found.facts["heads"], found.facts["gated"], found.values["iteration"]) == ("megatron", 4, True, 5)


def _accelerated(target: Path) -> None:
    """A step under Accelerate's FSDP2; saved by itself, in pieces and gathered."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from harness.frameworks import accelerate_loop  # noqa: F401 - has Accelerate take FSDP on a CPU

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_offload=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Linear(33, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(3, 8)).sum())
    optimizer.step()
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin  # prepare makes it a CPU's again
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        plugin.set_state_dict_type(kind)
        accelerator.save_state(str(target / kind))


@pytest.mark.slow
def test_fsdp_of_accelerate(tmp_path: Path) -> None:
    """Directories of pieces inside the state's directory, and the gathered files, are the same checkpoint."""
    run_ranks(2, _accelerated, tmp_path)
    pieces, whole = open_checkpoint(tmp_path / "SHARDED_STATE_DICT"), open_checkpoint(tmp_path / "FULL_STATE_DICT")
    assert pieces.format == whole.format == "Accelerate"
    assert not pieces.problems + whole.problems
    assert pieces.tensors.keys() == whole.tensors.keys()
    assert {"0.weight", "optimizer.exp_avg.0.weight", "optimizer.step.1.bias"} <= pieces.tensors.keys()
    assert len(pieces.tensors["0.weight"].boxes) == 2
    for key, tensor in pieces.tensors.items():
        np.testing.assert_array_equal(array_of(tensor), array_of(whole.tensors[key]))
    assert pieces.values["optimizer.param_groups.0.lr"] == whole.values["optimizer.param_groups.0.lr"] == 1e-3


def _for_hugging_face(target: Path) -> None:
    """The pieces of two ranks as safetensors, and put together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 33), nn.Linear(33, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for name, whole in (("pieces", False), ("whole", True)):
        writer = HuggingFaceStorageWriter(str(target / name), save_distributed=True, enable_consolidation=whole)
        dcp.save(get_model_state_dict(model), storage_writer=writer)


def test_safetensors_of_two_ranks(tmp_path: Path) -> None:
    """What torch wrote for Hugging Face in pieces is what it put together itself; a missing file is said."""
    run_ranks(2, _for_hugging_face, tmp_path)
    pieces, whole = open_checkpoint(tmp_path / "pieces"), open_checkpoint(tmp_path / "whole")
    assert not pieces.problems + whole.problems
    assert pieces.tensors.keys() == whole.tensors.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [box.sizes for box in pieces.tensors["0.weight"].boxes] == [(17, 8), (16, 8)]
    for key, tensor in pieces.tensors.items():
        np.testing.assert_array_equal(array_of(tensor), array_of(whole.tensors[key]))
    min((tmp_path / "pieces").glob("*.safetensors")).unlink()
    found = open_checkpoint(tmp_path / "pieces")
    assert len(found.problems) == 4
    assert "do not fill" in found.problems[0]


def _titan(target: Path) -> Any:
    """Two steps of torchtitan's own Trainer, and its checkpoint; weights and moments as this rank's model has them."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
    from harness.frameworks import torchtitan_trainer
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    if dist.get_rank() == 0:
        torchtitan_trainer.assets(target)
    dist.barrier()
    settings = torchtitan_trainer.config(target, dp=2, steps=2)
    field = next(name for name in ("checkpointer", "checkpoint") if hasattr(settings, name))
    manager = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    trainer = dataclasses.replace(settings, **{field: manager}).build()
    trainer.train()
    return {name: parameter.full_tensor().detach().numpy() for name, parameter in trainer.model_parts[0].named_parameters()}


@pytest.mark.slow
def test_a_checkpoint_of_torchtitan(tmp_path: Path) -> None:
    """Weights at the top of the state dict, flat names of optimizer states, train state: of its Trainer on two ranks."""
    weights = run_ranks(2, _titan, tmp_path, timeout=240)[0]
    found = open_checkpoint(tmp_path / "dump" / "checkpoint")
    assert (found.path.name, found.problems) == ("step-2", [])
    mine = {t.name: t for t in found.tensors.values() if t.group == "model"}
    assert {name for name in weights if "wqkv" not in name} == {name for name in mine if "qkv" not in name}
    for name in weights.keys() & mine.keys():
        np.testing.assert_array_equal(array_of(mine[name]), weights[name], err_msg=name)
    assert {t.name for t in found.tensors.values() if t.state == "exp_avg"} == weights.keys()
    assert found.values["train_state.step"] == 2
    assert found.values["optimizer.param_groups.0.params"] == len(weights)
