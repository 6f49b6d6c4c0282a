"""Reads checkpoints of MindSpore: a file, a directory of saves, or ``rank_*`` directories of a distributed training.

Tensors come out under their tags. An optimizer's states have the name of their parameter behind a word (``moment1.fc.weight``,
``adam_m.fc.weight``). Ranks are put together where a strategy file says how they cut the parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.words import some
from msprobe_engine.formats.checkpoint.files.small_files import entries, read_json
from msprobe_engine.formats.checkpoint.mindspore.file import FileTensor, MindSporeFile, number_of, read_file
from msprobe_engine.formats.checkpoint.mindspore.strategy import Layout, read_strategy, strategy_files
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, Box, Checkpoint, Index, StoredTensor

_MAP = "param_name_map.json"
_RANK = re.compile(r"rank_(\d{1,6})")
_SAVE = re.compile(r"(?P<prefix>.*?)(?:-(?P<epoch>\d{1,12})_(?P<step>\d{1,12}))?(?:_breakpoint)?\.(?:ckpt|safetensors)")
_STATES = frozenset({
    "accum", "accum_update", "accu_grads", "adam_m", "adam_v", "exp_avg", "exp_avg_sq", "exp_inf", "lamb_m", "lamb_v", "linear",
    "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1", "moment2", "moments", "moments1", "moments2",
    "momentum_buf", "momentum_buffer", "prev", "square_avg", "stat", "step_size", "vhat",
})  # fmt: skip
"""Prefixes of the states in ``mindspore/nn/optim``, ``mint/optim`` and ``experimental/optim``."""
_SETTINGS = frozenset({"beta1_power", "beta2_power", "momentum", "weight_decay"})
_COUNTERS = frozenset({"global_step", "current_iterator_step", "last_overflow_iterator_step", "state_step"})
_LEARNING_RATE = re.compile(r"learning_rate(?:_group_(\d{1,4}))?")


def read_checkpoint(path: Path, trust: Collection[str] = ()) -> Checkpoint:  # noqa: ARG001  # no pickles here; all readers are called alike
    """The checkpoint in a file or a directory.

    Raises:
        DumpFormatError: nothing can be read, it is encrypted, or of something else.
    """
    found = Checkpoint(path, "MindSpore")
    if not path.is_dir():
        _add(found, {0: read_file(path)}, {})
        return found
    ranks = {int(match[1]): path / name for name in entries(path) if (match := _RANK.fullmatch(name)) and (path / name).is_dir()}
    if ranks:
        _read_ranks(found, ranks)
    elif (path / _MAP).is_file():
        _read_parts(found)
    else:
        _add(found, {0: read_file(_newest(path, found))}, {})
    return found


def _read_parts(found: Checkpoint) -> None:
    """Files that ``mindspore.unified_safetensors`` wrote, and the map of what lies in which."""
    places = {
        str(name): str(file)
        for name, file in read_json(found.path / _MAP).items()
        if isinstance(file, str) and file.endswith(".safetensors")
    }
    tensors: dict[str, FileTensor] = {}
    there = entries(found.path)
    for name in sorted(set(places.values())):
        if name not in there:
            found.problems.append(f"{found.path / name}: is not there, and {_MAP} names it for {list(places.values()).count(name)} tensors")
            continue
        part = read_file(found.path / name)
        found.files.append(part.path)
        found.notes += part.notes
        tensors |= {tag: held for tag, held in part.tensors.items() if tag not in tensors}
    gone = [name for name, file in places.items() if file in there and name not in tensors]
    if gone:
        found.problems.append(f"{found.path}: {_MAP} names {len(gone)} tensors that are in none of the files, the first {gone[0][:80]}")
    _add(found, {0: MindSporeFile(found.path / _MAP, tensors)}, {})


def _read_ranks(found: Checkpoint, ranks: Mapping[int, Path]) -> None:
    files: dict[int, MindSporeFile] = {}
    for rank, directory in sorted(ranks.items()):
        try:
            files[rank] = read_file(_newest(directory, found))
        except DumpFormatError as error:
            found.problems.append(str(error))
    if not files:
        raise DumpFormatError(found.problems[0])
    saves = {rank: _save(file.path.name) for rank, file in files.items()}
    newest = max(saves.values())
    stale = [str(files[rank].path) for rank, save in saves.items() if save != newest]
    if stale:
        found.problems.append(
            f"{some(stale, 4)}: the newest save of these ranks is older than epoch {newest[0]}, step {newest[1]}, which others have"
        )
    gone = sorted(set(range(max(ranks) + 1)) - set(ranks))
    if gone:
        shown = some([f"rank_{rank}" for rank in gone], 4)
        found.problems.append(f"{found.path}: {shown} missing; what these ranks hold cannot be compared")
    layouts: dict[str, Layout] = {}
    for file in strategy_files(found.path):
        try:
            layouts |= {name: layout for name, layout in read_strategy(file).items() if name not in layouts}
            found.files.append(file)
        except DumpFormatError as error:
            found.problems.append(str(error))
    _add(found, files, layouts)


def _newest(directory: Path, found: Checkpoint) -> Path:
    """The newest save in a directory: of the highest epoch and step in its name (``{prefix}-{epoch}_{step}.ckpt``).

    Raises:
        DumpFormatError: there is none, or several without these numbers.
    """
    names = [name for name in sorted(entries(directory)) if name.endswith((".ckpt", ".safetensors")) and "strategy" not in name]
    names = [name for name in names if (directory / name).is_file()]
    if not names:
        raise DumpFormatError(f"{directory}: holds no .ckpt and no .safetensors")
    best = max(map(_save, names))
    chosen = [name for name in names if _save(name) == best]
    if len(chosen) > 1:
        shown = ", ".join(chosen[:4])
        raise DumpFormatError(
            f"{directory}: holds {len(chosen)} files ({shown}), and no epoch and step tell which is the newest; give one of them"
        )
    if len(names) > 1:
        found.notes.append(f"{directory}: holds {len(names)} saves; the newest, {chosen[0]}, is taken")
    return directory / chosen[0]


def _save(name: str) -> tuple[int, int]:
    match = _SAVE.fullmatch(name)
    return (int(match["epoch"]), int(match["step"])) if match is not None and match["epoch"] else (-1, -1)


def _add(found: Checkpoint, files: Mapping[int, MindSporeFile], layouts: Mapping[str, Layout]) -> None:
    """Fills the checkpoint with what the ranks' files hold."""
    first = files[min(files)]
    values: dict[str, dict[int, Any]] = {}
    held: dict[str, dict[int, FileTensor]] = {}
    for rank, file in files.items():
        found.files.append(file.path)
        found.notes += file.notes
        found.problems += file.problems
        for tag, text in file.texts.items():
            values.setdefault(tag, {})[rank] = text
        for tag, tensor in file.tensors.items():
            if _is_value(tag, tensor.shape):
                values.setdefault(_value_name(tag), {})[rank] = number_of(tensor)
            else:
                held.setdefault(tag, {})[rank] = tensor
    for name, seen in values.items():
        found.values[name] = next(iter(seen.values()))
        if len(set(map(repr, seen.values()))) > 1:
            shown = ", ".join(f"rank {rank} {value!r}" for rank, value in list(seen.items())[:4])
            found.problems.append(f"{found.path}: the ranks disagree in {name}: {shown}; some files are of another step")
    wholes, notes, problems = together(held, layouts, len(files))
    found.notes += notes
    found.problems += [f"{found.path}: {text}" for text in problems]
    for tag, (tensor, copies) in wholes.items():
        apart, _, inner = tag.partition(".") if tag not in held else ("", "", tag)  # the rank, where ranks are apart
        state, name = _state(inner)
        name = f"{apart}.{name}" if apart else name
        group = OPTIMIZER if state else MODEL
        found.add(
            StoredTensor(name, tensor.shape, tensor.dtype, tensor.boxes, copies, state=state, group=group, origin=tag if state else "")
        )
    if not found.tensors:
        raise DumpFormatError(f"{first.path}: holds no tensor")


