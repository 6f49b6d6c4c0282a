"""How Megatron cuts a parameter over tensor-parallel ranks, and how the pieces become the whole again: index arithmetic on boxes.

Sources: ``sharded_state_dict`` and the layers of megatron-core 0.16.1 (core/tensor_parallel/layers.py, core/transformer/mlp.py,
attention.py, multi_latent_attention.py, moe/experts.py, core/ssm/mamba_mixer.py), legacy/model/transformer.py of Megatron-LM, and the
models of MindSpeed-LLM.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.model import Box, Index, StoredTensor, concatenate_tensors, rows


class Cut(enum.Enum):
    """What each tensor-parallel rank has of a parameter."""

    SAME = "the whole"
    ROWS = "some of the rows"
    COLUMNS = "some of the columns"
    GATED = "rows of the gate, then rows of up"
    MAMBA = "rows of each of z, x, B, C and dt"
    MAMBA_CONV = "rows of each of x, B and C"


_NORM = re.compile(
    r"layer_?norm|[.](?:e|h)norm[.]|(?:^|[._])(?:input_norm|post_attention_norm|final_norm|norm)[._]|rms_?norm", re.IGNORECASE
)
_ROWS = (
    "word_embeddings", "word_embeddings_for_head", "output_layer", "lm_head", "linear_qkv", "query_key_value", "query",
    "key_value", "linear_q", "linear_kv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_qb", "linear_kvb",
    "linear_qk_nope", "linear_qk_rope", "linear_kv_nope", "linear_v", "eh_proj",
)  # fmt: skip
_COLUMNS = ("linear_proj", "linear_fc2", "dense_4h_to_h", "self_attention.dense", "inter_attention.dense", "mixer.out_proj")
_FIRST = ("linear_fc1", "dense_h_to_4h")
_MAMBA_ROWS = ("mixer.A_log", "mixer.D", "mixer.dt_bias", "mixer.norm.weight")
_MAYBE = ("linear_q_down_proj", "linear_kv_down_proj")
_SAME = ("router.weight", "router.bias", "expert_bias", "gate_weight", "position_embeddings.weight", "_down_proj.weight", "softmax_offset")
_LEAF = re.compile(r"(?P<leaf>.+)\.(?P<kind>weight|bias)(?P<expert>\d*)")
_EXPERT = re.compile(r"\.experts\.(?!.*shared)|\.local_experts\.")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert: it is cut over expert-parallel ranks, and over their tensor-parallel ones."""
    return _EXPERT.search(name) is not None and ".shared_experts." not in name


def is_listed(name: str) -> bool:
    """Whether `cut_of` knows the parameter by its name, rather than taking it for one that every rank has as a whole."""
    sum_biases = tuple(f"{leaf}.bias" for leaf in _COLUMNS)
    return bool(_NORM.search(name)) or name.endswith((*_SAME, *sum_biases)) or _by_name(name) is not Cut.SAME


def cut_of(name: str, shapes: Mapping[str, Index], ranks: int, latent: bool = False) -> Cut:
    """How a parameter is cut over `ranks` tensor-parallel ranks.

    Args:
        name: of the parameter, by any family of Megatron's names.
        shapes: of all parameters of one rank, by name; they tell gated layers from others, and which projections of latent attention
            are cut.
        ranks: how many hold pieces.
        latent: multi-head latent attention: ``linear_qkv`` is the pair of down projections, which every rank has (MindSpeed-LLM).
    """
    if ranks == 1:
        return Cut.SAME
    cut = _by_name(name)
    if cut is Cut.SAME and name.endswith(tuple(f"{leaf}.{kind}" for leaf in _MAYBE for kind in ("weight", "bias"))):
        return Cut.ROWS if _is_cut_down_projection(name, shapes) else Cut.SAME
    if latent and ".linear_qkv." in name and cut is Cut.ROWS and _has_up_projection(name, shapes):
        return Cut.SAME
    if cut is Cut.ROWS and _leaf(name).endswith(_FIRST) and is_gated(name, shapes):
        return Cut.GATED
    return cut


def _leaf(name: str) -> str:
    match = _LEAF.fullmatch(name)
    return match["leaf"] if match else name


