"""Checkpoints that megatron-core wrote in many layouts: the same weights and optimizer states come out; what was planted, and no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_pickles import load
from megatron_writer import CASES, FAST
from stored_arrays import array_of

from msprobe_engine.find.checkpoint.diff import diff
from msprobe_engine.find.checkpoint.result import Result
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, Box, StoredTensor
from msprobe_engine.formats.checkpoint.open import open_checkpoint

Copy = Callable[[str], Path]

DENSE = [
    "dense-tp2",
    "dense-pp2",
    "dense-tp2pp2",
    "dense-pp2vpp2",
    "dense-uneven",
    "sharded",
    "sharded-tp2",
    "sharded-pp2vpp2",
    "sharded-buckets",
    "dist",
    "dist-tp2",
    "dist-tp2pp2",
    "dist-pp2vpp2",
    "dist-dp-reshardable",
    "dist-dp-reshardable-tp2pp2",
    "dist-dp-reshardable-pp2vpp2",
    "dist-dp-reshardable-buckets",
    "dist-fully-reshardable",
    "dist-fully-reshardable-tp2",
]
WEIGHTS_ONLY = [
    ("dense-te", "dense"),
    ("dense-te-tp2", "dense"),
    ("dense-te-tp2", "dense-tp2pp2"),
    ("dense-legacy", "dense"),
    ("dense-release", "dense-te"),
    ("plain-mlp-tp2", "plain-mlp"),
    ("dense-tp4", "dense-tp1-of-tp4"),
    ("moe-grouped", "moe"),
    ("moe-grouped-ep2", "moe"),
    ("moe-tp2ep2etp2", "moe"),
    ("mla-tp2", "mla"),
    ("dist-mla-tp2", "mla"),
]
STATES_TOO = [
    *((name, "dense") for name in DENSE),
    ("dense-tp2pp2", "dist-dp-reshardable-pp2vpp2"),
    ("dist-fully-reshardable-tp2", "sharded-pp2vpp2"),
    ("tied-pp2", "tied"),
    ("sharded-tied-pp2", "tied"),
    ("tied-sharded", "sharded-tied-pp2"),
    ("dist-tied-pp2", "tied"),
    ("dist-dp-reshardable-tied-pp2", "tied"),
    ("ahead-tp2pp2", "ahead"),
    ("ahead-sharded-pp2", "ahead"),
    ("dist-ahead-dp-reshardable-tp2", "ahead"),
    ("dist-ahead-dp-reshardable-pp2", "ahead"),
    ("fp32-tp2", "fp32"),
    ("dist-fp32", "fp32-tp2"),
    ("moe-ep2", "moe"),
    ("moe-sharded", "moe"),
    ("moe-sharded-ep2", "moe"),
    ("moe-sharded-ep2pp2", "moe"),
    ("moe-tp2ep2etp1", "moe-tied"),
    ("dist-moe", "moe"),
    ("dist-moe-ep2", "moe"),
    ("dist-moe-dp-reshardable-ep2pp2", "moe-sharded-ep2"),
    ("dist-moe-fully-reshardable-ep2", "moe"),
    ("dist-moe-singleton-ep2", "dist-moe"),
]


def tiered(cells: Sequence[tuple[str, ...]]) -> list[Any]:
    """Those with a case that the fast tier does not write are slow."""
    return [pytest.param(*cell, marks=[pytest.mark.slow] if set(cell) & CASES.keys() - set(FAST) else []) for cell in cells]


def assert_equal(found: Result) -> None:
    """All tensors of the models have the same bits, and nothing is missing or damaged."""
    assert_equal_tensors(found)
    assert found.equal


def assert_equal_tensors(found: Result) -> None:
    """As `assert_equal`, but values may differ."""
    assert found.problems == []
    assert [t.name for t in (*found.different, *found.unknown)] == []
    assert (found.only_in_a, found.only_in_b) == ([], [])
    assert [t.name for t in found.tensors if t.drift_a or t.drift_b] == []


@pytest.mark.parametrize(("a", "b"), tiered(STATES_TOO))
def test_weights_and_optimizer_states_of_one_model_are_equal_in_any_two_layouts(megatron_checkpoints: Path, a: str, b: str) -> None:
    """Whatever the cuts, stages, formats and optimizers, the same model has the same parameters and the same states."""
    found = diff(megatron_checkpoints / a, megatron_checkpoints / b)
    assert_equal(found)
    assert sum(t.state == "exp_avg_sq" for t in found.tensors) == len(
        {t.name for t in found.tensors if t.group == "model" and "expert_bias" not in t.name}
    )
    assert [v.name for v in found.values_that_matter] == []


@pytest.mark.parametrize(("a", "b"), tiered(WEIGHTS_ONLY))
def test_weights_of_one_model_are_equal_in_any_two_layouts(megatron_checkpoints: Path, a: str, b: str) -> None:
    """Names of Transformer Engine, of Megatron before core and of grouped experts; latent attention; more tensor-parallel ranks."""
    found = diff(megatron_checkpoints / a, megatron_checkpoints / b)
    assert_equal(found)
    assert len([t for t in found.tensors if not t.state]) > 20


def test_what_is_read_is_what_torch_loads(megatron_checkpoints: Path) -> None:
    """The tensors of one rank's file are those that torch gives, bit by bit."""
    path = megatron_checkpoints / "dense"
    loaded = load(path / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt")["model"]
    read = open_checkpoint(path)
    assert {name for name, tensor in loaded.items() if tensor is not None} == {t.name for t in read.tensors.values() if t.group == "model"}
    for name, tensor in loaded.items():
        if tensor is not None:
            assert np.array_equal(array_of(read.tensors[name]), tensor.float().numpy()), name


@pytest.mark.parametrize(
    "name",
    tiered([("dense-tp2pp2",), ("sharded-pp2vpp2",), ("dist-dp-reshardable-tp2pp2",), ("dist-moe-dp-reshardable-ep2pp2",)]),
)
def test_states_belong_to_the_parameters_that_they_are_given_to(megatron_checkpoints: Path, name: str) -> None:
    """The numbers of every state follow from the name of its parameter, so a state under another's name shows."""
    read = open_checkpoint(megatron_checkpoints / name)
    states = [t for t in read.tensors.values() if t.state == "exp_avg"]
    assert len(states) >= 35
    for tensor in states:
        generator = torch.Generator().manual_seed(zlib.crc32(f"0 exp_avg {_local_name(tensor.name)}".encode()))
        table = tensor.name.endswith(("word_embeddings.weight", "output_layer.weight"))
        drawn = torch.randn([56, *tensor.shape[1:]] if table else tensor.shape, generator=generator)
        assert np.array_equal(array_of(tensor)[: len(drawn)], drawn.numpy()), tensor.name
        assert (tensor.dtype, tensor.group) == ("float32", OPTIMIZER)


def _local_name(name: str) -> str:
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def test_settings_steps_and_facts_are_the_same_in_all_formats(megatron_checkpoints: Path) -> None:
    """Arguments, iteration, schedule, groups of the optimizer and its step have the same paths and values everywhere."""
    read = {name: open_checkpoint(megatron_checkpoints / name) for name in ("dense", "sharded-tp2", "dist", "dist-dp-reshardable")}
    for checkpoint in read.values():
        values = checkpoint.values
        assert values["iteration"] == 5
        assert values["args.num_layers"] == 4
        assert values["args.attention_backend"] == read["dense"].values["args.attention_backend"]
        assert values["args.params_dtype"] == "torch.bfloat16"
        assert values["opt_param_scheduler.num_steps"] == 5
        assert values["optimizer.step"] == 1.0
        assert values["optimizer.param_groups.decayed.lr"] == values["optimizer.param_groups.not_decayed.lr"]
        assert values["optimizer.param_groups.not_decayed.wd_mult"] == 0.0
        known = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 16, "layers": 4, "vocab": 56, "gated": True, "tied": False}
        assert checkpoint.facts == known
    assert read["sharded-tp2"].tensors["rng_state.tp1.pp0.0.torch_rng_state"].group == "random"


