"""Numbers of an optimizer that one checkpoint holds as tensors and the other as plain values: Adam's ``step``, learning rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msprobe_engine.align.parameters.prefixes import bare
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, Checkpoint, StoredTensor
from msprobe_engine.measure.stored.contents import Contents

_STATE = ".state."


def as_the_other(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    """A checkpoint with those tensors of one element as values that the other has as values, so that they are compared.

    States are ``optimizer.state.<parameter>.<state>`` among the values (`optimizer_names`), settings of groups have the same path. The
    elements are read; what cannot be read stays a tensor.
    """
    plain = {_common(key): key for key, value in other.values.items() if key.startswith("optimizer") and type(value) in (int, float)}
    theirs = {bare(key) for key in other.tensors}
    moved: dict[str, Any] = {}
    contents = Contents()
    for key, tensor in checkpoint.tensors.items() if plain else ():
        path = f"optimizer.state.{tensor.name}.{tensor.state}" if tensor.state else tensor.name
        found = plain.get(_common(path))
        if found is None or tensor.group != OPTIMIZER or tensor.numel != 1 or bare(key) in theirs:
            continue
        number = _number(tensor, contents)
        if number is not None:
            moved[key] = (found, number)
    if not moved:
        return checkpoint
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in moved}
    return replace(checkpoint, tensors=tensors, values=checkpoint.values | dict(moved.values()))


def _common(path: str) -> str:
    """A path without what wrappers put before the name of the parameter."""
    head, state, rest = path.partition(_STATE)
    return f"{head}{state}{bare(rest)}" if state else path


def _number(tensor: StoredTensor, contents: Contents) -> int | float | None:
    try:
        found = contents.sample(tensor, 1).reshape(-1)
    except DumpFormatError:
        return None
    return found[0].item() if found.size == 1 and found.dtype.kind in "iuf" else None
