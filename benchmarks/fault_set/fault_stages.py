"""Defects of trainings with stages and experts on several ranks, and what is true about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

LAYOUTS: dict[str, tuple[int, str, str]] = {
    "pp": (2, "--layers 4 --pp 2", "--layers 4"),
    "vpp": (2, "--layers 4 --pp 2 --vpp 2", "--layers 4"),
    "tp x pp": (4, "--layers 4 --tp 2 --pp 2", "--layers 4"),
    "ep": (2, "--experts 4 --ep 2 --nmb 1", "--experts 4 --nmb 2"),
    "ep, all-gather": (2, "--experts 4 --ep 2 --nmb 1 --allgather", "--experts 4 --nmb 2"),
    "ep, micro batches": (2, "--experts 4 --ep 2 --nmb 2", "--experts 4 --nmb 4"),
}
"""Name -> ranks, arguments, and those of one process that trains the same."""


@dataclass(frozen=True)
class Planted:
    """One defect.

    Attributes:
        name: what went wrong.
        layouts: where it can be.
        plant: changes the chunks of a rank.
        record: pattern of the first suspect's record, as the dump of its rank has it.
        module: pattern of its module in the whole model.
        ranks: by layout, the rank that is to blame.
    """

    name: str
    layouts: tuple[str, ...]
    plant: Callable[[list[Any]], None]
    record: str
    module: str
    ranks: dict[str, int]


def layer(chunks: list[Any], number: int) -> Any:
    """The layer with a number of the whole model, from 0; None on ranks that have it not."""
    layers = (one for chunk in chunks for one in chunk.decoder.layers)
    return next((one for one in layers if one.layer_number == number + 1), None)


def expert(chunks: list[Any], number: int, block: int) -> Any:
    """The expert with a number of the whole model; None on ranks that have it not."""
    local = chunks[0].decoder.layers[block].mlp.experts.local_experts
    return local[number % len(local)] if number // len(local) == dist.get_rank() else None


def wrong_eps(chunks: list[Any]) -> None:
    found = layer(chunks, 2)
    if found is not None:
        found.pre_mlp_layernorm.eps = 1e-1


def stale_weight(chunks: list[Any]) -> None:
    found = layer(chunks, 3)
    if found is not None:
        with torch.no_grad():
            found.mlp.linear_fc1.weight[0].zero_()


def wrong_offset(chunks: list[Any]) -> None:
    """The layers of the last stage hold each other's weights."""
    layers = {one.layer_number: one for chunk in chunks for one in chunk.decoder.layers}
    if {3, 4} <= set(layers) and 1 not in layers:
        for a, b in zip(layers[3].parameters(), layers[4].parameters()):
            a.data, b.data = b.data.clone(), a.data.clone()


