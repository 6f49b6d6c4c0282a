"""What each model parallel rank of a DeepSpeed checkpoint has: its weights, and the optimizer states that its data parallel ranks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.deepspeed.experts import expert_optimizers, expert_weights, stack_experts, teams
from msprobe_engine.formats.checkpoint.deepspeed.files import Listing, Reading
from msprobe_engine.formats.checkpoint.deepspeed.model import ModelFile, model_file
from msprobe_engine.formats.checkpoint.deepspeed.parallel import Cuts, together
from msprobe_engine.formats.checkpoint.deepspeed.unpartitioned_states import read_unpartitioned_states
from msprobe_engine.formats.checkpoint.deepspeed.zero_partitions import Slot, of_pieces
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import RankFile, rank_file
from msprobe_engine.formats.checkpoint.deepspeed.zero_states import MASTER, states_of
from msprobe_engine.formats.checkpoint.files.trainer_files import make_stored_tensor
from msprobe_engine.formats.checkpoint.model import MODEL, Index, StoredTensor

Tensors = dict[str, StoredTensor]
Layers = Mapping[str, Mapping[int, Sequence[StoredTensor]]]
"""Name of a parameter of a pipeline -> tensor parallel rank -> its tensors, several of tied layers."""


@dataclass
class Part:
    """A model parallel rank: a tensor parallel piece of a pipeline stage.

    Attributes:
        mp: its number; tensor parallel ranks are counted first.
        models: the model's files, by data parallel rank; one (under 0) before stage 3.
        ranks: the optimizer's files, by data parallel rank.
        tensors: what they make together, by key.
    """

    mp: int
    models: dict[int, ModelFile] = field(default_factory=dict)
    ranks: dict[int, RankFile] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)

    @property
    def head(self) -> ModelFile:
        return self.models[min(self.models)]

    def count_optimized_elements(self) -> dict[str, int]:
        """Elements of the parameters that ZeRO's optimizer has, by name."""
        if self.head.shapes or not self.ranks:
            return {name: math.prod(shape) for group in self.head.shapes for name, shape in group.items()}
        return {name: numel for group in self._fragments() for name, numel in group.items()}

    def _fragments(self) -> list[dict[str, int]]:
        """Parameters of each group in the order of the flat vector, and the elements of them that the ranks have."""
        found: list[dict[str, int]] = []
        for _, file in sorted(self.ranks.items()):
            for group, fragments in enumerate(file.fragments):
                if group == len(found):
                    found.append({})
                for name, (_, numel) in sorted(fragments.items(), key=lambda item: item[1]):
                    found[group][name] = found[group].get(name, 0) + numel
        return found

    def fill(self, files: Listing, stage: int, dp_size: int, layers: Sequence[StoredTensor], reading: Reading) -> None:
        """Makes `tensors`.

        Args:
            dp_size: data parallel ranks.
            layers: of a pipeline, as this tensor parallel rank has them; all stages.

        Raises:
            DumpFormatError: the files hold a parameter twice.
        """
        head = self.head
        for name, tensor in head.weights.items():
            if stage != 3 or name in head.buffers or tensor.numel:
                self._add(make_stored_tensor(name, tensor, MODEL))
        if stage == 3:
            self._copies_of_buffers()
            self._add_frozen(dp_size)
        for found in expert_weights(files, self.mp, head, reading):
            self._add(found)
        weights = [tensor for tensor in self.tensors.values() if tensor.name not in head.buffers] or list(layers)
        if self.ranks:
            self._zero(weights, stage, dp_size, reading)
        elif any(mp == self.mp for mp, _ in files.expert_optimizer):
            for found in expert_optimizers(files, self.mp, head, weights, reading):
                self._add(found)
        elif head.optimizer is not None:
            for found in read_unpartitioned_states(head.optimizer, weights, head.values, reading.notes):
                self._add(replace(found, name=f"mp_rank_{self.mp:02d}.{found.name}") if layers and found.name.startswith("#") else found)
        self.tensors = stack_experts(self.tensors)
        for alias, source in head.aliases.items():
            if alias not in self.tensors and source in self.tensors:
                self._add(replace(self.tensors[source], name=alias))

    def _zero(self, weights: Sequence[StoredTensor], stage: int, dp_size: int, reading: Reading) -> None:
        groups: list[dict[str, Index]] = self.head.shapes
        if not groups:  # the bf16 optimizer without ZeRO
            shapes = {tensor.name: tensor.shape for tensor in weights}
            groups = [{name: shapes.get(name, (numel,)) for name, numel in group.items()} for group in self._fragments()]
        for team in teams(self.ranks, self.head, groups, dp_size, reading):
            for found in states_of(team, reading.problems):
                self._add(found)
                if stage == 3 and found.state == MASTER and found.name not in self.tensors:
                    self._add(replace(found, state="", group=MODEL))

    def _add(self, found: StoredTensor) -> None:
        if found.key in self.tensors:
            raise DumpFormatError(f"{self.head.file}: {found.key} is in this checkpoint twice; files of two runs lie in one directory")
        self.tensors[found.key] = found

    def _copies_of_buffers(self) -> None:
        """In stage 3 every rank has the buffers."""
        for name in sorted(self.head.buffers & self.tensors.keys()):
            first = self.tensors[name]
            others = [file.weights[name] for rank, file in self.models.items() if rank != min(self.models) and name in file.weights]
            copies = tuple(box for other in others if other.shape == first.shape for box in make_stored_tensor(name, other).boxes)
            self.tensors[name] = replace(first, copies=copies)

    def _add_frozen(self, dp_size: int) -> None:
        """Parameters that the optimizer does not have are cut as those that it has, in the model's files."""
        for name, shape in self.head.frozen.items():
            pieces = {dp: file.fragments[name] for dp, file in self.models.items() if name in file.fragments}
            if name not in self.tensors and pieces:
                boxes = of_pieces(Slot(name, shape, 0), pieces, dp_size)
                self._add(StoredTensor(name, shape, next(iter(pieces.values())).dtype, boxes))


