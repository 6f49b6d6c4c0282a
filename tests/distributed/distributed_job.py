"""Work under a capture in gloo ranks, and its distributed records in a form that can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from capturing import capture
from torch import nn

from msprobe_engine.core.records import Frame, Opaque, TensorRef
from msprobe_engine.core.statistics import rows


class Seen(NamedTuple):
    """One distributed record; tensors are means, "?" where there are no statistics."""

    name: str
    args: Any
    kwargs: Any
    output: Any
    tags: dict[str, Any]
    parent: str | None
    line: str


def records(
    work: Callable[[], Any], level: str = "L1", model: nn.Module | None = None, **options: Any
) -> tuple[list[Seen], dict[str, int]]:
    """The distributed records of one step of `work`, and what the frame counts as lost."""
    (frame,) = frames(work, level, model, **options)
    return distributed(frame), frame.lost


def frames(work: Callable[[], Any], level: str = "L1", model: nn.Module | None = None, steps: int = 1, **options: Any) -> list[Frame]:
    """The frames of `steps` runs of `work`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(model if model is not None else nn.Identity(), work, level, steps, **options)


def distributed(frame: Frame) -> list[Seen]:
    """The distributed records of a frame, in order."""
    found = []
    for entry in frame.entries:
        if entry.name.startswith("Distributed."):
            parts = [_plain(entry.sections.get(key), frame) for key in ("input_args", "input_kwargs", "output")]
            line = frame.stacks[entry.stack][0] if entry.stack >= 0 else ""
            name = entry.name.removeprefix("Distributed.").removesuffix(".forward")
            found.append(Seen(name, *parts, dict(entry.tags), entry.parent, line))
    return found


def _plain(node: Any, frame: Frame) -> Any:
    if isinstance(node, TensorRef):
        return rows.read_row(frame.rows[node.row]).mean if node.row >= 0 else "?"
    if isinstance(node, Opaque):
        value = node.json
        return value if not isinstance(value, dict) else value["group_ranks"] if "group_ranks" in value else value["value"]
    if isinstance(node, dict):
        return {key: _plain(child, frame) for key, child in node.items()}
    return [_plain(child, frame) for child in node] if isinstance(node, list) else node


def full(value: float, n: int = 2) -> torch.Tensor:
    """[n], all `value`."""
    return torch.full((n,), float(value))
