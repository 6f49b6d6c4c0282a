"""Checkpoints that real DeepSpeed 0.19.8 writes on gloo ranks, held bit by bit against what its engines hold."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("deepspeed")

import deepspeed_runs
import torch
from deepspeed_runs import RUNS, Truth
from forkpool import run_ranks
from stored_arrays import array_of

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.find.checkpoint.diff import Options, diff
from msprobe_engine.find.checkpoint.result import SAME
from msprobe_engine.formats.checkpoint.model import RANDOM, Checkpoint
from msprobe_engine.formats.checkpoint.open import open_checkpoint
from msprobe_engine.formats.tensors.decoding import decoder

pytestmark = pytest.mark.framework

ZERO = [name for name in (*RUNS, "zero 3 parts", "zero 0 fused", "bf16 optimizer", "elastic") if name != "zero 0 fp32"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Truth]]]:
    """The directory of all runs, and what each of two ranks held."""
    directory = tmp_path_factory.mktemp("deepspeed")
    with contextlib.redirect_stdout(io.StringIO()):
        return directory, run_ranks(2, deepspeed_runs.all_runs, str(directory), timeout=240)


@pytest.fixture
def copy(runs: tuple[Path, list[dict[str, Truth]]], tmp_path: Path) -> Callable[[str], Path]:
    """A run's directory that may be damaged; its tag is below."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(runs[0] / name, tmp_path / name))

    return make


