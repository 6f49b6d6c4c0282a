"""Names of Cells and Parameters as the monitor has them. Cells that only hold the model (loss, training step) are no part of a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msprobe_integrations.common.monitor.targets import Named
from msprobe_integrations.mindspore.models import is_cell, iterate_named_cells, named_parameters

_HOLDERS = {
    "WithLossCell": "_backbone", "WithEvalCell": "_network", "WithGradCell": "network", "ForwardValueAndGrad": "network",
    "TrainOneStepCell": "network", "TrainOneStepWithLossScaleCell": "network", "_TrainGradAccuStepCell": "network",
    "_TrainAccuStepCell": "network", "_VirtualDatasetCell": "_backbone", "MicroBatchInterleaved": "network", "PipelineCell": "network",
    "PipelineGradReducer": "network", "DistributedDataParallel": "module",
}  # fmt: skip
"""Cells around a model, by class, and the attribute that holds it."""


def unwrap_model(model: Any) -> Any:
    """The model inside of the Cells that compute its loss or make its training step."""
    for _ in range(8):
        inner = next((getattr(model, _HOLDERS[c.__name__], None) for c in type(model).__mro__ if c.__name__ in _HOLDERS), None)
        if not is_cell(inner):
            return model
        model = inner
    return model


def parameter_names(models: Sequence[Any]) -> dict[int, tuple[int, str]]:
    """Chunk and path of every parameter of the models, by id; the first path of one that is shared."""
    names: dict[int, tuple[int, str]] = {}
    for chunk, model in enumerate(models):
        for name, parameter in named_parameters(unwrap_model(model)):
            names.setdefault(id(parameter), (chunk, name))
    return names


def named_cells(models: Sequence[Any]) -> Iterator[Named]:
    """Every Cell of the models once, the model itself first."""
    for chunk, model in enumerate(models):
        root = unwrap_model(model)
        for name, cell in iterate_named_cells(root):
            yield Named(chunk, name, cell, cell, root, False)
