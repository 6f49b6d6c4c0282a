"""Megatron checkpoints that lack a file, were cut off, mixed up or are hostile: said clearly with the file's name, never taken as equal."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_pickles import load
from stored_arrays import array_of

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.checkpoint.diff import diff
from msprobe_engine.formats.checkpoint.model import Checkpoint
from msprobe_engine.formats.checkpoint.open import open_checkpoint

Copy = Callable[[str], Path]


@pytest.fixture
def copy(megatron_checkpoints: Path, tmp_path: Path) -> Copy:
    """A copy of a case that may be changed."""

    def make(name: str) -> Path:
        shutil.copytree(megatron_checkpoints / name, tmp_path / name)
        return tmp_path / name

    return make


def rank(path: Path, name: str) -> Path:
    return path / "iter_0000005" / name / "model_optim_rng.pt"


def save(file: Path, tree: Any) -> None:
    """A file as Megatron's, of plain contents."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, file)


def small(embedding: bool = True, end: bool = True, layers: int = 1, **args: Any) -> dict[str, Any]:
    """What one rank saves of a model of a few tensors; without `args` there are none in the file."""
    model = {f"decoder.layers.{n}.self_attention.linear_proj.weight": torch.ones(4, 4) for n in range(layers)}
    model |= {"embedding.word_embeddings.weight": torch.ones(8, 4)} if embedding else {}
    model |= {"decoder.final_layernorm.weight": torch.ones(4)} if end else {}
    return {"checkpoint_version": 3.0, "iteration": 5, "model": model} | ({"args": argparse.Namespace(**args)} if args else {})


def one_problem(checkpoint: Checkpoint, *words: str) -> None:
    assert [problem for problem in checkpoint.problems if all(word in problem for word in words)], checkpoint.problems


@pytest.mark.parametrize("name", ["mp_rank_01_000", "mp_rank_00_001"])
def test_a_missing_rank_is_named_and_what_it_held_stays_open(copy: Copy, name: str) -> None:
    """The other ranks' parts are compared, the pieces of the missing one are told, and the verdict is not "equal"."""
    path = copy("dense-tp2pp2")
    shutil.rmtree(rank(path, name).parent)
    read = open_checkpoint(path)
    one_problem(read, name, "missing", "tensor parallel 2, pipeline parallel 2")
    found = diff(path.parent / "dense-tp2pp2", path)
    assert not found.equal
    assert found.unknown


def test_numbers_of_layers_hold_when_a_stage_is_missing(megatron_checkpoints: Path, copy: Copy) -> None:
    """Layers behind a stage without any file are numbered by the arguments; nothing of theirs is different."""
    path = copy("dense-pp2")
    shutil.rmtree(rank(path, "mp_rank_00_000").parent)
    found = diff(megatron_checkpoints / "dense", path)
    assert found.different == []
    assert {t.layer for t in found.tensors if t.layer is not None} == {2, 3}
    assert "decoder.layers.0.mlp.linear_fc1.weight" in found.only_in_a
    one_problem(open_checkpoint(path), "mp_rank_00_000", "missing")


def test_a_stage_of_unknown_size_cannot_be_left_out(tmp_path: Path) -> None:
    """Without arguments that say how many layers a lost stage had, the rest cannot be numbered, and that is an error."""
    args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    save(tmp_path / "mp_rank_00_001" / "model_optim_rng.pt", small(**args))
    with pytest.raises(DumpFormatError, match=r"no file of pipeline stage 0.*cannot be numbered"):
        open_checkpoint(tmp_path)


