"""Puts the ranks' pieces of a Megatron ``torch`` checkpoint together: tensors of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.megatron.arguments import find_padding_row, number
from msprobe_engine.formats.checkpoint.megatron.cuts import Cut, as_copies, cut_of, is_expert, is_listed, mamba_parts, merge_pieces
from msprobe_engine.formats.checkpoint.megatron.file import RankFile, single_experts
from msprobe_engine.formats.checkpoint.megatron.numbering import expert_number, in_model, layers_in, local_layer, offsets
from msprobe_engine.formats.checkpoint.megatron.ranks import Rank, Sizes, in_words
from msprobe_engine.formats.checkpoint.model import Index, StoredTensor, whole

Pieces = dict[str, dict[str, StoredTensor]]
"""Tensors of a rank and a chunk by name in the file and by state (the parameter itself: "")."""


class Merging:
    """All ranks of a checkpoint.

    Args:
        path: for messages.
    """

    def __init__(self, path: Path, sizes: Sizes, ranks: Mapping[Rank, RankFile], args: Mapping[str, Any]) -> None:
        self.path, self.sizes, self.args = path, sizes, args
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.chunks = len(next(iter(ranks.values())).chunks)
        wanted = set(sizes.list_writing_ranks())
        self.ranks = {rank: file for rank, file in sorted(ranks.items()) if rank in wanted}
        self.empty = _noop_layers(args)
        self.offsets = self._offsets()
        self._taken_as_whole: set[str] = set()
        self._holes: dict[str, list[str]] = {}

    def _offsets(self) -> dict[str, list[list[int]]]:
        """Numbers of the first layers by root, chunk and stage."""
        seen: list[list[dict[str, int]]] = [[{} for _ in range(self.sizes.pp)] for _ in range(self.chunks)]
        for rank, file in self.ranks.items():
            for chunk, tensors in enumerate(file.chunks):
                for root, count in layers_in(tensors).items():
                    known = seen[chunk][rank.pp]
                    known[root] = max(known.get(root, 0), count)
        stages = {rank.pp for rank in self.ranks}
        lost = [stage for stage in range(self.sizes.pp) if stage not in stages]
        roots = list(dict.fromkeys(root for chunk in seen for stage in chunk for root in stage))
        found = {}
        for root in roots:
            counts = [[stage.get(root, 0) for stage in chunk] for chunk in seen]
            if (lost or self.empty) and root.endswith(("decoder.layers", "encoder.layers")):
                counts = self._count_layers_by_arguments(counts, lost)
            found[root] = offsets(counts, self.args.get("schedules_method") == "dualpipev")
        return found

    def _count_layers_by_arguments(self, counts: list[list[int]], lost: Sequence[int]) -> list[list[int]]:
        """Layers by chunk and stage as the arguments say them, where files do not: a stage has none, or layers that are nothing."""
        layers, parts = number(self.args, "num_layers"), self.chunks * self.sizes.pp
        first = number(self.args, "decoder_first_pipeline_num_layers")
        last = number(self.args, "decoder_last_pipeline_num_layers")
        special = self.args.get("pipeline_model_parallel_layout") or self.args.get("num_layer_list")
        if layers and not special and self.chunks == 1 and (first or last) and self.sizes.pp > (first is not None) + (last is not None):
            middle = (layers - (first or 0) - (last or 0)) // (self.sizes.pp - (first is not None) - (last is not None))
            stages = [middle] * self.sizes.pp
            stages[0], stages[-1] = first or middle, last or middle
            return [stages]
        if layers and layers % parts == 0 and not special and not first and not last:
            return [[layers // parts] * self.sizes.pp for _ in range(self.chunks)]
        if lost:
            raise DumpFormatError(
                f"{self.path}: there is no file of pipeline stage {in_words([str(stage) for stage in lost])}, and the args do not say how "
                "many layers it has; the layers behind it cannot be numbered"
            )
        return counts

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors of the whole model, parameters and states; what lies in several stages once."""
        found: dict[str, StoredTensor] = {}
        for chunk in range(self.chunks):
            for stage in range(self.sizes.pp):
                for tensor in self._part(chunk, stage):
                    known = found.get(tensor.key)
                    if known is None:
                        found[tensor.key] = tensor
                    elif (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
                        found[tensor.key] = replace(known, copies=(*known.copies, *as_copies(tensor)))
                    else:
                        self.problems.append(
                            f"{self.path}: pipeline stages hold {tensor.key} as {known.dtype} {list(known.shape)} and as {tensor.dtype} "
                            f"{list(tensor.shape)}; the first is taken"
                        )
        for file, names in self._holes.items():
            self.problems.append(f"{file}: lacks {in_words(names)}, which other ranks of its kind have")
        if self._taken_as_whole:
            self.notes.append(
                f"{len(self._taken_as_whole)} parameters with names that are in no table are taken as whole on every tensor-parallel rank: "
                f"{in_words(sorted(self._taken_as_whole))}"
            )
        yield from found.values()

    def _part(self, chunk: int, stage: int) -> Iterator[StoredTensor]:
        pieces = {rank: self._pieces(file, chunk) for rank, file in self.ranks.items() if rank.pp == stage}
        shapes: dict[str, Index] = {}
        for some in pieces.values():
            for name, states in some.items():
                shapes.setdefault(name, next(iter(states.values())).shape)
        local = 1 + max((n for name in shapes if (n := expert_number(name)) is not None), default=-1)
        for name in shapes:
            if not is_expert(name):
                yield from self._over_ranks(name, chunk, stage, pieces, shapes, None, 0)
        for ep in range(self.sizes.ep) if local else ():
            for name in shapes:
                if is_expert(name):
                    yield from self._over_ranks(name, chunk, stage, pieces, shapes, ep, ep * local)

    def _pieces(self, file: RankFile, chunk: int) -> Pieces:
        found: Pieces = {}
        experts = (number(self.args, "num_experts") or 0) // self.sizes.ep
        for name, tensor in file.chunks[chunk].items():
            boxes = whole(tensor.shape, tensor.file, tensor.start, tensor.strides)
            for single, piece in single_experts(name, StoredTensor(name, tensor.shape, tensor.dtype, boxes), experts):
                found.setdefault(single, {})[""] = piece
        for ((number_of_chunk, name), state), held in file.states.tensors.items():
            if number_of_chunk == chunk:
                for single, piece in single_experts(name, held, experts):
                    found.setdefault(single, {})[state] = piece
        return found

    def _over_ranks(
        self,
        name: str,
        chunk: int,
        stage: int,
        pieces: Mapping[Rank, Pieces],
        shapes: Mapping[str, Index],
        ep: int | None,
        first_expert: int,
    ) -> Iterator[StoredTensor]:
        """One parameter and its states, put together from the tensor-parallel ranks that have pieces of it."""
        size = self.sizes.tp if ep is None else self.sizes.etp
        holders = [
            [rank for rank in pieces if rank.tp % size == place and ep in (None, rank.ep)] for place in range(size)
        ]  # of the first, files of other ranks with the same piece are copies
        root = local_layer(name).root
        offset = self.offsets[root][chunk][stage] if root else 0
        whole_name = in_model(name, offset, first_expert, self.empty)
        cut = cut_of(name, shapes, size, bool(self.args.get("multi_latent_attention")))
        parts = mamba_parts(name, shapes) if cut in (Cut.MAMBA, Cut.MAMBA_CONV) else ()
        if size > 1 and not is_listed(name) and cut is Cut.SAME:
            self._taken_as_whole.add(whole_name)
        for state in list(dict.fromkeys(state for some in pieces.values() for state in some.get(name, {}))):
            some: list[StoredTensor | None] = []
            for place, ranks in enumerate(holders):
                held = [pieces[rank][name][state] for rank in ranks if state in pieces[rank].get(name, {})]
                if held:
                    copies = tuple(
                        box for other in held[1:] if (other.shape, other.dtype) == (held[0].shape, held[0].dtype) for box in other.boxes
                    )
                    some.append(replace(held[0], copies=copies))
                else:
                    some.append(None)
                    self._hole(whole_name, state, place, stage, ep, ranks)
            known = next((piece for piece in some if piece is not None), None)
            if known is None:
                continue
            if cut is Cut.SAME:
                filled = [piece for piece in some if piece is not None]
            else:
                filled = [piece if piece is not None else replace(known, boxes=(), copies=()) for piece in some]
            try:
                tensor = merge_pieces(filled, cut, parts)
            except DumpFormatError as error:
                self.problems.append(f"{self.path}: {error}")
                continue
            origin = name if name != whole_name else ""
            yield replace(tensor, name=whole_name, origin=origin, padding=find_padding_row(self.args, whole_name, tensor.shape))

    def _hole(self, name: str, state: str, place: int, stage: int, ep: int | None, ranks: Sequence[Rank]) -> None:
        """A piece that no file has. Missing files are named once, elsewhere."""
        for rank in ranks:
            file = str(self.ranks[rank].path)
            self._holes.setdefault(file, []).append(f"{state + ' of ' if state else ''}{name}")
        if not ranks:
            lost = f"{self.path}: no file of tensor-parallel rank {place}" + (f", expert-parallel rank {ep}" if ep is not None else "")
            lost += f" in pipeline stage {stage}" if self.sizes.pp > 1 else ""
            if lost not in self.problems:
                self.problems.append(lost)


def _noop_layers(args: Mapping[str, Any]) -> frozenset[int]:
    """MindSpeed's layers that do nothing."""
    given = args.get("noop_layers")
    if isinstance(given, str):
        given = [word for word in given.split(",") if word.strip().isdigit()]
    if isinstance(given, (list, tuple, set, frozenset)):
        return frozenset(int(word) for word in given if str(word).strip().isdigit())
    return frozenset()
