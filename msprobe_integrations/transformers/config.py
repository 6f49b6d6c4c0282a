"""TrainingArguments of a Trainer, and the configuration of its model, each value with where it comes from."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import CODE, DEFAULT, FILE, Resolved, flags_of, flatten_tree, plain_data, resolve_settings
from msprobe_engine.core.guard import raise_of_training

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_VARIABLES = {"local_rank": "LOCAL_RANK", "mixed_precision": "ACCELERATE_MIXED_PRECISION"}
_NOT = frozenset(("_n_gpu", "deepspeed_plugin", "hf_deepspeed_config", "distributed_state", "_name_or_path", "transformers_version"))


def read_resolved(reach: Reach) -> dict[str, Resolved]:
    """Of the first Trainer in reach, and of the first model that has a configuration of this library (below ``model.``)."""
    settings: dict[str, Resolved] = {}
    trainers = reach.instances("transformers", "Trainer")
    if trainers:
        trainer = trainers[0]
        settings.update(_of_arguments(trainer.args, list(reach.arguments)))
        measured = {
            "world_size": getattr(trainer.args, "world_size", None),
            "train_batch_size": getattr(trainer, "_train_batch_size", None),
            "trainer.class": type(trainer).__name__,
            "optimizer.class": _class_of(trainer.optimizer),
            "lr_scheduler.class": _class_of(trainer.lr_scheduler),
        }
        settings.update(resolve_settings({name: value for name, value in measured.items() if value is not None}, "transformers"))
    for model in (*reach.models, *(getattr(trainer, "model", None) for trainer in trainers)):
        config = _config_of(model)
        if config is not None:
            settings.update(_of_model(config))
            break
    return settings


def _class_of(value: Any) -> str | None:
    inner = getattr(value, "optimizer", getattr(value, "scheduler", None))  # Accelerate's wrappers
    kind = type(inner if type(value).__name__.startswith("Accelerated") and inner is not None else value).__name__
    return None if value is None else kind


def _of_arguments(args: Any, line: list[str]) -> dict[str, Resolved]:
    fields = [field for field in dataclasses.fields(args) if field.name not in _NOT]
    values = {field.name: getattr(args, field.name, None) for field in fields}
    defaults = {}
    for field in fields:
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    flags = flags_of(line, values)
    file = next((word for word in line[:1] if word.endswith((".json", ".yaml", ".yml"))), "")  # HfArgumentParser reads it
    variables = {name: variable for name, variable in _VARIABLES.items() if variable in os.environ and name in values}
    settings = resolve_settings(values, "transformers", defaults=defaults, flags=flags, variables=variables)
    if file:
        settings = {name: field._replace(origin=FILE, where=file) if field.origin == CODE else field for name, field in settings.items()}
    return settings


def _config_of(model: Any) -> Any:
    """The configuration of a model, through wrappers."""
    for _ in range(8):
        config = getattr(model, "config", None)
        if config is not None and any(cls.__module__.partition(".")[0] == "transformers" for cls in type(config).__mro__):
            return config
        model = getattr(model, "module", None) or getattr(model, "_orig_mod", None) or getattr(model, "base_model", None)
        if model is None:
            return None
    return None


def _of_model(config: Any) -> dict[str, Resolved]:
    values = {name: value for name, value in plain_data(config.to_dict()).items() if name not in _NOT}
    try:
        defaults = plain_data(type(config)().to_dict())
    except Exception as error:  # a configuration of several models has none
        raise_of_training(error)
        defaults = {}
    where = getattr(config, "_name_or_path", "") or ""
    settings = resolve_settings(flatten_tree({"model": values}), "transformers", defaults=flatten_tree({"model": defaults}))
    origin = FILE if where else CODE
    return {
        name: setting if setting.origin == DEFAULT else setting._replace(origin=origin, where=str(where))
        for name, setting in settings.items()
    }