def _is_value(tag: str, shape: Index) -> bool:
    """Whether a tensor is a plain number: of ``append_dict`` or of the optimizer itself. Parameters of modules have a dot in their name."""
    return "." not in tag and (shape == () or (shape == (1,) and tag in _COUNTERS))


def _value_name(tag: str) -> str:
    match = _LEARNING_RATE.fullmatch(tag)
    if match is not None:
        return f"optimizer.param_groups.{match[1] or 0}.lr"
    return f"optimizer.{tag}" if tag in _SETTINGS else tag


def _state(tag: str) -> tuple[str, str]:
    word, dot, name = tag.partition(".")
    return (word, name) if dot and word in _STATES else ("", tag)


Whole = tuple[FileTensor, tuple[Box, ...]]
"""A tensor, and boxes that hold parts of it once more."""


def together(
    held: Mapping[str, Mapping[int, FileTensor]], layouts: Mapping[str, Layout], ranks: int
) -> tuple[dict[str, Whole], list[str], list[str]]:
    """The whole of every tensor.

    Args:
        held: tag -> rank -> what it has.
        layouts: of parameters, by name; states are cut as their parameter unless they have their own.
        ranks: how many files were read.

    Returns:
        Tensors by tag, notes, problems. Without any layout and more than one rank each rank's tensors are apart, as ``rank_3.fc.weight``.
    """
    found: dict[str, Whole] = {}
    problems: list[str] = []
    if ranks == 1:
        return {tag: (next(iter(pieces.values())), ()) for tag, pieces in held.items()}, [], []
    if not layouts:
        note = (
            f"{ranks} ranks saved and no strategy file says how they cut the parameters: each rank is compared by itself. Copy the "
            "files of strategy_ckpt_config into a directory 'strategy' beside the ranks; where every rank has the whole model, give the "
            "directory of one"
        )
        return {f"rank_{rank}.{tag}": (piece, ()) for tag, pieces in held.items() for rank, piece in sorted(pieces.items())}, [note], []
    uncut = 0
    for tag, pieces in held.items():
        layout = layouts.get(tag) or _of_parameter(tag, pieces, held, layouts)
        uncut += layout is None
        whole = _merge_ranks(tag, pieces, layout, problems)
        if whole is not None:
            found[tag] = whole
    notes = [f"{uncut} of {len(held)} tensors are in no strategy file and were taken for the same on all ranks"] if uncut else []
    return found, notes, problems


