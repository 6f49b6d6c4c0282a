"""Names of transformers and of megatron-core: the same weights, proven by the models' own forward."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from stored_arrays import array_of, checkpoint_of, fill

from msprobe_engine.align.parameters.align_names import align_checkpoints
from msprobe_engine.find.checkpoint.diff import Options, diff

JOB = Path(__file__).parents[1] / "gpt_pairs_job.py"
MODELS = (
    "llama", "llama-tied", "gpt2", "qwen2", "qwen3", "qwen3-interleaved", "phi3", "gpt-neox", "starcoder2", "mixtral",
    "qwen2-moe", "qwen3-moe", "qwen3-next", "deepseek", "deepseek-full-rank",
)  # fmt: skip


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What `gpt_pairs_job` saw for all models, and its directory."""
    directory = tmp_path_factory.mktemp("pairs")
    done = warm.run(warm.script(JOB), directory, *MODELS)
    assert done.returncode == 0, done.stderr[-3000:]
    return directory, json.loads((directory / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_weights_that_go_over_by_the_pairs_give_the_same_logits(proven: tuple[Path, dict[str, Any]], model: str) -> None:
    """Every parameter of megatron-core 0.16.1 has its values in what transformers saves, and nothing is left on either side."""
    seen = proven[1][model]
    assert seen["before"] > 0.1 * seen["size"]
    assert seen["after"] < 1e-5 * seen["size"]
    assert (seen["only_a"], seen["only_b"], seen["left_out"]) == ([], [], [])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_states_of_an_optimizer_are_cut_as_their_parameters(proven: tuple[Path, dict[str, Any]], model: str) -> None:
    """Gradients of one loss, kept as a state: those of a fused projection are the other model's, part by part."""
    seen = proven[1][model]["gradients"]
    assert seen["only"] == []
    assert seen["apart"] < 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_a_megatron_checkpoint_is_equal_to_the_snapshot_of_transformers(proven: tuple[Path, dict[str, Any]], model: str) -> None:
    """Files of both, read with what they themselves say of the model: no difference, and nothing missing, from either side."""
    megatron, snapshot = proven[0] / model / "megatron_run", proven[0] / model / "hf"
    for a, b in ((megatron, snapshot), (snapshot, megatron)):
        found = diff(a, b, Options(memory_mb=256, workers=1))
        assert found.verdict().startswith("equal: "), found.verdict()
        assert found.code == 0


def test_planted_changes_between_frameworks_are_exactly_what_is_reported(proven: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A transposed block of q, two exchanged experts, rotary rows: the tensors of Megatron that are concerned, the part, and how."""
    from safetensors.numpy import load_file, save_file

    def planted(model: str, change: Callable[[dict[str, Any]], None]) -> Any:
        snapshot = tmp_path / model
        shutil.copytree(proven[0] / model / "hf", snapshot, dirs_exist_ok=True)
        tensors = load_file(proven[0] / model / "hf" / "model.safetensors")
        change(tensors)
        save_file(tensors, snapshot / "model.safetensors", {"format": "pt"})
        return diff(proven[0] / model / "megatron_run", snapshot, Options(memory_mb=256, workers=1))

    def transposed(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].T.copy()

    found = planted("llama", transposed)
    assert [(t.name, t.hint) for t in found.different] == [
        ("decoder.layers.1.self_attention.linear_qkv.weight[q]", "equal when transposed")
    ]

    def rotary(tensors: dict[str, Any]) -> None:
        key = tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.k_proj.weight"] = key.reshape(2, 2, 4, 32).swapaxes(1, 2).reshape(16, 32).copy()

    found = planted("llama", rotary)
    assert [t.name for t in found.different] == ["decoder.layers.0.self_attention.linear_qkv.weight[k]"]
    assert found.different[0].hint.startswith("equal when rotary pairs of rows become halves of each head")

    def experts(tensors: dict[str, Any]) -> None:
        for leaf in ("w1", "w2", "w3"):
            one, two = (f"model.layers.1.block_sparse_moe.experts.{e}.{leaf}.weight" for e in (1, 3))
            tensors[one], tensors[two] = tensors[two], tensors[one]

    found = planted("mixtral", experts)
    assert len(found.different) == 6
    assert found.hints == ["layer 1: experts 1 and 3 are exchanged (6 tensors)"]


@pytest.mark.parametrize("model", ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek"])
def test_experts_in_a_stack_are_those_that_transformers_saves_one_by_one(
    proven: tuple[Path, dict[str, Any]], model: str, tmp_path: Path
) -> None:
    """transformers 5 keeps experts fused in memory (`torch.save` of a state dict) and writes them apart; both are the same weights."""
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    saved = load_file(proven[0] / model / "hf" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(proven[0] / model / "hf")
    a = checkpoint_of({key: value.numpy() for key, value in loaded.state_dict().items()}, tmp_path / "a")
    b = checkpoint_of(saved, tmp_path / "b")
    assert any(key.endswith("experts.gate_up_proj") for key in a.tensors)
    found = align_checkpoints(a, b)
    assert (found.only_a, found.only_b, found.left_out) == ([], [], [])
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)
    assert any(pair.name.endswith("experts.gate_up_proj[expert 3 up]") for pair in found.pairs)


@pytest.mark.parametrize(("family", "options"), [("llama3", {}), ("qwen3", {}), ("deepseek_v3", {"num_mtp_layers": 1})])
def test_torchtitan_names_are_what_its_own_adapter_makes_of_them(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """torchtitan 0.3 writes Hugging Face weights with an adapter: rotary rows of Llama, stacked experts, further layers, tied output."""
    import torch

    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel", **options)
    config = spec.model
    config.layers = config.layers[:2]
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    own = {key: value.detach() for key, value in model.state_dict().items()}
    theirs = {key: value.numpy() for key, value in spec.state_dict_adapter(config, None).to_hf(dict(own)).items() if value is not None}
    attention = config.layers[0].attention
    facts = {"heads": attention.n_heads, "layers": 2}
    found = align_checkpoints(
        checkpoint_of({key: value.numpy() for key, value in own.items()}, tmp_path / "a"), checkpoint_of(theirs, tmp_path / "b", facts)
    )
    assert (found.only_a, found.only_b, found.left_out) == ([], [], [])
    assert len(found.pairs) >= len(own)
    assert all(np.array_equal(array_of(pair.a), array_of(pair.b)) for pair in found.pairs)


def test_gpt_oss_experts_with_alternating_columns_are_cut(tmp_path: Path) -> None:
    """GPT-OSS keeps experts inputs first, gate and up in turns; forward of transformers says which is which."""
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=8, intermediate_size=6, num_local_experts=2, num_experts_per_tok=1)
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    own = {f"model.layers.0.mlp.experts.{key}": value.detach().numpy() for key, value in experts.named_parameters()}
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    apart: dict[str, Any] = {}
    for e in range(2):
        for name, shape in shapes.items():
            apart[f"model.layers.0.mlp.experts.{e}.{name}.weight"] = np.zeros(shape, np.float32)
            apart[f"model.layers.0.mlp.experts.{e}.{name}.bias"] = np.zeros(shape[:1], np.float32)
    a, b = checkpoint_of(apart, tmp_path / "a"), checkpoint_of(own, tmp_path / "b")
    found = align_checkpoints(a, b)
    assert (found.only_a, found.only_b, found.left_out) == ([], [], [])
    for pair in found.pairs:
        fill(pair.a, array_of(pair.b))
    w = {key: torch.from_numpy(array_of(t)) for key, t in a.tensors.items()}
    x, e = torch.randn(3, 8), 1

    def layer(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(
            value, w[f"model.layers.0.mlp.experts.{e}.{name}.weight"], w[f"model.layers.0.mlp.experts.{e}.{name}.bias"]
        )

    gate, up = layer("gate_proj", x).clamp(max=experts.limit), layer("up_proj", x).clamp(-experts.limit, experts.limit)
    expected = layer("down_proj", (up + 1) * gate * torch.sigmoid(gate * experts.alpha))
    got = experts(x, torch.full((3, 1), e), torch.ones(3, 1))
    assert torch.allclose(got, expected, atol=1e-5)