def test_a_file_that_was_cut_off_is_a_problem_and_the_rest_is_read(copy: Copy) -> None:
    """A truncated file of one rank: named, its pieces missing."""
    path = copy("dense-tp2")
    file = rank(path, "mp_rank_01")
    os.truncate(file, file.stat().st_size // 2)
    read = open_checkpoint(path)
    one_problem(read, "mp_rank_01/model_optim_rng.pt")
    assert sum(box.numel for box in read.tensors["output_layer.weight"].boxes) == 32 * 16
    assert not diff(path.parent / "dense-tp2", path).equal


def test_no_readable_file_is_an_error(copy: Copy) -> None:
    """When no rank's file can be read there is nothing to compare."""
    path = copy("dense")
    rank(path, "mp_rank_00").write_bytes(b"")
    with pytest.raises(DumpFormatError, match=r"no rank's model_optim_rng.pt can be read.*mp_rank_00"):
        open_checkpoint(path)


def test_files_of_another_iteration_are_told(copy: Copy) -> None:
    """A rank's file that an earlier save left is a problem that names it."""
    path = copy("dense-tp2")
    file = rank(path, "mp_rank_01")
    tree = load(file)
    torch.save(tree | {"iteration": 4}, file)
    one_problem(open_checkpoint(path), "mp_rank_01", "iteration 4", "stale")


def test_files_of_two_layouts_are_an_error(copy: Copy, megatron_checkpoints: Path) -> None:
    """Files whose arguments name other parallel sizes do not belong together."""
    path = copy("dense-tp2")
    shutil.copy(rank(megatron_checkpoints / "dense", "mp_rank_00"), rank(path, "mp_rank_01"))
    with pytest.raises(DumpFormatError, match=r"mp_rank_01.*tensor_model_parallel_size 1.*mp_rank_00 2.*mixed up"):
        open_checkpoint(path)


def test_directories_of_another_layout_are_an_error(copy: Copy, megatron_checkpoints: Path) -> None:
    """Names of directories with another count of numbers than the sizes have."""
    path = copy("dense-pp2")
    shutil.copytree(rank(megatron_checkpoints / "dense", "mp_rank_00").parent, path / "iter_0000005" / "mp_rank_00")
    with pytest.raises(DumpFormatError, match="rank directories of two layouts"):
        open_checkpoint(path)
    for name in ("mp_rank_00_000", "mp_rank_00_001"):
        shutil.rmtree(path / "iter_0000005" / name)
    (path / "iter_0000005" / "mp_rank_00").rename(path / "iter_0000005" / "mp_rank_00_000")
    with pytest.raises(DumpFormatError, match=r"args say tensor parallel 1.*should be called mp_rank_00, not mp_rank_00_000"):
        open_checkpoint(path)


def test_a_rank_too_many_is_told(copy: Copy) -> None:
    """A directory that a larger layout left behind is not read, and said."""
    path = copy("dense-tp2")
    shutil.copytree(rank(path, "mp_rank_01").parent, path / "iter_0000005" / "mp_rank_02")
    one_problem(open_checkpoint(path), "mp_rank_02", "should not be there")


def test_the_second_number_of_a_directory_is_a_stage_or_experts(megatron_checkpoints: Path, tmp_path: Path) -> None:
    """`mp_rank_00_001` is told by the arguments; without them by what the files hold; or not at all, which is an error."""
    experts, stages = (open_checkpoint(megatron_checkpoints / name) for name in ("moe-ep2", "dense-pp2"))
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight" in experts.tensors
    assert "decoder.layers.3.mlp.linear_fc2.weight" in stages.tensors
    for name, parts in {
        "stages": ((True, False), (False, True)),
        "ep": ((True, True), (True, True)),
        "none": ((False, False),) * 2,
    }.items():
        for number, (embedding, end) in enumerate(parts):
            save(tmp_path / name / f"mp_rank_00_{number:03d}" / "model_optim_rng.pt", small(embedding, end))
    staged = open_checkpoint(tmp_path / "stages")
    assert [t.name for t in staged.tensors.values() if ".layers." in t.name] == [
        f"decoder.layers.{n}.self_attention.linear_proj.weight" for n in range(2)
    ]
    dense = open_checkpoint(tmp_path / "ep").tensors["decoder.layers.0.self_attention.linear_proj.weight"]
    assert len(dense.copies) == 1
    with pytest.raises(DumpFormatError, match=r"pipeline stage or of an expert-parallel rank.*no `args`"):
        open_checkpoint(tmp_path / "none")


def test_layers_that_do_nothing_are_not_counted(tmp_path: Path) -> None:
    """MindSpeed's `noop_layers` have a number and no parameters; the whole model's layers are numbered without them."""
    args = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "num_layers": 4, "noop_layers": "1"}
    for stage, layers in enumerate((1, 2)):
        save(tmp_path / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt", small(stage == 0, stage == 1, layers, **args))
    read = open_checkpoint(tmp_path)
    origins = {
        t.name.split(".")[2]: (t.boxes[0].file.parent.name, t.origin.split(".")[2:3]) for t in read.tensors.values() if "layers." in t.name
    }
    assert origins == {"0": ("mp_rank_00_000", []), "1": ("mp_rank_00_001", ["0"]), "2": ("mp_rank_00_001", ["1"])}


def test_other_files_beside_a_rank_are_said(copy: Copy) -> None:
    """States of data loaders and of layer-wise optimizers are passed over, with their names."""
    path = copy("dense-tp2")
    (rank(path, "mp_rank_01").parent / "layer_wise_optimizer_0.pt").touch()
    read = open_checkpoint(path)
    assert [note for note in read.notes if "mp_rank_01: layer_wise_optimizer_0.pt passed over: states" in note]


def test_release_and_trackers(megatron_checkpoints: Path, copy: Copy) -> None:
    """`release` is followed; a tracker that names what is not there, or nothing, is an error that says so."""
    assert open_checkpoint(megatron_checkpoints / "dense-release").path.name == "release"
    path = copy("dense")
    (path / "latest_checkpointed_iteration.txt").write_text("6")
    with pytest.raises(DumpFormatError, match="names iter_0000006, which is not there"):
        open_checkpoint(path)
    (path / "latest_checkpointed_iteration.txt").write_text("$(rm -rf /)")
    with pytest.raises(DumpFormatError, match="iteration number or 'release'"):
        open_checkpoint(path)


def test_missing_buffers_of_the_distributed_optimizer_are_told(copy: Copy) -> None:
    """Without `distrib_optim.pt` there are no states, and that is a problem."""
    path = copy("sharded-tp2")
    (path / "iter_0000005" / "mp_rank_01" / "distrib_optim.pt").unlink()
    read = open_checkpoint(path)
    one_problem(read, "mp_rank_01/distrib_optim.pt", "missing")
    assert "optimizer.exp_avg.output_layer.weight" in read.tensors
    assert not diff(path.parent / "sharded-tp2", path).equal


def test_buffers_of_another_model_are_not_taken_apart(copy: Copy, megatron_checkpoints: Path) -> None:
    """Flat buffers that the parameters do not fill are not cut at the wrong places."""
    path = copy("sharded")
    shutil.copy(
        megatron_checkpoints / "tied-sharded" / "iter_0000005" / "mp_rank_00" / "distrib_optim.pt",
        path / "iter_0000005" / "mp_rank_00" / "distrib_optim.pt",
    )
    read = open_checkpoint(path)
    one_problem(read, "distrib_optim.pt", "do not fill in the way Megatron lays them out")
    assert not [t for t in read.tensors.values() if t.state]


def test_states_that_belong_to_no_parameter_are_not_given_to_one(copy: Copy) -> None:
    """Groups of an optimizer that do not have the model's parameters: a problem, no guess."""
    path = copy("fp32")
    file = rank(path, "mp_rank_00")
    tree = load(file)
    group = tree["optimizer"]["param_groups"][0]
    group["params"] = group["params"][1:]
    torch.save(tree, file)
    read = open_checkpoint(path)
    one_problem(read, "which state belongs to which")
    assert not [t for t in read.tensors.values() if t.state]


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/must_not_be_there",)


@pytest.mark.parametrize("place", ["model_optim_rng.pt", "distrib_optim.pt", "common.pt", ".metadata"])
def test_hostile_pickles_are_refused_by_name(copy: Copy, place: str) -> None:
    """A file that would run something is refused with the name of what it would run, wherever it is; nothing is executed."""
    case = "sharded" if "optim" in place else "dist-fp32"
    directory = copy(case) / "iter_0000005"
    file = directory / "mp_rank_00" / place if "optim" in place else directory / place
    tree = {"args": Hostile(), "model": {}}
    if place == ".metadata":
        file.write_bytes(pickle.dumps(tree))
    else:
        torch.save(tree, file)
    with pytest.raises(DumpFormatError, match=r"posix\.system.*--trust"):
        open_checkpoint(directory)


@pytest.mark.parametrize("tree", [[1], {"model": 3}, {"weights": {}}, {"model1": {}}])
def test_files_that_hold_no_model_are_told(tmp_path: Path, tree: Any) -> None:
    """What Megatron would not save is named by its keys or its type."""
    save(tmp_path / "mp_rank_00" / "model_optim_rng.pt", tree)
    with pytest.raises(DumpFormatError, match=r"mp_rank_00/model_optim_rng.pt: (holds|its)"):
        open_checkpoint(tmp_path)


def test_pieces_that_do_not_fit_are_a_problem(tmp_path: Path) -> None:
    """Ranks whose pieces have other widths: the tensor is not put together, and the rest is read."""
    args = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    for number in range(2):
        tree = small(**args)
        tree["model"]["embedding.word_embeddings.weight"] = torch.ones(8, 4 + number)
        tree["model"]["decoder.final_layernorm.weight"] = torch.ones(4 + number)
        save(tmp_path / f"mp_rank_{number:02d}" / "model_optim_rng.pt", tree)
    read = open_checkpoint(tmp_path)
    one_problem(read, "embedding.word_embeddings.weight", "cannot be put together")
    one_problem(read, "final_layernorm", "every tensor-parallel rank should have the whole")
    assert read.tensors["decoder.layers.0.self_attention.linear_proj.weight"].shape == (4, 8)


def test_distributed_checkpoints_with_missing_or_damaged_parts(copy: Copy) -> None:
    """A data file that is missing or cut off, no common part, another backend: each is named."""
    path = copy("dist-tp2") / "iter_0000005"
    (path / "common.pt").unlink()
    one_problem(open_checkpoint(path), "common.pt", "missing")
    file = next(iter(sorted(path.glob("__1_*.distcp"))))
    os.truncate(file, file.stat().st_size // 2)
    one_problem(open_checkpoint(path), file.name)
    file.unlink()
    read = open_checkpoint(path)
    one_problem(read, file.name)
    assert not diff(path, path).equal
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "hdf5", "sharded_backend_version": 1}))
    with pytest.raises(DumpFormatError, match="backend is 'hdf5'"):
        open_checkpoint(path)
    (path / "metadata.json").write_text("{")
    with pytest.raises(DumpFormatError, match=r"metadata.json: is no JSON"):
        open_checkpoint(path)


