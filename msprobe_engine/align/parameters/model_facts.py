"""What is known of a model whose checkpoint's tensors are taken apart: heads, sizes, whether layers are gated.

Facts come from the checkpoint itself (config.json, args), else from the shapes of its tensors, else from the other checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msprobe_engine.align.parameters.prefixes import bare
from msprobe_engine.align.parameters.rules import LAYER, Rule, Spot, spot_of
from msprobe_engine.formats.checkpoint.cuts import Heads
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, Checkpoint

Shape = tuple[int, ...]
_MINDSPORE = ("norm_out.weight", "tok_embeddings.embedding_weight")
_LARGEST = 1 << 32
"""Beyond it a number of heads, layers or words is damage."""
_AFTER, _BEFORE = "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"


class Model:
    """Facts of one side.

    Attributes:
        interleaved: Megatron ran with ``--rotary-interleaved``: rows of q and k are in pairs, not in halves.
        is_mindspore: names are those of MindSpore Transformers.
        slots: of all that the checkpoint has.

    Args:
        checkpoint: whose facts and shapes are looked at.
        other: asked when the checkpoint says nothing.
        given: of a mapping file; go before everything.
    """

    def __init__(self, checkpoint: Checkpoint, other: Checkpoint | None = None, given: dict[str, Any] | None = None) -> None:
        self.notes: list[str] = []
        self._path = checkpoint.path
        self._facts = {k: v for k, v in checkpoint.facts.items() if v is not None} | (given or {})
        self._other = {k: v for k, v in other.facts.items() if v is not None} if other is not None else {}
        self._shapes: dict[str, Shape] = {}
        self._spots: dict[str, Spot | None] = {}
        self.slots: set[str] = set()
        self._plain = {bare(tensor.name) for tensor in checkpoint.tensors.values() if tensor.group in (MODEL, OPTIMIZER)}
        self.is_mindspore = checkpoint.format.startswith("MindSpore") or any(name.endswith(_MINDSPORE) for name in self._plain)
        whole = checkpoint.values.get("args.rotary_percent", 1.0) == 1.0
        self.interleaved = checkpoint.values.get("args.rotary_interleaved") is True and whole
        self._roots = _roots(self._plain)
        self._two = all(any(name.startswith(f"{part}.layers.") for name in self._plain) for part in ("encoder", "decoder"))
        for tensor in checkpoint.tensors.values():
            spot = self.spot(tensor.name)
            if spot is None:
                continue
            slot = f"{spot.layer}{spot.rule.slot}.{spot.kind}"
            if not tensor.state or slot not in self._shapes:
                self._shapes[slot] = tensor.shape
                self.slots.add(slot)

    def spot(self, name: str) -> Spot | None:
        """The place of a parameter by its name."""
        if name not in self._spots:
            plain = bare(name)
            spot = spot_of(plain)
            for root in self._roots if spot is None else ():
                if plain.startswith(root):
                    spot = spot or spot_of(plain[len(root) :])
            if spot is not None and plain.endswith(_AFTER) and plain.replace(_AFTER, _BEFORE) in self._plain:
                spot = spot._replace(rule=Rule("attention.norm_after"))  # Gemma 2: norms before and behind each part
            if spot is not None and self._two and plain.startswith("encoder."):
                spot = spot._replace(layer=f"encoder.{spot.layer}")  # of an encoder and a decoder, which have layers of the same numbers
            self._spots[name] = self._further(spot)
        return self._spots[name]

    def _further(self, spot: Spot | None) -> Spot | None:
        """Layers behind the last one predict further tokens: DeepSeek-V3's checkpoints number them on."""
        layers = self._facts.get("layers")
        number = spot.layer.split(".")[1] if spot is not None and spot.layer.startswith("layers.") else ""
        if spot is None or not number or not isinstance(layers, int) or int(number) < layers:
            return spot
        return spot._replace(layer=f"mtp.{int(number) - layers}.")

    def has(self, slot: str) -> bool:
        """Whether the checkpoint has something at a slot."""
        return slot in self.slots

    def shape(self, slot: str) -> Shape | None:
        """Shape of what the checkpoint stores at a slot (fused ones: the slot of the whole)."""
        return self._shapes.get(slot)

    def fact(self, name: str) -> Any:
        """A fact of this checkpoint, else of the other one, with a note; None: unknown."""
        if name in self._facts:
            return self._facts[name]
        if name in self._other:
            self._add_note(f"{self._path}: says nothing of {name}; taken from the other checkpoint: {self._other[name]}")
            return self._other[name]
        return None

    def number(self, name: str) -> int | None:
        """A fact that is a whole number above 0."""
        value = self.fact(name)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST else None

    def _add_note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    @property
    def hidden(self) -> int | None:
        """Width of the model: of the final norm, else a fact."""
        norm = self.shape("final_norm.weight")
        return norm[0] if norm is not None and len(norm) == 1 else self.number("hidden")

    def head_dim(self, layer: str) -> int | None:
        """Elements of an attention head: a fact, else the norm of queries, else width by heads (with a note)."""
        known = self.number("head_dim")
        if known is not None:
            return known
        norm = self.shape(f"{layer}attention.q_norm.weight")
        if norm is not None and len(norm) == 1 and 0 < norm[0] <= 512 and not self.has(f"{layer}attention.q_up.weight"):
            self._add_note(f"{self._path}: head_dim {norm[0]} is taken from the norm of the queries")
            return norm[0]
        heads, out, hidden = self.number("heads"), self.shape(f"{layer}attention.out.weight"), self.hidden
        if heads and hidden and out is not None and len(out) == 2:
            inner = out[0] * out[1] // hidden
            if inner % heads == 0:
                return inner // heads
        return None

    def heads(self, layer: str, total: int) -> Heads | str:
        """Rows of q, k and v in a fused projection of `total` rows; a text says why that cannot be told."""
        size = self.head_dim(layer)
        if size is None:
            return "the number of attention heads is not known: give `facts: {heads: N, kv_heads: N, head_dim: N}` in a mapping file"
        heads = self.number("heads")
        out, hidden = self.shape(f"{layer}attention.out.weight"), self.hidden
        q = heads * size if heads else 0
        if out is not None and hidden and len(out) == 2:
            q = out[0] * out[1] // hidden
        if not q:
            return "the number of attention heads is not known: give `facts: {heads: N}` in a mapping file"
        groups = self.number("kv_heads")
        if groups and total == 2 * q + 2 * groups * size:
            return Heads(2 * q, groups * size, groups, gated=True, size=size)
        rest = total - q
        if rest <= 0 or rest % (2 * size):
            return f"{total} rows are not {q} rows of queries and as many keys as values in heads of {size}; is `head_dim` right?"
        if groups and rest != 2 * groups * size:
            self._add_note(f"{self._path}: {layer}attention has {rest // (2 * size)} key/value heads by its shape; kv_heads is {groups}")
        return Heads(q, rest // 2, rest // (2 * size))

    def is_gated(self, layer: str, inner: str, rows: int) -> bool | None:
        """Whether the first linear layer of an MLP holds gate and up: twice the columns of the second layer; else a fact.

        Args:
            layer: ``layers.7.``.
            inner: slot of the first layer, ``mlp.up`` or ``experts.3.up``.
            rows: of the first layer.
        """
        down = self.shape(f"{layer}{inner[: -len('up')]}down.weight")
        if down is not None and len(down) == 2 and rows in (down[1], 2 * down[1]):
            return rows == 2 * down[1]
        if down is not None and len(down) == 2 and rows in (down[0], 2 * down[0]):
            return rows == 2 * down[0]
        value = self.fact("gated")
        return bool(value) if value is not None else None

    def is_tied(self) -> bool | None:
        """Whether the output layer is the embedding; None: not said."""
        value = self._facts.get("tied")
        return bool(value) if value is not None else None


def _roots(names: Iterable[str]) -> tuple[str, ...]:
    """What stands before all names of a model that is a part of another module (``net.model.``, ``net.``), the longest first.

    Nothing where some names have a layer without it, or where several parts have layers: a part that sees images has layers too.
    """
    roots: set[str] = set()
    for plain in names:
        place = LAYER.search(plain)
        if place is None or not place.start():
            continue
        if spot_of(plain) is not None:
            return ()
        if spot_of(plain[place.start() :]) is not None:
            roots.add(plain[: place.start()])
    if len(roots) != 1:
        return ()
    parts = roots.pop().split(".")[:-1]
    return tuple(".".join(parts[:n]) + "." for n in range(len(parts), 0, -1))
