"""Megatron's arguments and configurations as they are resolved, each with where it comes from."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import CODE, DEFAULT, Resolved, flags_of, resolve_settings
from msprobe_engine.core.guard import raise_of_training

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_GLOBALS = ("megatron.training.global_vars", "megatron.global_vars", "mindspeed_llm.training.arguments")
_PARSERS = ("megatron.training.arguments", "megatron.arguments")
_VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
"""Arguments that Megatron takes from the environment."""
_CONFIGS = ("TransformerConfig", "MLATransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig", "ModelParallelConfig")
_SIZES = {
    "tensor_model_parallel_size": "get_tensor_model_parallel_world_size",
    "pipeline_model_parallel_size": "get_pipeline_model_parallel_world_size",
    "virtual_pipeline_model_parallel_size": "get_virtual_pipeline_model_parallel_world_size",
    "context_parallel_size": "get_context_parallel_world_size",
    "expert_model_parallel_size": "get_expert_model_parallel_world_size",
    "expert_tensor_parallel_size": "get_expert_tensor_parallel_world_size",
    "data_parallel_size": "get_data_parallel_world_size",
}


def read_resolved(reach: Reach) -> dict[str, Resolved]:
    """Arguments of Megatron's training (``get_args``) where there are some; what a loop on megatron-core has made of its own else: the
    configurations of model, optimizer and data parallel. And the sizes of the groups, and micro batches."""
    settings: dict[str, Resolved] = {}
    args = arguments()
    if args is not None:
        settings.update(of_arguments(args, list(reach.arguments)))
    for each in reach.objects:
        for config in _configs(each):
            made = resolve_settings(_fields(config), "megatron", defaults=_defaults(type(config)))
            settings.update({name: value for name, value in made.items() if name not in settings})
    if settings:
        measured = resolve_settings(_read_sizes(), "megatron")
        settings.update({name: value for name, value in measured.items() if name not in settings})
    return settings


def arguments() -> Mapping[str, Any] | None:
    """``vars`` of Megatron's arguments, None before there are any. Nothing is imported for it."""
    for name in _GLOBALS:
        module = sys.modules.get(name)
        held = getattr(module, "_GLOBAL_ARGS", None)
        if held is not None:
            return {name: value for name, value in vars(held).items() if not name.startswith(("_", "msprobe_"))}
    return None


def of_arguments(args: Mapping[str, Any], line: list[str]) -> dict[str, Resolved]:
    """Each argument with its origin.

    Args:
        args: as `arguments` gives them.
    """
    defaults, flags = dict(_parsed_defaults()), dict(_options(line))
    flags = {name: flag for name, flag in flags.items() if name in args} or flags_of(line, args)
    known = flags_of(line, [name for name in args if name not in defaults])  # of the script's own options
    variables = {name: variable for name, variable in _VARIABLES.items() if os.environ.get(variable) == str(args.get(name))}
    settings = resolve_settings(args, "megatron", defaults=defaults, flags={**known, **flags}, variables=variables)
    file = args.get("yaml_cfg")
    if isinstance(file, str) and file:
        settings = {
            name: setting._replace(origin="file", where=file) if setting.origin == CODE else setting for name, setting in settings.items()
        }
    return settings


@functools.lru_cache(maxsize=1)
def _parser() -> argparse.ArgumentParser | None:
    """A parser of the loaded Megatron, without the script's own options; None: this Megatron makes it in another way."""
    for name in _PARSERS:
        add = getattr(sys.modules.get(name), "add_megatron_arguments", None)
        if add is not None:
            try:
                made = add(argparse.ArgumentParser(allow_abbrev=False))
            except Exception as error:  # a version whose groups need more; then nothing is known to be a default
                raise_of_training(error)
                return None
            return made if isinstance(made, argparse.ArgumentParser) else None
    return None


def _parsed_defaults() -> dict[str, Any]:
    parser = _parser()
    return {} if parser is None else {action.dest: action.default for action in parser._actions if action.default != argparse.SUPPRESS}


def _options(line: list[str]) -> dict[str, str]:
    """Argument to the option of the command line that set it."""
    parser = _parser()
    if parser is None:
        return {}
    options = {}
    for word in line:
        option = word.partition("=")[0]
        action = parser._option_string_actions.get(option)
        if action is not None:
            options[action.dest] = option
    return options


def _configs(holder: Any) -> list[Any]:
    """Configurations that an object of Megatron holds."""
    configs: list[Any] = []
    if not any(cls.__module__.partition(".")[0] in ("megatron", "torch", "mindspeed", "mindspeed_llm") for cls in type(holder).__mro__):
        return configs
    for name in ("config", "ddp_config"):
        value = getattr(holder, name, None)
        names = {cls.__name__ for cls in type(value).mro()}
        if dataclasses.is_dataclass(value) and not names.isdisjoint(_CONFIGS):
            configs.append(value)
    inner = getattr(holder, "module", None)
    return (
        [*configs, *_configs(inner)]
        if inner is not None and inner is not holder and type(holder).__module__.startswith("megatron")
        else configs
    )


_STEPS = ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func")
"""Fields that a training puts functions into."""


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config) if field.name not in _STEPS}


def _defaults(cls: Any) -> dict[str, Any]:
    defaults = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _read_sizes() -> dict[str, Any]:
    """Sizes of the process groups, and how many micro batches a step has."""
    values: dict[str, Any] = {}
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and getattr(state, "model_parallel_is_initialized", lambda: False)():
        for name, function in _SIZES.items():
            try:
                values[name] = getattr(state, function)()
            except (AssertionError, AttributeError, RuntimeError):  # this group is not there
                continue
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if getattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None:
        values["num_microbatches"] = calculator.get_num_microbatches()  # type: ignore[union-attr]
        values["current_global_batch_size"] = calculator.get_current_global_batch_size()  # type: ignore[union-attr]
    return {name: value for name, value in values.items() if value is not None}


__all__ = ["DEFAULT", "arguments", "of_arguments", "read_resolved"]
