"""Settings of two runs: what means the same is no difference, what means something else is one, whatever it is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from msprobe_engine.config.settings.pack_settings import PackSettings, Setting
from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.find.config.compare_settings import compare_settings
from msprobe_engine.find.config.difference import ONLY_BENCH, ONLY_CMP, Difference, SettingsComparison

MEGATRON: dict[str, Any] = {
    "tensor-model-parallel-size": "2",
    "pipeline-model-parallel-size": "1",
    "num-layers": "4",
    "hidden-size": "64",
    "num-attention-heads": "4",
    "lr": "3e-4",
    "min-lr": "3e-5",
    "lr-decay-style": "cosine",
    "lr-warmup-fraction": "0.1",
    "train-iters": "1000",
    "micro-batch-size": "2",
    "global-batch-size": "16",
    "bf16": True,
    "seed": "1234",
    "norm-epsilon": "1e-5",
    "swiglu": True,
    "untie-embeddings-and-output-weights": True,
    "clip-grad": "1.0",
    "adam-beta2": "0.95",
    "weight-decay": "0.1",
    "nproc_per_node": "8",
    "hidden-dropout": "0",
    "attention-dropout": "0",
    "init-method-std": "0.02",
}
TRANSFORMERS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr": 3e-5},
    "warmup_steps": 100,
    "max_steps": 1000,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "bf16": True,
    "seed": 1234,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "output_dir": "/x",
}
DEEPSPEED: dict[str, Any] = {
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 1e-4,
    "optimizer.params.betas": [0.9, 0.95],
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization.stage": 2,
    "bf16.enabled": True,
}


def _side(values: Mapping[str, Any], **more: Any) -> PackSettings:
    return PackSettings([Setting(name, value) for name, value in values.items()], **more)


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], **more: Any) -> SettingsComparison:
    return compare_settings(_side(a, **more), _side(b, **more), "file")


def _matter(found: SettingsComparison) -> list[Difference]:
    return [one for one in found.differences if one.matters]


def _one(found: SettingsComparison) -> Difference:
    matter = _matter(found)
    assert len(matter) == 1, [one.sentence() for one in matter]
    return matter[0]


def test_the_same_settings_are_equal() -> None:
    """Nothing is reported of two equal sides of any framework."""
    for values in (MEGATRON, TRANSFORMERS, DEEPSPEED):
        found = _compare(values, values, world_size=8)
        assert not found.differences
        assert found.compared >= len(values)


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": "0.0003", "norm-epsilon": "0.00001", "bf16": "True", "clip-grad": "1"},
        {"weight-decay": "1e-1", "no-save-optim": True, "save": "/a", "load-interval": None},
        {"adam-beta1": "0.9", "position-embedding-type": None, "use-distributed-optimizer": False},
        {"master_port": "6001", "rdzv_endpoint": "host:1", "tensorboard-dir": "/t", "log-interval": "5", "save-interval": "9"},
        {"sequence_parallel": False, "expert-model-parallel-size": "1", "accumulate-allreduce-grads-in-fp32": False},
    ],
)
def test_what_means_the_same_is_no_difference(changed: dict[str, Any]) -> None:
    """Other spellings of a number, defaults said aloud, switches that are off, paths and ports do not matter."""
    assert not _matter(_compare(MEGATRON, MEGATRON | changed))
    assert not _matter(_compare(MEGATRON | changed, MEGATRON))


def test_a_renamed_setting_is_compared() -> None:
    """An alias of the table is matched and its value compared, in any pair of frameworks."""
    renamed = {key: value for key, value in MEGATRON.items() if key != "lr"}
    assert not _matter(_compare(MEGATRON, renamed | {"learning_rate": 0.0003}))
    one = _one(_compare(MEGATRON, renamed | {"learning_rate": 1e-4}))
    assert (one.bench_name, one.cmp_name, one.matched, one.severity, one.verdict) == ("lr", "learning_rate", "mapping", CHANGES, "error")


def test_names_that_only_look_alike_are_not_matched() -> None:
    """beta1 is not compared with beta2, nor tensor with pipeline parallel: the names are near, the meanings are not."""
    found = _compare({"adam-beta1": 0.9, "tensor-model-parallel-size": 2}, {"adam-beta2": 0.9, "pipeline-model-parallel-size": 2})
    assert all(one.cmp_name == ONLY_BENCH or one.bench_name == ONLY_CMP for one in found.differences)
    assert {one.term for one in _matter(found)} >= {"tensor_parallel", "pipeline_parallel"}


def test_megatron_and_transformers_that_mean_the_same_are_equal() -> None:
    """Micro batch x accumulation x ranks is the global batch, a share of the steps is a number of steps, a flag is a data type."""
    found = compare_settings(_side(MEGATRON), _side(TRANSFORMERS, world_size=4), "file")
    assert {one.term for one in _matter(found)} <= {"world_size", "tensor_parallel"}, [one.sentence() for one in _matter(found)]
    assert found.derived["global_batch_size"] == ("16", "16 (2 samples x 2 micro batches x 4 data parallel)", True)
    assert found.derived["warmup_steps"][2]
    assert found.derived["compute_dtype"][2]


@pytest.mark.parametrize(
    ("changed", "term"),
    [
        ({"gradient_accumulation_steps": 4}, "global_batch_size"),
        ({"rms_norm_eps": 1e-6}, "norm_eps"),
        ({"warmup_steps": 10}, "warmup_steps"),
        ({"bf16": False, "fp16": True}, "bf16"),
        ({"tie_word_embeddings": True}, "tie_embeddings"),
        ({"initializer_range": 0.01}, "init_std"),
        ({"max_grad_norm": 0.5}, "clip_grad"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, "min_lr"),
        ({"num_key_value_heads": 2}, "kv_heads"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"seed": 42}, "seed"),
        ({"lr_scheduler_type": "linear"}, "lr_schedule"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_one_difference_between_frameworks_is_the_one_reported(changed: dict[str, Any], term: str) -> None:
    """A planted difference is found under the common term, and nothing else is."""
    before = {one.term for one in _matter(compare_settings(_side(MEGATRON), _side(TRANSFORMERS, world_size=4), "file"))}
    found = compare_settings(_side(MEGATRON), _side(TRANSFORMERS | changed, world_size=4), "file")
    new = [one for one in _matter(found) if one.term not in before]
    assert [one.term for one in new] == [term], [one.sentence() for one in new]
    assert new[0].severity == CHANGES


def test_a_part_of_the_global_batch_says_what_it_does() -> None:
    """Another accumulation alone is another global batch; with another micro batch that makes up for it only rounding differs."""
    one = _one(_compare(DEEPSPEED, DEEPSPEED | {"gradient_accumulation_steps": 8}, world_size=2))
    assert one.severity == CHANGES
    assert "16 against 32" in one.why
    one = _one(_compare(DEEPSPEED, DEEPSPEED | {"gradient_accumulation_steps": 8, "train_micro_batch_size_per_gpu": 1}, world_size=2))
    assert (one.term, one.severity) == ("micro_batch_size", MAY)


def test_a_part_of_a_batch_of_unknown_size_may_change_the_numbers() -> None:
    """Twice the micro batches may be of half the size each; neither side says how large they are."""
    side = {"seed": 1, "accelerate.gradient_accumulation_steps": 2}
    for other in (side | {"accelerate.gradient_accumulation_steps": 4}, {"seed": 1}):
        sides = [PackSettings([Setting(*item, framework="accelerate") for item in values.items()]) for values in (side, other)]
        assert _one(compare_settings(*sides, "file")).severity == MAY


def test_another_number_of_ranks_is_another_global_batch() -> None:
    """A batch that nobody has set is computed of the ranks of each side."""
    found = compare_settings(_side(DEEPSPEED, world_size=2), _side(DEEPSPEED, world_size=4), "file")
    terms = {one.term: one for one in _matter(found)}
    assert terms["global_batch_size"].severity == CHANGES
    assert terms["world_size"].severity == MAY


def test_a_default_that_changed_between_releases_is_a_difference() -> None:
    """The same ds_config without gradient_clipping clips with DeepSpeed 0.19.3 and does not with 0.19.2."""
    a, b = (_side(DEEPSPEED, versions={"deepspeed": version}) for version in ("0.19.2", "0.19.3"))
    one = _one(compare_settings(a, b, "file"))
    assert (one.term, one.bench, one.cmp, one.severity) == ("clip_grad", "0", "1", CHANGES)
    assert not _matter(compare_settings(b, _side(DEEPSPEED | {"gradient_clipping": 1.0}, versions={"deepspeed": "0.19.4"}), "file"))


@pytest.mark.parametrize("said", [False, True])
def test_defaults_of_deepspeeds_optimizer_hold_for_that_one_alone(said: bool) -> None:
    """Without ``optimizer`` in the file the training gives DeepSpeed one of its own, of which the file says nothing."""
    engine = {name: value for name, value in DEEPSPEED.items() if not name.startswith("optimizer.")} | {"world_size": 2}
    own = {"optimizer.class": "AdamW", "optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.1, "world_size": 2}
    found = compare_settings(_side(engine | ({"optimizer.type": "AdamW"} if said else {})), _side(own), "file")
    assert ("adam_beta2" in {one.term for one in _matter(found) if one.severity == CHANGES}) == said


def test_a_deepspeed_file_of_the_trainer_decides_on_clipping() -> None:
    """Without ``gradient_clipping`` DeepSpeed's own default holds, whatever Transformers' is; ``auto`` takes that of Transformers."""
    trainer = TRANSFORMERS | {"deepspeed": "ds.json", "zero_optimization.stage": 2}
    del trainer["max_grad_norm"]
    one = _one(_compare(trainer, trainer | {"gradient_clipping": 1.0}, versions={"deepspeed": "0.19.2"}))
    assert (one.term, one.bench, one.cmp, one.severity) == ("clip_grad", "0", "1.0", CHANGES)
    assert not _matter(_compare(trainer, trainer | {"gradient_clipping": 1.0}, versions={"deepspeed": "0.19.3"}))
    assert not _matter(
        _compare(trainer | {"gradient_clipping": "auto"}, trainer | {"gradient_clipping": 1.0}, versions={"deepspeed": "0.19.2"})
    )
    half = trainer | {"gradient_clipping": "auto", "max_grad_norm": 0.5}
    assert _one(_compare(half, trainer | {"gradient_clipping": 1.0, "max_grad_norm": 0.5})).term == "clip_grad"
    without = {name: value for name, value in TRANSFORMERS.items() if name != "max_grad_norm"}
    assert "clip_grad" in {row.term for row in _matter(_compare(trainer, without, versions={"deepspeed": "0.19.2"}))}


def test_auto_of_a_deepspeed_file_is_what_the_trainer_says() -> None:
    """``auto`` for the micro batch is the flag's number: equal to it written out, and another one than another."""
    auto = TRANSFORMERS | {"zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": "auto"}
    assert not _matter(_compare(auto, auto | {"train_micro_batch_size_per_gpu": 2}, world_size=2))
    other = auto | {"train_micro_batch_size_per_gpu": 4, "per_device_train_batch_size": 4}
    assert _matter(_compare(auto, other, world_size=2))


