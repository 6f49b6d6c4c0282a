"""The settings that the frameworks of this process have resolved, found from the objects of a training.

Each framework has a module with ``resolved(reach)``; it is asked when the framework is loaded. Objects in reach are the models, the
optimizers, and whatever calls are in progress on this thread belong to: a Trainer that trains, an engine inside of its forward pass.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from msprobe_engine.config.collect import resolved
from msprobe_engine.config.collect.resolved import CODE, DEFAULT, Resolved, plain_data
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import one_line, warn_once
from msprobe_integrations.requirements import MissingNameError, need, optional

OURS = {
    "megatron": "msprobe_integrations.megatron.config",
    "torchtitan": "msprobe_integrations.torchtitan.config",
    "lightning": "msprobe_integrations.lightning.config",
    "pytorch_lightning": "msprobe_integrations.lightning.config",
    "transformers": "msprobe_integrations.transformers.config",
    "deepspeed": "msprobe_integrations.deepspeed.config",
    "accelerate": "msprobe_integrations.accelerate.config",
}
"""Modules by root module of the framework, what knows most of a training first."""
_NAMES = ("self", "trainer", "engine", "model_engine", "observer")
_TORCH = torch.__path__[0]
_MOST_FRAMES = 200
_OPTIMIZERS = frozenset(("MegatronOptimizer",))
"""Classes of optimizers that do not derive from torch's."""
_OPTIMIZER_SAID = frozenset(("megatron", "torchtitan", "transformers", "deepspeed"))


@dataclass
class Reach:
    """What a search for settings may look at.

    Attributes:
        models: of the training, wrapped or not.
        optimizers: as far as they are known.
        objects: everything else that takes part: trainers, engines, the models and optimizers too.
        arguments: of the command line, without the program.
    """

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    objects: list[Any] = field(default_factory=list)
    arguments: Sequence[str] = field(default_factory=lambda: sys.argv[1:])

    @classmethod
    def of(cls, models: Sequence[Any], optimizers: Any = None, frame: FrameType | None = None) -> Reach:
        """Of these objects, and of the calls that `frame` and the frames around it are."""
        several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [] if optimizers is None else [optimizers]
        objects: list[Any] = []
        callers = _callers(frame)
        for outer in (*models, *several, *callers):
            for each in (outer, *_inside(outer)):
                if not any(each is known for known in objects):
                    objects.append(each)
        if not several:  # a loop of one's own: what it holds
            several = [outer for outer in objects if issubclass(type(outer), torch.optim.Optimizer)]
        return cls(list(models), several, objects)

    def instances(self, root: str, *names: str) -> list[Any]:
        """Objects of a class of these names, or of one that inherits from it, defined in a package of root module `root`."""
        return [
            one
            for one in self.objects
            if any(cls.__name__ in names and cls.__module__.partition(".")[0] == root for cls in type(one).__mro__)
        ]


def _callers(frame: FrameType | None) -> list[Any]:
    objects: list[Any] = []
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if not frame.f_code.co_filename.startswith(_TORCH):
            local = frame.f_locals
            if frame.f_code.co_argcount:
                objects += [local[name] for name in _NAMES if local.get(name) is not None and not issubclass(type(local[name]), type)]
            objects += [value for value in list(local.values()) if _moves_weights(type(value))]
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
                local.clear()  # a copy that the frame would keep, and with it models, until the function returns
        frame = frame.f_back
    return objects


def _moves_weights(kind: type) -> bool:
    """Asked of the type: isinstance asks the objects themselves, and these are anybody's."""
    return issubclass(kind, (torch.optim.Optimizer, LRScheduler)) or any(cls.__name__ in _OPTIMIZERS for cls in kind.__mro__)


def _inside(value: Any) -> list[Any]:
    """What an observer of ours, or a callback, holds of a framework."""
    if not type(value).__module__.startswith("msprobe_integrations"):
        return []
    held = vars(value) if hasattr(value, "__dict__") else {}
    objects = [*(held.get("models") or ()), *(dict(held.get("objects") or {}).values())]
    return [*objects, *(held[name] for name in ("engine", "optimizer", "_trainer") if held.get(name) is not None)]


