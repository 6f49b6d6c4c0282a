"""Reads universal checkpoints of DeepSpeed: a directory per parameter, ``zero/{name}/{fp32,exp_avg,exp_avg_sq,step}.pt``.

``deepspeed/checkpoint/ds_to_universal.py`` makes them of ZeRO checkpoints and copies the files of the model beside them. A state is a dict
with the whole tensor under ``param`` (stages 1 and 2), or the flat tensor itself (stage 3), whose shape the model's file has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.deepspeed.completeness import other_steps
from msprobe_engine.formats.checkpoint.deepspeed.files import Listing, Reading, list_files
from msprobe_engine.formats.checkpoint.deepspeed.model import extras, trained_in
from msprobe_engine.formats.checkpoint.deepspeed.parallel import cuts_of
from msprobe_engine.formats.checkpoint.deepspeed.parts import Part, Tensors, over_ranks, parts_of, tensor_parallel_size
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import settings, stage_of
from msprobe_engine.formats.checkpoint.deepspeed.zero_states import MASTER
from msprobe_engine.formats.checkpoint.files.small_files import entries
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, Checkpoint, Index, StoredTensor, whole
from msprobe_engine.formats.tensors.torch_file import FileTensor

_COMMON = "optimizer_state.pt"
Shapes = list[dict[str, Index]]
States = Mapping[str, Mapping[str, StoredTensor]]


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """The universal checkpoint in a directory.

    Raises:
        DumpFormatError: it holds no parameter that can be read, or a pickle names what checkpoints do not hold.
    """
    reading, found, files = Reading(trust), Checkpoint(path, "DeepSpeed universal"), list_files(path)
    common = reading.tree(path / "zero" / _COMMON) or {}
    parts = {mp: part for mp, part in parts_of(files, reading).items() if part.models}
    tensors = _weights(path, files, parts, stage_of(common.get("zero_stage")) or 0, reading)
    shapes = _shapes(parts, _tp_size(files, parts))
    states = _states(path / "zero", shapes, found, reading)
    if not states:
        raise DumpFormatError(f"{path}: no parameter below zero/ can be read" + "".join(f"; {text}" for text in reading.problems[:1]))
    gone = [name for group in shapes for name in group if name not in states]
    if gone:
        reading.problems.append(f"{path}: {len(gone)} parameters of the optimizer have no directory below zero/: {some(gone)}")
    copies = _add_states(states, tensors, path, reading)
    _add_steps(common, shapes, tensors)
    if parts:
        head = parts[min(parts)].head
        found.values = head.values | found.values
        found.facts = head.facts()
        for alias, source in head.aliases.items():
            if alias not in tensors and source in tensors:
                tensors[alias] = replace(tensors[source], name=alias)
        if copies and (dtype := trained_in(head)) is not None:
            reading.notes.append(
                f"the weights in {dtype} of {copies} parameters were not saved: the float32 copies of the optimizer stand for them"
            )
            found.facts["stored_for"] = dtype
    inner = common.get("optimizer_state_dict")
    rest = {key: item for key, item in common.items() if key != "param_groups"}
    found.values |= settings(rest, inner if isinstance(inner, dict) else common)
    for tensor in tensors.values():
        found.add(tensor)
    found.files, found.notes, found.problems = reading.files, list(dict.fromkeys(reading.notes)), reading.problems
    return found


def _weights(path: Path, files: Listing, parts: Mapping[int, Part], stage: int, reading: Reading) -> Tensors:
    """What the files of the model hold."""
    if not parts:
        reading.problems.append(f"{path}: has no *_model_states.pt that can be read; weights of frozen parameters and settings are missing")
        return {}
    reading.problems += other_steps([file for part in parts.values() for _, file in sorted(part.models.items())])
    head = parts[min(parts)].head
    dp_size = head.number("dp_world_size") or 1
    for part in parts.values():
        if stage == 3 and part.head.frozen and len(part.models) < dp_size:
            reading.problems.append(
                f"{path}: has {len(part.models)} of {dp_size} files of the model; parts of frozen parameters are missing"
            )
        part.fill(files, stage, dp_size if stage == 3 else 1, [], reading)
    tensors = over_ranks(parts, {}, _tp_size(files, parts), cuts_of(head.parallel, reading.notes), reading)
    return tensors | {tensor.key: tensor for tensor in extras(head)}


def _tp_size(files: Listing, parts: Mapping[int, Part]) -> int:
    return tensor_parallel_size(files, parts[min(parts)].head, max(parts) + 1, pipeline=False) if parts else 1


def _shapes(parts: Mapping[int, Part], tp_size: int) -> Shapes:
    """Shapes of the optimizer's parameters, by group. Of tensor parallel ranks they are those of pieces; then the states have their own."""
    found: Shapes = []
    for part in parts.values() if tp_size == 1 else ():
        for number, group in enumerate(part.head.shapes):
            found += [{}] if number == len(found) else []
            found[number] |= group
    return found


