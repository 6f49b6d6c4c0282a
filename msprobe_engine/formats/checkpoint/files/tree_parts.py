"""Takes what training scripts save, dicts of state dicts, apart: weights, optimizers, the rest.

Known are the names of plain scripts (``model``, ``model_state_dict``, ``optimizer``), Lightning (``state_dict``, ``optimizer_states``) and
rank files of Megatron read by themselves (``model0``, ``model1``).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.model import MODEL, OTHER, RANDOM, SCHEDULER, Checkpoint, value_group
from msprobe_engine.formats.checkpoint.optimizer_names import Parameter, is_optimizer, optimizer_parts
from msprobe_engine.formats.tensors.opaque_objects import Inert, Named, attributes
from msprobe_engine.formats.tensors.torch_file import FileTensor, Storage, plain

_MODELS = ("model", "model_state_dict", "model_state", "state_dict", "module", "net", "network", "weights", "params", "generator")
"""Where a script's model is; the first that holds tensors. Its names stand for themselves, those of other parts get the part before."""
_SCHEDULERS = re.compile(r"(lr_)?sched(uler)?s?(_state_dict|_state)?|lr_schedulers?(_state_dict)?|opt_param_scheduler")
_RANDOM = re.compile(r"(.*_)?(rng|random)(_.*)?")
_PART = re.compile(r"(model_\d+|ema\w*|teacher\w*|\w+_ema)\.")
"""Before the names of another model in the same checkpoint."""
_CHUNK = re.compile(r"model\d+")
_MAX_DEPTH = 3
_MOST_PARTS = 64
"""Where optimizers are looked for: dicts of state dicts are small."""


def add_training_state(out: Checkpoint, tree: Any) -> None:
    """Take in the object of a file, whatever it is."""
    if isinstance(tree, FileTensor):
        out.add(make_stored_tensor("tensor", tree, MODEL))
        return
    if is_optimizer(tree):
        add_optimizer(out, tree, "optimizer", True)
        return
    parts = attributes(tree)
    if not parts:
        tensors, values = plain(tree, "data")
        out.add_values(values)
        for name, tensor in tensors.items():
            out.add(make_stored_tensor(name, tensor, MODEL))
        return
    main = _main(parts)
    if main is None:
        # {"state": {"model": ..., "optimizer": ...}, "epoch": 3}
        inner = [name for name, part in parts.items() if isinstance(part, dict) and not is_optimizer(part) and _main(part) is not None]
        if len(inner) == 1:
            parts = {name: part for name, part in parts.items() if name != inner[0]} | parts[inner[0]]
            main = _main(parts)
    if main is None and _is_state_dict(parts):
        add_state_dict(out, parts, values_at="")
        return
    optimizers: list[tuple[str, dict[Any, Any]]] = []
    for name, part in parts.items():
        if name == main:
            add_state_dict(out, part)
        elif _CHUNK.fullmatch(name) and _holds_tensors(part):
            add_state_dict(out, part, f"{name}.")
        else:
            rest = _without_optimizers(part, _path(name), optimizers, 0)
            if rest is not _NOTHING:
                _add_rest(out, rest, _path(name))
    for path, part in optimizers:
        add_optimizer(out, part, path, True)


def _main(parts: dict[str, Any]) -> str | None:
    """Where the model is; None: under none of the usual names."""
    return next((name for name in _MODELS if not isinstance(parts.get(name), FileTensor) and _holds_tensors(parts.get(name))), None)


def add_state_dict(out: Checkpoint, tree: Any, prefix: str = "", values_at: str = "model.") -> None:
    """Take in the tensors of a model's state dict, nested or not."""
    tensors, values = plain(tree)
    for name, tensor in tensors.items():
        out.add(make_stored_tensor(prefix + name, tensor, MODEL))
    out.add_values({f"{values_at}{prefix}{name}": value for name, value in values.items()})


def add_optimizer(out: Checkpoint, tree: dict[Any, Any], path: str, ordered: bool, number: int = 0) -> None:
    """Take in an optimizer's state dict.

    Args:
        out: has the tensors of the models already.
        tree: what ``Optimizer.state_dict()`` gave.
        path: of it; a second optimizer's states get it before their names where these are taken.
        ordered: the tensors of the models are in the order of the module.
        number: of the optimizer; it is most likely that of the model of this number (``model_1.`` before its names).
    """
    models: dict[str, list[Parameter]] = {}
    seen: set[tuple[Any, ...]] = set()
    for tensor in out.tensors.values():
        if tensor.group != MODEL or tensor.state:
            continue
        place = (*((box.file, box.start) for box in tensor.boxes), tensor.shape)
        if tensor.numel and place in seen:  # tied: the same storage under two names is one parameter
            continue
        seen.add(place)
        part = found[0] if (found := _PART.match(tensor.name)) else ""
        models.setdefault(part, []).append(Parameter(tensor.name, tensor.shape))
    likely = sorted(models, key=lambda part: part != (f"model_{number}." if number else ""))
    first, *others = [*(models[part] for part in likely), [p for part in likely for p in models[part]]]
    parts = optimizer_parts(tree, first, path, ordered, others)
    taken = {tensor.key for tensor in parts.tensors} & out.tensors.keys()
    for tensor in parts.tensors:
        out.add(replace(tensor, name=f"{path}.{tensor.name}") if taken else tensor)
    out.values |= parts.values
    out.notes += [f"{out.path}: {note}" for note in parts.notes]


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
    out.add_values(values)
    group = SCHEDULER if path == "lr_scheduler" else RANDOM if _RANDOM.fullmatch(path) else value_group(path)
    for name, tensor in tensors.items():
        out.add(make_stored_tensor(name, tensor, group if group != OTHER or not _is_weight(path) else MODEL))


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