def collect(reach: Reach) -> dict[str, Resolved]:
    """Settings by name. Of a framework whose objects are not what they should be nothing is given, which is said once."""
    parts: list[Mapping[str, Resolved]] = []
    for root, module in OURS.items():
        if root not in sys.modules:
            continue
        try:
            parts.append(importlib.import_module(module).read_resolved(reach))
        except Exception as error:
            raise_of_training(error)
            warn_once(
                f"settings of {root}",
                f"config check: settings of {root} are left out: {type(error).__name__}: {one_line(str(error)[:200])}",
            )
    said = {setting.framework for part in parts for setting in part.values()}
    try:
        parts.append(of_torch(reach, optimizers=not said & _OPTIMIZER_SAID))
    except Exception as error:
        raise_of_training(error)
        warn_once(
            "settings of torch", f"config check: settings of torch are left out: {type(error).__name__}: {one_line(str(error)[:200])}"
        )
    return resolved.merge_settings(parts)


def of_torch(reach: Reach, *, optimizers: bool = True) -> dict[str, Resolved]:
    """What torch's own objects say: parameter groups, wrappers of models, sizes.

    Args:
        optimizers: False where a framework has told them; parameter groups change while a training goes on.
    """
    values: dict[str, Any] = {}
    for number, each in enumerate(reach.optimizers if optimizers else ()):
        values.update(_of_optimizer(each, "optimizer." if not number else f"optimizer{number}."))
    schedulers = [each for each in reach.objects if issubclass(type(each), LRScheduler)] if optimizers else []
    inner = {id(part) for each in schedulers for part in _parts(each)}
    values.update(next((_of_scheduler(each) for each in schedulers if id(each) not in inner), {}))
    defaults = {name: value for name, value in _defaults(reach.optimizers).items() if name in values}
    models = [model for model in reach.models if isinstance(model, nn.Module)]
    if models:
        tensors = [p for model in models for p in model.parameters()]
        values["model.class"] = [_bare(model) for model in models] if len(models) > 1 else _bare(models[0])
        values["model.parameters_of_rank"] = sum(int(getattr(p, "ds_numel", None) or p.numel()) for p in tensors)
        values["model.trainable_tensors"] = sum(p.requires_grad for p in tensors)
        values["model.parameter_dtypes"] = sorted({str(p.dtype) for p in tensors})
        values.update(_wrappers(models))
    settings = resolved.resolve_settings(values, "torch", defaults=defaults)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        settings["world_size"] = Resolved(torch.distributed.get_world_size(), CODE, "", "torch")
        settings["distributed_backend"] = Resolved(torch.distributed.get_backend(), CODE, "", "torch")
    return settings


def _of_optimizer(optimizer: Any, prefix: str) -> dict[str, Any]:
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], Mapping):
        return {}
    inner = getattr(optimizer, "optimizer", None)
    values: dict[str, Any] = {f"{prefix}class": type(inner if hasattr(inner, "param_groups") else optimizer).__name__}
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name in ("params", "param_names", "initial_lr"):
                continue
            if name == "lr":
                value = group.get("initial_lr", value)  # a scheduler has moved it already
            value = plain_data(value)
            if not number:
                values[f"{prefix}{name}"] = value
            elif name not in groups[0] or values.get(f"{prefix}{name}") != value:
                values[f"{prefix}{name}.group{number}"] = value
    if len(groups) > 1:
        values[f"{prefix}groups"] = [sum(p.numel() for p in group["params"]) for group in groups]
    return values


