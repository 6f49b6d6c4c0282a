"""Takes what training scripts save, dicts of state dicts, apart: weights, optimizers, the rest.

Known are the names of plain scripts (``model``, ``model_state_dict``, ``optimizer``), Lightning (``state_dict``, ``optimizer_states``) and
rank files of Megatron read by themselves (``model0``, ``model1``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from msprobe_engine.checkpoint.inert import Inert, Named, attributes
from msprobe_engine.checkpoint.optimizer_names import Parameter, is_optimizer, optimizer_parts
from msprobe_engine.checkpoint.stored import MODEL, OTHER, RANDOM, SCHEDULER, Checkpoint, value_group
from msprobe_engine.checkpoint.torchfile import FileTensor, Storage, plain
from msprobe_engine.checkpoint.trainer_files import stored

_MODELS = ("model", "model_state_dict", "model_state", "state_dict", "module", "net", "network", "weights", "params", "generator")
"""Where a script's model is; the first that holds tensors. Its names stand for themselves, those of other parts get the part before."""
_SCHEDULERS = re.compile(r"(lr_)?sched(uler)?s?(_state_dict|_state)?|lr_schedulers?(_state_dict)?|opt_param_scheduler")
_RANDOM = re.compile(r"(.*_)?(rng|random)(_.*)?")
_CHUNK = re.compile(r"model\d+")
_MAX_DEPTH = 3
_MOST_PARTS = 64
"""Where optimizers are looked for: dicts of state dicts are small."""


def add_training_state(out: Checkpoint, tree: Any) -> None:
    """Take in the object of a file, whatever it is."""
    if isinstance(tree, FileTensor):
        out.add(stored("tensor", tree, MODEL))
        return
    if is_optimizer(tree):
        add_optimizer(out, tree, "optimizer", True)
        return
    parts = attributes(tree)
    if not parts:
        tensors, values = plain(tree, "data")
        out.values |= values
        for name, tensor in tensors.items():
            out.add(stored(name, tensor, MODEL))
        return
    holds = {name: _holds_tensors(part) for name, part in parts.items()}
    main = next((name for name in _MODELS if holds.get(name) and not isinstance(parts[name], FileTensor)), None)
    if main is None and _is_state_dict(parts):
        add_state_dict(out, tree)
        return
    optimizers: list[tuple[str, dict[Any, Any]]] = []
    for name, part in parts.items():
        if name == main:
            add_state_dict(out, part)
        elif _CHUNK.fullmatch(name) and holds[name]:
            add_state_dict(out, part, f"{name}.")
        else:
            rest = _without_optimizers(part, _path(name), optimizers, 0)
            if rest is not _NOTHING:
                _add_rest(out, rest, _path(name))
    for path, part in optimizers:
        add_optimizer(out, part, path, True)


def add_state_dict(out: Checkpoint, tree: Any, prefix: str = "") -> None:
    """Take in the tensors of a model's state dict, nested or not."""
    tensors, values = plain(tree)
    for name, tensor in tensors.items():
        out.add(stored(prefix + name, tensor, MODEL))
    out.values |= {f"model.{prefix}{name}": value for name, value in values.items()}


def add_optimizer(out: Checkpoint, tree: dict[Any, Any], path: str, ordered: bool) -> None:
    """Take in an optimizer's state dict.

    Args:
        out: has the tensors of the model already.
        tree: what ``Optimizer.state_dict()`` gave.
        path: of it; a second optimizer's states get it before their names.
        ordered: the tensors of the model are in the order of the module.
    """
    parameters: list[Parameter] = []
    seen: set[tuple[Any, ...]] = set()
    for tensor in out.tensors.values():
        if tensor.group != MODEL or tensor.state:
            continue
        place = tuple((box.file, box.start) for box in tensor.boxes)
        if tensor.numel and (*place, tensor.shape) in seen:  # tied: the same storage under two names is one parameter
            continue
        seen.add((*place, tensor.shape))
        parameters.append(Parameter(tensor.name, tensor.shape))
    found = optimizer_parts(tree, parameters, path, ordered)
    taken = {tensor.key for tensor in found.tensors} & out.tensors.keys()
    for tensor in found.tensors:
        if taken:
            tensor = replace(tensor, name=f"{path}.{tensor.name}")
        out.add(tensor)
    out.values |= found.values
    out.notes += [f"{out.path}: {note}" for note in found.notes]


_NOTHING = object()


def _without_optimizers(tree: Any, path: str, found: list[tuple[str, dict[Any, Any]]], depth: int) -> Any:
    """`tree` less the optimizers in it, which are put into `found`."""
    if is_optimizer(tree):
        found.append((path, tree))
        return _NOTHING
    if depth >= _MAX_DEPTH:
        return tree
    if isinstance(tree, dict) and len(tree) <= _MOST_PARTS:
        kept = {key: _without_optimizers(value, f"{path}.{key}", found, depth + 1) for key, value in tree.items()}
        left = {key: value for key, value in kept.items() if value is not _NOTHING}
        return left if left or not tree else _NOTHING
    if isinstance(tree, list) and len(tree) <= _MOST_PARTS and any(is_optimizer(item) for item in tree):
        single = len(tree) == 1
        for number, item in enumerate(tree):
            _without_optimizers(item, path if single else f"{path}.{number}", found, depth + 1)
        return _NOTHING
    return tree


def _path(name: str) -> str:
    """The common name of a part: ``optimizer_states`` of Lightning, ``optimizer_state_dict`` of scripts are ``optimizer``."""
    if re.fullmatch(r"optim(izer)?s?(_states?|_state_dict|_states_dict)?|opt(_state|_state_dict)?", name):
        return "optimizer"
    if _SCHEDULERS.fullmatch(name):
        return "lr_scheduler"
    return name


def _add_rest(out: Checkpoint, tree: Any, path: str) -> None:
    if path == "lr_scheduler" and isinstance(tree, list) and len(tree) == 1:  # Lightning has a list of them
        tree = tree[0]
    tensors, values = plain(tree, path)
    out.values |= values
    group = SCHEDULER if path == "lr_scheduler" else RANDOM if _RANDOM.fullmatch(path) else value_group(path)
    for name, tensor in tensors.items():
        out.add(stored(name, tensor, group if group != OTHER or not _is_weight(path) else MODEL))


def _is_weight(path: str) -> bool:
    """Whether a part holds weights of a model: an average of it, another network."""
    return re.search(r"ema|teacher|model|net|discriminator|critic|actor|encoder|decoder", path) is not None


def _is_state_dict(parts: dict[str, Any]) -> bool:
    """Whether most of the entries are tensors: a state dict by itself, perhaps with some numbers in it."""
    leaves = sum(isinstance(part, (FileTensor, Storage, Named)) for part in parts.values())
    return 2 * leaves >= len(parts)


def _holds_tensors(tree: Any) -> bool:
    waiting: list[Any] = [tree]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, FileTensor):
            return True
        if not isinstance(value, (dict, list, tuple, Inert)) or isinstance(value, Named) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend(value.values() if isinstance(value, dict) else attributes(value).values() if isinstance(value, Inert) else value)
    return False