@pytest.mark.parametrize("changed", [{"micro-batch-size": "4"}, {"tensor-model-parallel-size": "4"}])
def test_other_micro_batches_of_one_global_batch_only_round_otherwise(changed: dict[str, str]) -> None:
    """Megatron's number of micro batches is computed: while the global batch stays, another one changes no more than the order of sums."""
    found = _matter(_compare(MEGATRON, MEGATRON | changed))
    assert found
    assert {one.severity for one in found} == {MAY}


def test_two_sources_of_one_setting_count_once() -> None:
    """``lr`` of the arguments and ``optimizer.lr`` of the optimizer with the same two values are one difference, with others two."""
    a, b = ({"learning_rate": rate, "optimizer.lr": rate, "seed": 1} for rate in (1e-4, 2e-4))
    found = _compare(a, b)
    assert _one(found).name == "learning_rate"
    assert [row.why for row in found.differences if not row.matters] == ["it says again what 'learning_rate' says"]
    assert len(_matter(_compare(a, b | {"optimizer.lr": 3e-4}))) == 2


def test_a_default_that_all_frameworks_share_cannot_be_told_without_the_framework() -> None:
    """``--adam_beta2 0.999`` alone is what every framework with that name takes: no difference, but the program may be of none of them.
    ``--seed 42`` is not what all take."""
    found = _compare({"script": "train.py", "adam_beta2": "0.999"}, {"script": "train.py"})
    assert not _matter(found)
    assert any(note.startswith("no pack says which framework it is") and ": adam_beta2" in note for note in found.notes)
    assert found.unknown == {"adam_beta2"}
    assert _matter(_compare({"script": "train.py", "adam_beta2": "0.95"}, {"script": "train.py"}))
    assert _matter(_compare({"script": "train.py", "seed": "42"}, {"script": "train.py"}))