def _states(zero: Path, shapes: Shapes, found: Checkpoint, reading: Reading) -> States:
    """All states, by parameter and name."""
    known = {name: shape for group in shapes for name, shape in group.items()}
    states: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(entries(zero) - {_COMMON}):
        if not (zero / name).is_dir():
            reading.notes.append(f"{zero / name} is no directory of a parameter and was passed over")
            continue
        for file in sorted(entries(zero / name)):
            if file.endswith(".pt"):
                value = _value(zero / name / file, reading)
                state = MASTER if file == "fp32.pt" else file.removesuffix(".pt")
                if isinstance(value, FileTensor):
                    states.setdefault(name, {})[state] = _make_state_tensor(name, state, value, known.get(name))
                elif value is not None:
                    found.values[f"optimizer.state.{name}.{state}"] = value
    return states


def _value(path: Path, reading: Reading) -> FileTensor | int | float | None:
    """What a file of a state holds."""
    tree = reading.content(path)
    value = tree.get("param") if isinstance(tree, dict) else tree
    if isinstance(value, (FileTensor, int, float)):
        return value
    if tree is not None:
        reading.problems.append(f"{path}: holds no tensor under 'param', as DeepSpeed writes it; it is not compared")
    return None


def _make_state_tensor(name: str, state: str, value: FileTensor, shape: Index | None) -> StoredTensor:
    if shape is not None and value.strides == (1,) and math.prod(shape) == value.numel:
        boxes = whole(shape, value.file, value.start)  # flat, of stage 3
    else:
        shape, boxes = value.shape, whole(value.shape, value.file, value.start, value.strides)
    return StoredTensor(name, shape, value.dtype, boxes, state=state, group=OPTIMIZER)


def _add_states(states: States, tensors: Tensors, path: Path, reading: Reading) -> int:
    """Adds the states; a parameter without weights elsewhere has those of its float32 copy. Returns how many have."""
    usual = {state for held in states.values() for state in held if state != MASTER}
    twice = taken = 0
    for name, held in states.items():
        if held.keys() <= {
            MASTER
        }:  # frozen parameters, buffers, tied ones: the converter has them as float32, the model's file as they are
            twice += name in tensors
            tensors.setdefault(name, replace(held[MASTER], state="", group=MODEL))
            continue
        gone = [f"zero/{name}/{'fp32' if state == MASTER else state}.pt" for state in sorted(usual | {MASTER}) if state not in held]
        if gone:
            reading.problems.append(f"{path}: {some(gone)} {'is' if len(gone) == 1 else 'are'} missing; other parameters have this state")
        for tensor in held.values():
            tensors[tensor.key] = tensor
        if name not in tensors and MASTER in held:
            tensors[name] = replace(held[MASTER], state="", group=MODEL)
            taken += 1
    if twice:
        reading.notes.append(
            f"{twice} tensors that no optimizer moves are below zero/ once more in float32; those of the model's files are compared"
        )
    return taken


def _add_steps(common: Mapping[str, Any], shapes: Shapes, tensors: Tensors) -> None:
    """Stage 3 keeps the counter of steps once for each group."""
    inner = common.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    for number, group in enumerate(shapes) if isinstance(states, dict) else ():
        state = states.get(number) if isinstance(states, dict) else None
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, FileTensor) and not step.shape:
            for name in group:
                tensor = _make_state_tensor(name, "step", step, None)
                tensors.setdefault(tensor.key, tensor)
