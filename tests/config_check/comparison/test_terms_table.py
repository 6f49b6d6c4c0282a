"""The table of terms: well formed, and its names are those of the installed frameworks."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.config.environment.rules import environment_rules
from msprobe_engine.config.settings.aliases import ANY, FRAMEWORKS, default_of, key, known_terms
from msprobe_engine.config.severity import SEVERITIES


def _names(framework: str) -> set[str]:
    table = known_terms()
    return {name for name, aliases in table._aliases.items() if any(alias.framework == framework for alias in aliases)}


def test_every_row_is_complete() -> None:
    """A term has a severity, a sentence, names of known frameworks, and feeds a term that there is."""
    table = known_terms()
    frameworks = {alias.framework for aliases in table._aliases.values() for alias in aliases}
    assert frameworks <= {ANY, *FRAMEWORKS}
    for term in table:
        assert term.severity in SEVERITIES
        assert term.why
        assert term.why[-1] != "."
        assert term.kind in ("", "dtype", "word", "path")
        assert not term.feeds or term.feeds in table.terms
        assert set(term.default) <= set(FRAMEWORKS)
    for name in table._aliases:
        assert name == key(name)


_MISSING = object()


def _place(package: str) -> Path:
    """Where an installed package is; it is not imported, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent


def _fields(file: Path, *classes: str) -> dict[str, Any]:
    """Fields of dataclasses in a source file, with their defaults where these are constants."""
    found: dict[str, Any] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for one in node.body:
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    value = one.value
                    if isinstance(value, ast.Call):
                        value = next((k.value for k in value.keywords if k.arg == "default"), None)
                    found[one.target.id] = value.value if isinstance(value, ast.Constant) else _MISSING
    return found


def test_names_and_defaults_of_transformers_are_those_installed() -> None:
    """Names of the table are fields of TrainingArguments, and what the table says they are without being said, the framework says too."""
    fields = _fields(_place("transformers") / "training_args.py", "TrainingArguments")
    wanted = {"learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "lr_scheduler_type", "optim"}
    wanted |= {
        "warmup_steps",
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "bf16",
        "fp16",
    }
    wanted |= {"tf32", "seed", "data_seed", "full_determinism", "torch_compile", "fsdp", "average_tokens_across_devices"}
    assert wanted <= fields.keys()
    assert wanted <= _names("transformers")
    table = known_terms()
    for name in wanted:
        alias = table.of(name, "transformers")
        assert alias is not None
        if "transformers" in alias.term.default and fields[name] is not _MISSING:
            assert default_of(alias.term, "transformers") == fields[name], name


def test_names_and_defaults_of_torchtitan_are_those_installed() -> None:
    """The training and parallelism sections have the fields and defaults that the table has."""
    file = _place("torchtitan") / "config" / "configs.py"
    table = known_terms()
    for section, kind in (("training", "TrainingConfig"), ("parallelism", "ParallelismConfig"), ("debug", "DebugConfig")):
        fields = {f"{section}.{name}": default for name, default in _fields(file, kind).items()}
        known = _names("torchtitan") & fields.keys()
        assert len(known) > 1
        for name in known:
            alias = table.of(name, "torchtitan")
            if alias is not None and not alias.term.group and "torchtitan" in alias.term.default and fields[name] is not _MISSING:
                assert default_of(alias.term, "torchtitan") == fields[name], name


def test_defaults_of_deepspeed_are_those_installed() -> None:
    """Constants of the installed DeepSpeed agree; clipping depends on the release."""
    tree = ast.parse((_place("deepspeed") / "runtime" / "constants.py").read_text(encoding="utf-8"))
    lines = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    constants = {node.targets[0].id: node.value.value for node in lines if isinstance(node.targets[0], ast.Name)}  # type: ignore[attr-defined]
    table = known_terms()
    assert default_of(table["initial_loss_scale"], "deepspeed") == 2 ** constants["FP16_INITIAL_SCALE_POWER_DEFAULT"]
    assert default_of(table["loss_scale_window"], "deepspeed") == constants["FP16_LOSS_SCALE_WINDOW_DEFAULT"]
    assert default_of(table["loss_scale_hysteresis"], "deepspeed") == constants["FP16_HYSTERESIS_DEFAULT"]
    assert default_of(table["clip_grad"], "deepspeed", "0.19.2") == 0.0
    assert default_of(table["clip_grad"], "deepspeed", "0.19.3+cu12") == 1.0


def test_names_of_megatron_are_fields_of_its_configuration() -> None:
    """Model settings of the table are fields of megatron-core's TransformerConfig."""
    core = _place("megatron.core")
    fields = _fields(core / "transformer" / "transformer_config.py", "TransformerConfig")
    fields |= _fields(core / "model_parallel_config.py", "ModelParallelConfig")
    wanted = {"num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels", "hidden_dropout"}
    wanted |= {
        "attention_dropout",
        "init_method_std",
        "layernorm_epsilon",
        "normalization",
        "add_bias_linear",
        "moe_router_topk",
        "params_dtype",
    }
    wanted |= {"attention_softmax_in_fp32", "fp32_residual_connection", "masked_softmax_fusion", "moe_aux_loss_coeff", "moe_z_loss_coeff"}
    assert wanted <= fields.keys()
    assert wanted <= _names("megatron")


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("--lr", "learning_rate"),
        ("actor_rollout_ref/actor/optim/lr", "learning_rate"),
        ("optimizer.params.betas", "adam_beta1"),
        ("no-rope-fusion", "fusion"),
        ("model.model_config.seq_length", "sequence_length"),
        ("deepspeed:gradient_clipping", "clip_grad"),
        ("optimizer.type", "optimizer"),
        ("accelerate.gradient_accumulation_steps", "gradient_accumulation"),
    ],
)
def test_a_name_finds_its_term(name: str, term: str) -> None:
    """Dashes, directories of a dotted name and prefixes do not hide a name."""
    alias = known_terms().of(name)
    assert alias is not None
    assert alias.term.name == term


@pytest.mark.parametrize("name", ["callbacks.0.type", "beta", "num_layers_per_stage", "lrx", ""])
def test_a_name_that_only_resembles_one_has_no_term(name: str) -> None:
    """Names are not matched by likeness."""
    assert known_terms().of(name) is None


@pytest.mark.parametrize(
    ("variable", "severity"),
    [
        ("NCCL_ALGO", "may change numerics"),
        ("NCCL_IB_HCA", "harmless"),
        ("NVIDIA_TF32_OVERRIDE", "changes numerics"),
        ("INF_NAN_MODE_ENABLE", "changes numerics"),
        ("CUDA_VISIBLE_DEVICES", "harmless"),
        ("CUDA_LAUNCH_BLOCKING", "harmless"),
        ("TORCHINDUCTOR_CACHE_DIR", "harmless"),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", "may change numerics"),
        ("MASTER_PORT", "harmless"),
        ("HOME", "harmless"),
        ("SSH_CONNECTION", "harmless"),
        ("TMPDIR", "harmless"),
        ("SLURM_JOB_ID", "harmless"),
        ("SLURM_ARRAY_TASK_ID", "may change numerics"),
        ("MY_RECIPE", "may change numerics"),
    ],
)
def test_variables_have_a_rule(variable: str, severity: str) -> None:
    """A variable that is named goes before a star; one in no row may be read by the program, so it may matter."""
    assert environment_rules().of(variable).severity == severity
