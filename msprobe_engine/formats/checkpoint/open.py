"""Opens a checkpoint of any known format: tells which one it is, follows the files that name the newest one, and calls its reader.

A reader is a module with ``read_checkpoint(path, trust) -> Checkpoint``; it is imported when its format is met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import DAMAGED
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.checkpoint.files.small_files import entries, read_text
from msprobe_engine.formats.checkpoint.model import Checkpoint

_MEGATRON_TRACKER, _DEEPSPEED_TRACKER = "latest_checkpointed_iteration.txt", "latest"
_ZIP, _PROTOBUF = b"PK\x03\x04", b"\x0a"
_ENCRYPTED, _OF_MINDSPORE = b"\x5e\x3a\x7f", b'"format":"ms"'
"""Of MindSpore: bytes 1 to 4 of a file that was saved with a key; in the header of a safetensors file."""
_INSIDE = re.compile(r"\.metadata|.*\.distcp|.*\.index(\.[\w-]+)?\.json|latest(_checkpointed_iteration\.txt)?|metadata\.json")
"""Files that hold nothing by themselves: the directory they are in is meant."""
_SAVE = re.compile(r"checkpoint[-_]([0-9]{1,12})")
"""``checkpoint-500`` (``transformers/trainer.py``), ``checkpoint_3`` (Accelerate); they leave no file that names the newest."""
_MAX_SHOWN = 8
_DEPTH = 3  # lightning_logs/version_0/checkpoints/epoch=0-step=8.ckpt
_MOST_ENTRIES = 1000


class Format(NamedTuple):
    """A format and how it is recognised.

    Attributes:
        name: in messages.
        module: the reader, a module of this package.
        fits: whether a path is of this format, given the names of what is in it (none for a file).
    """

    name: str
    module: str
    fits: Callable[[Path, frozenset[str]], bool]


def _any(names: Collection[str], pattern: str) -> bool:
    found = re.compile(pattern)
    return any(found.fullmatch(name) for name in names)


def _head(path: Path, count: int = 4) -> bytes:
    try:
        with open_input(path) as file:
            return file.read(count)
    except OSError:
        return b""


def _is_mindspore(path: Path, names: frozenset[str]) -> bool:
    if not names:
        head = _head(path, 256)
        return (path.suffix == ".ckpt" and (head[:1] == _PROTOBUF or head[1:4] == _ENCRYPTED)) or (
            path.suffix == ".safetensors" and _OF_MINDSPORE in head
        )
    ranks = [path / name for name in names if re.fullmatch(r"rank_\d+", name)]
    if any(_any(entries(rank), r".*\.(ckpt|safetensors)") for rank in ranks if rank.is_dir()):
        return True
    files = [path / name for name in sorted(names) if name.endswith((".ckpt", ".safetensors"))]
    return any(file.is_file() and _is_mindspore(file, frozenset()) for file in files[:64])


def _is_legacy_megatron(path: Path, names: frozenset[str]) -> bool:
    ranks = (path / name for name in names if re.fullmatch(r"mp_rank_\d+(_\d+){0,2}", name))
    return any(rank.is_dir() and _any(entries(rank), r"(model_optim_rng|model_rng|distrib_optim)\.pt") for rank in ranks)


def _is_universal(path: Path, names: frozenset[str]) -> bool:
    zero = path / "zero"
    if "zero" not in names or not zero.is_dir():
        return False
    return any((zero / name / "fp32.pt").is_file() for name in sorted(entries(zero))[:64])


def _is_files(path: Path, names: frozenset[str]) -> bool:
    if not names:
        return path.suffix in (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".pkl", ".tar") or _head(path) == _ZIP
    if _any(names, r".*\.safetensors(\.index\.json)?|(pytorch_|adapter_)?model.*\.bin(\.index\.json)?|pytorch_model_fsdp.*"):
        return True
    return "trainer_state.json" in names or ("optimizer.bin" in names and _any(names, r"random_states_\d+\.pkl"))


def _is_dcp(_: Path, names: frozenset[str]) -> bool:
    return ".metadata" in names or _any(names, r"__\d+_\d+\.distcp")


FORMATS = (
    Format("Megatron distributed checkpoint", "torch_dist.reader", lambda _, names: "metadata.json" in names),
    Format("torch distributed checkpoint (DCP)", "dcp.reader", _is_dcp),
    Format("Megatron torch", "megatron.reader", _is_legacy_megatron),
    Format("DeepSpeed universal", "deepspeed.universal", _is_universal),
    Format("DeepSpeed", "deepspeed.reader", lambda _, names: _any(names, r".*_model_states\.pt")),
    Format("MindSpore", "mindspore.reader", _is_mindspore),
    Format("files of Hugging Face or torch.save", "files.reader", _is_files),
)
"""In the order in which they are tried."""


def open_checkpoint(path: Path | str, trust: Collection[str] = ()) -> Checkpoint:
    """What a checkpoint holds, whatever its format; no tensor data are read.

    Args:
        path: a checkpoint's file or directory, or the directory of a run, whose newest checkpoint is taken as its own tracker file
            (``latest_checkpointed_iteration.txt``, ``latest``) says.
        trust: names (``module.Class``) that its pickles may hold beyond the known ones; nothing is executed either way.

    Raises:
        DumpFormatError: there is no checkpoint of a known format, it is damaged, or holds something that is not known.
    """
    root = Path(path)
    chosen, notes = locate(root)
    found = reader_of(chosen)
    try:
        reader = import_module(f"msprobe_engine.formats.checkpoint.{found.module}")
        checkpoint: Checkpoint = reader.read_checkpoint(chosen, trust)
    except DAMAGED as error:
        text = f"{type(error).__name__}: {error}"[:120]
        raise DumpFormatError(
            f"{chosen}: cannot be read as a checkpoint of the format '{found.name}' ({one_line(text)}); its files are damaged, do not "
            "belong together, or are of a version that is not known. --debug shows where it was noticed"
        ) from error
    checkpoint.notes[:0] = notes
    if found.module != "files.reader" and chosen.is_dir():
        from msprobe_engine.formats.checkpoint.files.trainer_files import add_trainer_files

        for directory in dict.fromkeys((root, chosen)):  # the Trainer leaves its own files beside a DeepSpeed tag and in FSDP's directory
            if directory.is_dir():
                add_trainer_files(checkpoint, directory, trust)
    return checkpoint


def reader_of(path: Path) -> Format:
    """The format of a file or directory.

    Raises:
        DumpFormatError: none fits.
    """
    found = _format(path)
    if found is None:
        raise DumpFormatError(_describe_unrecognised(path))
    return found


def locate(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a path means, and notes on how it was chosen.

    Raises:
        DumpFormatError: there is no such path, a tracker file names what is not there, or there are several checkpoints.
    """
    if not path.exists():
        raise DumpFormatError(f"{path}: there is no such file or directory; give a checkpoint or the directory a run saves them to")
    if not path.is_dir():
        if not path.is_file():
            raise DumpFormatError(f"{path}: is no regular file; give a checkpoint or the directory a run saves them to")
        if _INSIDE.fullmatch(path.name):
            return locate(path.parent)
        return path, []
    names = entries(path)
    if _MEGATRON_TRACKER in names:
        return _megatron(path), []
    if _DEEPSPEED_TRACKER in names and (path / _DEEPSPEED_TRACKER).is_file():
        return _tag(path), []
    if _format(path) is not None:
        return path, []
    inside = _checkpoints_in(path, _DEPTH)
    if len(inside) == 1:
        chosen, notes = locate(inside[0])
        return chosen, [f"{path} holds one checkpoint, {one_line(str(inside[0].relative_to(path)))}, which is taken", *notes]
    if newest := _newest_of(inside):
        chosen, notes = locate(newest)
        name = one_line(str(newest.relative_to(path)))
        return chosen, [f"{path} holds {len(inside)} checkpoints; the newest by its number, {name}, is taken", *notes]
    if inside:
        shown = ", ".join(one_line(str(found.relative_to(path))) for found in inside[:_MAX_SHOWN]) + (" ..." if inside[_MAX_SHOWN:] else "")
        raise DumpFormatError(f"{path}: holds {len(inside)} checkpoints ({shown}) and no file that names one; give one of them")
    raise DumpFormatError(_describe_unrecognised(path))


