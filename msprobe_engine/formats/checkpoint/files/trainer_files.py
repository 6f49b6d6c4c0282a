"""What trainers leave beside the weights: scheduler, random states, arguments, progress (transformers' Trainer, Accelerate).

``trainer_state.json``, ``training_args.bin``, ``scheduler.pt``, ``scaler.pt``, ``rng_state[_N].pth`` (``transformers/trainer.py``);
``scheduler[_N].bin``, ``sampler[_N].bin``, ``random_states_N.pkl``, ``scaler.pt``, ``custom_checkpoint_N.pkl``
(``accelerate/checkpointing.py``); ``meta.pt`` (Lightning's FSDP); ``config.json``, ``generation_config.json``, ``adapter_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.files.small_files import entries, read_json
from msprobe_engine.formats.checkpoint.flat_tables import plain
from msprobe_engine.formats.checkpoint.model import OTHER, Checkpoint, StoredTensor, value_group, whole
from msprobe_engine.formats.tensors.torch_file import FileTensor, UnknownNameError, read_torch

_TORCH_FILES: tuple[tuple[str, str], ...] = (
    (r"training_args\.bin", "training_args"),
    (r"scheduler\.(?:pt|bin)", "lr_scheduler"),
    (r"scheduler_(\d+)\.bin", "lr_scheduler.{}"),
    (r"scaler\.pt", "scaler"),
    (r"sampler\.bin", "sampler"),
    (r"sampler_(\d+)\.bin", "sampler.{}"),
    (r"rng_state\.pth", "rng_state.rank0"),
    (r"rng_state_(\d+)\.pth", "rng_state.rank{}"),
    (r"random_states_(\d+)\.pkl", "rng_state.rank{}"),
    (r"custom_checkpoint_(\d+)\.pkl", "custom.{}"),
    (r"dl_state_dict\.bin", "dataloader"),
    (r"meta\.pt", "lightning"),
)
"""Files of `read_torch`, and the path of what is in them."""
_JSON_FILES = {
    "config.json": "config",
    "generation_config.json": "generation_config",
    "adapter_config.json": "adapter_config",
    "trainer_state.json": "trainer_state",
}
_FACTS = {
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "vocab": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
}
"""Fact of the model, and what ``config.json`` calls it."""


def add_trainer_files(checkpoint: Checkpoint, directory: Path, trust: Collection[str] = (), only: Collection[str] | None = None) -> None:
    """Take in what lies beside the weights, or `only` some of the files. A damaged file becomes a problem.

    Raises:
        UnknownNameError: a pickle names what is not known.
    """
    names = entries(directory) if only is None else entries(directory) & set(only)
    for pattern, path in _TORCH_FILES:
        for name in sorted(names, key=lambda text: (len(text), text)):
            if found := re.fullmatch(pattern, name):
                try:
                    tree = read_torch(directory / name, trust).tree
                    add_tree(checkpoint, tree, path.format(*found.groups()))
                except UnknownNameError:
                    raise
                except DumpFormatError as error:
                    checkpoint.problems.append(str(error))
                    continue
                checkpoint.files.append(directory / name)
    for name, path in _JSON_FILES.items():
        if name in names:
            _add_json(checkpoint, directory / name, path)


def add_tree(checkpoint: Checkpoint, tree: Any, path: str) -> None:
    """Take in the tensors and values of a tree, by their paths below `path`."""
    tensors, values = plain(tree, path)
    checkpoint.values |= values
    for name, tensor in tensors.items():
        checkpoint.add(make_stored_tensor(name, tensor, value_group(path)))


def make_stored_tensor(name: str, tensor: FileTensor, group: str = OTHER, state: str = "", origin: str = "") -> StoredTensor:
    boxes = whole(tensor.shape, tensor.file, tensor.start, tensor.strides)
    return StoredTensor(name, tensor.shape, tensor.dtype, boxes, state=state, group=group, origin=origin)


def _add_json(checkpoint: Checkpoint, file: Path, path: str) -> None:
    try:
        found = read_json(file)
    except DumpFormatError as error:
        checkpoint.problems.append(str(error))
        return
    checkpoint.files.append(file)
    if path == "config":
        _facts(checkpoint, found)
    if path == "trainer_state" and isinstance(found.get("log_history"), list):
        # one entry per logged step: the last one is compared, and how many there are
        history = found.pop("log_history")
        found["log_history"] = {"entries": len(history), "last": history[-1] if history else None}
    checkpoint.values |= plain(found, path)[1]


def _facts(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    if "model_type" not in config and "architectures" not in config:
        return
    checkpoint.naming = checkpoint.naming or "huggingface"
    inner = config.get("text_config")
    levels = [config, inner] if isinstance(inner, dict) else [config]
    for fact, words in _FACTS.items():
        for level in levels:
            value = next((level[word] for word in words if isinstance(level.get(word), (int, bool))), None)
            if value is not None:
                checkpoint.facts.setdefault(fact, value)
                break
