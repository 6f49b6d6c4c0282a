"""The model's files of a DeepSpeed checkpoint: ``[zero_pp_rank_{dp}_]mp_rank_{mp}_model_states.pt``.

Its keys are those of ``_common_checkpoint_state`` in ``deepspeed/runtime/engine.py`` and whatever the training passes as ``client_state``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import as_list
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.megatron.arguments import facts_of
from msprobe_engine.formats.checkpoint.model import RANDOM, Index, StoredTensor, value_group
from msprobe_engine.formats.tensors.torch_file import FileTensor, attributes, plain

_TENSORS = ("module", "optimizer", "frozen_param_fragments")
_LAYOUT = ("param_shapes", "frozen_param_shapes", "shared_params", "buffer_names", "universal_checkpoint_info", "ds_autoep_layers")
_RANDOM_NAMES = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "npu_rng_state", "rng_tracker_states")
"""Of Megatron-DeepSpeed (``megatron/checkpointing.py``)."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass
class ModelFile:
    """What a file of the model says.

    Attributes:
        weights: tensors of the module by name; without elements in stage 3.
        shapes: of ZeRO's parameters, one table per group, in the order of the flat vectors.
        frozen: shapes of parameters that the optimizer does not have.
        fragments: of these, this rank's part (stage 3).
        aliases: name of a tied parameter -> name under which it is stored.
        optimizer: entry ``optimizer``: states without ZeRO.
        parallel: how tensor parallel ranks have cut parameters (``universal_checkpoint_info``).
        values: settings, counters, schedule, what the training added.
        extra: tensors that the training added, by dotted path.
    """

    file: Path
    weights: dict[str, FileTensor]
    shapes: list[dict[str, Index]]
    frozen: dict[str, Index]
    fragments: dict[str, FileTensor]
    aliases: dict[str, str]
    buffers: set[str]
    optimizer: Any
    parallel: dict[str, Any]
    values: dict[str, Any]
    extra: dict[str, FileTensor] = field(default_factory=dict)

    def number(self, key: str) -> int | None:
        """A value that is a whole number."""
        value = self.values.get(key)
        return value if type(value) is int else None

    def of_another_rank(self) -> ModelFile:
        """What is a rank's own in stage 3. The rest is the same on all ranks, and there may be thousands."""
        weights = {name: tensor for name, tensor in self.weights.items() if name in self.buffers}
        return replace(self, weights=weights, shapes=[], aliases={}, optimizer=None, parallel={}, extra={})

    def facts(self) -> dict[str, Any]:
        """Of the model, when the training saved Megatron's arguments with it (Megatron-DeepSpeed does, under ``args``)."""
        return facts_of({key.removeprefix("args."): value for key, value in self.values.items() if key.startswith("args.")})


def model_file(tree: Mapping[str, Any], path: Path) -> ModelFile:
    """Takes the tree of such a file apart; entries of an unexpected kind count as absent."""
    rest = {str(key): item for key, item in tree.items() if key not in (*_TENSORS, *_LAYOUT)}
    extra, values = plain(rest)
    groups = tree.get("param_shapes")
    groups = [groups] if isinstance(groups, dict) else groups  # old versions have one table
    return ModelFile(
        path,
        plain(tree["module"])[0] if isinstance(tree.get("module"), dict) else {},
        [_shapes(group) for group in as_list(groups)],
        _shapes(tree.get("frozen_param_shapes")),
        {str(k): v for k, v in (tree.get("frozen_param_fragments") or {}).items() if isinstance(v, FileTensor)}
        if isinstance(tree.get("frozen_param_fragments"), dict)
        else {},
        _aliases(tree.get("shared_params")),
        {name for name in as_list(tree.get("buffer_names")) if isinstance(name, str)},
        tree.get("optimizer"),
        attributes(tree.get("universal_checkpoint_info")),
        values,
        extra,
    )


def extras(file: ModelFile) -> list[StoredTensor]:
    """Tensors that the training added: states of random generators, and others."""
    found = []
    for name, tensor in file.extra.items():
        first = name.split(".", 1)[0]
        group = RANDOM if first in _RANDOM_NAMES else value_group(name)
        found.append(make_stored_tensor(name, tensor, group))
    return found


def _shapes(table: Any) -> dict[str, Index]:
    found: dict[str, Index] = {}
    for name, shape in table.items() if isinstance(table, dict) else ():
        if isinstance(shape, (tuple, list)) and all(type(n) is int and n >= 0 for n in shape):
            found[str(name)] = tuple(shape)
    return found


def _aliases(value: Any) -> dict[str, str]:
    """A dict, or in older versions a list of pairs."""
    if isinstance(value, dict):
        return {str(name): str(source) for name, source in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(pair[0]): str(pair[1]) for pair in value if isinstance(pair, (list, tuple)) and len(pair) == 2}
    return {}


def trained_in(head: ModelFile) -> str | None:
    """The 16-bit type of the weights while training."""
    return next((dtype for key, dtype in _DTYPES.items() if head.values.get(f"ds_config.{key}.enabled") is True), None)
