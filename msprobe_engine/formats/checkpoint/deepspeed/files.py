"""The files of a DeepSpeed checkpoint, told by their names (``deepspeed/runtime/engine.py``, ``_get_ckpt_name`` and its neighbours;
``deepspeed/runtime/pipe/module.py``, ``ckpt_layer_path``)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.files.small_files import entries
from msprobe_engine.formats.tensors.torch_file import UnknownNameError, read_torch

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(bf16|fp16)_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")


@dataclass
class Listing:
    """Files by what they hold. Ranks: ``mp`` counts tensor parallel within pipeline stages, ``dp`` data parallel.

    Attributes:
        model: ``(mp, dp)`` -> states of the model; `dp` is None before stage 3, where all ranks have the same.
        optimizer: ``(mp, dp)`` -> a rank's part of ZeRO's optimizer.
        layers: ``(layer, tensor parallel rank)`` -> a layer of a pipeline.
        experts: ``(layer of experts, expert, mp)`` -> an expert.
        expert_optimizer: ``(mp, expert parallel rank)`` -> the optimizer without ZeRO.
        other: names of what is none of these.
        doubled: names of files beside another one for the same rank: of bf16 and of another precision.
    """

    model: dict[tuple[int, int | None], Path] = field(default_factory=dict)
    optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    expert_optimizer: dict[tuple[int, int], Path] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)

    @property
    def mp_ranks(self) -> list[int]:
        return sorted({mp for mp, _ in self.model} | {mp for mp, _ in self.optimizer})


def list_files(directory: Path) -> Listing:
    """Which files a checkpoint (a tag's directory) has.

    Raises:
        DumpFormatError: the directory cannot be read.
    """
    found = Listing()
    for name in sorted(entries(directory)):
        path = directory / name
        if match := _MODEL.fullmatch(name):
            found.model[int(match[2]), None if match[1] is None else int(match[1])] = path
        elif match := _OPTIMIZER.fullmatch(name):
            key = int(match[3]), int(match[2])
            if key in found.optimizer:
                found.doubled.append(name)
            else:
                found.optimizer[key] = path
        elif match := _LAYER.fullmatch(name):
            found.layers[int(match[1]), int(match[2] or 0)] = path
        elif match := _EXPERT.fullmatch(name):
            found.experts[int(match[1] or 0), int(match[2]), int(match[3])] = path
        elif match := _EXPERT_OPTIMIZER.fullmatch(name):
            found.expert_optimizer[int(match[2]), int(match[1])] = path
        else:
            found.other.append(name)
    return found


@dataclass
class Reading:
    """Reads files one after the other and keeps what is wrong with them.

    Attributes:
        trust: see `read_torch`.
        notes, problems: as of a `Checkpoint`.
    """

    trust: Collection[str] = ()
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def content(self, path: Path) -> Any:
        """What a file holds; None, and a problem, where it cannot be read. What is refused as unsafe is never passed over.

        Raises:
            UnknownNameError: the file names what checkpoints do not hold.
        """
        try:
            found = read_torch(path, self.trust)
        except UnknownNameError:
            raise
        except DumpFormatError as error:
            self.problems.append(str(error))
            return None
        self.files.append(path)
        return found.tree

    def tree(self, path: Path) -> dict[str, Any] | None:
        """The dict that a file holds; as `content`."""
        found = self.content(path)
        if isinstance(found, dict) or found is None:
            return found
        self.problems.append(f"{path}: holds a {type(found).__name__}, and a dict should be there; it is of something else")
        return None