def floats(words: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Words of bits as values."""
    known = decoder(dtype)
    assert known is not None
    return words if known.values is None else known.values(words)


def assert_holds(checkpoint: Checkpoint, truth: Truth) -> None:
    """Every tensor of `truth` is in the checkpoint with the same bits; weights that were not saved in 16 bits round to them."""
    wrong = []
    for key, expected in truth.items():
        found = checkpoint.tensors.get(key)
        if found is None:
            wrong.append(f"{key} is missing")
            continue
        values = array_of(found)
        if expected.dtype == np.uint16 and found.dtype == "float32" and checkpoint.facts.get("stored_for") == "bfloat16":
            values = torch.from_numpy(values.copy()).bfloat16().float().numpy()
        expected = floats(expected, "bfloat16") if expected.dtype == np.uint16 else expected
        if values.shape != expected.shape or values.astype(expected.dtype).tobytes() != expected.tobytes():
            wrong.append(f"{key} differs")
    assert not wrong


@pytest.mark.parametrize("name", ZERO)
def test_weights_masters_and_moments_are_the_engines_own_bits(runs: tuple[Path, list[dict[str, Truth]]], name: str) -> None:
    """Stages 0 to 3 in fp32, fp16 and bf16: with tied, frozen and grouped parameters, buffers and parts of sub groups, nothing is lost."""
    checkpoint = open_checkpoint(runs[0] / name)
    assert_holds(checkpoint, runs[1][0][name])
    assert checkpoint.problems == []
    extra = {key for key in checkpoint.tensors if key not in runs[1][0][name] and ".step." not in key}
    assert extra == {"torch_rng_state"}
    assert checkpoint.tensors["torch_rng_state"].group == RANDOM


@pytest.mark.parametrize(
    "name", [name for name in (*RUNS, "zero 3 parts", "zero 1 round robin", "elastic") if not name.startswith("zero 0")]
)
def test_masters_are_what_deepspeeds_own_converter_gives(runs: tuple[Path, list[dict[str, Truth]]], name: str) -> None:
    """`zero_to_fp32` gives the same float32 weights, in order of the model's names."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()):
        expected = get_fp32_state_dict_from_zero_checkpoint(str(runs[0] / name), tag="global_step2")
    found = open_checkpoint(runs[0] / name / "global_step2")
    for parameter, tensor in expected.items():
        name = "embed.weight" if parameter == "head.weight" else parameter
        stored = found.tensors.get(f"optimizer.master.{name}", found.tensors[name])
        assert array_of(stored).astype(np.float32).tobytes() == tensor.detach().float().numpy().tobytes(), parameter


def test_round_robin_follows_the_order_of_the_shapes(runs: tuple[Path, list[dict[str, Truth]]]) -> None:
    """With round robin gradients the fragments that a rank's file names are wrong (0.19.8): masters are found by the shapes, and round to
    the weights."""
    found = open_checkpoint(runs[0] / "zero 1 round robin")
    for parameter in ("embed.weight", "up.weight", "up.bias", "down.weight", "norm.weight", "scale"):
        master = torch.from_numpy(array_of(found.tensors[f"optimizer.master.{parameter}"]).copy())
        assert master.bfloat16().float().numpy().tobytes() == array_of(found.tensors[parameter]).tobytes()


def test_settings_counters_and_schedule_are_values(runs: tuple[Path, list[dict[str, Truth]]]) -> None:
    """Steps, the scheduler, what the client added, DeepSpeed's configuration and the groups' settings are plain values."""
    checkpoint = open_checkpoint(runs[0] / "zero 2 fp32 groups")
    values = checkpoint.values
    assert (values["args.hidden_size"], checkpoint.facts["heads"], checkpoint.facts["head_dim"]) == (16, 4, 4)
    assert (values["global_steps"], values["lr_scheduler.last_batch_iteration"], values["epoch"], values["note"]) == (2, 1, 3, "kept")
    assert (values["optimizer.param_groups.0.weight_decay"], values["optimizer.param_groups.1.weight_decay"]) == (0.1, 0.0)
    assert values["optimizer.param_groups.0.betas"] == [0.9, 0.95]
    assert 0 < values["optimizer.param_groups.0.lr"] < 1e-2
    assert values["ds_config.zero_optimization.stage"] == 2
    assert not any(isinstance(value, torch.Tensor) for value in values.values())


def test_every_parameter_has_the_step_of_its_group(runs: tuple[Path, list[dict[str, Truth]]]) -> None:
    """The counter of steps, which ZeRO keeps once for a group, belongs to each parameter, as in a plain torch optimizer."""
    found = open_checkpoint(runs[0] / "zero 3 bf16 groups")
    assert array_of(found.tensors["optimizer.step.up.weight"]) == array_of(found.tensors["optimizer.step.up.bias"]) == 2.0


@pytest.mark.parametrize("name", ["experts", "experts without zero"])
def test_experts_have_the_numbers_of_the_whole_model(runs: tuple[Path, list[dict[str, Truth]]], name: str) -> None:
    """Weights and states of four experts on two expert parallel ranks come out under their whole-model numbers."""
    checkpoint = open_checkpoint(runs[0] / name)
    for rank in runs[1]:
        assert_holds(checkpoint, rank[name])
    assert checkpoint.problems == []
    assert sum("deepspeed_experts.3." in key and "exp_avg_sq" in key for key in checkpoint.tensors) == 4


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_of_a_transformers_model_are_one_stack(runs: tuple[Path, list[dict[str, Truth]]], stage: int) -> None:
    """What AutoEP keeps on each rank for its experts is the module's tensor of all of them, and equals what transformers saved."""
    directory = runs[0] / f"expert layers {stage}"
    before, after = open_checkpoint(directory / "before"), open_checkpoint(directory / "after")
    held = [rank[directory.name] for rank in runs[1]]
    whole = {name: np.concatenate([rank[name] for rank in held]) if ".experts." in name else value for name, value in held[0].items()}
    assert_holds(before, whole)
    assert before.problems == after.problems == []
    for state in ("master", "exp_avg"):
        assert array_of(after.tensors[f"optimizer.{state}.model.layers.0.mlp.experts.w2"]).shape == (4, 16, 24)
    result = diff(directory / "before", directory / "transformers")
    assert (result.different, result.only_in_b) == ([], [])
    assert set(result.only_in_a) <= {"model.layers.0.mlp.gate.gate.weight"}  # the router once more


@pytest.mark.parametrize("name", ["pipeline", "pipeline bf16 optimizer"])
def test_stages_of_a_pipeline_are_one_model(runs: tuple[Path, list[dict[str, Truth]]], name: str) -> None:
    """Layers of two stages come out under the module's names; the tied embedding is one parameter, its second stage's states are copies."""
    checkpoint = open_checkpoint(runs[0] / name)
    for rank in runs[1]:
        assert_holds(checkpoint, rank[name])
    assert checkpoint.problems == []
    assert checkpoint.tensors["optimizer.master.tied_modules.embed.weight"].copies


def test_tensor_parallel_ranks_are_put_together(runs: tuple[Path, list[dict[str, Truth]]]) -> None:
    """What AutoTP cut in rows, columns and three parts of a projection is the transformers model again, also the tied head."""
    checkpoint = open_checkpoint(runs[0] / "tensor parallel" / "before")
    assert checkpoint.problems == []
    assert_holds(checkpoint, runs[1][0]["whole"])
    after = open_checkpoint(runs[0] / "tensor parallel" / "after")
    for key, axis in {
        "transformer.h.1.mlp.dense_h_to_4h.weight": 0,
        "transformer.h.1.mlp.dense_4h_to_h.weight": 1,
        "optimizer.exp_avg.transformer.h.0.self_attention.dense.weight": 1,
    }.items():
        joined = np.concatenate([rank["tensor parallel"][key] for rank in runs[1]], axis)
        assert_holds(after, {key: joined})
    norm = "optimizer.exp_avg.transformer.ln_f.weight"
    assert_holds(after, {norm: runs[1][0]["tensor parallel"][norm]})
    assert after.tensors[norm].copies


def test_the_second_name_of_a_tied_parameter_is_no_difference(runs: tuple[Path, list[dict[str, Truth]]], tmp_path: Path) -> None:
    """A side that stores a tied parameter once lacks nothing."""
    source = runs[0] / "zero 1 bf16" / "global_step2"
    module = torch.load(source / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    torch.save({name: tensor for name, tensor in module.items() if name != "embed.weight"}, tmp_path / "once.pt")
    result = diff(source, tmp_path / "once.pt", Options(model_only=True))
    assert (result.different, result.only_in_a, result.only_in_b) == ([], [], [])
    assert len(result.tensors) >= 10


def test_pieces_of_a_tensor_parallel_rank_are_missed(copy: Callable[[str], Path]) -> None:
    """Without one tensor parallel rank's part of the optimizer no state is taken for whole."""
    directory = copy("tensor parallel") / "after"
    next(directory.glob("*mp_rank_01_optim_states.pt")).unlink()
    found = open_checkpoint(directory)
    assert not any(tensor.state for tensor in found.tensors.values())
    text = "\n".join(found.problems)
    assert "mp_rank_01_optim_states.pt is missing" in text
    assert "not all of 2 tensor parallel ranks have a piece" in text


def convert(source: Path) -> Path:
    """DeepSpeed's own universal checkpoint of a tag's directory."""
    from deepspeed.checkpoint import ds_to_universal

    target = source.parent / f"{source.name}_universal"
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(arguments)
    return target


@pytest.mark.parametrize("name", ["zero 1 bf16", "zero 2 fp32 groups", "zero 3 bf16 groups", "pipeline"])
def test_universal_checkpoints_hold_the_same(copy: Callable[[str], Path], name: str) -> None:
    """A universal checkpoint has the tensors and the settings of the checkpoint it was made of, and the engine's own bits."""
    source = copy(name) / "global_step2"
    universal, before = open_checkpoint(convert(source)), open_checkpoint(source)
    assert universal.format == "DeepSpeed universal"
    assert universal.problems == []
    assert universal.tensors.keys() == before.tensors.keys()
    for key, tensor in universal.tensors.items():
        if tensor.dtype == before.tensors[key].dtype:
            assert array_of(tensor).tobytes() == array_of(before.tensors[key]).tobytes(), key
        else:  # the converter copies no layers of pipelines; their float32 copies stand for them
            assert (name, tensor.dtype) == ("pipeline", "float32"), key
    assert universal.values == before.values


@pytest.mark.parametrize("name", ["zero 2 fp16", "zero 3 bf16 groups", "pipeline"])
def test_a_checkpoint_and_its_universal_one_are_equal(copy: Callable[[str], Path], name: str) -> None:
    """Weights, masters, moments, steps and settings: nothing differs and nothing is left out. Where the converter saved no weights, the
    masters stand for them, rounded to the type they are trained in."""
    source = copy(name) / "global_step2"
    result = diff(source, convert(source))
    assert result.code == SAME, result.verdict()
    assert (result.only_in_a, result.only_in_b, result.not_compared) == ([], [], [])
    assert {tensor.by for tensor in result.tensors if tensor.state} == {"bits"}
    assert {tensor.by for tensor in result.tensors if not tensor.state} == ({"rounded"} if name == "pipeline" else {"bits"})


def test_parameters_missing_from_a_universal_checkpoint_are_said(copy: Callable[[str], Path]) -> None:
    """A directory or a state that is not there, and one that is cut off, are problems that name it."""
    target = convert(copy("zero 2 fp32 groups") / "global_step2")
    shutil.rmtree(target / "zero" / "down.weight")
    (target / "zero" / "up.weight" / "exp_avg.pt").unlink()
    cut = target / "zero" / "up.bias" / "fp32.pt"
    cut.write_bytes(cut.read_bytes()[:300])
    found = open_checkpoint(target)
    text = "\n".join(found.problems)
    assert "zero/up.weight/exp_avg.pt is missing" in text
    assert "no directory below zero/: down.weight" in text
    assert str(cut) in text
    assert len(found.problems) == 4  # the cut-off file counts as missing, too


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("zero 1 bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero 3 fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("zero 3 fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("pipeline", "layer_03-model_states.pt"),
        ("pipeline", "mp_rank_01_model_states.pt"),
        ("experts", "layer_0_expert_2_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_named_and_the_rest_is_read(copy: Callable[[str], Path], name: str, gone: str) -> None:
    """Without one file the others are read, what it had is covered by nothing, and a problem names it."""
    directory = copy(name) / "global_step2"
    whole = open_checkpoint(directory)
    (directory / gone).unlink()
    found = open_checkpoint(directory)
    assert any(gone.replace("layer_03-", "layer_03-*") in problem and "missing" in problem for problem in found.problems)
    boxes = [box for tensor in found.tensors.values() for box in tensor.boxes]
    assert sum(box.numel for box in boxes) < sum(box.numel for tensor in whole.tensors.values() for box in tensor.boxes)
    for key, tensor in found.tensors.items():
        assert tensor.shape == whole.tensors[key].shape
        if tensor.state != "step":  # any rank has it
            assert set(tensor.boxes) <= {*whole.tensors[key].boxes, *whole.tensors[key].copies}, key


@pytest.mark.parametrize("at", [0, 10, 1000, -100])
def test_a_truncated_file_is_a_problem_that_names_it(copy: Callable[[str], Path], at: int) -> None:
    """A rank's file that was cut off, however early, does not stop the comparison of the rest."""
    file = copy("zero 1 bf16") / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:at])
    found = open_checkpoint(file.parent)
    assert [problem for problem in found.problems if str(file) in problem]
    assert "optimizer.exp_avg.embed.weight" in found.tensors


def test_without_any_file_of_the_model_there_is_no_checkpoint(copy: Callable[[str], Path]) -> None:
    """What cannot be read at all is an error that says which file and why."""
    file = copy("zero 1 bf16") / "global_step3" / "mp_rank_00_model_states.pt"
    file.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(DumpFormatError, match=r"mp_rank_00_model_states\.pt"):
        open_checkpoint(file.parent)


def test_a_stale_shard_is_named(copy: Callable[[str], Path]) -> None:
    """A rank's file of the step before is told by its counter of steps and its learning rate."""
    directory = copy("zero 1 bf16")
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(directory / "global_step2" / name, directory / "global_step3" / name)
    found = open_checkpoint(directory)
    (problem,) = found.problems
    assert problem.startswith(f"{directory}/global_step3/{name}: is stale")
    assert "optimizer.state.0.step 2 (other ranks: 3)" in problem
    assert "optimizer.param_groups.0.lr" in problem


def test_files_of_a_run_with_more_ranks_are_left_out(copy: Callable[[str], Path]) -> None:
    """What a run on more ranks left in the directory is named and not compared."""
    directory = copy("zero 1 bf16") / "global_step3"
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(directory / name.format(1), directory / name.format(2))
    found = open_checkpoint(directory)
    assert [name.format(2) in problem and "2 data parallel ranks" in problem for problem in found.problems] == [True]


def test_files_of_runs_of_other_sizes_do_not_fit(runs: tuple[Path, list[dict[str, Truth]]], copy: Callable[[str], Path]) -> None:
    """A rank's file whose partition has another size than the others' is a problem, not a wrong comparison."""
    directory = copy("zero 1 bf16") / "global_step3"
    other = runs[0] / "bf16 optimizer" / "global_step2"
    tree = torch.load(other / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", weights_only=False)
    state = tree["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"] = [part[:100].clone() for part in state["single_partition_of_fp32_groups"]]
    torch.save(tree, directory / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    found = open_checkpoint(directory)
    assert any("the files do not belong together" in problem for problem in found.problems)
    assert not any(tensor.state == "master" for tensor in found.tensors.values())


def test_a_latest_file_that_leads_elsewhere_is_refused(copy: Callable[[str], Path]) -> None:
    """The tracker file may name a directory beside it and nothing else."""
    directory = copy("zero 1 bf16")
    (directory / "latest").write_text("../../somewhere")
    with pytest.raises(DumpFormatError, match="latest"):
        open_checkpoint(directory)


def test_code_in_a_rank_file_is_refused_by_name(copy: Callable[[str], Path]) -> None:
    """A pickle that would run a command is refused with the name of what it calls, and nothing runs."""
    directory = copy("zero 1 bf16") / "global_step3"
    marker = directory / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.system, (f"touch {marker}",)

    torch.save({"optimizer_state_dict": Evil()}, directory / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(DumpFormatError, match=r"posix\.system"):
        open_checkpoint(directory)
    assert not marker.exists()