def _by_name(name: str) -> Cut:
    if _NORM.search(name) and not name.endswith("mixer.norm.weight"):
        return Cut.SAME
    if name.endswith(_MAMBA_ROWS):
        return Cut.ROWS
    match = _LEAF.fullmatch(name)
    if match is None:
        return Cut.SAME
    leaf = match["leaf"]
    if leaf.endswith("mixer.in_proj"):
        return Cut.MAMBA
    if leaf.endswith("mixer.conv1d"):
        return Cut.MAMBA_CONV
    if leaf.rpartition(".")[2] in (*_ROWS, *_FIRST):
        return Cut.ROWS
    if leaf.endswith(_COLUMNS) and match["kind"] == "weight":
        return Cut.COLUMNS
    return Cut.SAME


def is_gated(name: str, shapes: Mapping[str, Index]) -> bool:
    """Whether a first linear layer holds gate and up: it has twice as many rows as the second has columns (on every rank)."""
    fc1 = _weight(name)
    fc2 = fc1.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h")
    return fc1 in shapes and fc2 in shapes and len(shapes[fc2]) == 2 and shapes[fc1][0] == 2 * shapes[fc2][1]


def _weight(name: str) -> str:
    return re.sub(r"\.bias(\d*)$", r".weight\1", name)


def _is_cut_down_projection(name: str, shapes: Mapping[str, Index]) -> bool:
    """Down projections of latent attention are whole on every rank with Transformer Engine and cut with the local layers. The up
    projection behind one takes in the whole rank of it."""
    up = _weight(name).replace("_down_proj.", "_up_proj.")
    down = _weight(name)
    return len(shapes.get(up, ())) > 1 and len(shapes.get(down, ())) > 0 and shapes[down][0] < shapes[up][1]


def _has_up_projection(name: str, shapes: Mapping[str, Index]) -> bool:
    head = name.partition("linear_qkv.")[0]
    return any(f"{head}{leaf}.weight" in shapes for leaf in ("linear_kv_up_proj", "linear_kvb", "linear_kv_nope"))


def merge_pieces(pieces: Sequence[StoredTensor], cut: Cut, parts: Sequence[int] = ()) -> StoredTensor:
    """The whole of the pieces of all tensor-parallel ranks, in their order.

    Args:
        pieces: of each rank; `copies` of a piece become copies of that part of the whole.
        parts: rows of each part in one rank's piece, for `Cut.MAMBA` and `Cut.MAMBA_CONV`.

    Raises:
        DumpFormatError: the pieces do not fit together.
    """
    if len(pieces) == 1:
        return pieces[0]
    if cut is Cut.SAME:
        head = pieces[0]
        for piece in pieces[1:]:
            if (piece.dtype, piece.shape) != (head.dtype, head.shape):
                raise DumpFormatError(
                    f"{head.key}: every tensor-parallel rank should have the whole, but one has {head.dtype} {list(head.shape)} and one "
                    f"{piece.dtype} {list(piece.shape)}; the ranks' files do not belong together"
                )
        return replace(head, copies=(*head.copies, *(box for piece in pieces[1:] for box in (*piece.boxes, *piece.copies))))
    if cut is Cut.ROWS:
        return concatenate_tensors(pieces, 0)
    if cut is Cut.COLUMNS:
        return concatenate_tensors(pieces, 1)
    width = width_of(pieces[0])
    sizes = list(parts) if cut in (Cut.MAMBA, Cut.MAMBA_CONV) else [pieces[0].shape[0] // 2] * 2
    for piece in pieces:
        if sum(sizes) != piece.shape[0]:
            raise DumpFormatError(f"{piece.key}: its {piece.shape[0]} rows on a rank are not made of parts of {sizes}")
    return concatenate_tensors([rows(piece, sum(sizes[:i]), size, width) for i, size in enumerate(sizes) for piece in pieces])


def as_copies(tensor: StoredTensor) -> tuple[Box, ...]:
    """All that `tensor` is made of, as copies of another tensor of its shape."""
    return (*tensor.boxes, *tensor.copies)


def mamba_parts(name: str, shapes: Mapping[str, Index]) -> list[int]:
    """Rows of z, x, B, C and dt in one rank's `in_proj` (x, B, C in its `conv1d`), from its other shapes; []: they do not tell."""
    head, _, _ = name.partition("mixer.")
    head += "mixer."
    try:
        inner = shapes[f"{head}out_proj.weight"][1]
        heads = shapes[f"{head}D"][0]
        conv = shapes[f"{head}conv1d.weight"][0]
    except (KeyError, IndexError):
        return []
    state = (conv - inner) // 2
    return [inner, state, state] if ".conv1d." in name else [inner, inner, state, state, heads]