def _of_parameter(
    tag: str, pieces: Mapping[int, FileTensor], held: Mapping[str, Mapping[int, FileTensor]], layouts: Mapping[str, Layout]
) -> Layout | None:
    """The layout of a state's parameter, where they have the same shape on a rank."""
    name = tag.partition(".")[2]
    rank = min(pieces)
    same = name in held and rank in held[name] and held[name][rank].shape == pieces[rank].shape
    return layouts.get(name) if same else None


def _merge_ranks(tag: str, pieces: Mapping[int, FileTensor], layout: Layout | None, problems: list[str]) -> Whole | None:
    ranks = sorted(pieces)
    first = pieces[ranks[0]]
    if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in pieces.values()):
        problems.append(f"the ranks have {tag} in several shapes or types; their files do not belong together, and it is not compared")
        return None
    if layout is None:
        return first, tuple(box for rank in ranks[1:] for box in pieces[rank].boxes)
    if len(layout.axes) != len(first.shape):
        problems.append(
            f"the strategy of {tag} is of {len(layout.axes)} dimensions and the tensor has {len(first.shape)}; it is not compared"
        )
        return None
    cuts = layout.cuts()
    shape = tuple(size * count for size, count in zip(first.shape, cuts))
    boxes: dict[tuple[int, ...], tuple[Box, ...]] = {}
    copies: list[Box] = []
    for rank in ranks:
        offsets = tuple(number * size for number, size in zip(layout.piece(rank), first.shape))
        placed = tuple(
            replace(box, offsets=tuple(inner + outer for inner, outer in zip(box.offsets, offsets))) for box in pieces[rank].boxes
        )
        if offsets in boxes:
            copies += placed
        else:
            boxes[offsets] = placed
    if len(boxes) < math.prod(cuts):
        problems.append(f"{tag} was cut into {math.prod(cuts)} pieces and the ranks that can be read have {len(boxes)}")
    return replace(first, shape=shape, boxes=tuple(box for part in boxes.values() for box in part)), tuple(copies)
