"""Names of frameworks are asked for by `msprobe_integrations.requirements`, which says what has gone; `getattr` with a default takes what
has gone for what is not so. How often that is still written is counted here by package: a number may only fall."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "msprobe_integrations"
STILL = {
    "accelerate": 0,
    "deepspeed": 44,
    "lightning": 7,
    "megatron": 35,
    "mindspeed": 21,
    "mindspore": 53,
    "torch": 178,
    "torchtitan": 4,
    "transformers": 11,
}
"""Package -> calls of `getattr` with a default that are left."""
NONE_LEFT = (
    *("megatron/layout.py", "megatron/replicas.py", "deepspeed/shards.py", "deepspeed/parallel_layout.py"),
    *("torch/parameters/fsdp.py", "torch/parameters/fsdp1.py", "torch/tensors/dtensors.py"),
)
"""Files whose answers are numbers or ranks: a name that has gone would make them wrong, so there is none."""


def defaults(path: Path) -> list[int]:
    """Lines of calls of `getattr` with a default."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) == 3]


@pytest.mark.parametrize("package", STILL)
def test_no_more_defaults_than_before(package: str) -> None:
    """Whoever needs a name of a framework asks `need`, or says in `optional` why its absence means just that."""
    found = {str(path.relative_to(ROOT)): len(defaults(path)) for path in sorted((ROOT / package).rglob("*.py"))}
    assert sum(found.values()) <= STILL[package], {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("name", NONE_LEFT)
def test_where_a_default_would_be_a_wrong_number(name: str) -> None:
    """Places of gradients and groups of ranks take no default."""
    assert defaults(ROOT / name) == []