def test_an_item_of_a_list_names_its_term() -> None:
    """Of betas the one that differs is named."""
    one = _one(_compare(DEEPSPEED, DEEPSPEED | {"optimizer.params.betas": "[0.9, 0.999]"}))
    assert one.term == "adam_beta2"


def test_a_switch_off_is_the_switch_of_the_other_name() -> None:
    """``--no-masked-softmax-fusion`` is ``masked_softmax_fusion: false``."""
    a, b = MEGATRON | {"no-masked-softmax-fusion": True}, MEGATRON | {"masked_softmax_fusion": False}
    assert not _matter(_compare(a, b))
    assert _one(_compare(a, MEGATRON | {"masked_softmax_fusion": True})).term == "fusion"


def test_data_types_are_compared_by_meaning() -> None:
    """A data type that is an object on one side and a flag on the other is one data type; another one is found."""
    dynamic = MEGATRON | {"params_dtype": "torch.bfloat16"}
    assert not _matter(_compare(dynamic, MEGATRON | {"params_dtype": "bf16"}))
    assert _one(_compare(dynamic, MEGATRON | {"params_dtype": "torch.float32"})).term == "param_dtype"


def test_null_of_the_existing_tool_says_nothing() -> None:
    """Its dynamic file has null for what JSON cannot hold, which is counted and is no difference."""
    a = PackSettings([Setting("params_dtype", None), Setting("lr", 1e-4)], opaque=True)
    found = compare_settings(a, _side({"params_dtype": "torch.bfloat16", "lr": 1e-4}), "file")
    assert not found.differences
    assert any("null" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "a", "b", "severity"),
    [
        ("data-path", "/a/text", "/b/text", HARMLESS),
        ("data-path", "0.3 /a/x 0.7 /a/y", "0.3 /b/x 0.7 /b/y", HARMLESS),
        ("data-path", "0.3 /a/x 0.7 /a/y", "0.7 /a/x 0.3 /a/y", MAY),
        ("load", "/ckpt/a", "/ckpt/b", MAY),
        ("my-plugin-file", "/a/p.py", "/b/p.py", HARMLESS),
        ("my-plugin-level", "1", "2", MAY),
        ("wandb-project", "x", "y", HARMLESS),
        ("overlap-grad-reduce", True, False, MAY),
        ("recompute-granularity", "full", "selective", HARMLESS),
    ],
)
def test_severity_of_settings(name: str, a: Any, b: Any, severity: str) -> None:
    """Moved files are harmless, other mixtures of data are not, and what is not known may matter."""
    found = _compare(MEGATRON | {name: a}, MEGATRON | {name: b})
    assert [one.severity for one in found.differences] == [severity]
    assert all(one.why for one in found.differences)


