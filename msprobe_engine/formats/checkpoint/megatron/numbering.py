"""Numbers of layers and experts: those of one rank's file become those of the whole model.

A pipeline stage counts its layers from 0, and so does each chunk of a virtual pipeline; an expert-parallel rank counts its experts from 0.
Sources: ``get_transformer_layer_offset`` of megatron-core 0.16.1 (core/transformer/transformer_layer.py); MindSpeed's ``noop_layers`` and
``dualpipev``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_LAYER = re.compile(r"(?P<root>(?:[^.]+\.)*?layers)\.(?P<number>[0-9]{1,9})\.")
_EXPERT = re.compile(
    r"(?P<head>.*\.experts\.(?:local_experts\.)?)(?P<number>[0-9]{1,9})\.(?P<tail>.+)|(?P<old>.*\.local_experts\.)(?P<n>[0-9]{1,9})\.(?P<rest>.+)"
)
_GROUPED = re.compile(r"(?P<head>.*\.experts\.)(?P<layer>linear_fc[12])\.(?P<kind>weight|bias)(?P<number>[0-9]{1,9})")


class Local(NamedTuple):
    """A name of a rank's file taken apart: ``decoder.layers``, 3 and what is behind; the expert's number and its own name."""

    root: str
    layer: int | None
    rest: str


def local_layer(name: str) -> Local:
    """Where the number of the layer is in a name; `root` is "" where there is none."""
    match = _LAYER.match(name)
    if match is None:
        return Local("", None, name)
    return Local(match["root"], int(match["number"]), name[match.end() :])


def layers_in(names: Iterable[str]) -> dict[str, int]:
    """How many layers there are in a part of the model, by root (``decoder.layers``): the highest number and one."""
    counts: dict[str, int] = {}
    for name in names:
        root, layer, _ = local_layer(name)
        if layer is not None:
            counts[root] = max(counts.get(root, 0), layer + 1)
    return counts


def offsets(counts: Sequence[Sequence[int]], v_shaped: bool = False) -> list[list[int]]:
    """The number in the whole model of each part's first layer.

    Args:
        counts: layers by [chunk][stage].
        v_shaped: the second chunk goes through the stages from the last to the first (MindSpeed's ``dualpipev``).
    """
    found: list[list[int]] = []
    total = 0
    for chunk, stages in enumerate(counts):
        starts = [0] * len(stages)
        order = range(len(stages) - 1, -1, -1) if v_shaped and chunk % 2 else range(len(stages))
        for stage in order:
            starts[stage] = total
            total += stages[stage]
        found.append(starts)
    return found


def without(number: int, empty: Collection[int]) -> int:
    """A layer's number when the layers in `empty` (MindSpeed's ``noop_layers``, which do nothing) are not counted."""
    return number - sum(other < number for other in empty)


def in_model(name: str, offset: int, first_expert: int, empty: Collection[int] = ()) -> str:
    """The name in the whole model of a parameter of one rank.

    Args:
        name: in the rank's file.
        offset: number of the part's first layer.
        first_expert: number of the rank's first expert.
        empty: layers that do nothing, by number in the whole model.
    """
    root, layer, rest = local_layer(name)
    rest = _expert_in_model(rest, first_expert)
    return rest if layer is None else f"{root}.{without(layer + offset, empty)}.{rest}"


def expert_number(name: str) -> int | None:
    """The number of the expert that a parameter belongs to."""
    for pattern in (_GROUPED, _EXPERT):
        match = pattern.fullmatch(name)
        if match is not None:
            return int(match["number"] or match["n"])
    return None


def _expert_in_model(rest: str, first: int) -> str:
    """Experts of Transformer Engine's grouped layers (``experts.linear_fc1.weight3``) get the names of single ones."""
    grouped = _GROUPED.fullmatch(rest)
    if grouped is not None:
        return f"{grouped['head']}local_experts.{int(grouped['number']) + first}.{grouped['layer']}.{grouped['kind']}"
    match = _EXPERT.fullmatch(rest)
    if match is None:
        return rest
    if match["old"]:
        head = (
            match["old"]
            if match["old"].endswith(".experts.local_experts.")
            else match["old"].replace(".local_experts.", ".experts.local_experts.")
        )
        return f"{head}{int(match['n']) + first}.{match['rest']}"
    return f"{match['head']}{int(match['number']) + first}.{match['tail']}"
