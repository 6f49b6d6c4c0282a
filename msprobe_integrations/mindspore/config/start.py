"""What is collected once, when a run of MindSpore starts: environment, packages, system, settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore

from msprobe_engine.config.collect import job, packages, system
from msprobe_engine.config.collect.resolved import CODE, Resolved, entry, resolve_settings, to_existing_format
from msprobe_engine.config.environment.variables import Environment
from msprobe_engine.formats.pack import entries
from msprobe_integrations.mindspore.models import named_parameters
from msprobe_integrations.mindspore.ranks.job import is_initialized
from msprobe_integrations.mindspore.tensors.memory import array_at

_CONTEXT = ("mode", "device_target", "deterministic", "jit_level", "max_call_depth")
_OF_NN = {
    "learning_rate": "lr", "weight_decay": "weight_decay", "eps": "eps", "momentum": "momentum", "use_nesterov": "nesterov",
    "nesterov": "nesterov", "dampening": "dampening", "loss_scale": "loss_scale", "use_amsgrad": "amsgrad",
}  # fmt: skip
"""Attributes of optimizers of mindspore.nn, and what the settings are called elsewhere."""


class Start:
    """What is known now is taken now; what takes long and does not change is left to `entries`, which another thread may call.

    Args:
        environment: as it may be written.
        cells, optimizers: of the training, as far as they are there.
    """

    def __init__(self, rank: int, environment: Environment, cells: Sequence[Any], optimizers: Sequence[Any] = ()) -> None:
        self.rank = rank
        self._settings = settings_of(cells, optimizers)
        self._environment = environment
        self._flags = _context()

    def entries(self) -> dict[str, Any]:
        """For the pack: of every rank its own; of rank 0 those of the existing tool as well."""
        about = self._environment
        facts = {**system.collect(), "versions": {"mindspore": mindspore.__version__}, "flags": self._flags}
        made: dict[str, Any] = {entries.of_rank("env", self.rank): about.values, entries.of_rank("system", self.rank): facts}
        made[entries.of_rank("withheld", self.rank)] = about.entry()
        made[entries.of_rank("hyperparameters", self.rank)] = entry(self._settings)
        if self.rank == 0:
            made |= {entries.ENV: about.values, entries.PIP: packages.text(), entries.DYNAMIC: to_existing_format(self._settings)}
        return made


def ranks() -> tuple[int, int]:
    """Rank of this process and number of ranks: of the communication, else as the launcher's environment says."""
    if is_initialized():
        return mindspore.communication.get_rank(), mindspore.communication.get_group_size()
    return job.rank(), job.world_size()


def _context() -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in _CONTEXT:
        try:
            value = mindspore.get_context(name)
        except (ValueError, RuntimeError, KeyError, AttributeError):  # not in this version, or not for this device
            continue
        settings[name] = value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
    return settings


def settings_of(cells: Sequence[Any], optimizers: Sequence[Any] = ()) -> dict[str, Resolved]:
    """What MindSpore's own objects say."""
    values: dict[str, Any] = {"seed": mindspore.get_seed()}
    if cells:
        values["model.class"] = type(cells[0]).__name__
        values["model.parameter_dtypes"] = sorted({str(p.dtype) for cell in cells for _, p in named_parameters(cell)})
    for number, optimizer in enumerate(optimizers):
        values.update(_of_optimizer(optimizer, "optimizer." if not number else f"optimizer{number}."))
    return resolve_settings(values, "mindspore", otherwise=CODE)


def _of_optimizer(optimizer: Any, prefix: str) -> dict[str, Any]:
    """Class and settings: those of the groups, or (mindspore.nn) of the object."""
    values: dict[str, Any] = {f"{prefix}class": type(optimizer).__name__}
    groups = getattr(optimizer, "param_groups", None)
    for number, group in enumerate(groups or ()):
        for name, value in group.items():
            if name != "params" and (not number or values.get(f"{prefix}{name}") != _plain(value)):
                values[f"{prefix}{name}{f'.group{number}' if number else ''}"] = _plain(value)
    if not groups:
        for attribute, name in _OF_NN.items():
            if isinstance(value := getattr(optimizer, attribute, None), (bool, int, float, mindspore.Tensor)):
                values[f"{prefix}{name}"] = _plain(value)
        if "beta1" in vars(optimizer) and "beta2" in vars(optimizer):
            values[f"{prefix}betas"] = [_plain(optimizer.beta1), _plain(optimizer.beta2)]
    return values


def _plain(value: Any) -> Any:
    """Numbers as they are, those of float32 with the digits they were written with, everything else as text."""
    if isinstance(value, mindspore.Tensor):
        array = array_at(value)
        return float(str(array.reshape(-1)[0])) if array.size == 1 else str(array.tolist())
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