def meant(path: Path) -> list[Path]:
    """What a path stands for as files: itself, and the directory of a file that holds nothing by itself."""
    return [path, path.parent] if path.is_file() and _INSIDE.fullmatch(path.name) else [path]


def _newest_of(found: list[Path]) -> Path | None:
    """Of the saves of one run, as Trainer and Accelerate call them, that of the highest number; None: they are something else."""
    numbers = {int(name[1]): path for path in found if (name := _SAVE.fullmatch(path.name))}
    if len(numbers) < len(found) or len({path.parent for path in found}) > 1:
        return None
    return numbers[max(numbers)] if numbers else None


def _checkpoints_in(path: Path, depth: int) -> list[Path]:
    """Checkpoints below a directory, by name; nothing is looked for inside of one."""
    found: list[Path] = []
    for name in sorted(entries(path))[:_MOST_ENTRIES]:
        inner = path / name
        if _is_checkpoint(inner):
            found.append(inner)
        elif depth > 1 and inner.is_dir() and not inner.is_symlink():
            found += _checkpoints_in(inner, depth - 1)
    return found


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        names = entries(path)
        return bool(names & {_MEGATRON_TRACKER, _DEEPSPEED_TRACKER}) or _format(path) is not None
    return path.suffix in (".ckpt", ".pt", ".pth") and _format(path) is not None