@pytest.fixture
def zarr(tmp_path: Path) -> Path:
    """A copy of the checkpoint of the old backend that may be changed; fixtures/make_megatron_zarr.py says what is in it."""
    shutil.copytree(Path(__file__).parents[2] / "fixtures" / "megatron_zarr" / "iter_0000003", tmp_path / "zarr")
    return tmp_path / "zarr"


def test_checkpoints_of_the_zarr_backend_are_read(zarr: Path) -> None:
    """Chunks of tensor-parallel ranks and stacked layers are put together; bfloat16 too; objects of ranks are there."""
    read = open_checkpoint(zarr)
    assert (read.problems, read.format, read.facts) == ([], "Megatron zarr", {"hidden": 4, "layers": 2})
    assert array_of(read.tensors["embedding.word_embeddings.weight"]).tolist() == np.arange(24).reshape(6, 4).tolist()
    for key in ("decoder.layers.1.mlp.linear_fc2.weight", "optimizer.exp_avg.decoder.layers.1.mlp.linear_fc2.weight"):
        assert array_of(read.tensors[key]).tolist() == np.arange(24, 48).reshape(4, 6).tolist()
    assert (read.values["iteration"], read.values["rng_state.tp1.pp0.0.step"]) == (3, 1)
    assert diff(zarr, zarr).equal


