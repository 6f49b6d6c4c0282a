"""Reads files of whole tensors: single ones, Hugging Face directories, checkpoints of its Trainer and of Accelerate, Lightning, PEFT.

A directory holds the weights in one file or in shards with an index (``{"weight_map": {name: file}}``), optimizer states by number of the
parameter (``optimizer.pt``, ``optimizer.bin``) or, of FSDP, in directories of DCP, and what `trainer_files` reads.

Tensors that lie in pieces over several safetensors files, as torch's distributed checkpoint writes them for Hugging Face.

``HuggingFaceStorageWriter`` (``torch/distributed/checkpoint/hf_storage.py``) leaves in the metadata of each file where its pieces belong:
``DCP_SHARDING_INFO``, JSON text, ``{name: {"saved_offsets": [17, 0]}}``. The size of the whole is not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.checkpoint.files.small_files import entries, read_json
from msprobe_engine.formats.checkpoint.files.trainer_files import add_trainer_files, make_stored_tensor
from msprobe_engine.formats.checkpoint.files.tree_parts import add_optimizer, add_state_dict, add_training_state
from msprobe_engine.formats.checkpoint.model import MODEL, Box, Checkpoint, StoredTensor
from msprobe_engine.formats.checkpoint.optimizer_names import is_optimizer
from msprobe_engine.formats.tensors.opaque_objects import Inert, attributes
from msprobe_engine.formats.tensors.pt_parts import is_size
from msprobe_engine.formats.tensors.safetensors_file import SafeFile, read_safetensors
from msprobe_engine.formats.tensors.torch_file import FileTensor, plain, read_torch

_WEIGHTS = (
    r"model\.safetensors",
    r"model\.[\w-]+\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model\.[\w-]+\.bin",
    r"pytorch_model_fsdp\.bin",
    r"adapter_model\.safetensors",
    r"adapter_model\.bin",
)
"""File of the weights, or what its index and its shards are called after; the first that is there."""
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\..+)")
_MORE_MODELS = re.compile(r"(?:model|pytorch_model|pytorch_model_fsdp)_(\d+)\.(?:safetensors|bin)")
_OPTIMIZERS = re.compile(r"optimizer(?:_(\d+))?\.(?:pt|bin)")
_RANK_FILE = re.compile(r"model_optim_rng\.pt|distrib_optim\.pt|.*_(model|optim)_states\.pt")
_MOST_MODULES = 100_000
_FSDP = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:
    """Read a file or a directory; see `msprobe_engine.formats.checkpoint.open.open_checkpoint`."""
    return _read_directory(path, trust) if path.is_dir() else _read_file(path, trust)


def _read_file(path: Path, trust: Collection[str]) -> Checkpoint:
    if path.suffix == ".safetensors":
        out = Checkpoint(path, "safetensors", files=[path])
        _add_safetensors(out, path)
        if (path.parent / "config.json").is_file():
            # Facts of the model from the ``config.json`` beside a single file; its values are no part of that file
            beside = Checkpoint(path.parent, "")
            add_trainer_files(beside, path.parent, only=("config.json",))
            out.facts, out.naming = beside.facts, beside.naming
        return out
    tree = read_torch(path, trust).tree
    if isinstance(tree, dict) and "state_dict" in tree and "pytorch-lightning_version" in tree:
        out = Checkpoint(path, "Lightning", files=[path])
    else:
        out = Checkpoint(path, "torch file", files=[path])
    add_training_state(out, _unwrap_object(tree))
    if _RANK_FILE.fullmatch(path.name):
        out.notes.append(f"{path}: is the file of one rank; give its directory to have the whole model, with states by parameter")
    if not out.tensors:
        out.notes.append(f"{path}: holds no tensors; only its {len(out.values)} values can be compared")
    return out


def _unwrap_object(tree: Any) -> Any:
    """The dict of an object that was saved whole; a module that was saved whole by its parameters."""
    if not isinstance(tree, Inert):
        return tree
    return _of_module(tree) if "_parameters" in attributes(tree) else attributes(tree)


def _of_module(module: Inert) -> dict[str, Any]:
    """Parameters and buffers of a ``torch.nn.Module`` that was saved itself, named as its ``state_dict`` does."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Inert, int]] = [("", module, 0)]
    count = 0
    while waiting:
        prefix, inner, depth = waiting.pop()
        if (count := count + 1) > _MOST_MODULES:
            raise DumpFormatError(
                f"{prefix[:80]}: a module with more than {_MOST_MODULES} modules in it; it is damaged or made to take for ever"
            )
        state = attributes(inner)
        for part in ("_parameters", "_buffers"):
            found |= {prefix + name: tensor for name, tensor in attributes(state.get(part)).items() if isinstance(tensor, FileTensor)}
        children = [
            (f"{prefix}{name}.", child, depth + 1) for name, child in attributes(state.get("_modules")).items() if isinstance(child, Inert)
        ]
        if depth < 100:
            waiting.extend(reversed(children))
    return found


