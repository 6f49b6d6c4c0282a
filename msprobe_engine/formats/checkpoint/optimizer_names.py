"""Optimizer states of ``torch.optim`` by the name of their parameter.

``Optimizer.state_dict()`` is ``{"state": {number: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": ..., "params": [number, ...]}]}``. The
numbers count the parameters in the order of the groups; their names are not in it, unless the groups have ``param_names`` (torch 2.6) or
the states were gathered by FSDP, which puts names in place of numbers. Otherwise the names follow from the order and the shapes of the
model's tensors.

The order in which the usual models define their parameters, from their names alone: safetensors files are sorted by name.

The tables follow the module definitions of transformers (``models/{llama,mistral,qwen2,qwen3,gemma2,gpt2,bert,roberta}/modeling_*.py``). A
model with other words in its names has no order here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from msprobe_engine.core.names import is_number
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, StoredTensor, whole
from msprobe_engine.formats.tensors.torch_file import FileTensor

Shape = tuple[int, ...]


class Parameter(NamedTuple):
    """A tensor of the model that an optimizer may move."""

    name: str
    shape: Shape


@dataclass
class OptimizerParts:
    """What an optimizer's state dict holds.

    Attributes:
        tensors: states, by parameter.
        values: the rest, by path below ``optimizer``.
        notes: how names were found.
    """

    tensors: list[StoredTensor] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|position_ids|attn\.(masked_)?bias)$")
_NORM = re.compile(r"(?:^|[._])(?:layer_?norm|rms_?norm|ln(?:_\w+)?|norm\w*|batch_?norm|bn\d*)(?:\.|$)|norm(?:\.|$)", re.IGNORECASE)


def is_optimizer(tree: Any) -> bool:
    """Whether a tree is what ``Optimizer.state_dict()`` gives."""
    return isinstance(tree, dict) and isinstance(tree.get("state"), dict) and isinstance(tree.get("param_groups"), list)


def optimizer_parts(
    tree: dict[Any, Any],
    parameters: Sequence[Parameter],
    prefix: str = "optimizer",
    ordered: bool = True,
    others: Sequence[Sequence[Parameter]] = (),
) -> OptimizerParts:
    """States by parameter, and the settings of the groups.

    Args:
        tree: what ``Optimizer.state_dict()`` gave.
        parameters: tensors of the model.
        prefix: path of the values.
        ordered: `parameters` are in the order of the module; else (safetensors sorts them) the order of the usual modules is tried.
        others: the tensors of other models that it may be the optimizer of, if not of `parameters`.
    """
    out = OptimizerParts()
    groups = [group if isinstance(group, dict) else {} for group in tree["param_groups"]]
    members = [[number for number in _as_sequence(group.get("params")) if isinstance(number, (int, str))] for group in groups]
    states: dict[Any, Any] = tree["state"]
    names = _names(groups, members, states, [parameters, *others], ordered, prefix, out.notes)
    for number, state in states.items():
        name = names.get(number, f"#{number}") if not isinstance(number, str) else number
        tensors, values = plain(state)
        for what, tensor in tensors.items():
            out.tensors.append(
                StoredTensor(
                    name,
                    tensor.shape,
                    tensor.dtype,
                    whole(tensor.shape, tensor.file, tensor.start, tensor.strides),
                    state=what or "state",
                    group=OPTIMIZER,
                )
            )
        out.values.update({f"{prefix}.state.{name}.{what}": value for what, value in values.items()})
    for index, (group, numbers) in enumerate(zip(groups, members)):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        tensors, values = plain(settings, f"{prefix}.param_groups.{index}")
        out.values |= values
        out.values[f"{prefix}.param_groups.{index}.params"] = len(numbers)
        for path, tensor in tensors.items():  # a learning rate that is a tensor
            out.tensors.append(
                StoredTensor(
                    path, tensor.shape, tensor.dtype, whole(tensor.shape, tensor.file, tensor.start, tensor.strides), group=OPTIMIZER
                )
            )
    tensors, values = plain({key: value for key, value in tree.items() if key not in ("state", "param_groups")}, prefix)
    out.values |= values
    for path, tensor in tensors.items():
        out.tensors.append(
            StoredTensor(path, tensor.shape, tensor.dtype, whole(tensor.shape, tensor.file, tensor.start, tensor.strides), group=OPTIMIZER)
        )
    return out


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _names(
    groups: list[dict[Any, Any]],
    members: list[list[Any]],
    states: dict[Any, Any],
    models: Sequence[Sequence[Parameter]],
    ordered: bool,
    prefix: str,
    notes: list[str],
) -> dict[Any, str]:
    if all(isinstance(number, str) for numbers in members for number in numbers):
        return {}
    if groups and all(isinstance(g.get("param_names"), (list, tuple)) and len(g["param_names"]) == len(m) for g, m in zip(groups, members)):
        return {number: str(name) for group, numbers in zip(groups, members) for number, name in zip(numbers, group["param_names"])}
    shapes = [[_shape(states.get(number)) for number in numbers] for numbers in members]
    found = next((names for model in models if (names := _match(shapes, model, ordered)) is not None), None)
    count = sum(map(len, members))
    if found is None:
        notes.append(
            f"{prefix} holds the states of {count} parameters by number, and which of the model's {len(models[0])} tensors these are "
            "does not follow from their shapes: they are called #0, #1, ..."
        )
        return {}
    notes.append(
        f"{prefix} holds the states of {count} parameters by number; their names follow from the order and the shapes of the "
        "model's tensors"
    )
    return {number: name for numbers, part in zip(members, found) for number, name in zip(numbers, part)}


def _shape(state: Any) -> Shape | None:
    """The shape of a parameter, by that of its states; None: there is none of its shape."""
    tensors = [value for value in state.values() if isinstance(value, FileTensor)] if isinstance(state, dict) else []
    shapes = {t.shape for t in tensors if t.shape}
    return shapes.pop() if len(shapes) == 1 else None


def _fits(shape: Shape | None, parameter: Parameter) -> bool:
    return shape is None or shape == parameter.shape


def _match(shapes: list[list[Shape | None]], parameters: Sequence[Parameter], ordered: bool) -> list[list[str]] | None:
    """The names of each group's members; None: they do not follow."""
    if not any(shape is not None for group in shapes for shape in group):
        return None
    without = [p for p in parameters if not _BUFFER.search(p.name)]
    orders = [without, parameters] if ordered else [in_module_order(without, _name_of)]
    known = [order for order in orders if order is not None]
    for order in known:
        found = [names for split in _SPLITS if (names := _by_split(shapes, order, split)) is not None]
        if found:
            return found[0] if all(names == found[0] for names in found) else None
    if len(shapes) == 1 and known:
        return _only_way(shapes[0], known[0])
    return None