def test_embeddings_with_a_learning_rate_of_their_own_have_their_states(megatron_checkpoints: Path) -> None:
    """A third group of parameters, which newer versions tell by its rate alone; each state still belongs to its parameter."""
    found = diff(megatron_checkpoints / "decoupled", megatron_checkpoints / "dense")
    assert_equal_tensors(found)
    assert sum(t.state == "exp_avg" for t in found.tensors) == 52


@pytest.mark.slow
def test_files_of_newer_megatron_are_read(megatron_checkpoints: Path, tmp_path: Path) -> None:
    """Since core 0.17 the common part of a distributed checkpoint is an object in its data files; what it holds is the same."""
    mcore = os.environ.get("MCORE19_ENVIRONMENT", "")
    if not mcore:
        pytest.skip("MCORE19_ENVIRONMENT does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    cases = ["dist-tp2", "dist-dp-reshardable", "dense-tp2"]
    script = Path(__file__).parents[1] / "megatron_writer.py"
    environment = {**os.environ, "PYTHONPATH": mcore}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *cases], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "dist-tp2" / "iter_0000005" / "common.pt").exists()
    for case in cases:
        found = diff(tmp_path / case, megatron_checkpoints / case)
        assert_equal(found)
        assert [v.name for v in found.values_that_matter] == []


