"""The configuration of a torchtitan Trainer: names as on its command line, ``training.local_batch_size``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from msprobe_engine.config.collect.resolved import CODE, FILE, Resolved, flatten_tree, plain_data, resolve_settings

if TYPE_CHECKING:
    from msprobe_integrations.torch.config.sources import Reach

_FILES = ("--job.config_file", "--job.config-file")
_NAMES = ("config", "job_config")
"""Attribute of the Trainer, since 0.3 and before."""
_DEEPEST = 6


def read_resolved(reach: Reach) -> dict[str, Resolved]:
    """Of the first Trainer in reach, and the sizes of its parallel dimensions."""
    trainers = reach.instances("torchtitan", "Trainer")
    if not trainers:
        return {}
    trainer = trainers[0]
    config = next((getattr(trainer, name) for name in _NAMES if dataclasses.is_dataclass(getattr(trainer, name, None))), None)
    if config is None:
        return {}
    line = list(reach.arguments)
    values = flatten_tree(plain_data(config))
    settings = resolve_settings(values, "torchtitan", defaults=flatten_tree(_defaults(config)), flags=_flags(line, values))
    file = _file(line)
    if file:
        settings = {
            name: setting._replace(origin=FILE, where=file) if setting.origin == CODE else setting for name, setting in settings.items()
        }
    dims = getattr(trainer, "parallel_dims", None)
    if dataclasses.is_dataclass(dims):
        sizes = {f"parallel_dims.{name}": value for name, value in plain_data(dims).items() if isinstance(value, (int, bool))}
        settings.update(resolve_settings(sizes, "torchtitan"))
    return settings


def _defaults(config: Any, depth: int = 0) -> dict[str, Any]:
    """Of the dataclasses that the configuration is made of, as they are: a section may be of a class that is not the default one."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _DEEPEST:
            defaults[field.name] = _defaults(value, depth + 1)
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = plain_data(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = plain_data(field.default_factory())
    return defaults


def _flags(line: list[str], values: dict[str, Any]) -> dict[str, str]:
    given: dict[str, str] = {}
    for word in line:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            parts = flag[2:].replace("-", "_").split(".")
            for name in (".".join(parts), ".".join((*parts[:-1], parts[-1].removeprefix("no_")))):
                given.setdefault(name, flag)
    return {name: given[name] for name in values if name in given}


def _file(line: list[str]) -> str:
    for number, word in enumerate(line):
        flag, equals, value = word.partition("=")
        if flag in _FILES:
            return value if equals else (line[number + 1] if number + 1 < len(line) else "")
    return ""