def test_content_that_was_compared_decides_over_its_path() -> None:
    """Another checkpoint path is harmless where the weights themselves were compared."""
    a, b = _side(MEGATRON | {"load": "/a/x"}), _side(MEGATRON | {"load": "/b/y"})
    assert _matter(compare_settings(a, b, "file"))
    assert not _matter(compare_settings(a, b, "file", {"weights": True}))


def test_secrets_are_not_shown() -> None:
    """A token among the settings is left out, differing or not."""
    found = _compare(MEGATRON | {"hub_token": "hf_" + "a" * 30}, MEGATRON | {"hub_token": "hf_" + "b" * 30})
    assert not found.differences


def test_two_names_of_one_side_that_disagree_are_said() -> None:
    """When a side says a term twice, differently, the reader is told which one was taken."""
    found = _compare(TRANSFORMERS, DEEPSPEED | {"learning_rate": 5e-4})
    assert any("learning_rate" in note and "optimizer.params.lr" in note for note in found.notes)


def test_defaults_that_hold_only_with_something_else() -> None:
    """DeepSpeed's warm-up of 1000 updates is there with a scheduler only; loss scales are read in float16 only."""
    plain = _side(DEEPSPEED | {"fp16.loss_scale_window": 500}, world_size=2)
    found = compare_settings(plain, _side(TRANSFORMERS, world_size=2), "file")
    assert not {"warmup_type", "loss_scale_window", "initial_loss_scale"} & {one.term for one in found.differences}
    scheduled = _side(DEEPSPEED | {"scheduler.type": "WarmupLR"}, world_size=2)
    found = compare_settings(scheduled, _side(TRANSFORMERS | {"lr_scheduler_type": "constant_with_warmup"}, world_size=2), "file")
    assert {"warmup_type", "warmup_steps"} <= {one.term for one in found.differences}
    one = _compare(DEEPSPEED | {"fp16.hysteresis": 2}, DEEPSPEED | {"fp16.hysteresis": 3}).differences
    assert [d.severity for d in one] == [HARMLESS]
