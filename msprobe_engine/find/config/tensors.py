"""Weights and samples of two runs: by digests of their bits where both packs have them, else by the existing tool's four statistics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.config.severity import CHANGES, ERROR, MAY
from msprobe_engine.core.redaction import NO_KEY
from msprobe_engine.core.text.ranges import format_ranges
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.core.text.words import some
from msprobe_engine.find.config.difference import DATASET, HAS_BENCH, HAS_CMP, SIDES, WEIGHTS, Difference, Sheet, merge_ranks, short

STATISTICS = ("max", "min", "mean", "norm")
REDACTED = "redacted"
"""Key of records whose values were left out: the key that made their digests, see `msprobe_engine.core.redaction`."""
MOST_NAMES = 4
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Attributes under which torch.compile, FSDP and checkpoint_wrapper keep the module they wrap; DDP's is ``module``."""
MOST_EQUAL_ROWS = 500_000
"""In a longer sheet only what is not equal has a row."""
Place = tuple[int, int]
"""(step, rank)."""


@dataclass
class Tensors:
    """What one side recorded.

    Attributes:
        existing: the existing tool's entries, by name or tag.
        ours: entries with digests.
    """

    existing: Mapping[Place, Mapping[str, Any]] = field(default_factory=dict)
    ours: Mapping[Place, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def places(self) -> set[Place]:
        """Steps and ranks of which anything is there."""
        return set(self.existing) | set(self.ours)

    def at(self, place: Place, digests: bool) -> dict[str, dict[str, Any]]:
        """Name to what is known of it: ``shape``, ``dtype``, ``digest``, ``samples``, ``value`` and the four statistics."""
        found: dict[str, dict[str, Any]] = {}
        for name, one in self.existing.get(place, {}).items():
            found[name] = {key: one[key] for key in STATISTICS if key in one}
        if digests:
            for name, one in self.ours.get(place, {}).items():
                if isinstance(one, Mapping):
                    found[name] = {**found.get(name, {}), **one}
        return found


def flat_tags(entry: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The existing tool's entry of a forward pass by tags: ``args.0``, ``kwargs.labels``; only tensors."""
    return dict(_flat("", entry, 0))


def _flat(tag: str, value: Any, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(value, Mapping) or depth > 64:
        return
    if set(value) == set(STATISTICS) and not any(isinstance(child, Mapping) for child in value.values()):
        yield tag, value
        return
    for key, child in value.items():
        yield from _flat(f"{tag}.{key}" if tag else str(key), child, depth + 1)


def compare_weights(bench: Tensors, cmp: Tensors, *, other_ranks: bool = False, other_cut: bool = False) -> Sheet:
    """Compare parameters and buffers. Those of the first recorded step are the weights the training began with.

    Args:
        other_ranks: the runs have another number of ranks, so ranks of one side only are no difference.
        other_cut: the model may be dealt out to the ranks in another way, so what a rank lacks may be another's.
    """
    work = _Comparison(WEIGHTS, "weight_name", bench, cmp, other_ranks, other_cut)
    sheet = work.run()
    first = min((step for step, _ in bench.places & cmp.places), default=0)
    by_rank: list[tuple[tuple[int, ...], Difference]] = []
    later: Counter[str] = Counter()
    since = math.inf
    elsewhere = _names_by_digest(bench, first) if other_cut else {}
    for (name, rank), seen in work.unequal.items():
        steps = sorted(seen)
        if steps[0] > first:
            later[name] += 1
            since = min(since, steps[0])
            continue
        golden_tensor, target_tensor = seen[steps[0]]
        why, severity = _why_weights(golden_tensor, target_tensor, other_cut)
        if (same := elsewhere.get(target_tensor.get("digest"))) is not None:
            why, severity = Sentence("it is another layer on this rank: the golden run has its numbers as {0}", same), MAY
        by_rank.append(
            (
                (rank,),
                Difference(WEIGHTS, name, name, _text(golden_tensor), _text(target_tensor), severity, why, steps=tuple(steps), level=ERROR),
            )
        )
    sheet.differences += merge_ranks(by_rank, work.everyone)
    if later:
        names = f"{len(later)} tensors: {', '.join(sorted(later)[:MOST_NAMES])}{', ...' if len(later) > MOST_NAMES else ''}"
        why = Sentence("they are equal at step {0} and other ones from step {1} on: another input or update before it", first, int(since))
        sheet.differences.append(Difference(WEIGHTS, names, names, "", "", CHANGES, why, term=LATER, level=ERROR))
    return sheet


def _names_by_digest(side: Tensors, step: int) -> dict[Any, str]:
    """Digest -> name of all weights of a step: each stage of a pipeline may number its layers from 0."""
    known = (side.at(place, True) for place in sorted(side.places) if place[0] == step)
    return {one["digest"]: name for weights in known for name, one in weights.items() if one.get("digest")}


LATER = "later weights"
"""`Difference.term` of weights that were equal at first: they follow from another difference, if there is one."""


def compare_dataset(bench: Tensors, cmp: Tensors, *, other_ranks: bool = False) -> Sheet:
    """Compare what the model was called with.

    Args:
        other_ranks: the runs have another number of ranks, so ranks of one side only are no difference.
    """
    work = _Comparison(DATASET, "tag", bench, cmp, other_ranks)
    sheet = work.run()
    moved = _same_samples(bench, cmp) if work.unequal or other_ranks else {}
    by_why: dict[tuple[str, int, str, str], dict[int, tuple[Any, Any]]] = {}
    for (tag, rank), seen in work.unequal.items():
        for step, (golden_tensor, target_tensor) in seen.items():
            if tag in moved:
                continue
            severity, why = _why_samples(golden_tensor, target_tensor)
            by_why.setdefault((tag, rank, severity, why), {})[step] = (golden_tensor, target_tensor)
    by_rank = []
    for (tag, rank, severity, why), seen in by_why.items():
        golden_tensor, target_tensor = seen[min(seen)]
        sample_difference = Difference(
            DATASET, tag, tag, _text(golden_tensor), _text(target_tensor), severity, why, steps=tuple(sorted(seen)), level=ERROR
        )
        by_rank.append(((rank,), sample_difference))
    sheet.differences += merge_ranks(by_rank, work.everyone)
    for tag, why in moved.items():
        sheet.differences.append(Difference(DATASET, tag, tag, "", "", MAY, why))
    return sheet


class _Comparison:
    """The rows of a sheet, and what in them is not equal."""

    def __init__(self, sheet: str, column: str, bench: Tensors, cmp: Tensors, other_ranks: bool, other_cut: bool = False) -> None:
        self.sheet = Sheet(sheet)
        self.column, self.bench, self.cmp, self.other_ranks, self.other_cut = column, bench, cmp, other_ranks, other_cut
        self.digests = bool(bench.ours) and bool(cmp.ours)
        self.unequal: dict[tuple[str, int], dict[int, tuple[Any, Any]]] = {}
        self.shared = False
        self.hidden: set[str] = set()
        self.undigested: set[str] = set()
        self.everyone = tuple({rank for _, rank in bench.places & cmp.places})

    def run(self) -> Sheet:
        one_sided: dict[tuple[str, str], dict[str, set[int]]] = {}
        for place in sorted(self.bench.places | self.cmp.places):
            if place in self.bench.places and place in self.cmp.places:
                self._place(place, one_sided)
            else:
                self._add_missing_place(place)
        self._absent_places()
        if self.hidden:
            hidden = ", ".join(sorted(self.hidden)[:MOST_NAMES]) + (", ..." if len(self.hidden) > MOST_NAMES else "")
            why = Sentence("values are redacted, and both sides do not have digests of one key: they cannot be compared")
            self.sheet.differences.append(Difference(self.sheet.name, hidden, hidden, "", "", MAY, why, level=ERROR))
        self.sheet.unknown = tuple(sorted(self.undigested)[:MOST_NAMES])
        if self.undigested:
            listed_names = ", ".join(self.sheet.unknown) + (", ..." if len(self.undigested) > MOST_NAMES else "")
            self.sheet.notes.append(Sentence("only one side has a digest of {0}: of these only the statistics were compared", listed_names))
        if one_sided and not self.shared:
            what = "weights" if self.column == "weight_name" else "inputs"
            why = Sentence("no name of the {0} is on both sides; of two frameworks compare checkpoints (msprobe ckpt diff)", what)
            self.sheet.differences.append(Difference(self.sheet.name, what, what, "", "", MAY, why, level=ERROR))
            return self.sheet
        for (name, side), at in one_sided.items():
            names = (name, "") if side == "bench" else ("", name)
            what = Sentence("this parameter or buffer") if self.column == "weight_name" else Sentence("this input")
            why, severity = Sentence("only the {0} side has {1}", SIDES[side], what), CHANGES
            if self.other_cut:
                why, severity = Sentence("{0} on this rank, and the runs deal the model out to their ranks in other ways", why), MAY
            ranks = () if at["ranks"] >= set(self.everyone) else tuple(sorted(at["ranks"]))
            self.sheet.differences.append(
                Difference(self.sheet.name, *names, "", "", severity, why, ranks=ranks, steps=tuple(sorted(at["steps"])), level=ERROR)
            )
        return self.sheet

    def _place(self, place: Place, one_sided: dict[tuple[str, str], dict[str, set[int]]]) -> None:
        step, rank = place
        golden, target = self.bench.at(place, self.digests), self.cmp.at(place, self.digests)
        if self.sheet.name == WEIGHTS:
            target = named_alike(golden, target)
        for name in sorted(golden.keys() | target.keys()):
            self.sheet.compared += 1
            if name not in golden or name not in target:
                side = "bench" if name in golden else "cmp"
                self._row(place, name, HAS_BENCH if name in golden else HAS_CMP, None, None)
                where_seen = one_sided.setdefault((name, side), {"steps": set(), "ranks": set()})
                where_seen["steps"].add(step)
                where_seen["ranks"].add(rank)
                continue
            self.shared = True
            if not comparable(golden[name], target[name]):
                self.hidden.add(name)
                continue
            if self.digests and bool(golden[name].get("digest")) != bool(target[name].get("digest")):
                self.undigested.add(name)
            equal = same_tensor(golden[name], target[name])
            if not equal:
                self.unequal.setdefault((name, rank), {})[step] = (golden[name], target[name])
            if not equal or ("value" not in golden[name] and len(self.sheet.rows) < MOST_EQUAL_ROWS):
                self._row(place, name, equal, golden[name], target[name])

    def _add_missing_place(self, place: Place) -> None:
        """A step of a rank that one side has alone: every name a row, as the existing tool has it."""
        side, word = (self.bench, HAS_BENCH) if place in self.bench.places else (self.cmp, HAS_CMP)
        for name in sorted(side.at(place, self.digests)):
            self._row(place, name, word, None, None)

    def _absent_places(self) -> None:
        for side, places, other_places in (("bench", self.bench.places, self.cmp.places), ("cmp", self.cmp.places, self.bench.places)):
            names = ("recorded", "") if side == "bench" else ("", "recorded")
            ranks = {rank for _, rank in places} - {rank for _, rank in other_places}
            if ranks and not self.other_ranks:
                why = Sentence(
                    "only the {0} side has recorded anything of rank {1}, so it is not compared", SIDES[side], format_ranges(ranks)
                )
                self.sheet.differences.append(
                    Difference(self.sheet.name, *names, "", "", MAY, why, ranks=tuple(sorted(ranks)), level=ERROR)
                )
            steps: dict[int, set[int]] = {}
            for step, rank in places - other_places:
                if rank not in ranks:
                    steps.setdefault(step, set()).add(rank)
            if steps:
                every = set().union(*steps.values())
                why = Sentence("only the {0} side has recorded step {1}, so it is not compared", SIDES[side], format_ranges(steps))
                shown = () if every >= set(self.everyone) else tuple(sorted(every))
                self.sheet.differences.append(
                    Difference(self.sheet.name, *names, "", "", MAY, why, ranks=shown, steps=tuple(sorted(steps)), level=ERROR)
                )

    def _row(self, place: Place, name: str, equal: bool | str, golden: Mapping[str, Any] | None, target: Mapping[str, Any] | None) -> None:
        row: dict[str, Any] = {"step": place[0], "rank": place[1], self.column: name, "equal": equal}
        for key in STATISTICS:
            row[f"{key}_relative_diff"] = None if golden is None or target is None else relative(golden.get(key), target.get(key))
        self.sheet.rows.append(row)


def named_alike(golden: Mapping[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """`target` with the names of `golden` for what a wrapper (DDP, FSDP, torch.compile) has renamed: ``module.0.weight`` is ``0.weight``.
    Only names that are on one side, and one to one."""
    plain: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
    for names, records, others in zip(plain, (golden, target), (target, golden)):
        for name in records.keys() - others.keys():
            names.setdefault(_strip_wrappers(name), []).append(name)
    renamed = {plain[1][name][0]: plain[0][name][0] for name in plain[0] if len(plain[0][name]) == len(plain[1].get(name, ())) == 1}
    return {renamed.get(name, name): one for name, one in target.items()} if renamed else target


def _strip_wrappers(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def comparable(golden: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Can two records tell whether they are of the same values? Those of redacted ones with digests that one key has made."""
    if REDACTED not in golden and REDACTED not in target:
        return True
    return bool(golden.get(REDACTED) == target.get(REDACTED) != NO_KEY and golden.get("digest") and target.get("digest"))


def same_tensor(golden: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Equal bits, shape and type; without digests on both sides equal statistics."""
    if "value" in golden or "value" in target or "class" in golden or "class" in target:
        return bool(golden.get("value") == target.get("value") and golden.get("class") == target.get("class"))
    if golden.get("digest") and target.get("digest"):
        return all(golden.get(key) == target.get(key) for key in ("digest", "shape", "dtype"))
    if any(key in golden and key in target and golden[key] != target[key] for key in ("shape", "dtype")):
        return False
    return all(_same_number(golden.get(key), target.get(key)) for key in STATISTICS)


def _same_number(golden: Any, target: Any) -> bool:
    return golden == target or (isinstance(golden, float) and isinstance(target, float) and math.isnan(golden) and math.isnan(target))


def relative(golden: Any, target: Any) -> float | None:
    """``|golden - target| / golden`` as the existing tool has it; None where that is nothing."""
    if golden == 0 or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in (golden, target)):
        return None
    return float(abs(golden - target) / golden)


def _why_weights(golden: Mapping[str, Any], target: Mapping[str, Any], other_cut: bool) -> tuple[str, str]:
    if golden.get("shape") != target.get("shape") and "shape" in golden and "shape" in target:
        if other_cut or golden.get("placements") != target.get("placements"):
            return Sentence("it has another shape on this rank, and the runs deal the model out to their ranks in other ways"), MAY
        return Sentence("it has another shape: another model, or another cut by tensor parallelism"), CHANGES
    if golden.get("dtype") != target.get("dtype") and "dtype" in golden and "dtype" in target:
        return Sentence("it is kept in {0}, golden {1}", *(str(one["dtype"]).removeprefix("torch.") for one in (target, golden))), CHANGES
    if (
        golden.get("digest")
        and target.get("digest")
        and all(key in golden and key in target and _same_number(golden[key], target[key]) for key in STATISTICS)
    ):
        return Sentence("its bits differ, though max, min, mean and norm agree: few elements, or the same ones in another order"), CHANGES
    return Sentence("the training begins with other numbers in it"), CHANGES


def _why_samples(golden: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[str, str]:
    if "value" in golden or "value" in target or "class" in golden or "class" in target:
        return CHANGES, Sentence("the model is called with another value")
    if golden.get("shape") != target.get("shape") and "shape" in golden and "shape" in target:
        return CHANGES, Sentence("it has another shape")
    if golden.get("dtype") != target.get("dtype") and "dtype" in golden and "dtype" in target:
        return CHANGES, Sentence("it has another data type")
    golden_samples, target_samples = golden.get("samples") or [], target.get("samples") or []
    if golden_samples and len(golden_samples) == len(target_samples) and None not in golden_samples and None not in target_samples:
        if Counter(golden_samples) == Counter(target_samples):
            indices = [str(i) for i, (p, q) in enumerate(zip(golden_samples, target_samples)) if p != q]
            return MAY, Sentence("the same samples in another order (index {0})", some(indices))
        indices = [str(i) for i, (p, q) in enumerate(zip(golden_samples, target_samples)) if p != q]
        return CHANGES, Sentence("{0} of {1} samples are others (index {2})", len(indices), len(golden_samples), some(indices))
    return CHANGES, Sentence("the model sees other samples")


def _same_samples(bench: Tensors, cmp: Tensors) -> dict[str, str]:
    """Tags whose samples are the same on both sides over all steps and ranks, and lie at other steps, ranks or micro batches."""
    golden_samples, target_samples = _samples(bench), _samples(cmp)
    moved = {}
    for tag in golden_samples.keys() & target_samples.keys():
        golden_by_place, target_by_place = golden_samples[tag], target_samples[tag]
        golden_flat, target_flat = ([one for samples in side.values() for one in samples] for side in (golden_by_place, target_by_place))
        if (
            None in golden_flat
            or Counter(golden_flat) != Counter(target_flat)
            or {k: Counter(v) for k, v in golden_by_place.items()} == {k: Counter(v) for k, v in target_by_place.items()}
        ):
            continue
        order = "cut into other micro batches" if golden_flat == target_flat else "at other ranks or steps"
        moved[tag] = f"the same {len(golden_flat)} samples, {order}; sums over a batch round in another way"
    return moved


def _samples(side: Tensors) -> dict[str, dict[Place, list[Any]]]:
    samples_by_tag: dict[str, dict[Place, list[Any]]] = {}
    for place in sorted(side.ours):
        for tag, entry in side.ours[place].items():
            if isinstance(entry, Mapping) and entry.get("samples"):
                samples_by_tag.setdefault(tag, {})[place] = list(entry["samples"])
    return samples_by_tag


def _text(one: Mapping[str, Any]) -> str:
    """What is known of a tensor, in short."""
    if "value" in one or "class" in one:
        return short(str(one.get("value", one.get("class"))))
    parts = [f"{one['dtype']} {one['shape']}"] if "dtype" in one and "shape" in one else []
    if one.get("digest"):
        parts.append(f"digest {one['digest']}")
    if not one.get("digest") and all(key in one for key in STATISTICS):
        parts.append(", ".join(f"{key} {_number(one[key])}" for key in STATISTICS))
    return ", ".join(parts)


def _number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, int | float) else short(str(value))