def _name_of(parameter: Parameter) -> str:
    return re.sub(r"^model_\d+\.", "", parameter.name)  # Accelerate's second model


def _is_bias_or_norm(parameter: Parameter) -> bool:
    return parameter.name.endswith("bias") or _NORM.search(parameter.name) is not None


_SPLITS: tuple[Callable[[Parameter], bool] | None, ...] = (
    None,
    _is_bias_or_norm,  # transformers' Trainer: no weight decay for these, which are the second group
    lambda p: len(p.shape) < 2,
    lambda p: p.name.endswith("bias"),
)


def _by_split(
    shapes: list[list[Shape | None]], order: Sequence[Parameter], split: Callable[[Parameter], bool] | None
) -> list[list[str]] | None:
    """All of `order`, cut at the sizes of the groups, or divided in two by `split`."""
    if sum(map(len, shapes)) != len(order):
        return None
    if split is None:
        sequence = list(order)
    elif len(shapes) == 2:
        sequence = [p for p in order if not split(p)] + [p for p in order if split(p)]
        if sum(not split(p) for p in order) != len(shapes[0]):
            return None
    else:
        return None
    found: list[list[str]] = []
    at = 0
    for group in shapes:
        part = sequence[at : at + len(group)]
        if not all(map(_fits, group, part)):
            return None
        found.append([p.name for p in part])
        at += len(group)
    return found


def _only_way(shapes: list[Shape | None], order: Sequence[Parameter]) -> list[list[str]] | None:
    """Some of `order`, when there is only one way to choose them: the first fit from the front and from the back are the same."""
    front = _first_fit(shapes, order)
    back = _first_fit(shapes[::-1], order[::-1])
    return [front] if front is not None and back is not None and front == back[::-1] else None


def _first_fit(shapes: list[Shape | None], order: Sequence[Parameter]) -> list[str] | None:
    found: list[str] = []
    rest = iter(order)
    for shape in shapes:
        name = next((p.name for p in rest if _fits(shape, p)), None)
        if name is None:
            return None
        found.append(name)
    return found


Item = TypeVar("Item")

# A module's own parameters come before those of the modules in it.
_LLAMA = """weight bias model base_model language_model embed_tokens layers self_attn q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm
mlp gate gate_proj up_proj gate_up_proj down_proj shared_expert shared_expert_gate
input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm norm lm_head score"""
_GPT2 = "weight bias transformer wte wpe h ln_1 attn c_attn ln_2 mlp c_fc c_proj ln_f lm_head score"
_BERT = """weight bias bert roberta embeddings word_embeddings position_embeddings token_type_embeddings encoder layer
attention self query key value
intermediate output dense LayerNorm pooler cls predictions transform decoder seq_relationship classifier out_proj"""
_FAMILIES = tuple({word: rank for rank, word in enumerate(text.split())} for text in (_LLAMA, _GPT2, _BERT))


def in_module_order(items: Sequence[Item], name_of: Callable[[Item], str]) -> list[Item] | None:
    """`items` as the model defines them; None: the model is none of the known ones."""
    split = [(name_of(item).split("."), item) for item in items]
    words = {word for parts, _ in split for word in parts if not is_number(word)}
    for family in _FAMILIES:
        if words <= family.keys():
            ranked = [([(int(w), 0) if is_number(w) else (-1, family[w]) for w in parts], n, item) for n, (parts, item) in enumerate(split)]
            return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]
    return None
