"""Which slots a stored tensor fills, and how it is taken apart into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from msprobe_engine.align.parameters import rules
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.align.parameters.prefixes import bare, state_of
from msprobe_engine.align.parameters.rules import Spot
from msprobe_engine.formats.checkpoint import cuts
from msprobe_engine.formats.checkpoint.cuts import Cut, Heads
from msprobe_engine.formats.checkpoint.model import StoredTensor


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored tensor and the slots that it fills.

    Attributes:
        slots: neutral names, with the state of an optimizer before them (``exp_avg|layers.0.mlp.up.weight``).
        form: how the slots lie in the tensor. Two tensors of the same slots, form and shape hold the same elements in the same order.
        cut: makes one tensor for each slot; None: the tensor is its only slot.
        why_not: why the tensor cannot be taken apart, although it is of several slots.
        hides: those slots; ``*`` at the end: all that begin so.
    """

    tensor: StoredTensor
    slots: tuple[str, ...]
    form: str = rules.PLAIN
    cut: Cut | None = None
    why_not: str = ""
    hides: tuple[str, ...] = ()


def place(tensor: StoredTensor, model: Model) -> Placed:
    """Where a tensor belongs. Optimizer states lie as their parameter does; single numbers (Adam's step) count for every slot."""
    state = state_of(tensor)
    head = f"{state}|" if state else ""
    spot = model.spot(tensor.name)
    if spot is None:
        return Placed(tensor, (head + bare(tensor.name),))
    stored = model.shape(f"{spot.layer}{spot.rule.slot}.{spot.kind}") or tensor.shape
    single = tensor.numel == 1 and stored != tensor.shape
    shaped = tensor if not single else replace(tensor, shape=stored)
    placed = _find_slots(shaped, spot, model)
    slots = tuple(f"{head}{spot.layer}{name}.{spot.kind}" for name in placed.slots)
    if single:
        return Placed(tensor, slots, rules.PLAIN, partial(_repeat_tensor, count=len(slots)) if len(slots) > 1 else None)
    if tensor.shape != stored and placed.cut is not None:
        return Placed(tensor, (head + bare(tensor.name),), why_not=f"has shape {list(tensor.shape)}, its parameter {list(stored)}")
    hides = tuple(f"{head}{spot.layer}{name}" + (f".{spot.kind}" if name[-1] != "*" else "") for name in placed.hides)
    return replace(placed, tensor=tensor, slots=slots, hides=hides)


def _repeat_tensor(tensor: StoredTensor, count: int) -> list[StoredTensor]:
    return [tensor] * count