def over_ranks(parts: Mapping[int, Part], layers: Layers, tp_size: int, cuts: Cuts | None, reading: Reading) -> Tensors:
    """Stages of a pipeline side by side, tensor parallel ranks put together, and the weights of a pipeline's layers.

    Args:
        parts: by model parallel rank, those that can be read.
        tp_size: tensor parallel ranks.
        cuts: how parameters are cut, as the checkpoint says it.
        reading: gets what does not fit.
    """
    found: Tensors = {}
    lacking: list[str] = []
    for stage in sorted({mp // tp_size for mp in parts}):
        ranks = [parts[mp] for mp in range(stage * tp_size, (stage + 1) * tp_size) if mp in parts]
        if len(ranks) < tp_size:
            reading.problems.append(
                f"{ranks[0].head.file.parent}: of pipeline stage {stage} only {len(ranks)} of {tp_size} tensor parallel ranks can be read; "
                "what this stage has cannot be compared"
            )
            continue
        shapes = {tensor.name: tensor.shape for tensor in ranks[0].tensors.values()}
        tied = _find_tied_names(ranks[0])
        for key in dict.fromkeys(key for part in ranks for key in part.tensors):
            pieces = [part.tensors[key] for part in ranks if key in part.tensors]
            if len(pieces) < tp_size:
                lacking.append(key)
            else:
                _add_merged(found, key, tied.get(key, pieces[0].name), pieces, cuts, shapes, reading)
    shapes = {name: held[min(held)][0].shape for name, held in layers.items()}
    for name, held in layers.items():
        for number in range(max(map(len, held.values()))):
            row = [tensors[number] for _, tensors in sorted(held.items()) if number < len(tensors)]
            if len(row) < tp_size:
                lacking.append(name)
            else:
                _add_merged(found, name, name, row, cuts, shapes, reading)
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        reading.problems.append(f"{lacking[0]}{more}: not all of {tp_size} tensor parallel ranks have a piece; it cannot be compared")
    return found


def _find_tied_names(part: Part) -> dict[str, str]:
    """Names of tied parameters and the first name of each: how it is cut is said of that one only."""
    first: dict[object, str] = {}
    found = dict(part.head.aliases)
    for key, tensor in part.tensors.items():
        if not tensor.state and tensor.numel:
            name = first.setdefault((tensor.boxes, tensor.shape), key)
            if name != key:
                found.setdefault(key, name)
    return found


def _add_merged(
    found: Tensors, key: str, name: str, pieces: Sequence[StoredTensor], cuts: Cuts | None, shapes: Mapping[str, Index], reading: Reading
) -> None:
    """Adds the whole of tensor parallel pieces, which are cut as `name` is; where it is there already (tied over stages), as a copy."""
    try:
        one = together(name, pieces, cuts, shapes)
    except DumpFormatError as error:
        reading.problems.append(str(error))
        return
    before = found.get(key)
    if before is None:
        found[key] = one
    elif (before.shape, before.dtype) == (one.shape, one.dtype):
        found[key] = replace(before, copies=(*before.copies, *one.boxes, *one.copies))
    else:
        reading.problems.append(
            f"{key}: one pipeline stage has {before.dtype} {list(before.shape)}, another {one.dtype} {list(one.shape)}; the ranks' files "
            "do not belong together"
        )


def parts_of(files: Listing, reading: Reading) -> dict[int, Part]:
    """Reads all files of model parallel ranks."""
    parts = {mp: Part(mp) for mp in files.mp_ranks}
    for (mp, dp), path in sorted(files.optimizer.items()):
        if (tree := reading.tree(path)) is not None:
            try:
                parts[mp].ranks[dp] = rank_file(tree, path)
            except DumpFormatError as error:
                reading.problems.append(str(error))
    whole = any(file.stage != 3 for part in parts.values() for file in part.ranks.values())
    for mp, part in parts.items():
        per_rank = [dp for of, dp in files.model if of == mp and dp is not None]
        ranks: list[int | None] = [None] if not per_rank or (whole and (mp, None) in files.model) else [*sorted(per_rank)]
        for rank in ranks:
            path_of = files.model.get((mp, rank))
            if path_of is not None and (tree := reading.tree(path_of)) is not None:
                found = model_file(tree, path_of)
                part.models[rank or 0] = found.of_another_rank() if part.models else found
    return parts


def tensor_parallel_size(files: Listing, head: ModelFile, mp_size: int, pipeline: bool) -> int:
    """Tensor parallel ranks among `mp_size` model parallel ones."""
    said = head.number("checkpoint_parallel_dimensions.tp_degree")
    if said is not None and 0 < said <= mp_size:
        return said
    return max(tp for _, tp in files.layers) + 1 if pipeline else mp_size
