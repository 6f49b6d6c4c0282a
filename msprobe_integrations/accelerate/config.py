"""What `accelerate launch` and an Accelerator have settled on."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import Resolved, flatten_tree, plain_data, resolve_settings
from msprobe_integrations.requirements import MissingNameError, need

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_PLUGINS = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config", "dynamo_plugin", "fp8_recipe")
_VARIABLES = {
    "accelerate.mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "accelerate.gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "accelerate.distributed_type": "ACCELERATE_DISTRIBUTED_TYPE",
}


def read_resolved(reach: Reach) -> dict[str, Resolved]:  # noqa: ARG001
    """Of the process' one AcceleratorState, below ``accelerate.``; empty before there is one."""
    module = sys.modules.get("accelerate.state")
    state = _read_shared_state(module, "AcceleratorState")
    if not state:
        return {}
    values: dict[str, Any] = {
        "accelerate.mixed_precision": state.get("_mixed_precision"),
        "accelerate.distributed_type": plain_data(state.get("distributed_type")),
    }
    for name in _PLUGINS:
        plugin = state.get(name)
        data = plain_data(plugin)
        if isinstance(data, dict):
            data.pop("hf_ds_config", None)  # told by DeepSpeed itself
            values.update(flatten_tree({f"accelerate.{name}": data}))
    steps = plain_data(_read_shared_state(module, "GradientState").get("plugin_kwargs"))
    if isinstance(steps, dict):
        if steps.get("num_steps") == 1:  # the default; Transformers says it too, and accumulates by itself
            del steps["num_steps"]
        values.update({f"accelerate.gradient_accumulation_{name.removeprefix('num_')}": value for name, value in steps.items()})
    variables = {name: variable for name, variable in _VARIABLES.items() if variable in os.environ}
    return resolve_settings(values, "accelerate", variables=variables)


def _read_shared_state(module: Any, name: str) -> dict[str, Any]:
    """What all objects of a class of states share; empty before there is one."""
    part = "Accelerate's settings in the configuration of the run"
    try:
        return {} if module is None else need(need(module, name, for_=part), "_shared_state", for_=part) or {}
    except MissingNameError:
        return {}
