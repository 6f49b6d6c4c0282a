"""Which parameter an optimizer's state belongs to: Megatron's optimizers number parameters by group.

Groups take the parameters of all model chunks in order: those with and those without weight decay, those of experts that are cut over
expert-parallel ranks, embeddings with a learning rate of their own. Source: ``_get_param_groups`` of megatron-core 0.12 to 0.19
(core/optimizer/__init__.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.formats.checkpoint.megatron.arguments import TABLES_OF_TOKENS
from msprobe_engine.formats.checkpoint.megatron.cuts import is_expert
from msprobe_engine.formats.checkpoint.model import Index


class Parameter(NamedTuple):
    """A parameter of a rank.

    Attributes:
        key: tells it from all others of the rank: chunk and name.
        shape, dtype: of the rank's piece.
    """

    key: tuple[int, str]
    shape: Index
    dtype: str

    @property
    def name(self) -> str:
        return self.key[1]


def _standard(parameter: Parameter) -> bool:
    return parameter.name.endswith(".bias") or len(parameter.shape) == 1


def _but_norms_of_queries(parameter: Parameter) -> bool:
    return _standard(parameter) and not ("q_layernorm." in parameter.name or "k_layernorm." in parameter.name)


def _one_dimension(parameter: Parameter) -> bool:
    return len(parameter.shape) == 1


_WITHOUT_DECAY: tuple[Callable[[Parameter], bool], ...] = (_standard, _but_norms_of_queries, _one_dimension)


def members_of(
    parameters: Sequence[Parameter], groups: Sequence[Mapping[str, Any]], shapes: Sequence[Sequence[Index | None]]
) -> list[list[Parameter]] | None:
    """The parameters of each group.

    Args:
        parameters: of all chunks, in the model's order.
        groups: ``param_groups`` of all optimizers of the rank, one behind the other.
        shapes: of the states of each group's members, in order; None: the member has none.

    Returns:
        None: they cannot be told with certainty.
    """
    experts_apart = any(group.get("is_expert_parallel") for group in groups)
    for own_rate in _own_rates(groups):
        keys = [
            (group.get("wd_mult", 1.0) == 0.0, bool(group.get("is_expert_parallel")), apart)
            for group, apart in zip(groups, own_rate, strict=True)
        ]
        if len(set(keys)) < len(keys):
            continue
        for without_decay in _WITHOUT_DECAY:
            found: dict[tuple[bool, bool, bool], list[Parameter]] = {key: [] for key in keys}
            for parameter in parameters:
                expert = experts_apart and is_expert(parameter.name)
                rate = any(own_rate) and parameter.name.endswith(TABLES_OF_TOKENS)
                found.setdefault((without_decay(parameter), expert, rate), []).append(parameter)
            if list(found) == keys and all(_fit(group, wanted) for group, wanted in zip(found.values(), shapes, strict=True)):
                return list(found.values())
    return None


def _own_rates(groups: Sequence[Mapping[str, Any]]) -> Iterator[list[bool]]:
    """Which groups may be those of embeddings with a learning rate of their own: told by a flag, or (since core 0.16) by the rate alone."""
    yield [bool(group.get("is_decoupled_lr")) for group in groups]
    rates = [group.get("max_lr") for group in groups]
    if len(set(map(repr, rates))) > 1:
        for rate in dict.fromkeys(rates):
            yield [other == rate for other in rates]


def _fit(group: Sequence[Parameter], shapes: Sequence[Index | None]) -> bool:
    return len(group) == len(shapes) and all(shape in (None, parameter.shape) for parameter, shape in zip(group, shapes, strict=True))


def label(group: Mapping[str, Any]) -> str:
    """A name for a parameter group that does not depend on the layout: ``decayed``, ``not_decayed``, ``decayed_embeddings``.

    Experts have groups of their own with expert parallelism only.
    """
    text = "not_decayed" if group.get("wd_mult", 1.0) == 0.0 else "decayed"
    return text + ("_embeddings" if group.get("is_decoupled_lr") else "")
