"""The configuration of a DeepSpeed engine as the engine has resolved it, under the names of ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import CODE, DEFAULT, FILE, Resolved, flatten_tree, plain_data, resolve_settings, same
from msprobe_integrations.deepspeed.key import KEY

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_COMPUTED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Of these three DeepSpeed computes what is not given."""
_PLAIN = (
    *(*_COMPUTED, "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("communication_data_type", "seq_parallel_communication_data_type", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("disable_allgather", "steps_per_print", "memory_breakdown", "wall_clock_breakdown", "dump_state", "dataloader_drop_last"),
)
"""Attributes of a DeepSpeedConfig that have the name of their key."""
_SECTIONS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "activation_checkpointing": "activation_checkpointing_config",
    "hybrid_engine": "hybrid_engine",
    "compile": "compile_config",
    "tensor_parallel": "tensor_parallel_config",
}
"""Key to attribute of sections that DeepSpeed has as objects."""
_SINGLE = {
    "data_types.grad_accum_dtype": "grad_accum_dtype",
    "torch_autocast.enabled": "torch_autocast_enabled",
    "torch_autocast.dtype": "torch_autocast_dtype",
}


def read_resolved(reach: Reach) -> dict[str, Resolved]:
    """Of the first engine in reach."""
    for engine in reach.instances("deepspeed", "DeepSpeedEngine"):
        config = getattr(engine, "_config", None)
        if config is not None:
            return _of(engine, config, list(reach.arguments))
    return {}


def _of(engine: Any, config: Any, arguments: list[str]) -> dict[str, Resolved]:
    given = getattr(config, "_param_dict", None)
    given = dict(given) if isinstance(given, Mapping) else {}
    given.pop(KEY, None)
    said = flatten_tree({str(k): plain_data(v) for k, v in given.items()})
    values = _values(config)
    for name in ("optimizer", "scheduler"):
        kind = plain_data(getattr(config, f"{name}_name", None))
        parameters = plain_data(getattr(config, f"{name}_params", None))
        if kind:
            values.update(flatten_tree({name: {"type": kind, "params": parameters if isinstance(parameters, dict) else {}}}))
    values.update({name: value for name, value in said.items() if name not in values})  # sections that DeepSpeed reads later
    resolved = resolve_settings(values, "deepspeed", defaults=_defaults(config))
    file, raw = _file(engine, given, arguments)
    for name, setting in resolved.items():
        if name in raw and raw[name] == "auto":
            resolved[name] = setting._replace(origin=CODE, where=f"auto in {file}")
        elif name in said and (same(said[name], setting.value) or isinstance(said[name], (str, int, float, bool))):
            resolved[name] = setting._replace(origin=FILE if file else CODE, where=f"{file}:{name}" if file else "ds_config")
        elif name in _PLAIN and name not in _COMPUTED:
            resolved[name] = setting._replace(origin=DEFAULT)
        elif setting.origin != DEFAULT:
            resolved[name] = setting._replace(origin=CODE, where="computed by DeepSpeed")
    return resolved


def _values(config: Any) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _PLAIN if hasattr(config, name)}
    values.update({key: getattr(config, attribute) for key, attribute in _SINGLE.items() if hasattr(config, attribute)})
    for key, attribute in _SECTIONS.items():
        section = getattr(config, attribute, None)
        data = plain_data(section)
        if not isinstance(data, dict) and hasattr(section, "__dict__"):  # not all of them are models of pydantic
            data = plain_data({name: value for name, value in vars(section).items() if not name.startswith("_")})
        if isinstance(data, dict):
            values.update(flatten_tree({key: data}))
    return values


def _defaults(config: Any) -> dict[str, Any]:
    """Of sections that DeepSpeed has as pydantic models: their classes know."""
    defaults: dict[str, Any] = {}
    for key, attribute in _SECTIONS.items():
        section = getattr(config, attribute, None)
        for name, field in getattr(type(section), "model_fields", {}).items():
            if not field.is_required():
                defaults[f"{key}.{name}"] = field.get_default(call_default_factory=True)
    return flatten_tree({name: plain_data(value) for name, value in defaults.items()})


def _file(engine: Any, given: Mapping[str, Any], arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The file the configuration was read from, and what stands in it; empty when it was made by the program. The engine does not keep
    its name, so it is looked for among the arguments of the program."""
    places = [getattr(getattr(engine, "args", None), name, None) for name in ("deepspeed_config", "deepspeed")]
    places += [word.partition("=")[2] or word for word in arguments if word.endswith(".json")]
    for place in places:
        if not isinstance(place, str) or not place.endswith(".json"):
            continue
        try:
            with open(place, encoding="utf-8") as file:
                raw = json.load(file)
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(raw, dict) and raw and set(raw) - {KEY} <= set(given):
            return place, flatten_tree(raw)
    return "", {}
