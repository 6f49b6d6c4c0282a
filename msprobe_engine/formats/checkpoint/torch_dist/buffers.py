"""Optimizer states of a ``dp_reshardable`` distributed checkpoint, by parameter: they are saved as the flat buckets of each model rank.

``optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_{buffer}.dtype_({}, {}).bucket_idx_{b}.{param,exp_avg,exp_avg_sq}``; with experts
``chained_0.`` (dense) or ``chained_1.`` (experts) before it. The rank counts tensor-parallel ranks first, then (experts: expert-parallel
ranks, then) pipeline stages; a buffer is that of a model chunk; parameters lie in it as `megatron_buffers` says. Which layers a rank has
follows from the sizes of its buckets; in which order, from the pieces in which they were saved: none holds two parameters.
Source: ``sharded_param_state_dp_reshardable`` (megatron-core 0.16.1, core/optimizer/distrib_optimizer.py).

The order in which Megatron's modules register their parameters, for checkpoints that keep names but not the order.

Sources: the constructors of core/models/gpt/gpt_model.py, core/transformer/transformer_block.py, transformer_layer.py, attention.py,
multi_latent_attention.py, mlp.py, moe/moe_layer.py (megatron-core 0.12 to 0.19) and, inside of a fused linear layer, of Transformer Engine.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.megatron.buffers import ALIGNMENT, Layout, fit_buckets
from msprobe_engine.formats.checkpoint.megatron.cuts import Cut, as_copies, is_expert, is_gated, mamba_parts, merge_pieces
from msprobe_engine.formats.checkpoint.megatron.groups import Parameter
from msprobe_engine.formats.checkpoint.megatron.numbering import expert_number, local_layer
from msprobe_engine.formats.checkpoint.megatron.ranks import Sizes
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, Box, Index, StoredTensor, flat

_BUCKET = re.compile(
    r"(?:chained_(?P<part>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<kinds>.+?)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>[A-Za-z0-9_]+)"
)
_AGAIN = "output_layer.weight"
"""What the last stage of a tied model calls its own copy of the embedding."""
_BUFFERS = ("expert_bias", "_extra_state", "tokens_per_expert", "inv_freq")


class BucketKey(NamedTuple):
    """What the key of a bucket says; `part` is 1 for experts, else 0; `kind` is the dtype of the parameters."""

    part: int
    rank: int
    buffer: int
    kind: str
    bucket: int
    state: str


def bucket_key(key: str) -> BucketKey | None:
    """The key of a bucket taken apart; None: it is none."""
    match = _BUCKET.fullmatch(key)
    if match is None:
        return None
    kind = match["kinds"].strip("()").split(",")[0].strip().removeprefix("torch.")
    return BucketKey(int(match["part"] or 0), int(match["rank"]), int(match["buffer"]), kind, int(match["bucket"]), match["state"])


@dataclass
class Buckets:
    """The buckets of a checkpoint, and the parameters of its model.

    Args:
        model: single parameters by name.
        buckets: flat tensors by key.
        tied: the last stage has the embedding again, as it has for layers that predict several tokens.
    """

    sizes: Sizes
    model: Mapping[str, StoredTensor]
    buckets: Mapping[BucketKey, StoredTensor]
    tied: bool = False
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shapes: dict[str, Index] = {name: tensor.shape for name, tensor in self.model.items()}
        self._apart = any(key.part == 1 for key in self.buckets)
        self._cuts: dict[str, Cut] = {}
        self._number: dict[str, int] = {}
        self._held: dict[tuple[bool, str], dict[tuple[str, int], list[str]]] = {}
        for name, tensor in self.model.items():
            if not name.endswith(_BUFFERS) and tensor.dtype.startswith(("float", "bfloat")):
                root, layer, _ = local_layer(name)
                expert = is_expert(name)
                self._held.setdefault((expert, tensor.dtype), {}).setdefault((root, layer or 0), []).append(name)
                if expert:
                    self._number[name] = expert_number(name) or 0
        self._experts = 1 + max(self._number.values(), default=-1)

    def tensors(self) -> Iterator[StoredTensor]:
        """States of the whole model's parameters.

        A buffer whose parameters cannot be told is a problem, and passed over.
        """
        try:
            parts = self._parts()
        except DumpFormatError as error:
            self.problems.append(str(error))
            return
        pieces: dict[tuple[str, str], dict[int, StoredTensor]] = {}
        copies: dict[tuple[str, str], dict[int, StoredTensor]] = {}
        for name, place, is_copy, states in parts:
            for state, tensor in states.items():
                (copies if is_copy else pieces).setdefault((name, state), {})[place] = tensor
        for (name, state), found in pieces.items():
            try:
                tensor = self._merge_pieces(name, found)
                again = copies.get((name, state))
                yield tensor if again is None else replace(tensor, copies=(*tensor.copies, *as_copies(self._merge_pieces(name, again))))
            except DumpFormatError as error:
                self.problems.append(str(error))

    def _merge_pieces(self, name: str, found: Mapping[int, StoredTensor]) -> StoredTensor:
        """The whole of the pieces of tensor-parallel ranks; what a rank lacks stays uncovered."""
        cut = self._find_cut(name)
        known = next(iter(found.values()))
        if cut is Cut.SAME:
            return merge_pieces([found[place] for place in sorted(found)], cut)
        size = self.sizes.etp if is_expert(name) else self.sizes.tp
        some = [found.get(place, replace(known, boxes=())) for place in range(size)]
        rows = [n // size for n in mamba_parts(name, self._shapes)] if cut in (Cut.MAMBA, Cut.MAMBA_CONV) else ()
        return merge_pieces(some, cut, rows)

    def _find_cut(self, name: str) -> Cut:
        if name not in self._cuts:
            self._cuts[name] = self._cut_of(name)
        return self._cuts[name]

    def _cut_of(self, name: str) -> Cut:
        """How a parameter is cut, by the pieces that its weight was saved in."""
        tensor = self.model[name]
        ranks = self.sizes.etp if is_expert(name) else self.sizes.tp
        if ranks == 1 or not tensor.boxes:
            return Cut.SAME
        if ".mixer.in_proj." in name:
            return Cut.MAMBA
        if ".mixer.conv1d." in name:
            return Cut.MAMBA_CONV
        if "linear_fc1." in name and ".layer_norm_" not in name and is_gated(name, self._shapes):
            return Cut.GATED
        smallest = [min(box.sizes[dim] for box in tensor.boxes) for dim in range(len(tensor.shape))]
        if smallest and smallest[0] < tensor.shape[0]:
            return Cut.ROWS
        return Cut.COLUMNS if len(smallest) > 1 and smallest[1] < tensor.shape[1] else Cut.SAME

    def _local_shape(self, name: str) -> Index:
        """Shape of a tensor-parallel rank's piece."""
        shape, cut = self.model[name].shape, self._find_cut(name)
        ranks = self.sizes.etp if is_expert(name) else self.sizes.tp
        if cut is Cut.SAME:
            return shape
        dim = 1 if cut is Cut.COLUMNS else 0
        return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])

    def _parts(self) -> list[tuple[str, int, bool, dict[str, StoredTensor]]]:
        """(parameter, tensor-parallel rank, whether it is a copy, states) of everything in the buckets.

        Model chunks are gone through in the order of the layers: chunk 0 of all stages, chunk 1 of all stages.
        """
        states: list[tuple[str, int, bool, dict[str, StoredTensor]]] = []
        for part in sorted({key.part for key in self.buckets}):
            own_buckets = {key: tensor for key, tensor in self.buckets.items() if key.part == part}
            kinds = sorted({(key.rank, key.buffer, key.kind) for key in own_buckets})
            inner = self.sizes.tp if part == 0 else self.sizes.etp * self.sizes.ep
            first_rank = [(buffer, kind) for rank, buffer, kind in kinds if rank == 0]
            chunks = max(1, len(first_rank) // len({kind for _, kind in first_rank}))
            states += self._of_part(part, own_buckets, inner, chunks, kinds)
        return states

    def _of_part(
        self, part: int, own_buckets: Mapping[BucketKey, StoredTensor], inner: int, chunks: int, kinds: Sequence[tuple[int, int, str]]
    ) -> list[tuple[str, int, bool, dict[str, StoredTensor]]]:
        offsets: dict[str, int] = {}
        states_of: list[tuple[str, int, bool, dict[str, StoredTensor]]] = []
        for chunk in range(chunks):
            for stage in range(self.sizes.pp):
                taken: dict[str, int] = {}
                for place in range(inner):
                    rank = stage * inner + place
                    buffers = [(buffer, kind) for r, buffer, kind in kinds if r == rank]
                    per_chunk = max(1, len(buffers) // chunks)
                    for buffer, kind in buffers[chunk * per_chunk : (chunk + 1) * per_chunk]:
                        states = {k: v for k, v in own_buckets.items() if (k.rank, k.buffer, k.kind) == (rank, buffer, kind)}
                        ends = (stage == 0 and chunk == 0, stage == self.sizes.pp - 1 and chunk == chunks - 1)
                        names, layout, counts = self._fit(part, kind, states, ends, offsets, place)
                        taken |= {root: max(taken.get(root, 0), count) for root, count in counts.items()}
                        states_of += self._cut_out(names, layout, states, place % (self.sizes.tp if part == 0 else self.sizes.etp))
                for root, count in taken.items():
                    offsets[root] = offsets.get(root, 0) + count
        return states_of

    def _fit(
        self,
        part: int,
        kind: str,
        states: Mapping[BucketKey, StoredTensor],
        ends: tuple[bool, bool],
        at: Mapping[str, int],
        place: int,
    ) -> tuple[list[tuple[str, bool]], Layout, dict[str, int]]:
        """Parameters of a buffer in its order (and whether each is a second copy), where they lie, and how many layers these are.

        Raises:
            DumpFormatError: no number of layers in a known order fills the buckets.
        """
        state = next(key.state for key in states)
        held = [states[key] for key in sorted(key for key in states if key.state == state)]
        buckets = [tensor.shape[0] for tensor in held]
        borders = [{box.offsets[0] for box in tensor.boxes} | {tensor.shape[0]} for tensor in held]
        ep = place // self.sizes.etp if part == 1 else 0
        for candidate in self._candidates(part, kind, ends, at, ep):
            parameters = [Parameter((0, member), self._local_shape(name), kind) for member, name in candidate.members.items()]
            missing = sum(buckets) - sum(math.prod(parameter.shape) for parameter in parameters)
            if missing < 0:
                break
            if missing > ALIGNMENT * len(parameters):
                continue
            for order in orders(parameters):
                numels = [math.prod(parameter.shape) for parameter in order[::-1]]
                layout = fit_buckets(numels, buckets)
                if layout is not None and _on_borders(layout, numels, borders):
                    names = [candidate.members[parameter.name] for parameter in order[::-1]]
                    again = [parameter.name == candidate.again for parameter in order[::-1]]
                    return list(zip(names, again)), layout, candidate.layers
        whose = f"model rank {next(iter(states)).rank}{' (experts)' if part else ''}"
        raise DumpFormatError(
            f"optimizer states of {whose}: no number of layers fills its {sum(buckets)} elements in an order of parameters that is known; "
            "these states are not compared"
        )

    def _candidates(self, part: int, kind: str, ends: tuple[bool, bool], at: Mapping[str, int], ep: int) -> Iterator[_Candidate]:
        """What a buffer may hold: the next layers of the model, from none of them to all, and what is before and behind them."""
        held = [
            self._held[key] for key in ((False, kind), (True, kind)) if key in self._held and (not self._apart or key[0] == (part == 1))
        ]
        counts: dict[str, int] = {}
        for by_layer in held:
            for (root, _), names in by_layer.items():
                counts[root] = counts.get(root, 0) + len(names) * bool(root)
        main = max(counts, key=lambda root: counts[root], default="")
        edge = [name for by_layer in held for (root, _), names in by_layer.items() if root != main for name in names]
        begin = [name for name in edge if ends[0] and "embedding" in name.split(".")[0]]
        finish = [name for name in edge if ends[1] and "embedding" not in name.split(".")[0]]
        members = {name: name for name in (*begin, *finish)}
        again = ""
        ahead = any(name.startswith("mtp.") for name in finish)
        table = next((name for name in edge if name.endswith("word_embeddings.weight")), "")
        if table and part == 0 and ends[1] and not ends[0] and (self.tied or ahead):
            again = table if ahead else _AGAIN
            members[again] = table
        last = max((layer for by_layer in held for root, layer in by_layer if root == main), default=-1)
        local = max(1, self._experts // self.sizes.ep)
        first = at.get(main, 0)
        for layer in range(first - 1, last + 1):
            for by_layer in held:
                for name in by_layer.get((main, layer), ()) if layer >= first else ():
                    if part == 0 or self._number[name] // local == ep:
                        members[name] = name
            if members:
                yield _Candidate(dict(members), {main: layer - first + 1} if main else {}, again)

    def _cut_out(
        self, names: Sequence[tuple[str, bool]], layout: Layout, states: Mapping[BucketKey, StoredTensor], tp: int
    ) -> Iterator[tuple[str, int, bool, dict[str, StoredTensor]]]:
        sorted_boxes = {key: sorted(tensor.boxes, key=lambda box: box.offsets) for key, tensor in states.items()}
        starts = {key: [box.offsets[0] for box in boxes] for key, boxes in sorted_boxes.items()}
        for (name, again), place in zip(names, layout.places):
            shape = self._local_shape(name)
            found: dict[str, StoredTensor] = {}
            for key, tensor in states.items():
                if key.bucket == place.bucket:
                    state = "master" if key.state == "param" else key.state
                    boxes = _boxes(shape, place.start, sorted_boxes[key], starts[key], width_of(tensor))
                    found[state] = StoredTensor(name, shape, tensor.dtype, tuple(boxes), state=state, group=OPTIMIZER)
            yield name, tp, again, found


class _Candidate(NamedTuple):
    """Parameters by their names on the rank, how many layers they are by root, and which of them is there for the second time."""

    members: dict[str, str]
    layers: dict[str, int]
    again: str


def _on_borders(layout: Layout, numels: Sequence[int], borders: Sequence[set[int]]) -> bool:
    """Whether each parameter begins and ends where a piece begins or ends."""
    return all(
        place.start in borders[place.bucket] and place.start + numel in borders[place.bucket] for place, numel in zip(layout.places, numels)
    )


def _boxes(shape: Index, start: int, boxes: Sequence[Box], starts: Sequence[int], width: int) -> Iterator[Box]:
    """The stretch of a flat tensor from `start`, as boxes of a tensor of `shape`."""
    end = start + math.prod(shape)
    for box in boxes[max(0, bisect_right(starts, start) - 1) :]:
        low, high = max(start, box.offsets[0]), min(end, box.offsets[0] + box.sizes[0])
        if box.offsets[0] >= end:
            break
        if low < high:
            yield from flat(shape, low - start, high - low, box.file, box.start + (low - box.offsets[0]) * width, width)


_FRONT = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings", "embedding.")
_BACK = ("final_layernorm", "final_norm", "mtp.", "lm_head", "output_layer")
_ATTENTION = (
    "linear_proj", "core_attention", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
)  # fmt: skip
_MLP = ("router", "linear_fc1", "linear_fc2", "experts", "shared_experts.linear_fc1", "shared_experts.linear_fc2", "shared_experts.gate")
_AHEAD = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm")
"""Of a layer that predicts tokens further ahead (core/transformer/multi_token_prediction.py)."""
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def orders(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """The parameters in each order that a rank may have registered them in, the likeliest first.

    They differ in whether the norm before attention is a module of its own (before all of the attention) or a part of the projection, and
    in whether experts are one after the other or each of their two layers is one module.
    """
    seen: set[tuple[int, ...]] = set()
    for norm_first in (False, True):
        for by_layer in (False, True):
            indices = tuple(sorted(range(len(parameters)), key=_key(parameters, norm_first, by_layer)))
            if indices not in seen:
                seen.add(indices)
                yield [parameters[i] for i in indices]


def _key(parameters: Sequence[Parameter], norm_first: bool, by_layer: bool) -> Callable[[int], tuple[int, ...]]:
    def key(index: int) -> tuple[int, ...]:
        name = parameters[index].name
        _, layer, rest = local_layer(name)
        if layer is None:
            bare = name.removeprefix("decoder.").removeprefix("encoder.")
            front = bare.startswith(_FRONT)
            return (0 if front else 2, _find(_FRONT if front else _BACK, bare), _kind(name))
        if name.startswith("mtp."):
            place = _find(_AHEAD, rest)
            inside = rest.partition(".")[2] if place in (3, 4) else ""
            return (2, _BACK.index("mtp."), layer, place, *(_in_layer(inside, norm_first, by_layer) if inside else (_kind(rest),)))
        return (1, layer, *_in_layer(rest, norm_first, by_layer))

    return key


def _in_layer(rest: str, norm_first: bool, by_layer: bool) -> tuple[int, ...]:
    if rest.startswith("input_layernorm") or (norm_first and rest.startswith("self_attention.linear_qkv.layer_norm")):
        return (0, 0, _kind(rest))
    if rest.startswith("self_attention."):
        return (1, _find(_ATTENTION, rest.removeprefix("self_attention.")), _kind(rest))
    if rest.startswith(("pre_cross_attn_layernorm", "cross_attention.")):
        return (2, int(rest.startswith("cross")), _find(_ATTENTION, rest.removeprefix("cross_attention.")), _kind(rest))
    if rest.startswith(("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm")):
        return (3, 0, _kind(rest))
    if rest.startswith("mlp."):
        inside = rest.removeprefix("mlp.")
        number = expert_number(rest)
        if number is not None:
            layer = 0 if ".linear_fc1." in rest else 1
            return (4, _MLP.index("experts"), *((layer, number) if by_layer else (number, layer)), _kind(rest))
        return (4, _find(_MLP, inside), _kind(rest))
    return (5, 0, _kind(rest))


def _find(table: Sequence[str], text: str) -> int:
    return next((i for i, start in enumerate(table) if text.startswith(start)), len(table))


def _kind(name: str) -> int:
    return _find(_KINDS, name.rpartition(".")[2])