def test_a_padded_vocabulary_is_told(megatron_checkpoints: Path) -> None:
    """Rows behind the vocabulary that the args name only fill the table up."""
    read = open_checkpoint(megatron_checkpoints / "dense-tp2")
    table = read.tensors["embedding.word_embeddings.weight"]
    assert (table.shape, table.padding) == ((64, 16), 56)
    assert read.tensors["optimizer.exp_avg.output_layer.weight"].padding == 56


@pytest.fixture
def copy(megatron_checkpoints: Path, tmp_path: Path) -> Copy:
    """A copy of a case that may be changed."""

    def make(name: str) -> Path:
        shutil.copytree(megatron_checkpoints / name, tmp_path / name)
        return tmp_path / name

    return make


def change(tensor: StoredTensor, within: str, boxes: tuple[Box, ...] | None = None) -> None:
    """Turn over the highest bit of the fraction of the first element that lies in files of `within`."""
    box = next(box for box in (boxes or tensor.boxes) if within in str(box.file))
    width = {"bfloat16": 2, "float32": 4}[tensor.dtype]
    with open(box.file, "r+b") as file:
        file.seek(box.start + width - 2)
        byte = file.read(1)[0]
        file.seek(box.start + width - 2)
        file.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize(
    ("reference", "case", "name", "within"),
    tiered(
        [
            ("mla", "mla-tp2", "decoder.layers.1.self_attention.linear_q_up_proj.weight", "mp_rank_01"),
            ("mla", "mla-tp2", "decoder.layers.0.self_attention.linear_kv_down_proj.weight", "mp_rank_01"),
            ("dense", "dense-uneven", "decoder.layers.3.mlp.linear_fc2.weight", "mp_rank_00_001"),
            ("dense", "dense-tp2pp2", "decoder.layers.2.mlp.linear_fc1.weight", "mp_rank_01_001"),
            ("moe", "moe-ep2", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", "mp_rank_00_001"),
            ("moe", "moe-grouped-ep2", "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight", "mp_rank_00_001"),
            ("moe-tied", "moe-tp2ep2etp1", "decoder.layers.0.self_attention.linear_qkv.weight", "mp_rank_01_001"),
            ("dense", "sharded-pp2vpp2", "optimizer.exp_avg_sq.decoder.layers.3.mlp.linear_fc2.bias", "mp_rank_00_001"),
            ("dense", "dist-tp2pp2", "decoder.layers.1.mlp.linear_fc2.weight", "distcp"),
            ("dense-te", "dist-dp-reshardable-tp2pp2", "decoder.layers.1.mlp.linear_fc2.weight", "distcp"),
            ("dist", "dist-dp-reshardable-tp2pp2", "optimizer.master.decoder.layers.3.self_attention.linear_qkv.weight", "distcp"),
        ]
    ),
)
def test_one_flipped_bit_is_the_only_difference(
    megatron_checkpoints: Path, copy: Copy, reference: str, case: str, name: str, within: str
) -> None:
    """A bit that differs on one rank is found, under the parameter's own name, in that rank's file, and nothing else is."""
    path = copy(case)
    change(open_checkpoint(path).tensors[name], within)
    found = diff(megatron_checkpoints / reference, path)
    assert [(t.name, t.changed) for t in found.different] == [(name, 1)]
    assert all(within in file for t in found.different for file in t.files_b)
    assert (found.only_in_a, found.only_in_b, found.problems) == ([], [], [])
    assert not found.equal


@pytest.mark.parametrize(
    ("reference", "case", "name"),
    [
        ("dense", "dense-tp2", "decoder.layers.2.input_layernorm.weight"),
        ("dense", "dense-tp2", "optimizer.exp_avg.decoder.layers.2.mlp.linear_fc2.bias"),
        ("tied", "tied-pp2", "embedding.word_embeddings.weight"),
        ("moe", "moe-ep2", "decoder.layers.0.mlp.router.weight"),
    ],
)
def test_replicas_that_drifted_apart_are_told(megatron_checkpoints: Path, copy: Copy, reference: str, case: str, name: str) -> None:
    """What every rank has as a whole is compared between the ranks too: a norm that differs on one of them, a tied output layer."""
    path = copy(case)
    tensor = open_checkpoint(path).tensors[name]
    assert tensor.copies
    change(tensor, "", tensor.copies)
    found = diff(megatron_checkpoints / reference, path)
    assert [(t.name, t.drift_b) for t in found.tensors if t.drift_b] == [(name, 1)]
    assert not found.equal


def test_two_experts_that_changed_places_are_the_only_difference(megatron_checkpoints: Path, copy: Copy) -> None:
    """An expert's own number counts, not that of its file."""
    path = copy("moe-ep2")
    first, second = (f"decoder.layers.1.mlp.experts.local_experts.{n}.linear_fc2.weight" for n in (1, 3))
    tensors = open_checkpoint(path).tensors
    places = [tensors[name].boxes[0] for name in (first, second)]
    data = [box.file.read_bytes()[box.start : box.start + 2 * box.numel] for box in places]
    for box, other in zip(places, data[::-1], strict=True):
        with open(box.file, "r+b") as file:
            file.seek(box.start)
            file.write(other)
    assert {t.name for t in diff(megatron_checkpoints / "moe", path).different} == {first, second}


def test_a_stale_file_of_optimizer_states_is_the_only_difference(megatron_checkpoints: Path, copy: Copy) -> None:
    """States of one rank from another time: they differ, all in that file, and no weight does."""
    path = copy("sharded-tp2")
    stale = path / "iter_0000005" / "mp_rank_01" / "distrib_optim.pt"
    for tensor in open_checkpoint(path).tensors.values():
        for box in tensor.boxes:
            if box.file == stale:
                change(tensor, "distrib_optim", (box,))
    found = diff(megatron_checkpoints / "sharded-tp2", path)
    assert {t.state for t in found.different} == {"master", "exp_avg", "exp_avg_sq"}
    assert {file for t in found.different for file in t.files_b} == {str(stale)}