def test_states_that_old_versions_saved_as_flat_stretches_are_read() -> None:
    """Halves of each tensor-parallel piece, by two data-parallel ranks; fixtures/make_megatron_flattened.py says what is in it."""
    read = open_checkpoint(Path(__file__).parents[2] / "fixtures" / "megatron_flattened" / "iter_0000004")
    assert read.problems == []
    for layer in range(2):
        name, numbers = f"decoder.layers.{layer}.mlp.linear_fc2.weight", np.arange(48).reshape(2, 4, 6)[layer]
        assert array_of(read.tensors[name]).tolist() == numbers.tolist()
        assert array_of(read.tensors[f"optimizer.exp_avg.{name}"]).tolist() == (numbers + 0.5).tolist()


def test_damaged_checkpoints_of_the_zarr_backend(zarr: Path) -> None:
    """A chunk that is missing or cut off, a description that is none, and one that is compressed: each is named."""
    (zarr / "embedding.word_embeddings.weight" / "1.0").unlink()
    os.truncate(zarr / "decoder.layers.mlp.linear_fc2.weight" / "0.0.1", 10)
    (zarr / "decoder.final_layernorm.weight" / ".zarray").write_text("{")
    state = zarr / "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight" / ".zarray"
    state.write_text(state.read_text().replace('"compressor": null', '"compressor": {"id": "blosc"}'))
    read = open_checkpoint(zarr)
    one_problem(read, "embedding.word_embeddings.weight", "of its 2 chunks 1.0 are missing")
    one_problem(read, "linear_fc2.weight", "of its 4 chunks 0.0.1 are missing or of another size")
    one_problem(read, "final_layernorm.weight/.zarray", "is no JSON")
    one_problem(read, "exp_avg", "compressed")
    assert not diff(zarr, zarr).equal


def test_buckets_that_no_order_fills_are_not_taken_apart(copy: Copy) -> None:
    """Optimizer buckets of a distributed checkpoint whose model lost a parameter: a problem, and no state under a wrong name."""
    path = copy("dist-dp-reshardable") / "iter_0000005"
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata["decoder.final_layernorm.bias"]
    file.write_bytes(pickle.dumps(metadata))
    read = open_checkpoint(path)
    one_problem(read, "optimizer states of model rank 0")
    assert not [t for t in read.tensors.values() if t.state]
