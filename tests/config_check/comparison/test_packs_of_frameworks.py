"""Packs that real runs of Transformers, DeepSpeed and megatron-core left: planted differences are found.

They were written by tests/fixtures/make_config_runs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.find.config.between_ranks import between_ranks
from msprobe_engine.find.config.pack_settings import DYNAMIC_FILE, PackSide
from msprobe_engine.find.config.packs import compare_packs

PACKS = Path(__file__).parents[2] / "fixtures" / "config_packs" / "ours"
VARIABLE = ("env", "NCCL_ALGO", ())
PLANTED = {
    "transformers": {
        ("hyperparameters", "gradient_accumulation_steps", ()),
        ("hyperparameters", "max_grad_norm", ()),
        ("hyperparameters", "model.rms_norm_eps", ()),
    },
    "deepspeed": {("hyperparameters", "gradient_clipping", ()), ("hyperparameters", "zero_optimization.stage", ())},
    "megatron": {
        ("hyperparameters", "use_distributed_optimizer", ()),
        ("weights", "decoder.layers.0.self_attention.linear_qkv.weight", (1,)),
    },
}


ARGUMENT = "train.py arguments: argument 3"
"""The word that told the program what to plant."""


@pytest.mark.parametrize("framework", PLANTED)
def test_planted_differences_of_a_framework(framework: str) -> None:
    """Each is found, at its rank, and nothing else is."""
    found = compare_packs(PACKS / f"{framework}_base.zip", PACKS / f"{framework}_planted.zip")
    assert {(one.sheet, one.name, one.ranks) for one in found.differences} == PLANTED[framework] | {
        VARIABLE,
        ("hyperparameters", ARGUMENT, ()),
    }
    assert not found.problems
    assert compare_packs(PACKS / f"{framework}_base.zip", PACKS / f"{framework}_base.zip").equal


EVERYWHERE = {
    ("hyperparameters", ARGUMENT, ARGUMENT, ()),
    ("hyperparameters", "lr", "learning_rate", ()),
    ("hyperparameters", "norm-epsilon", "rms_norm_eps", ()),
    ("hyperparameters", "global-batch-size", "global-batch-size", ()),
    ("env", "NCCL_ALGO", "NCCL_ALGO", ()),
    ("env", "NVIDIA_TF32_OVERRIDE", "NVIDIA_TF32_OVERRIDE", (1,)),
    ("pip", "transformer-engine", "transformer-engine", ()),
    ("random", "", "random.random", ()),
}
CHECKED = {
    "transformers": {
        *(("hyperparameters", name, name, ()) for name in ("adam_beta2", "max_grad_norm", "weight_decay")),
        ("weights", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight", ()),
        *(("dataset", name, name, (0,)) for name in ("kwargs.input_ids", "kwargs.labels")),  # one sample, which is its own label
    },
    "deepspeed": {
        *(
            ("hyperparameters", name, name, ())
            for name in ("gradient_clipping", "optimizer.params.weight_decay", "zero_optimization.stage")
        ),
        ("weights", "a.weight", "a.weight", (1,)),
        ("dataset", "args.0", "args.0", (0,)),
    },
    "megatron": {
        *(("hyperparameters", name, name, ()) for name in ("clip_grad", "lr", "use_distributed_optimizer")),
        *(("weights", name, name, (1,)) for name in ("module.decoder.layers.0.self_attention.linear_qkv.weight",)),
        ("dataset", "args.0", "args.0", (0,)),
    },
}


@pytest.mark.parametrize("framework", CHECKED)
def test_twelve_differences_of_a_checked_run(framework: str) -> None:
    """`ConfigChecker` in a real run on two ranks (tests/fixtures/make_config_planted.py): aliases in the launch script, a batch that makes
    another accumulation, variables, one of them on one rank, a package, a bit, a sample, a random call and settings of the framework
    are found, and nothing else is."""
    base, planted = (PACKS / f"{framework}_checked_{variant}.zip" for variant in ("base", "planted"))
    found = compare_packs(base, planted)
    assert {(one.sheet, one.bench_name, one.cmp_name, one.ranks) for one in found.differences} == EVERYWHERE | CHECKED[framework]
    assert compare_packs(base, base).equal


@pytest.mark.parametrize("framework", PLANTED)
def test_a_framework_is_told_from_its_settings(framework: str) -> None:
    """Its defaults hold for what it does not say."""
    side = PackSide(read_pack(PACKS / f"{framework}_base.zip")).settings(DYNAMIC_FILE, False)
    (one,) = side.values()
    assert framework in one.frameworks
    assert not one.conflicts


@pytest.mark.parametrize("framework", PLANTED)
def test_ranks_of_a_run_differ_in_nothing_that_matters(framework: str) -> None:
    """What ranks have of their own (numbers, shards, streams) is no difference."""
    assert between_ranks(PACKS / f"{framework}_base.zip").matter == []


def test_two_frameworks_are_compared_by_terms() -> None:
    """Settings of Transformers and DeepSpeed under their own names; weights without a common name are said once."""
    found = compare_packs(PACKS / "transformers_base.zip", PACKS / "deepspeed_base.zip")
    terms = {one.term: one for one in found.differences if one.sheet == "hyperparameters"}
    assert (terms["learning_rate"].bench_name, terms["learning_rate"].cmp_name) == ("learning_rate", "optimizer.params.lr")
    assert terms["compute_dtype"].severity == "changes numerics"
    assert "clip_grad" not in terms  # 1.0 in both, called max_grad_norm and gradient_clipping
    assert found.derived["global_batch_size"][:2] == ("4 (2 samples x 2 micro batches x 1 data parallel)", "16")
    assert [one.why for one in found.differences if one.sheet == "weights"] == [
        "no name of the weights is on both sides; of two frameworks compare checkpoints (msprobe ckpt diff)"
    ]