def _format(path: Path) -> Format | None:
    names = frozenset(entries(path)) if path.is_dir() else frozenset()
    if path.is_dir() and not names:
        return None
    return next((kind for kind in FORMATS if kind.fits(path, names)), None)


def _megatron(root: Path) -> Path:
    """The iteration that Megatron's tracker file names (``megatron/training/checkpointing.py``, ``read_metadata``)."""
    tracker = root / _MEGATRON_TRACKER
    text = read_text(tracker, 100).strip()
    if text != "release" and not re.fullmatch(r"[0-9]{1,12}", text):
        raise DumpFormatError(f"{tracker}: holds {one_line(text)[:60]!r}; an iteration number or 'release' should be there")
    found = root / (text if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise DumpFormatError(f"{tracker}: names {found.name}, which is not there; give another iteration's directory, or copy it")
    return found


def _tag(root: Path) -> Path:
    """The tag that DeepSpeed's file ``latest`` names."""
    tracker = root / _DEEPSPEED_TRACKER
    text = read_text(tracker, 1000).strip()
    if not text or text in (".", "..") or "/" in text or "\\" in text or "\0" in text:
        raise DumpFormatError(f"{tracker}: holds {one_line(text)[:60]!r}; the name of a directory beside it should be there")
    if not (root / text).is_dir():
        raise DumpFormatError(f"{tracker}: names {one_line(text)}, which is not there; give another directory, or copy it")
    return root / text


def _describe_unrecognised(path: Path) -> str:
    if path.is_dir():
        names = sorted(entries(path))
        shown = ", ".join(one_line(name) for name in names[:_MAX_SHOWN]) or "nothing"
        what = f"holds {shown}{' ...' if len(names) > _MAX_SHOWN else ''}"
    else:
        what = "is a file of another kind"
    return (
        f"{path}: {what}; no checkpoint is recognised. Known are Megatron (iter_N with mp_rank_*, or torch_dist), torch DCP (.metadata), "
        "DeepSpeed (*_model_states.pt, universal), Hugging Face (safetensors, bin), Lightning .ckpt, MindSpore .ckpt and single .pt files"
    )
