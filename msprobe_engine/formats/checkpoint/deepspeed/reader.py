"""Reads checkpoints of DeepSpeed: ZeRO stages 0 to 3, mixtures of experts, pipelines, tensor parallel ranks.

One directory (a tag) has the model's files, one per model parallel rank (in stage 3 per rank), and a file per rank with its part of the
optimizer. Names come out as the names of the module's parameters, with whole-model numbers for experts; the float32 copies that the
optimizer moves are the state ``master``. Stage 3 saves no other weights, so there the copies stand for the weights, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.deepspeed.completeness import find_missing_files, left_over, other_steps, without_weights
from msprobe_engine.formats.checkpoint.deepspeed.files import Listing, Reading, list_files
from msprobe_engine.formats.checkpoint.deepspeed.model import ModelFile, extras, trained_in
from msprobe_engine.formats.checkpoint.deepspeed.parallel import cuts_of
from msprobe_engine.formats.checkpoint.deepspeed.parts import Part, over_ranks, parts_of, tensor_parallel_size
from msprobe_engine.formats.checkpoint.deepspeed.zero_states import counters, disagreements
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.model import MODEL, Checkpoint, StoredTensor
from msprobe_engine.formats.tensors.torch_file import plain

_MOST_RANKS = 1 << 20


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """The checkpoint in a tag's directory.

    Raises:
        DumpFormatError: there is no file of the model that can be read, or a pickle names what checkpoints do not hold.
    """
    files, reading = list_files(path), Reading(trust)
    parts = parts_of(files, reading)
    readable = {mp: part for mp, part in parts.items() if part.models}
    if not readable:
        raise DumpFormatError(reading.problems[0] if reading.problems else f"{path}: has no *_model_states.pt; give the directory of a tag")
    head = readable[min(readable)].head
    stage = _stage(files, parts, head)
    dp_size = _dp_size(files, parts, head)
    mp_size = max(head.number("mp_world_size") or 1, max(parts) + 1)
    if mp_size * dp_size > _MOST_RANKS:
        raise DumpFormatError(
            f"{path}: its files say that {mp_size} model parallel times {dp_size} data parallel ranks saved it; no job has so many, "
            "they are damaged"
        )
    reading.problems += find_missing_files(path, files, mp_size, dp_size, stage)
    reading.problems += left_over(path, files, dp_size, stage)
    for part in parts.values():
        part.ranks = {dp: file for dp, file in part.ranks.items() if dp < dp_size}
        part.models = {dp: file for dp, file in part.models.items() if dp < dp_size}
    reading.problems += other_steps([file for part in parts.values() for _, file in sorted(part.models.items())])
    steps = head.number("global_steps")
    ranks = [file for part in parts.values() for _, file in sorted(part.ranks.items())]
    reading.problems += disagreements(ranks, None if steps is None else steps - (head.number("skipped_steps") or 0))

    pipeline = bool(files.layers) and not head.weights
    tp_size = tensor_parallel_size(files, head, mp_size, pipeline)
    optimized = {name: numel for part in readable.values() for name, numel in part.count_optimized_elements().items()}
    layers = _layer_weights(files, optimized, path, reading) if pipeline else {}
    for mp, part in readable.items():
        own_layers = [pieces[mp % tp_size][0] for pieces in layers.values() if mp % tp_size in pieces]
        part.fill(files, stage, dp_size, own_layers, reading)
    tensors = over_ranks(readable, layers, tp_size, cuts_of(head.parallel, reading.notes), reading)
    if stage < 3 and not files.experts:
        reading.problems += without_weights(path, optimized, tensors)

    checkpoint = Checkpoint(path, f"DeepSpeed ZeRO {stage}" if stage else "DeepSpeed", files=reading.files)
    for tensor in (*tensors.values(), *extras(head)):
        checkpoint.add(tensor)
    checkpoint.values = {**head.values, **(ranks[0].values | counters(ranks[0]) if ranks else {})}
    checkpoint.facts = head.facts()
    if stage == 3 and (dtype := trained_in(head)) is not None:
        reading.notes.append(f"ZeRO 3 saves no weights in {dtype}: the float32 copies of the optimizer stand for them")
        checkpoint.facts["stored_for"] = dtype
    if files.other:
        reading.notes.append(f"{len(files.other)} files of other kinds were passed over: {some(files.other)}")
    checkpoint.notes, checkpoint.problems = list(dict.fromkeys(reading.notes)), reading.problems
    return checkpoint


def _stage(files: Listing, parts: Mapping[int, Part], head: ModelFile) -> int:
    """The stage of ZeRO; 1 for the bf16 optimizer, whose configuration may say 0."""
    stages = [file.stage for part in parts.values() for file in part.ranks.values()]
    if stages:
        return next((stage for stage in stages if stage is not None), 1)
    if all(dp is not None for _, dp in files.model):
        return 3
    said = head.values.get("ds_config.zero_optimization.stage")
    return said if type(said) is int and 0 <= said < 3 and head.shapes else 0


def _dp_size(files: Listing, parts: Mapping[int, Part], head: ModelFile) -> int:
    """Data parallel ranks that share the optimizer."""
    counts = [count for part in parts.values() for file in part.ranks.values() for count in file.counts if count]
    if counts:
        return max(counts)
    if files.optimizer or head.shapes:
        return head.number("dp_world_size") or max((dp for _, dp in files.optimizer), default=0) + 1
    return 1


# Layers of a DeepSpeed pipeline: a file per layer and tensor parallel rank (``deepspeed/runtime/pipe/module.py``).
#
# The names in such a file lack the number of the layer, which the names of the module's parameters begin with; a layer that is tied to
# another is called after its key there (``tied_modules.embed.weight``).
def _layer_weights(files: Listing, known: Mapping[str, int], path: Path, reading: Reading) -> dict[str, dict[int, list[StoredTensor]]]:
    """Name of a parameter -> tensor parallel rank -> its tensors: one, or one of each of the layers that are tied.

    Args:
        known: elements of the parameters that the optimizer has, by name; empty without ZeRO.
        path: the directory, for messages.
    """
    found: dict[str, dict[int, list[StoredTensor]]] = {}
    for (layer, tp), file in files.layers.items():
        tree = reading.tree(file)
        for inner, tensor in plain(tree)[0].items() if tree is not None else ():
            name = _name(layer, inner, tensor.numel, known)
            found.setdefault(name, {}).setdefault(tp, []).append(make_stored_tensor(name, tensor, MODEL, origin=inner))
    there = {layer for layer, _ in files.layers}
    gone = sorted({int(match[1]) for name in known if (match := re.match(r"(\d{1,6})\.", name))} - there)
    if gone:
        shown = ", ".join(f"layer_{layer:02d}-*model_states.pt" for layer in gone[:4])
        reading.problems.append(f"{path}: {shown}{' ...' if len(gone) > 4 else ''} missing; the optimizer has parameters of these layers")
    return found


def _name(layer: int, inner: str, numel: int, known: Mapping[str, int]) -> str:
    name = f"{layer}.{inner}"
    if name in known:
        return name
    tied = [other for other in known if re.fullmatch(rf"tied_modules\.[^.]+\.{re.escape(inner)}", other) and known[other] == numel]
    return tied[0] if len(tied) == 1 else name