def _find_slots(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    """As `place`, slots without layer and kind."""
    slot, form = spot.rule.slot, spot.rule.form
    shape = tensor.shape
    if 0 in shape or not shape:
        return Placed(tensor, (slot,))
    if slot == "attention.k_norm" and model.has(f"{spot.layer}attention.kv_up.weight"):
        return Placed(tensor, ("attention.kv_norm",))  # latent attention of older releases of MindSpeed-LLM
    if slot in ("attention.q_norm", "attention.k_norm") and model.interleaved and shape == (model.head_dim(spot.layer),):
        return Placed(tensor, (slot,), rules.ROTARY, lambda t: [cuts.half_rotation(t, shape[0])])
    if form in (rules.GROUPED_QKV, rules.BLOCK_QKV, rules.CONV_QKV):
        return _qkv(tensor, spot, model)
    if form == rules.CONV and len(shape) == 2 and _is_conv(spot, model):
        return Placed(tensor, (slot,), form, lambda t: [cuts.transpose_tensor(t)])
    if form == rules.FC1:
        gated = model.is_gated(spot.layer, slot, shape[0])
        if gated is None:
            why = "whether it holds gate and up is not known: give `facts: {gated: true}` in a mapping file"
            return _refuse_splitting(tensor, spot, why, f"{slot[:-2]}gate", slot)
        form = rules.HALVES if gated else rules.PLAIN
    if form == rules.HALVES:
        return Placed(tensor, (f"{slot[:-2]}gate", slot), form, cuts.halves)
    if form == rules.ROTARY:
        return _rotary(tensor, spot, model)
    if form in (rules.STACK, rules.STACK_HALVES, rules.STACK_TURNS):
        return _stack(tensor, spot, model)
    if form in (rules.WIDE_FC1, rules.WIDE_FC2):
        return _wide(tensor, spot, model)
    return Placed(tensor, (slot,))


def _refuse_splitting(tensor: StoredTensor, spot: Spot, why: str, *hides: str) -> Placed:
    """A tensor that stays whole. It can only be another that lies in the same form and cannot be taken apart either."""
    return Placed(tensor, (f"?{spot.rule.form}?{spot.rule.slot}",), spot.rule.form, why_not=why, hides=hides)


def _is_conv(spot: Spot, model: Model) -> bool:
    """Whether weights of these names lie inputs first (GPT-2 of transformers) and not outputs first (nanoGPT, StarCoder2): told by the
    fused projection of attention, else by the first layer of the MLP, which has more outputs than inputs."""
    known = model.shape(f"{spot.layer}attention.qkv.weight") or model.shape(f"{spot.layer}mlp.up.weight")
    return known is not None and len(known) == 2 and known[0] < known[1]


def _qkv(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    form, layer = spot.rule.form, spot.layer
    if model.has(f"{layer}attention.q_up.weight"):
        return _latent(tensor, spot, model)
    slots = ("attention.q", "attention.k", "attention.v")
    turn = form == rules.CONV_QKV and len(tensor.shape) == 2 and _is_conv(spot, model)
    heads = model.heads(layer, tensor.shape[1] if turn else tensor.shape[0])
    if isinstance(heads, str):
        return _refuse_splitting(tensor, spot, heads, *slots)
    if form == rules.GROUPED_QKV:
        size = model.head_dim(layer) if model.interleaved and not heads.gated else None
        return Placed(tensor, slots, f"{form} {heads} {size}", partial(_groups, heads=heads, interleaved=size))

    def blocks(t: StoredTensor) -> list[StoredTensor]:
        return cuts.blocks(cuts.transpose_tensor(t) if turn else t, heads.sizes, "qkv")

    return Placed(tensor, slots, f"{form} {heads} {turn}", blocks)


def _groups(tensor: StoredTensor, heads: Heads, interleaved: int | None) -> list[StoredTensor]:
    """q, k and v; rows of q and k in halves of each head."""
    q, k, v = cuts.grouped_qkv(tensor, heads)
    return [q, k, v] if interleaved is None else [cuts.half_rotation(q, interleaved), cuts.half_rotation(k, interleaved), v]


def _latent(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    """MindSpeed's one projection down for queries, keys and values of multi-latent attention."""
    up = model.shape(f"{spot.layer}attention.q_up.weight")
    slots = ("attention.q_down", "attention.kv_down")
    if up is None or len(up) != 2 or up[1] >= tensor.shape[0]:
        return _refuse_splitting(tensor, spot, "the rank of the queries is not known", *slots)
    sizes = (up[1], tensor.shape[0] - up[1])
    return Placed(tensor, slots, rules.LATENT_DOWN, lambda t: cuts.blocks(t, sizes, ("q_down", "kv_down")))


def _rotary(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    """Llama of Meta and torchtitan rotates neighbouring elements of a head; their other models (norms of q and k, sinks, latent) halves,
    as the Llama of MindSpore Transformers does, which has the same names for the layers of attention."""
    layer = spot.layer
    if model.is_mindspore or any(
        model.has(f"{layer}attention.{other}") for other in ("q_norm.weight", "k_norm.weight", "sinks.", "kv_down.weight")
    ):
        return Placed(tensor, (spot.rule.slot,))
    size = model.head_dim(spot.layer)
    if size is None or tensor.shape[0] % size or size % 2:
        why = "the size of an attention head is not known: give `facts: {head_dim: N}` in a mapping file"
        return _refuse_splitting(tensor, spot, why, spot.rule.slot)
    return Placed(tensor, (spot.rule.slot,), f"{rules.ROTARY} {size}", lambda t: [cuts.half_rotation(t, size)])


def _stack(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    """Experts along dimension 0; each ``[outputs, inputs]``, or turned round where the widths say so."""
    if len(tensor.shape) < 2:
        return Placed(tensor, (spot.rule.slot,))
    n, leaf = tensor.shape[0], spot.rule.slot.rpartition(".")[2]
    turn = len(tensor.shape) == 3 and _is_turned(spot.layer, model)
    gated = spot.rule.form in (rules.STACK_HALVES, rules.STACK_TURNS)
    if gated and spot.rule.slot == "experts.up":
        down = model.shape(f"{spot.layer}experts.down.weight")
        if down is not None and len(down) == 3 and len(tensor.shape) == 3:
            gated = tensor.numel == 2 * down[1] * down[2] * n
    leaves = ("gate", leaf) if gated else (leaf,)
    # GPT-OSS, alone among the models of transformers whose experts lie inputs first, has biases, and gate and up in turns.
    in_turns = gated and (turn or len(tensor.shape) == 2) and _is_turned(spot.layer, model) and model.has(f"{spot.layer}experts.up.bias")
    in_turns = in_turns or spot.rule.form == rules.STACK_TURNS

    def parts(t: StoredTensor) -> list[StoredTensor]:
        pieces = []
        for expert in cuts.split_stack(t):
            expert = cuts.transpose_tensor(expert) if turn else expert
            pieces += cuts.halves(expert, alternating=in_turns) if gated else [expert]
        return pieces

    return Placed(tensor, _expert_slots(n, leaves), f"{spot.rule.form} {n} {turn} {gated} {in_turns}", parts)


def _is_turned(layer: str, model: Model) -> bool:
    """Whether experts lie inputs first: ``gate_up [E, hidden, 2 x inner]``, ``down [E, inner, hidden]``."""
    up, down = model.shape(f"{layer}experts.up.weight"), model.shape(f"{layer}experts.down.weight")
    if up is None or down is None or len(up) != 3 or len(down) != 3:
        return False
    outputs_first = up[2] == down[1] and up[1] in (down[2], 2 * down[2])
    inputs_first = up[1] == down[2] and up[2] in (down[1], 2 * down[1])
    return inputs_first and not outputs_first


def _wide(tensor: StoredTensor, spot: Spot, model: Model) -> Placed:
    """Megatron's older grouped experts: ``weight1``, ``weight2`` are matrices whose bytes are ``[E, inputs, outputs]``
    (`GroupedMLP.forward` of megatron-core views them so)."""
    n, hidden = model.number("experts"), model.hidden
    if len(tensor.shape) != 2 or not n or not hidden or tensor.numel % (n * hidden):
        return _refuse_splitting(
            tensor, spot, "the number of experts is not known: give `facts: {experts: N}` in a mapping file", "experts.*"
        )
    if any(box.sizes != tensor.shape for box in tensor.boxes):
        return _refuse_splitting(tensor, spot, "its experts lie on several ranks as one matrix", "experts.*")
    inner = tensor.numel // (n * hidden)
    is_first = spot.rule.form == rules.WIDE_FC1
    sizes = (n, hidden, inner) if is_first else (n, inner, hidden)
    gated = is_first and bool(model.fact("gated"))

    def parts(t: StoredTensor) -> list[StoredTensor]:
        strides = (sizes[1] * sizes[2], sizes[2], 1)
        whole = replace(
            t,
            shape=sizes,
            boxes=tuple(replace(box, offsets=(0, 0, 0), sizes=sizes, strides=strides) for box in t.boxes),
            copies=tuple(replace(box, offsets=(0, 0, 0), sizes=sizes, strides=strides) for box in t.copies if box.sizes == t.shape),
        )
        pieces = []
        for expert in cuts.split_stack(whole):
            pieces += cuts.halves(cuts.transpose_tensor(expert)) if gated else [cuts.transpose_tensor(expert)]
        return pieces

    return Placed(
        tensor,
        _expert_slots(n, ("gate", "up") if gated else ("up",) if is_first else ("down",)),
        f"{spot.rule.form} {sizes} {gated}",
        parts,
    )


def _expert_slots(count: int, leaves: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"experts.{e}.{leaf}" for e in range(count) for leaf in leaves)
