"""What a model is: Cells of MindSpore, and, where torch's names stand for MindSpore (MSAdapter), modules, which are no Cells and have
torch's attributes. Their records are named ``Cell.*`` and ``Module.*``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mindspore import nn

from msprobe_integrations.mindspore import environment


def is_cell(value: Any) -> bool:
    return isinstance(value, nn.Cell)


def is_model(value: Any) -> bool:
    """Is it one model, a Cell or a module of MSAdapter?"""
    return is_cell(value) or is_module(value)


def is_module(value: Any) -> bool:
    """Is it a ``torch.nn.Module`` of a torch that is MindSpore?"""
    kind = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    return isinstance(kind, type) and isinstance(value, kind) and environment.adapter()


def as_list(models: Any) -> list[Any]:
    """One model, or those of a sequence."""
    return [models] if is_model(models) else list(models)


def prefix_of(module: Any) -> str:
    """First part of the record names of a Cell or module."""
    return "Cell" if is_cell(module) else "Module"


def iterate_named_cells(model: Any) -> Iterable[tuple[str, Any]]:
    """Every Cell or module with its path, the model itself first (``""``)."""
    found: Iterable[tuple[str, Any]] = model.cells_and_names() if is_cell(model) else model.named_modules()
    return found


def named_parameters(model: Any) -> Iterable[tuple[str, Any]]:
    """Every parameter of a model with its path."""
    found: Iterable[tuple[str, Any]] = model.parameters_and_names() if is_cell(model) else model.named_parameters()
    return found


def parameters_of(module: Any) -> Mapping[str, Any]:
    """The parameters that a Cell or module has itself, by name; None in the place of one that it could have."""
    found: Mapping[str, Any] = module._params if is_cell(module) else module._parameters
    return found


def parts_of(models: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The live dictionaries in which all Cells or modules of the models keep their parts and parameters."""
    return [
        place
        for model in models
        for _, module in iterate_named_cells(model)
        for place in (module._cells if is_cell(module) else module._modules, parameters_of(module))
    ]
