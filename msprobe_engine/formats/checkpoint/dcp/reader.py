"""Reads checkpoints of ``torch.distributed.checkpoint``: FSDP2, torchtitan, Lightning, Accelerate, Megatron's ``torch_dcp``.

Keys are those of the flattened state dict. Weights are under ``model`` or at the top; optimizer states are ``optim.state.{name}.{state}``;
the settings in ``optim.param_groups`` are objects per group, or with flattened names one per parameter and setting.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.formats.checkpoint.dcp.metadata import METADATA, Metadata, find_pieces, read_metadata, read_objects
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.megatron.arguments import facts_of
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, OTHER, Checkpoint, StoredTensor, concatenate_tensors, value_group
from msprobe_engine.formats.tensors.opaque_objects import Inert, attributes

_MODEL = re.compile(r"model|module|state_dict|model_state_dict|net|network")
_OPTIMIZER = re.compile(r"optim|optimizers?|optimizer_state_dict|optim_state_dict|optimizer_(\d+)|optim_(\d+)")
_WRAPPERS = frozenset({"app", "state", "train_state", "app_state"})
_FLAT_STATE = re.compile(r"state\.(.+)\.([^.]+)")
_FLAT_GROUP = re.compile(r"param_groups\.(.+)\.([^.]+)")


_HALF = re.compile(r"(?P<name>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
"""Gate and up of a gated layer, which Megatron-FSDP stores apart (megatron-core, core/transformer/fsdp_dtensor_checkpoint.py)."""


class _Place(NamedTuple):
    """What a flat key is.

    Attributes:
        group: `MODEL`, `OPTIMIZER` or `OTHER`.
        name: of the parameter, or the path of something else.
    """

    group: str
    name: str
    state: str = ""


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """Read a directory with ``.metadata`` and ``.distcp`` files; see `msprobe_engine.formats.checkpoint.open.open_checkpoint`."""
    metadata = read_metadata(path, trust)
    out = Checkpoint(path, "torch DCP", files=[path / METADATA], problems=list(metadata.problems))
    pieces = find_pieces(metadata, metadata.tensors, trust)
    out.files += pieces.files
    out.problems += pieces.problems
    places = _Places(metadata)
    for key, entry in metadata.tensors.items():
        place = places.of(key)
        boxes = tuple(sorted(pieces.boxes[key], key=lambda box: box.offsets))
        if sum(box.numel for box in boxes) > _numel(entry.shape):
            out.problems.append(f"{path / METADATA}: the pieces of {key} lie over each other")
        name, group = place.name, place.group if place.group != OTHER else value_group(place.name)
        origin = key if key != name else ""
        out.add(StoredTensor(name, entry.shape, entry.dtype, boxes, state=place.state, group=group, origin=origin))
    _add_objects(out, metadata, places, trust)
    _join_halves(out)
    return out


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


class _Places:
    """What flat keys are, by their paths in the state dict that was saved, or by their own text where these were not kept."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def of(self, key: str) -> _Place:
        paths = self._metadata.paths
        parts = [str(part) for part in paths.get(key, ())] or key.split(".")
        while len(parts) > 2 and parts[0] in _WRAPPERS:
            parts = parts[1:]
        rest = ".".join(parts[1:])
        if len(parts) > 1 and _MODEL.fullmatch(parts[0]) and (key in paths or self._has_model):
            return _Place(MODEL, rest)
        if len(parts) > 1 and (found := _OPTIMIZER.fullmatch(parts[0])):
            number = found[1] or found[2]
            prefix = f"optimizer_{number}" if number and number != "0" else "optimizer"
            if key in paths and len(parts) >= 4 and parts[1] == "state":
                return _Place(OPTIMIZER, parts[2], ".".join(parts[3:]))
            if state := _FLAT_STATE.fullmatch(rest):
                return _Place(OPTIMIZER, state[1], state[2])
            return _Place(OPTIMIZER, f"{prefix}.{rest}")
        first = re.sub(r"^(lr_)?schedulers?$", "lr_scheduler", parts[0])
        text = ".".join([first, *parts[1:]])
        return _Place(MODEL if value_group(text) == OTHER and self._is_plain_model else OTHER, text)

    @cached_property
    def _has_model(self) -> bool:
        """Without the paths: whether ``model.`` is the part of a state dict, rather than the first word of all names (Hugging Face)."""
        keys = self._metadata.tensors
        firsts = {key.split(".", 1)[0] for key in keys}
        return any(_OPTIMIZER.fullmatch(first) for first in firsts) or all(key.startswith("model.model.") for key in keys)

    @cached_property
    def _is_plain_model(self) -> bool:
        """Whether the state dict that was saved is that of a model, and not one of parts."""
        return not any(_MODEL.fullmatch(str(where[0])) and len(where) > 1 for where in self._metadata.paths.values())


def _add_objects(out: Checkpoint, metadata: Metadata, places: _Places, trust: Collection[str]) -> None:
    found, problems = read_objects(metadata, metadata.objects, trust)
    out.problems += problems
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for key, tree in found.items():
        place = places.of(key)
        if place.group == OPTIMIZER and not place.state:
            prefix, _, rest = place.name.partition(".")
            if group := _FLAT_GROUP.fullmatch(rest):
                settings.setdefault(prefix, {}).setdefault(group[1], {})[group[2]] = tree
                continue
            if rest == "param_groups" and isinstance(tree, list):
                tree = [_replace_names_by_count(group) for group in tree]
        if key == "args" and isinstance(tree, Inert):  # of Megatron
            out.naming, out.facts = "megatron", facts_of(attributes(tree))
        path = f"optimizer.state.{place.name}.{place.state}" if place.state else place.name
        tensors, values = plain(tree, path)
        out.values |= values
        for name, tensor in tensors.items():
            out.add(make_stored_tensor(name, tensor, OPTIMIZER if place.group == OPTIMIZER else value_group(name)))
    for prefix, by_parameter in settings.items():
        _add_settings(out, prefix, by_parameter)


def _join_halves(out: Checkpoint) -> None:
    """Gate and up as the one parameter that they are."""
    halves: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for tensor in out.tensors.values():
        if found := _HALF.fullmatch(tensor.name):
            halves.setdefault((found["name"], tensor.state), {})[found["half"]] = tensor
    for (name, _), pair in halves.items():
        if len(pair) < 2:
            continue
        gate, up = pair["w"], pair["v"]
        del out.tensors[gate.key], out.tensors[up.key]
        # A step counter is there twice; a tensor is cut along its rows.
        whole = concatenate_tensors([gate, up]) if gate.shape else replace(gate, copies=up.boxes)
        out.add(replace(whole, name=name))


def _replace_names_by_count(group: Any) -> Any:
    """The settings of a group with the number of its parameters in place of their names."""
    if not isinstance(group, dict):
        return group
    return {key: len(value) if key == "params" and isinstance(value, (list, tuple)) else value for key, value in group.items()}


def _add_settings(out: Checkpoint, prefix: str, by_parameter: dict[str, dict[str, Any]]) -> None:
    """Settings that are stored per parameter, as the groups that they were."""
    groups: dict[str, tuple[dict[str, Any], int]] = {}
    for settings in by_parameter.values():
        same = repr(sorted(plain(settings)[1].items(), key=lambda item: item[0]))
        groups[same] = settings, groups.get(same, (settings, 0))[1] + 1
    for number, (settings, count) in enumerate(groups.values()):
        counted = _replace_names_by_count(settings) if "params" in settings else settings | {"params": count}
        out.values |= plain(counted, f"{prefix}.param_groups.{number}")[1]