def loss_not_scaled(_chunks: list[Any]) -> None:
    scaled = schedules.forward_step_calc_loss

    def unscaled(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(scaled).bind(*args, **kwargs)
        bound.arguments["num_microbatches"] = 1
        return scaled(*bound.args, **bound.kwargs)

    schedules.forward_step_calc_loss = unscaled


def dropped_gradient(chunks: list[Any]) -> None:
    """The gradient of the second micro batch gets lost on its way through one layer."""
    found, calls = layer(chunks, 2), [0]

    def lost(_module: Any, inputs: Any, _outputs: Any) -> Any:
        calls[0] += 1
        return tuple(None if one is None else torch.zeros_like(one) for one in inputs) if calls[0] == 2 else None

    if found is not None:
        found.mlp.linear_fc2.register_full_backward_hook(lost)


def changed_on_the_way(chunks: list[Any]) -> None:
    """What the last stage gets from the one before is not what was sent."""
    model = chunks[-1]
    if model.post_process:
        given = model.set_input_tensor
        model.set_input_tensor = lambda tensors: given([None if one is None else one * 1.01 for one in tensors])


def stale_expert(chunks: list[Any]) -> None:
    found = expert(chunks, 3, 0)
    if found is not None:
        with torch.no_grad():
            found.linear_fc1.weight[5].zero_()


def other_activation(chunks: list[Any]) -> None:
    found = expert(chunks, 2, 0)
    if found is not None:
        found.activation_func = torch.nn.functional.relu


def expert_gradient(chunks: list[Any]) -> None:
    found = expert(chunks, 3, 1)
    if found is not None:
        found.linear_fc2.weight.register_hook(lambda gradient: gradient * 0.5)


def other_routing(chunks: list[Any]) -> None:
    router = chunks[0].decoder.layers[1].mlp.router
    routed = router.routing
    if dist.get_rank() == 1:
        router.routing = lambda logits, *args, **kwargs: routed(logits * 1.05, *args, **kwargs)


def dropped_tokens(chunks: list[Any]) -> None:
    experts = chunks[0].decoder.layers[0].mlp.experts
    given = experts.forward

    def fewer(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = tokens.clone()
        tokens[:3] = 0
        return given(tokens, *args, **kwargs)

    if dist.get_rank() == 0:
        experts.forward = fewer


_STAGES, _EXPERTS = ("pp", "vpp"), ("ep",)

PLANTED: tuple[Planted, ...] = (
    Planted(
        "wrong eps in a layer of the second half",
        _STAGES,
        wrong_eps,
        r"Functional\.layer_norm\.\d+\.forward",
        r"decoder\.layers\.2\.pre_mlp_layernorm",
        {"pp": 1, "vpp": 0},
    ),
    Planted(
        "stale weight in the last layer",
        _STAGES,
        stale_weight,
        r"Tensor\.t\.\d+\.forward|Module\..*linear_fc1\..*\.forward\.0",
        r"decoder\.layers\.3\.mlp\.linear_fc1",
        {"pp": 1, "vpp": 1},
    ),
    Planted(
        "layers of a stage in the wrong order",
        ("pp",),
        wrong_offset,
        r"Functional\.layer_norm\.0\.forward",
        r"decoder\.layers\.2\.input_layernorm",
        {"pp": 1},
    ),
    Planted(
        "loss not divided by the micro batches", _STAGES, loss_not_scaled, r"Tensor\.__itruediv__\.0\.forward", r"", {"pp": 1, "vpp": 1}
    ),
    Planted(
        "gradient of a micro batch lost",
        _STAGES,
        dropped_gradient,
        r"Module\..*linear_fc2\.RowParallelLinear\.backward\.1",
        r"decoder\.layers\.2\.mlp\.linear_fc2",
        {"pp": 1, "vpp": 0},
    ),
    Planted(
        "changed between the stages",
        ("pp",),
        changed_on_the_way,
        r"Functional\.layer_norm\.0\.forward",
        r"decoder\.layers\.2\.input_layernorm",
        {"pp": 1},
    ),
    Planted(
        "stale weight of one expert",
        _EXPERTS,
        stale_expert,
        r"Tensor\.t\.\d+\.forward|Module\..*linear_fc1\..*\.forward\.0",
        r"decoder\.layers\.0\.mlp\.experts\.local_experts\.3\.linear_fc1",
        {"ep": 1},
    ),
    Planted(
        "another activation in one expert",
        _EXPERTS,
        other_activation,
        r"Functional\.relu\.0\.forward",
        r"decoder\.layers\.0\.mlp\.experts\.local_experts\.2",
        {"ep": 1},
    ),
    Planted(
        "gradient of one expert halved",
        _EXPERTS,
        expert_gradient,
        r"Module\..*linear_fc2\.RowParallelLinear\.(parameters_grad|backward)\.0|Tensor\.add_\.\d+\.forward",
        r"decoder\.layers\.1\.mlp\.experts\.local_experts\.3\.linear_fc2",
        {"ep": 1},
    ),
    Planted(
        "other routing on one rank",
        _EXPERTS,
        other_routing,
        r"Tensor\.view\.\d+\.forward|Module\..*router\..*\.forward\.0",
        r"decoder\.layers\.1\.mlp\.router",
        {"ep": 1},
    ),
    Planted(
        "tokens lost on one rank",
        _EXPERTS,
        dropped_tokens,
        r"Torch\.split\.\d+\.forward|Module\..*SequentialMLP\.forward\.0",
        r"decoder\.layers\.0\.mlp\.experts",
        {"ep": 0},
    ),
)