def _read_directory(path: Path, trust: Collection[str]) -> Checkpoint:
    names = entries(path)
    out = Checkpoint(path, _kind(names))
    weights = next((found for pattern in _WEIGHTS if (found := _files_of(path, names, pattern))), None)
    if weights is not None:
        _add_weights(out, path, names, weights, trust)
    else:
        _add_all_files(out, path, names)
    ordered = not any(file.suffix == ".safetensors" for file in out.files)
    for name in sorted(names):
        if more := _MORE_MODELS.fullmatch(name):
            _add_file(out, path / name, trust, f"model_{more[1]}.")
        elif (part := _FSDP.fullmatch(name)) and (path / name / ".metadata").is_file():
            _add_dcp(out, path / name, f"model_{part[2]}." if int(part[2]) else "", trust)
    for name in sorted(names):
        if states := _OPTIMIZERS.fullmatch(name):
            file = path / name
            tree = read_torch(file, trust).tree
            out.files.append(file)
            if is_optimizer(tree):
                add_optimizer(out, tree, "optimizer" if states[1] is None else f"optimizer_{states[1]}", ordered, int(states[1] or 0))
    add_trainer_files(out, path, trust)
    if not out.tensors and not out.problems:
        raise DumpFormatError(f"{path}: holds no weights ({', '.join(sorted(map(one_line, names))[:8])})")
    return out


def _kind(names: Collection[str]) -> str:
    if "trainer_state.json" in names:
        return "Hugging Face Trainer"
    if any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in names):
        return "Accelerate"
    return "PEFT adapter" if "adapter_config.json" in names else "Hugging Face"


def _files_of(path: Path, names: Collection[str], pattern: str) -> list[str] | None:
    """The file, index or shards of weights of one name."""
    stem, _, suffix = pattern.rpartition(r"\.")
    expected = re.compile(rf"({pattern}|{stem}\.{suffix}\.index(\.[\w-]+)?\.json|{stem}-\d{{5,6}}-of-\d{{5,6}}\.{suffix})")
    found = sorted(name for name in names if expected.fullmatch(name) and not (path / name).is_dir())
    return found or None


def _add_weights(out: Checkpoint, path: Path, names: Collection[str], weights: list[str], trust: Collection[str]) -> None:
    index = next((name for name in weights if name.endswith(".json")), None)
    shards = [name for name in weights if _SHARD.fullmatch(name)]
    used: set[str] = set()
    if index is not None and (shards or len(weights) == 1):
        used = _add_indexed(out, path, index, trust)
    elif shards:
        _add_shards(out, path, shards, trust)
    else:
        _add_file(out, path / weights[0], trust)
    used |= {file.name for file in out.files}
    others = sorted(
        name for name in names if name not in used and any(re.fullmatch(pattern, name) or _SHARD.fullmatch(name) for pattern in _WEIGHTS)
    )
    if others:
        shown = ", ".join(map(one_line, others[:4])) + (" ..." if len(others) > 4 else "")
        out.notes.append(f"{path}: more files of weights ({shown}) are not read; {weights[0]} is")


def _add_all_files(out: Checkpoint, path: Path, names: Collection[str]) -> None:
    """Safetensors files of any names, each tensor once, or in pieces."""
    found = {path / name: read_safetensors(path / name) for name in sorted(names) if name.endswith(".safetensors")}
    out.files += found
    pieces = {file: content for file, content in found.items() if has_pieces(content)}
    for file in found:
        if file not in pieces:
            _add_safetensors(out, file)
    add_pieces(out, pieces)


