"""Layers of a DeepSpeed pipeline: a file per layer and tensor parallel rank (``deepspeed/runtime/pipe/module.py``).

The names in such a file lack the number of the layer, which the names of the module's parameters begin with; a layer that is tied to
another is called after its key there (``tied_modules.embed.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msprobe_engine.formats.checkpoint.deepspeed.files import Listing, Reading
from msprobe_engine.formats.checkpoint.files.trainer_files import stored
from msprobe_engine.formats.checkpoint.model import MODEL, StoredTensor
from msprobe_engine.formats.tensors.torch_file import plain


def layer_weights(files: Listing, known: Mapping[str, int], path: Path, reading: Reading) -> dict[str, dict[int, list[StoredTensor]]]:
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
            found.setdefault(name, {}).setdefault(tp, []).append(stored(name, tensor, MODEL, origin=inner))
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
