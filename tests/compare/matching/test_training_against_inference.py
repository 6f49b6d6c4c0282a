"""Training against inference: names of FSDP and Megatron against those of vLLM, parts joined."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from msprobe_engine.align.calls.training_and_inference import align
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.measure.columns import GOLDEN_NAME, MAX_ABS, RESULT, TARGET_NAME, UNMATCHED
from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.pairs import compare_pair

torch.manual_seed(0)
X = torch.randn(7, 8)
Q, K, V = (torch.randn(4, 8) for _ in range(3))


def dumped(root: Path, calls: Iterable[tuple[str, dict[str, list[torch.Tensor]]]]) -> DumpTable:
    folder = root / "dump_tensor_data"
    folder.mkdir(parents=True)
    data = {}
    for name, sections in calls:
        record: dict[str, object] = {}
        for section, tensors in sections.items():
            leaves = []
            for number, tensor in enumerate(tensors):
                short = "weight" if section == "parameters" else str(number)
                file = f"{name}.{section.replace('input_args', 'input')}.{short}.pt"
                torch.save(tensor, folder / file)
                numbers = {"Max": tensor.max(), "Min": tensor.min(), "Mean": tensor.mean(), "Norm": tensor.norm()}
                shown = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "requires_grad": False}
                leaves.append({**shown, **{key: value.item() for key, value in numbers.items()}, "data_name": file})
            record[section] = {"weight": leaves[0]} if section == "parameters" else leaves
        data[name] = record
    (root / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "framework": "pytorch", "data": data}))
    return read_side(root / "dump.json")


def linear(name: str, weight: torch.Tensor, x: torch.Tensor) -> tuple[str, dict[str, list[torch.Tensor]]]:
    return name, {"input_args": [x], "parameters": [weight], "output": [x @ weight.T]}


@pytest.fixture
def sides(tmp_path: Path) -> tuple[DumpTable, DumpTable]:
    path = "Module._fsdp_wrapped_module.model.layers.1._fsdp_wrapped_module.self_attn"
    training = [linear(f"{path}.{part}_proj.Linear.forward.3", weight, X[None]) for part, weight in (("q", Q), ("k", K), ("v", V))]
    training.append((f"{path}.rotary.Rotary.forward.0", {"input_args": [X[None]], "output": [X[None]]}))
    training.append((f"{path}.q_proj.Linear.backward.0", {"input": [X], "output": [X]}))
    training += [linear(f"{path}.q_proj.Linear.forward.4", Q, X[None])]
    inference = [linear("Module.model.layers.1.self_attn.qkv_proj.QKVParallelLinear.forward.0", torch.cat([Q, K, V]), X)]
    inference.append(("Module.model.layers.1.self_attn.attn.Attention.forward.0", {"input_args": [X], "output": [X]}))
    return dumped(tmp_path / "training", training), dumped(tmp_path / "inference", inference)


@pytest.mark.parametrize("compat", [True, False])
def test_query_key_and_value_are_compared_as_one(sides: tuple[DumpTable, DumpTable], compat: bool) -> None:
    """Weights and results of three modules are those of the one; the shared input is taken once; only the first forward pass counts."""
    options = CompareOptions(compat=compat, consistent_check=True, backend="fsdp")
    (block,) = compare_pair(*align(*sides, "fsdp"), options)
    joined = [at for at, name in enumerate(block[TARGET_NAME]) if ";" in name]
    assert [block[GOLDEN_NAME][at].rpartition("forward.0.")[2] for at in joined] == ["input.0", "parameters.weight", "output.0"]
    assert all(block[TARGET_NAME][at].count("_proj") == 3 for at in joined)
    assert max(block[MAX_ABS][at] for at in joined) < 1e-5
    if not compat:
        assert {block[RESULT][at] for at in joined} == {"pass"}
    alone = [(a.rpartition(".self_attn.")[2], b.rpartition(".self_attn.")[2]) for a, b in zip(block[TARGET_NAME], block[GOLDEN_NAME])]
    assert (UNMATCHED, "attn.Attention.forward.0.output.0") in alone
    assert ("rotary.Rotary.forward.0.output.0", UNMATCHED) in alone
    assert not any("backward" in a or "forward.4" in a for a, _ in alone)


def test_a_wrong_part_is_off(sides: tuple[DumpTable, DumpTable]) -> None:
    """One part that differs makes the joined row an error."""
    target, golden = sides
    name = next(name for name in target.data_name if "k_proj" in name and "parameters" in name)
    torch.save(1.5 * K, target.path.parent / "dump_tensor_data" / name)
    (block,) = compare_pair(*align(target, golden, "fsdp"), CompareOptions(consistent_check=True, backend="fsdp"))
    row = next(at for at, name in enumerate(block[TARGET_NAME]) if name.count("parameters") == 3)
    assert block[RESULT][row] == "error"
    assert block[MAX_ABS][row] == pytest.approx(0.5 * K.abs().max().item())


def test_megatron_names(tmp_path: Path) -> None:
    """Megatron's words for the same modules."""
    training = dumped(tmp_path / "t", [linear("Module.module.module.decoder.layers.0.self_attention.linear_qkv.Column.forward.0", Q, X)])
    inference = dumped(tmp_path / "i", [linear("Module.model.layers.0.self_attn.qkv_proj.QKV.forward.0", Q, X)])
    (block,) = compare_pair(*align(training, inference, "megatron"), CompareOptions(consistent_check=True, backend="megatron"))
    assert UNMATCHED not in block[TARGET_NAME] + block[GOLDEN_NAME]
    assert set(block[RESULT]) == {"pass"}


def test_a_backend_is_needed(sides: tuple[DumpTable, DumpTable]) -> None:
    """Without one the names cannot be told."""
    with pytest.raises(UsageError, match="--backend"):
        align(*sides, None)
