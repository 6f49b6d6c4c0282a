"""Where a process is in a parallel layout, and which parameters of its models are pieces of larger ones: ``parallel`` in dump.json.

Megatron marks its parameters with attributes (``megatron.core.tensor_parallel.layers``): ``tensor_model_parallel`` with ``partition_dim``
and ``partition_stride`` on what is cut over tensor-parallel ranks, ``sequence_parallel`` on what every rank holds whole while it sees
a piece of the sequence, ``allreduce = False`` on parameters of experts. They are read when a model is attached, never in a hook.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msprobe_integrations.requirements import MissingNameError, need, optional

if TYPE_CHECKING:
    from msprobe_integrations.torch.capture.modules import ModuleInfo

_STATE = "megatron.core.parallel_state"
_AXES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "vpp": "virtual_pipeline_model_parallel",
}


def layout() -> dict[str, dict[str, int]]:
    """``rank`` and ``size`` of this process by axis (``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ``etp``; ``vpp`` has a size only), as far as
    Megatron's parallel state knows them; ``{}`` without Megatron. Imports nothing, no collective."""
    state = sys.modules.get(_STATE)
    try:
        if state is None or not need(state, "model_parallel_is_initialized", for_="places of ranks in the parallel layout, in dump.json")():
            return {}
    except MissingNameError:
        return {}
    places: dict[str, dict[str, int]] = {"rank": {}, "size": {}}
    for axis, name in _AXES.items():
        for key, word in (("rank", "rank"), ("size", "world_size")):
            if (axis, key) == ("vpp", "rank"):
                continue  # that of the chunk in progress
            try:
                value = getattr(state, f"get_{name}_{word}")()
            except (AttributeError, AssertionError, RuntimeError, TypeError):  # not in this version, or the group was not made
                continue
            if isinstance(value, int):
                places[key][axis] = value
    return places


def parameters(infos: Iterable[ModuleInfo]) -> list[dict[str, Any]]:
    """Parameters with marks, those with equal marks together: ``{"partition_dim": 0, "partition_stride": 1, "names": [...]}``, also
    ``sequence_parallel`` and ``expert``. Names are those of the records: path of the module, name of the parameter."""
    groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for info in infos:
        for name, parameter in info.module._parameters.items():
            marks = _marks(parameter)
            if marks:
                groups.setdefault(marks, []).append(f"{info.path}.{name}")
    return [{**dict(marks), "names": names} for marks, names in groups.items()]


def _marks(parameter: Any) -> tuple[tuple[str, Any], ...]:
    marks: list[tuple[str, Any]] = []
    if getattr(parameter, "tensor_model_parallel", False) is True:
        with suppress(MissingNameError):
            values = (
                ("partition_dim", need(parameter, "partition_dim", for_="the dimension that tensor parallelism cuts, in dump.json"), -1),
                ("partition_stride", optional(parameter, "partition_stride", because="one piece a rank"), 1),
            )
            marks += [(key, value if isinstance(value, int) else default) for key, value, default in values]
    if getattr(parameter, "sequence_parallel", False) is True:
        marks.append(("sequence_parallel", True))
    if getattr(parameter, "allreduce", True) is False:
        marks.append(("expert", True))
    return tuple(marks)


def describe_parallel(infos: Iterable[ModuleInfo]) -> dict[str, Any]:
    """``parallel`` of dump.json: `layout` and `parameters`; ``{}`` when there is nothing to say."""
    found: dict[str, Any] = dict(layout())
    marked = parameters(infos)
    if found or marked:
        found["parameters"] = marked
    return found