def _of_scheduler(scheduler: Any, prefix: str = "lr_scheduler.") -> dict[str, Any]:
    """Class and arguments, also of schedules that it is made of; what counts steps is left out."""
    values = {f"{prefix}class": type(scheduler).__name__}
    for name, value in vars(scheduler).items():
        name = "milestones" if name == "_milestones" else name  # of a sequence of schedules
        if not name.startswith("_") and name not in ("optimizer", "last_epoch", "verbose", "base_lrs"):
            value = sorted(value.elements()) if isinstance(value, Counter) else value  # milestones, as they were given
            values[f"{prefix}{name}"] = plain_data(value)
    for number, part in enumerate(_parts(scheduler)):
        values.update(_of_scheduler(part, f"{prefix}{number}."))
    return values


def _parts(scheduler: Any) -> list[Any]:
    """The schedules that one is made of, one after the other (`SequentialLR`) or at once (`ChainedScheduler`)."""
    return [part for value in vars(scheduler).values() if isinstance(value, list) for part in value if issubclass(type(part), LRScheduler)]


def _defaults(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Of the arguments of an optimizer's class."""
    defaults: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        inner = getattr(optimizer, "optimizer", None)
        cls = type(inner if hasattr(inner, "param_groups") else optimizer)
        try:
            parameters = inspect.signature(cls).parameters
        except (TypeError, ValueError):
            continue
        prefix = "optimizer." if not number else f"optimizer{number}."
        defaults.update({f"{prefix}{name}": p.default for name, p in parameters.items() if p.default is not p.empty})
    return defaults


def _bare(model: nn.Module) -> str:
    """Class of the model inside of its wrappers."""
    for _ in range(8):
        inner = next((model._modules[name] for name in ("module", "_orig_mod", "_fsdp_wrapped_module") if name in model._modules), None)
        if inner is None or len(model._modules) != 1:
            break
        model = inner
    return type(model).__name__


def _wrappers(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Data parallel wrappers: what they do to gradients and in which types they compute."""
    values: dict[str, Any] = {}
    for module in (module for model in models for module in model.modules()):
        kind = type(module).__name__
        if kind == "DistributedDataParallel" and "ddp.gradient_as_bucket_view" not in values:
            names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers", "bucket_bytes_cap")
            values.update({f"ddp.{name}": plain_data(getattr(module, name)) for name in names if hasattr(module, name)})
            of_torch = isinstance(module, nn.parallel.DistributedDataParallel)  # Megatron's class has the same name, and no hooks
            with suppress(MissingNameError):  # what puts the gradients of the ranks together in DDP's place
                hooks = [hook for hook, _ in need(module, "_comm_hooks", for_="setting ddp.comm_hook of the pack")] if of_torch else []
                if hooks:
                    values["ddp.comm_hook"] = ", ".join(f"{hook.__module__}.{_name_of(hook)}" for hook in hooks)
        elif kind == "FullyShardedDataParallel" and "fsdp1.sharding_strategy" not in values:
            values["fsdp1.sharding_strategy"] = plain_data(getattr(module, "sharding_strategy", None))
            values.update(resolved.flatten_tree({"fsdp1": {"mixed_precision": plain_data(getattr(module, "mixed_precision", None)) or {}}}))
        elif "fsdp.mp_policy.param_dtype" not in values and kind.startswith("FSDP") and callable(getattr(module, "_get_fsdp_state", None)):
            values.update(_of_fsdp2(module))
    return values


def _name_of(hook: Any) -> str:
    return str(optional(hook, "__qualname__", type(hook).__qualname__, because="an object that can be called has the name of its class"))


def _of_fsdp2(module: Any) -> dict[str, Any]:
    group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
    if group is None:
        return {}
    policy, mesh = getattr(group, "mp_policy", None), getattr(getattr(group, "mesh_info", None), "mesh", None)
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    values = {f"fsdp.mp_policy.{name}": plain_data(getattr(policy, name, None)) for name in names}
    values["fsdp.mesh"] = {"names": plain_data(getattr(mesh, "mesh_dim_names", None)), "shape": plain_data(getattr(mesh, "shape", None))}
    values["fsdp.reshard_after_forward"] = getattr(group, "_reshard_after_forward", None)
    return values


__all__ = ["CODE", "DEFAULT", "OURS", "Reach", "collect", "of_torch"]
