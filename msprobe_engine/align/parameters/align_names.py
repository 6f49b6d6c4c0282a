"""Which tensor of one checkpoint is which of another: same names, wrappers' prefixes, other frameworks' names, fused parameters.

`align_checkpoints` pairs first equal names, then what lies in the same slot (`names_rules`). Where one side fuses what the other keeps
apart (q, k and v; gate and up; stacked experts), both are cut to their common pieces. Names of side A are kept in the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as Mapping_
from dataclasses import dataclass, field, replace
from typing import Any

from msprobe_engine.align.parameters.leftover_names import lost_slots, prefixes
from msprobe_engine.align.parameters.mapped_names import pair_by_rules
from msprobe_engine.align.parameters.mapping_file import Mapping
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.align.parameters.prefixes import is_computed_buffer, state_of
from msprobe_engine.align.parameters.slots import Placed, place
from msprobe_engine.align.parameters.vocabulary import TABLES, Vocabulary, other_rows
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER, OTHER, RANDOM, SCHEDULER, Box, Checkpoint, StoredTensor
from msprobe_engine.formats.checkpoint.random_states import other_places

_SHARED = re.compile(r"mtp\.[0-9]+\.(?=(?:embedding|output)\.weight$)")
_ONE_EXPERT = re.compile(r"experts\.[0-9]+\.")
_MEMBERS = re.compile(r"optimizer\w*\.param_groups\.[0-9]+\.params")
"""How many parameters a group of an optimizer's own state dict has: where it is, the optimizer was saved, be it without states."""
_LOST = "the other checkpoint is not whole"
_REFUSED = "cannot be taken apart"
_GROUPS = {
    OPTIMIZER: "states of an optimizer",
    RANDOM: "random states",
    SCHEDULER: "tensors of a scheduler",
    OTHER: "tensors beside the model",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of both checkpoints.

    Attributes:
        name: side A's key, with the part in brackets where it was taken apart (``decoder.layers.0...linear_qkv.weight[q]``).
        a, b: the same part of the same parameter; shapes are equal unless the models differ.
        note: what was assumed to make the pair; "" where nothing was.
    """

    name: str
    a: StoredTensor
    b: StoredTensor
    note: str = ""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tensors that are not compared although one side has them.

    Attributes:
        side: ``a`` or ``b``.
        names: keys of the tensors.
        reason: one sentence.
        open: the other side may hold the same and differ: the checkpoints cannot be called equal.
    """

    side: str
    names: tuple[str, ...]
    reason: str
    open: bool = False


@dataclass
class Alignment:
    """What is compared with what.

    Attributes:
        pairs: in the order of checkpoint A.
        only_a, only_b: tensors that the other side lacks.
        left_out: what is on one side and says nothing of a difference (no optimizer on the other side, buffers that are computed), or
            cannot be taken apart.
        notes: assumptions, once each.
        models: what is known of side A and of side B.
    """

    pairs: list[Pair] = field(default_factory=list)
    only_a: list[StoredTensor] = field(default_factory=list)
    only_b: list[StoredTensor] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    models: tuple[Model, Model] | None = None


def label(tensor: StoredTensor) -> str:
    """Name of a tensor in results: its key, with the part in brackets."""
    return f"{tensor.key}[{tensor.part}]" if tensor.part else tensor.key


def align_checkpoints(
    target: Checkpoint, golden: Checkpoint, facts: dict[str, Any] | None = None, mapping: Mapping | None = None
) -> Alignment:
    """The pairs of two checkpoints, whatever they call their tensors.

    Args:
        target, golden: as read; of their tensors only rows that may fill up a vocabulary are read here.
        facts: of the model, where the checkpoints do not say them (``heads``, ``kv_heads``, ``head_dim``, ``experts``, ``gated``,
            ``vocab``); they go before those of the checkpoints.
        mapping: of a mapping file: names, facts and what is to be ignored.

    Raises:
        DumpFormatError: a rule of the mapping does not fit the shapes of the tensors it names.
    """
    mapping = mapping or Mapping()
    return _Aligning(target, golden, mapping.facts | (facts or {}), mapping).run()


class _Side:
    """One checkpoint, and what of it was paired."""

    def __init__(self, letter: str, checkpoint: Checkpoint, model: Model, leave: Mapping_[str, str]) -> None:
        self.letter, self.checkpoint, self.model, self.leave = letter, checkpoint, model, leave
        self.slots: dict[str, Placed] = {}
        self.slots_of: dict[str, tuple[str, ...]] = {}
        self.done: set[str] = set()
        self.refused: dict[str, str] = {}
        self._lost = lost_slots(checkpoint.lost, model)
        self._pieces: dict[str, StoredTensor] = {}
        self._twins: dict[tuple[Box, ...], str] | None = None
        for key, tensor in checkpoint.tensors.items():
            if key in leave:
                continue
            placed = place(tensor, self.model)
            if any(slot in self.slots for slot in placed.slots):
                placed = Placed(tensor, (f"={label(tensor)}",))  # a second tensor of a slot: its own name is all there is
            self.slots.update(dict.fromkeys(placed.slots, placed))
            self.slots_of[key] = placed.slots
        self.groups = {tensor.group for tensor in checkpoint.tensors.values()}
        self.states = {state_of(tensor) for tensor in checkpoint.tensors.values()}

    def piece(self, slot: str) -> StoredTensor:
        """What lies in a slot."""
        placed = self.slots[slot]
        if placed.cut is None:
            return placed.tensor
        if slot not in self._pieces:
            self._pieces.update(zip(placed.slots, placed.cut(placed.tensor)))
        return self._pieces[slot]

    def mark_paired(self, tensor: StoredTensor) -> None:
        """Count a tensor as paired."""
        self.done.update(self.slots_of.get(label(tensor), ()))

    def explain_hidden_slots(self) -> dict[str, str]:
        """Slots that lie in tensors which cannot be taken apart, and why not."""
        reasons = {}
        for slot, placed in self.slots.items():
            if placed.why_not and slot not in self.done:
                reasons.update(dict.fromkeys(placed.hides, f"{label(placed.tensor)} of the other checkpoint: {placed.why_not}"))
        return reasons

    def explain_lost_slot(self, slot: str) -> str:
        """Why what would lie in a slot of the model was not read; "" where nothing says that it was lost."""
        if "|" in slot or not self._lost:
            return ""
        return self._lost.get(slot) or self._lost.get(_ONE_EXPERT.sub("experts.", slot)) or self._lost.get("", "")

    def twin(self, tensor: StoredTensor) -> str:
        """A tensor that was paired and lies where `tensor` lies: both are names of one parameter. "" where there is none."""
        if self._twins is None:
            paired = (key for key, slots in self.slots_of.items() if self.done.issuperset(slots))
            self._twins = {self.checkpoint.tensors[key].boxes: key for key in paired}
        return self._twins.get(tensor.boxes, "") if tensor.boxes and tensor.numel else ""

    def unknown(self) -> dict[str, StoredTensor]:
        """What was not paired and is in no table of names, by name; no states of optimizers."""
        unknown = {}
        for slot, placed in self.slots.items():
            if slot not in self.done and "|" not in slot and placed.cut is None and self.model.spot(placed.tensor.name) is None:
                unknown[slot] = placed.tensor
        return unknown

    def iterate_unpaired(self) -> Iterator[tuple[Placed, StoredTensor]]:
        """What was not paired: whole tensors, and the parts of those of which other parts were."""
        seen: set[int] = set()
        for slot, placed in self.slots.items():
            if slot in self.done or id(placed) in seen:
                continue
            if self.done.isdisjoint(placed.slots):
                seen.add(id(placed))
                yield placed, placed.tensor
            else:
                yield placed, self.piece(slot)


class _Aligning:
    def __init__(self, target: Checkpoint, golden: Checkpoint, facts: dict[str, Any], mapping: Mapping) -> None:
        random = other_places(target, golden)
        self._target, self._golden = (
            _Side(letter, checkpoint, Model(checkpoint, other, facts), _find_ignored_tensors(checkpoint, random, mapping))
            for letter, checkpoint, other in (("a", target, golden), ("b", golden, target))
        )
        self._mapping = mapping
        self._named: set[str] = set()
        # Within one format, an optimizer without states beside one with states has lost them.
        self._lost_states = target.format == golden.format and all(
            any(_MEMBERS.fullmatch(key) and value for key, value in side.values.items()) for side in (target, golden)
        )
        self._out = Alignment(models=(self._target.model, self._golden.model))
        self._vocabulary = Vocabulary(
            *(s if isinstance(s := known.get("vocab"), int) else 0 for known in (facts, target.facts, golden.facts))
        )

    def run(self) -> Alignment:
        for name, target_tensor, golden_tensor in pair_by_rules(
            self._target.checkpoint, self._golden.checkpoint, self._mapping, self._out.notes
        ):
            self._out.pairs.append(Pair(name, target_tensor.piece, golden_tensor.piece, "by the mapping file"))
            self._named.add(name)
            self._target.mark_paired(target_tensor.whole)
            self._golden.mark_paired(golden_tensor.whole)
        self._same_names()
        self._stand_ins(self._target, self._golden)
        self._stand_ins(self._golden, self._target)
        self._by_slot()
        self._by_prefix()
        for side, other, only in ((self._target, self._golden, self._out.only_a), (self._golden, self._target, self._out.only_b)):
            self._alone(side, other, only)
            for note in side.model.notes:
                self._add_note(note)
        order = {key: i for i, key in enumerate(self._target.checkpoint.tensors)}
        self._out.pairs.sort(key=lambda pair: order.get(pair.a.key, len(order)))
        return self._out

    def _same_names(self) -> None:
        """Tensors of one key and shape are each other, whatever the names mean, unless they are known to lie in another way."""
        for key, slots in self._target.slots_of.items():
            others = self._golden.slots_of.get(key)
            tensor, other = self._target.checkpoint.tensors[key], self._golden.checkpoint.tensors.get(key)
            if others is None or other is None or other.shape != tensor.shape:
                continue
            if self._target.slots[slots[0]].form != self._golden.slots[others[0]].form and slots == others:
                continue
            if self._target.done.isdisjoint(slots) and self._golden.done.isdisjoint(others):
                self._pair(tensor, other)
                self._target.done.update(slots)
                self._golden.done.update(others)

    def _by_slot(self) -> None:
        for slot, target_placed in self._target.slots.items():
            golden_placed = self._golden.slots.get(slot)
            if golden_placed is None or slot in self._target.done or slot in self._golden.done:
                continue
            if target_placed.slots == golden_placed.slots and (target_placed.form, target_placed.tensor.shape) == (
                golden_placed.form,
                golden_placed.tensor.shape,
            ):
                self._pair(target_placed.tensor, golden_placed.tensor, slot)
                slots: tuple[str, ...] = target_placed.slots
            else:
                try:
                    target_piece, golden_piece = self._target.piece(slot), self._golden.piece(slot)
                except DumpFormatError as error:
                    for side, placed in ((self._target, target_placed), (self._golden, golden_placed)):
                        side.refused.update(dict.fromkeys(placed.slots, str(error)))
                    continue
                self._pair(target_piece, golden_piece, slot)
                slots = (slot,)
            self._target.done.update(slots)
            self._golden.done.update(slots)

    def _by_prefix(self) -> None:
        """Names that are in no table and differ in what stands before them."""
        target_unknown, golden_unknown = self._target.unknown(), self._golden.unknown()
        both_prefixes = prefixes(
            {name: t.shape for name, t in target_unknown.items()}, {name: t.shape for name, t in golden_unknown.items()}
        )
        if both_prefixes is None:
            return
        target_prefix, golden_prefix = both_prefixes
        for slot, placed in self._target.slots.items():
            if slot in self._target.done or self._target.model.spot(placed.tensor.name) is not None:
                continue
            state, _, name = slot.rpartition("|")
            golden_slot = (
                f"{state}|{golden_prefix}{name[len(target_prefix) :]}" if state else f"{golden_prefix}{name[len(target_prefix) :]}"
            )
            if name.startswith(target_prefix) and golden_slot in self._golden.slots and golden_slot not in self._golden.done:
                self._pair(self._target.piece(slot), self._golden.piece(golden_slot), slot)
                self._target.done.add(slot)
                self._golden.done.add(golden_slot)
        words = [f"begin with {prefix!r}" if prefix else "have nothing before them" for prefix in both_prefixes]
        self._add_note(f"names of the run that {words[0]} were taken for names of the golden run that {words[1]}")

    def _alone(self, side: _Side, other: _Side, only: list[StoredTensor]) -> None:
        """What has no counterpart: missing, or left out with a reason."""
        reasons: dict[str, list[str]] = {}
        for key, reason in side.leave.items():
            reasons.setdefault(reason, []).append(key)
        hidden = other.explain_hidden_slots()
        starts = [(slot[:-1], why) for slot, why in hidden.items() if slot.endswith("*")]
        for placed, tensor in side.iterate_unpaired():
            refused = next((side.refused[slot] for slot in placed.slots if slot in side.refused), placed.why_not)
            refused = refused or next((hidden[slot] for slot in placed.slots if slot in hidden), "")
            refused = refused or next((why for slot in placed.slots for start, why in starts if slot.startswith(start)), "")
            if tensor.group == OPTIMIZER and OPTIMIZER not in other.groups and self._lost_states:
                only.append(tensor)
            elif tensor.group != MODEL and tensor.group not in other.groups:
                reasons.setdefault(f"{other.checkpoint.path} holds no {_GROUPS[tensor.group]}", []).append(label(tensor))
            elif tensor.state == "step" and "step" not in other.states:
                reasons.setdefault(f"counts steps for each parameter; {other.checkpoint.path} does not", []).append(label(tensor))
            elif tensor.state and state_of(tensor) not in other.states and side.checkpoint.format != other.checkpoint.format:
                reasons.setdefault(f"{other.checkpoint.path} keeps no state {tensor.state!r} of any parameter", []).append(label(tensor))
            elif tensor.group == MODEL and is_computed_buffer(tensor.name):
                reasons.setdefault("a buffer that is computed, not learnt", []).append(label(tensor))
            elif lost := next((why for slot in placed.slots if (why := other.explain_lost_slot(slot))), ""):
                reasons.setdefault(f"{_LOST}: {lost}", []).append(label(tensor))
            elif refused:
                reasons.setdefault(f"{_REFUSED}: {refused}", []).append(label(tensor))
            elif twin := side.twin(tensor):
                reasons.setdefault(f"the same place in the file as {twin}, which is compared (tied)", []).append(label(tensor))
            else:
                only.append(tensor)
        for reason, names in reasons.items():
            self._out.left_out.append(LeftOut(side.letter, tuple(names), reason, reason.startswith((_REFUSED, _LOST))))

    def _stand_ins(self, side: _Side, other: _Side) -> None:
        """Slots that a checkpoint leaves out because another of its tensors is the same: tied output layers, master copies."""
        missing = [slot for slot in other.slots if slot not in side.slots and not side.explain_lost_slot(slot)]
        tied = side.model.is_tied()
        untied = not tied if tied is not None else any(slot.rpartition("|")[2] == "output.weight" for slot in side.slots)
        for slot in missing:
            source = side.slots.get(slot.replace("output.weight", "embedding.weight"))
            if slot.rpartition("|")[2] == "output.weight" and source is not None and not untied:
                side.slots[slot] = replace(source, slots=(slot,))
                self._add_note(f"{side.checkpoint.path}: stores no output layer; its embedding stands for it (tied)")
        for slot in missing:
            source = side.slots.get(_SHARED.sub("", slot)) if _SHARED.search(slot) else None
            if source is not None:
                side.slots[slot] = replace(source, slots=(slot,))
                self._add_note(
                    f"{side.checkpoint.path}: layers that predict further tokens have no tables of their own; the model's stand for them"
                )
        for slot in missing:
            if "|" not in slot and slot not in side.slots and f"master|{slot}" in side.slots:
                master = side.slots[f"master|{slot}"]
                placed = replace(master, slots=tuple(s.removeprefix("master|") for s in master.slots))
                side.slots.update({s: placed for s in placed.slots if s not in side.slots})
                self._add_note(
                    f"{side.checkpoint.path}: parameters without weights of their own; the optimizer's master copies stand for them"
                )
        if OPTIMIZER in side.groups and "master" not in side.states:
            for slot in [slot for slot in missing if slot.startswith("master|")]:
                weight = side.slots.get(slot.removeprefix("master|"))
                if weight is not None and weight.tensor.dtype == "float32":
                    side.slots[slot] = replace(weight, slots=tuple(f"master|{s}" for s in weight.slots))
                    self._add_note(
                        f"{side.checkpoint.path}: keeps no master copies; its float32 weights are compared with those of the other"
                    )

    def _pair(self, target: StoredTensor, golden: StoredTensor, slot: str = "") -> None:
        note = ""
        where = slot.rpartition("|")[2]
        name = label(target)
        if where in TABLES and other_rows(target, golden):
            target, golden, note = self._vocabulary.common(target, golden)
            if note:
                self._add_note(f"{name}: {note}")
        if name in self._named:  # it stands for another tensor too
            name = f"{name} (as {label(golden)})"
        self._named.add(name)
        self._out.pairs.append(Pair(name, target, golden, note))

    def _add_note(self, text: str) -> None:
        if text not in self._out.notes:
            self._out.notes.append(text)


def _find_ignored_tensors(checkpoint: Checkpoint, random: bool, mapping: Mapping) -> dict[str, str]:
    """Keys of tensors that are left out from the start, with the reason."""
    reasons = {}
    for key, tensor in checkpoint.tensors.items():
        if random and tensor.group == RANDOM:
            reasons[key] = "random states of each rank; the other checkpoint is of other ranks"
        elif mapping.ignores(tensor.name) or mapping.ignores(key):
            reasons[key] = "the mapping file says so"
    return reasons