def _add_indexed(out: Checkpoint, path: Path, index: str, trust: Collection[str]) -> set[str]:
    """The tensors that an index names, each from the file that it names; gives the names of these files, read or not."""
    found = read_json(path / index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise DumpFormatError(f"{path / index}: has no 'weight_map' of names to files; it is damaged or no index of weights")
    out.files.append(path / index)
    by_file: dict[str, list[str]] = {}
    for tensor, name in found.items():
        by_file.setdefault(name, []).append(tensor)
    for name, wanted in sorted(by_file.items()):
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\\" in name or "\0" in name:
            raise DumpFormatError(
                f"{path / index}: names the file {one_line(name)[:80]!r}, which is not inside the checkpoint; nothing is read"
            )
        try:
            tensors = _tensors_of(out, path / inside, trust)
        except DumpFormatError as error:
            out.problems.append(f"{error} ({len(wanted)} tensors, among them {wanted[0]})")
            out.lost |= dict.fromkeys(wanted, f"{path / inside} is missing or damaged")
            continue
        out.files.append(path / inside)
        missing = [tensor for tensor in wanted if tensor not in tensors]
        if missing:
            out.problems.append(f"{path / inside}: lacks {len(missing)} tensors that {index} says are in it, among them {missing[0]}")
            out.lost |= dict.fromkeys(missing, f"{path / inside} lacks what {index} says is in it")
        named = set(wanted)
        for tensor in tensors:  # in the order of the file, which for .bin is that of the module
            if tensor in named:
                out.add(make_stored_tensor(tensor, tensors[tensor], MODEL))
        more = len(tensors) - (len(wanted) - len(missing))
        if more:
            out.notes.append(f"{path / inside}: holds {more} tensors that {index} does not name; they are not read")
    return set(by_file)


def _add_shards(out: Checkpoint, path: Path, shards: list[str], trust: Collection[str]) -> None:
    """Shards without an index."""
    numbers = {int(found[2]) for name in shards if (found := _SHARD.fullmatch(name))}
    total = max(int(found[3]) for name in shards if (found := _SHARD.fullmatch(name)))
    missing = sorted(set(range(1, total + 1)) - numbers) if total < 100_000 else []
    if missing:
        out.problems.append(f"{path}: {len(missing)} of {total} shards are missing, the first is number {missing[0]}")
        out.lost[""] = f"{path} lacks {len(missing)} of {total} shards, and no index says what is in them"
    for name in shards:
        _add_file(out, path / name, trust)


def _add_file(out: Checkpoint, file: Path, trust: Collection[str], prefix: str = "") -> None:
    if file.suffix == ".safetensors":
        _add_safetensors(out, file, prefix)
    else:
        add_state_dict(out, read_torch(file, trust).tree, prefix)
    out.files.append(file)


def _add_safetensors(out: Checkpoint, file: Path, prefix: str = "") -> None:
    for name, tensor in _tensors_of(out, file, ()).items():
        out.add(make_stored_tensor(prefix + name, tensor, MODEL))


def _tensors_of(out: Checkpoint, file: Path, trust: Collection[str]) -> dict[str, FileTensor]:
    if file.suffix == ".safetensors":
        found = read_safetensors(file)
        if found.raw:
            out.notes.append(
                f"{file}: {len(found.raw)} tensors are of types that are not known, among them {found.raw[0]}; compared as bytes"
            )
        if found.nobodys:
            out.notes.append(f"{file}: {found.nobodys:,} bytes in it are of no tensor that its header names; they are not compared")
        return found.tensors
    return plain(read_torch(file, trust).tree)[0]


def _add_dcp(out: Checkpoint, directory: Path, prefix: str, trust: Collection[str]) -> None:
    """Weights or optimizer states that FSDP wrote into a directory of DCP inside the checkpoint."""
    from msprobe_engine.formats.checkpoint.dcp import reader

    found = reader.read_checkpoint(directory, trust)
    for tensor in found.tensors.values():
        out.add(replace(tensor, name=prefix + tensor.name))
    out.values |= {prefix + name: value for name, value in found.values.items()}
    out.files += found.files
    out.notes += found.notes
    out.problems += found.problems


_KEY = "DCP_SHARDING_INFO"


def has_pieces(file: SafeFile) -> bool:
    """Whether the tensors of a file are pieces."""
    return _KEY in file.metadata


def add_pieces(out: Checkpoint, files: Mapping[Path, SafeFile]) -> None:
    """Take in the tensors whose pieces lie in `files`.

    Raises:
        DumpFormatError: what a file says of its pieces is damaged.
    """
    boxes: dict[str, list[Box]] = {}
    dtypes: dict[str, str] = {}
    for path, file in files.items():
        places = _places(path, file)
        for name, tensor in file.tensors.items():
            offsets = places[name]
            if len(offsets) != len(tensor.shape):
                raise DumpFormatError(f"{path}: {name} has {len(tensor.shape)} dimensions and begins at {list(offsets)}; it is damaged")
            boxes.setdefault(name, []).append(Box(offsets, tensor.shape, path, tensor.start, tensor.strides))
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise DumpFormatError(f"{path}: {name} is {tensor.dtype}, in other files {dtypes[name]}; the files do not belong together")
    for name, found in boxes.items():
        if len({len(box.sizes) for box in found}) > 1:
            raise DumpFormatError(f"{out.path}: pieces of {name} have other numbers of dimensions; the files do not belong together")
        shape = tuple(max(box.offsets[d] + box.sizes[d] for box in found) for d in range(len(found[0].sizes)))
        if sum(box.numel for box in found) != math.prod(shape):
            out.problems.append(
                f"{out.path}: the {len(found)} pieces of {name} do not fill {list(shape)}; a file is missing or there twice"
            )
        found.sort(key=lambda box: box.offsets)
        out.add(StoredTensor(name, shape, dtypes[name], tuple(found), group=MODEL))


def _places(path: Path, file: SafeFile) -> dict[str, tuple[int, ...]]:
    try:
        said: Any = parse_json(file.metadata[_KEY])
    except ValueError:
        said = None
    found: dict[str, tuple[int, ...]] = {}
    for name in file.tensors:
        entry = said.get(name) if isinstance(said, dict) else None
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not all(map(is_size, offsets)):
            raise DumpFormatError(f"{path}: its {_KEY} does not say where the piece of {name} belongs; it is damaged")
        found[name] = tuple(offsets)
    return found
