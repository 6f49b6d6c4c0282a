"""What differences between two checkpoints look like: exchanged experts, a stale file, a transposed weight, one flipped bit, rounding.

`explain` writes a hint to each result it understands and returns sentences for several together. It reads tensors again where their norms
or shapes make an explanation likely, never more than a budget, and says only what it has checked.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from msprobe_engine.align.parameters.align_names import Alignment, Pair
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.core.dtypes import FLOATS, item_size, plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.checkpoint.hints_layouts import explain_rearrangement
from msprobe_engine.find.checkpoint.hints_renamed import explain_renames
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN
from msprobe_engine.find.checkpoint.tensor_result import DIFFERENT, SHAPE, TensorResult
from msprobe_engine.formats.checkpoint.blocks import Block
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, StoredTensor
from msprobe_engine.measure.stored.contents import Contents

_MOST = 2000
"""Differing tensors that are looked at one by one."""
_READ_AGAIN = 4 << 30
"""Bytes."""
_FILES = 4
"""Of so many at most is said that all differences lie in them."""
_SENTENCES = 8
"""About experts, each of its own."""
_NORM = 1e-9
"""Norms of the same elements in another order agree to this."""
_WIDE = {name: FLOATS[name] for name in ("float64", "float32", "float16", "bfloat16")}
_EXPERT = re.compile(r"experts?[. ](?P<e>[0-9]+)|\.(?:weight|bias)(?P<g>[0-9]+)$|\[expert (?P<p>[0-9]+)")
_LAYER = re.compile(r"(?:layers|h|blocks)\.(?P<n>[0-9]+)\.")


def explain(alignment: Alignment, results: Sequence[TensorResult]) -> list[str]:
    """Write hints to results that differ.

    Args:
        alignment: whose pairs were compared.
        results: one for each pair, in their order; `hint` is written.

    Returns:
        hints that are of several tensors.
    """
    return _Explaining(alignment, results).run()


class _Explaining:
    def __init__(self, alignment: Alignment, results: Sequence[TensorResult]) -> None:
        self._alignment, self._pairs = alignment, alignment.pairs
        self._model: Model | None = alignment.models[0] if alignment.models is not None else None
        self._results = results
        self._contents = Contents(_READ_AGAIN)
        self._differing = [i for i, r in enumerate(results) if r.status in (DIFFERENT, SHAPE)]
        self._notes: list[str] = []

    def run(self) -> list[str]:
        note = explain_renames(self._alignment.only_a, self._alignment.only_b, self._contents)
        if note:
            self._notes.append(note)
        if not self._differing:
            return self._notes
        if len(self._differing) > _MOST:
            self._notes.append(Sentence("{0} tensors differ; the first {1} were looked at for hints", len(self._differing), _MOST))
        looked = self._differing[:_MOST]
        self._exchanges(looked)
        for i in looked:
            result = self._results[i]
            if not result.hint:
                try:
                    result.hint = self._alone(self._pairs[i], result)
                except DumpFormatError:
                    continue
        of_target = self._few_files([r.files_a for r in self._results], [p.a for p in self._pairs])
        of_golden = self._few_files([r.files_b for r in self._results], [p.b for p in self._pairs])
        if of_target and of_target == of_golden:
            self._notes.append(Sentence("all differences lie in {0} of both sides: {1}", of_target[0], of_target[1]))
        else:
            self._notes += [
                Sentence("all differences lie in {0} of {1}: {2}", note[0], side, note[1])
                for side, note in ((RUN, of_target), (GOLDEN, of_golden))
                if note
            ]
        self._optimizer_alone()
        self._summarize_repeated_hints()
        return self._notes

    def _alone(self, pair: Pair, result: TensorResult) -> str:
        """What one tensor's difference looks like by itself."""
        if result.status == SHAPE:
            return explain_rearrangement(pair.a, pair.b, self._model, self._contents)
        if result.rounded:
            narrow = min((result.dtype_a, result.dtype_b), key=lambda d: item_size(d) or 0)
            return Sentence("the same, rounded to {0}", narrow)
        simple = self._few(pair, result) or _by_numbers(result)
        if not simple and plain_name(result.dtype_a) in _WIDE and plain_name(result.dtype_b) in _WIDE:
            simple = self._explain_scaling(pair, result) or self._explain_shift(pair, result) or self._rounded_before(pair)
        if simple:
            return simple
        norms = result.norm_a, result.norm_b
        if norms[0] and norms[1] and abs(norms[0] - norms[1]) <= _NORM * norms[0] and not result.nan_a and not result.nan_b:
            return explain_rearrangement(pair.a, pair.b, self._model, self._contents)
        return ""

    def _few(self, pair: Pair, result: TensorResult) -> str:
        """One changed element: which bits; of a tensor of one element the two numbers."""
        if result.changed != 1 or result.max_at is None:
            return ""
        if result.numel == 1:
            numbers = [values.reshape(-1)[0].item() for values in map(self._contents.sample, (pair.a, pair.b)) if values.size == 1]
            subject = Sentence("optimizer steps") if result.state == "step" else Sentence("the numbers")
            return Sentence("{0} {1} and {2}", subject, f"{numbers[0]:.10g}", f"{numbers[1]:.10g}") if len(numbers) == 2 else ""
        if result.dtype_a != result.dtype_b:
            return ""
        block = Block(tuple(result.max_at), (1,) * len(result.max_at))
        target_bits, golden_bits = (
            int(self._contents.words(t, block).reshape(-1).view(f"u{item_size(t.dtype)}")[0]) for t in (pair.a, pair.b)
        )
        bits = [i for i in range(64) if (target_bits ^ golden_bits) >> i & 1]
        place = list(result.max_at)
        if len(bits) != 1:
            return Sentence("one element differs, at {0}", place)
        return Sentence("one flipped bit: bit {0}{1} of the element at {2}", bits[0], _describe_bit_field(result.dtype_a, bits[0]), place)

    def _explain_scaling(self, pair: Pair, result: TensorResult) -> str:
        """One side is the other times a constant."""
        if result.cos is None or not result.norm_a or not result.norm_b or result.numel <= 8:
            return ""
        precision = max(_WIDE[plain_name(dtype)].eps for dtype in (result.dtype_a, result.dtype_b))
        ratio = math.copysign(result.norm_b / result.norm_a, result.cos)
        if 1.0 - abs(result.cos) > max(1e-14, precision**2) or abs(ratio - 1.0) <= 4.0 * precision:
            return ""
        target, golden = (values.astype(np.float64) for values in (self._contents.sample(pair.a), self._contents.sample(pair.b)))
        if target.shape != golden.shape or not np.allclose(golden, ratio * target, rtol=2.0 * precision, atol=1e-30):
            return ""
        return (
            Sentence("the golden run is the run with the sign turned")
            if abs(ratio + 1.0) < 1e-6
            else Sentence("the golden run is the run times {0}", f"{ratio:.6g}")
        )

    def _explain_shift(self, pair: Pair, result: TensorResult) -> str:
        """One side is the other plus a constant: norms that hold what is to be added to 1."""
        n, l2, most = result.numel, result.l2, result.max_abs
        if not l2 or not most or n < 4 or result.changed != n or abs(most * math.sqrt(n) - l2) > 1e-2 * l2:
            return ""
        target, golden = (values.astype(np.float64) for values in (self._contents.sample(pair.a), self._contents.sample(pair.b)))
        if target.shape != golden.shape or not target.size:
            return ""
        shift = float(np.median(golden - target))
        if not np.allclose(golden - target, shift, rtol=0.0, atol=_WIDE[plain_name(pair.b.dtype)].eps * max(1.0, abs(shift))):
            return ""
        why = Sentence(" (a norm that is stored as what is added to 1?)") if abs(abs(shift) - 1.0) < 1e-3 and "norm" in result.name else ""
        return (
            Sentence("the golden run is the run plus {0}{1}", f"{shift:.6g}", why)
            if shift > 0
            else Sentence("the golden run is the run minus {0}{1}", f"{-shift:.6g}", why)
        )

    def _rounded_before(self, pair: Pair) -> str:
        """One side went through a narrower element type and back."""
        if plain_name(pair.a.dtype) != "float32" or plain_name(pair.b.dtype) != "float32" or pair.a.shape != pair.b.shape:
            return ""
        target, golden = self._contents.sample(pair.a), self._contents.sample(pair.b)
        if target.shape != golden.shape or not target.size or np.array_equal(target, golden):
            return ""
        for name, narrow in (("bfloat16", _to_bfloat16), ("float16", _to_float16)):
            for side, wide, other in ((GOLDEN, target, golden), (RUN, golden, target)):
                rounded = narrow(wide)
                if np.array_equal(rounded, other) and not np.array_equal(rounded, wide):
                    return Sentence(
                        "{0} holds what the other side holds rounded to {1}, in float32 (seen in the first {2} elements)",
                        side,
                        name,
                        target.size,
                    )
        return ""

    def _exchanges(self, looked: Iterable[int]) -> None:
        """Tensors of A that are another tensor of B."""
        by_norm: dict[tuple[tuple[int, ...], str, str], list[tuple[float, int]]] = defaultdict(list)
        known = [i for i in looked if self._results[i].status == DIFFERENT and self._results[i].norm_b]
        for i in known:
            pair, norm = self._pairs[i], self._results[i].norm_b or 0.0
            by_norm[(pair.b.shape, pair.b.dtype, pair.b.state)].append((norm, i))
        moved: dict[int, int] = {}
        for i in known:
            pair, norm = self._pairs[i], self._results[i].norm_a or 0.0
            for other, j in by_norm.get((pair.a.shape, pair.a.dtype, pair.a.state), ()):
                if j != i and abs(other - norm) <= _NORM * norm and self._same(pair.a, self._pairs[j].b):
                    moved[i] = j
                    break
        for i, j in moved.items():
            name = self._results[j].name
            self._results[i].hint = (
                Sentence("exchanged with {0}", name) if moved.get(j) == i else Sentence("equal to what the golden run holds as {0}", name)
            )
        self._exchanged_groups(moved)

    def _exchanged_groups(self, moved: dict[int, int]) -> None:
        """Experts and layers that went somewhere else as a whole."""
        experts: Counter[tuple[str, int, int]] = Counter()
        layers: Counter[tuple[int, int]] = Counter()
        for i, j in moved.items():
            target_name, golden_name = self._results[i].name, self._results[j].name
            e, f = _number(_EXPERT, target_name), _number(_EXPERT, golden_name)
            m, n = _number(_LAYER, target_name), _number(_LAYER, golden_name)
            if e is not None and f is not None and e != f and m == n:
                experts["" if m is None else f"layer {m}: ", e, f] += 1
            elif m is not None and n is not None and m != n:
                layers[m, n] += 1
        sentences = []
        for (where, e, f), count in experts.items():
            if experts.get((where, f, e)):
                if e < f:
                    sentences.append(
                        Sentence("{0}experts {1} and {2} are exchanged ({3} tensors)", where, e, f, count + experts[where, f, e])
                    )
            else:
                sentences.append(Sentence("{0}expert {1} of the run is expert {2} of the golden run ({3} tensors)", where, e, f, count))
        if len(sentences) > _SENTENCES:
            remaining = len(sentences) - _SENTENCES
            sentences[_SENTENCES:] = [
                Sentence("{0} more experts lie elsewhere ({1} tensors of experts in all)", remaining, sum(experts.values()))
            ]
        self._notes += sentences
        for m, n in [pair for pair in layers if pair[0] < pair[1] and layers.get((pair[1], pair[0]))]:
            self._notes.append(Sentence("layers {0} and {1} are exchanged ({2} tensors)", m, n, layers.pop((m, n)) + layers.pop((n, m))))
        self._notes += _moved_layers(layers)

    def _same(self, target: StoredTensor, golden: StoredTensor) -> bool:
        try:
            return self._contents.same(target, golden)
        except DumpFormatError:
            return False

    def _few_files(self, files: Sequence[dict[str, int]], tensors: Sequence[StoredTensor]) -> tuple[str, str] | None:
        """The few files that all differences of a side lie in, in words; None where they lie in most, or where a side has but one."""
        changed = [files[i] for i in self._differing if self._results[i].status == DIFFERENT and self._results[i].changed]
        where = {file for counts in changed for file in counts}
        every = {str(box.file) for tensor in tensors for box in tensor.boxes}
        if not where or len(where) > min(_FILES, len(every) // 2) or any(not counts for counts in changed):
            return None
        if len(changed) == 1 and not any(len({box.file for box in tensors[i].boxes}) > 1 for i in self._differing):
            return None  # one tensor, in one file: that is said of it anyway
        groups = {self._results[i].group for i in self._differing}
        inside = [i for i, t in enumerate(tensors) if t.group in groups and any(str(box.file) in where for box in t.boxes)]
        same = sum(self._results[i].equal for i in inside)
        if same and len(where) > 1:
            return None
        every_one = (
            Sentence("every state of the optimizer there differs: of another save?")
            if groups == {OPTIMIZER}
            else Sentence("every tensor there differs: of another save?")
        )
        rest = Sentence("{0} others there are equal", same) if same else every_one
        above = Path(os.path.commonpath(every))
        names = ", ".join(sorted(str(Path(file).relative_to(above)) for file in where))
        files_in_words = Sentence("one file") if len(where) == 1 else Sentence("{0} of {1} files", len(where), len(every))
        return files_in_words, Sentence("{0} ({1} tensors; {2})", names, len(changed), rest)

    def _optimizer_alone(self) -> None:
        different = [self._results[i] for i in self._differing]
        weights = [r for r in self._results if r.group != OPTIMIZER]
        if weights and all(r.group == OPTIMIZER for r in different):
            states = sorted({r.state for r in different})
            self._notes.append(Sentence("the weights are equal; only states of the optimizer differ ({0})", ", ".join(states)))

    def _summarize_repeated_hints(self) -> None:
        """One sentence for a hint that many tensors have."""
        counts = Counter(re.sub(r"[0-9][0-9.e+-]*", "N", self._results[i].hint) for i in self._differing if self._results[i].hint)
        words = {re.sub(r"[0-9][0-9.e+-]*", "N", self._results[i].hint): self._results[i].hint for i in self._differing}
        for key, count in counts.items():
            if count > 1 and not key.startswith(("exchanged with", "equal to what")):
                self._notes.append(
                    Sentence("{0} tensors: {1}", count, words[key])
                    if key == words[key]
                    else Sentence("{0} tensors like: {1}", count, words[key])
                )


def _moved_layers(layers: Counter[tuple[int, int]]) -> list[str]:
    """Layers of A that are others of B: neighbours that moved by the same in one sentence."""
    sentences: list[str] = []
    runs: list[list[int]] = []  # first layer of A, last, how far it moved, tensors
    for m, n in sorted(layers):
        count = layers[m, n]
        if runs and runs[-1][1] == m - 1 and runs[-1][2] == n - m:
            runs[-1][1], runs[-1][3] = m, runs[-1][3] + count
        else:
            runs.append([m, m, n - m, count])
    for first, last, by, count in runs:
        if first == last:
            sentences.append(Sentence("layer {0} of the run is layer {1} of the golden run ({2} tensors)", first, first + by, count))
        else:
            sentences.append(
                Sentence(
                    "layers {0} to {1} of the run are layers {2} to {3} of the golden run ({4} tensors)",
                    first,
                    last,
                    first + by,
                    last + by,
                    count,
                )
            )
    return sentences


def _by_numbers(result: TensorResult) -> str:
    """What the sums of the comparison alone say."""
    target_norm, golden_norm = result.norm_a, result.norm_b
    if result.nan_a != result.nan_b or result.inf_a != result.inf_b:
        return Sentence(
            "NaN in {0} elements of the run and {1} of the golden run, Inf in {2} and {3}",
            result.nan_a,
            result.nan_b,
            result.inf_a,
            result.inf_b,
        )
    if target_norm is None or golden_norm is None:
        return ""
    if (target_norm == 0.0) != (golden_norm == 0.0):
        return Sentence("{0} is all zeros", RUN if target_norm == 0.0 else GOLDEN)
    return ""


def _describe_bit_field(dtype: str, bit: int) -> str:
    name = plain_name(dtype)
    if name not in _WIDE:
        return ""
    fraction, exponent = _WIDE[name].bits - 1, _WIDE[name].exponent_bits
    if bit < fraction:
        return Sentence(" (fraction, {0} from the top)", fraction - bit)
    return Sentence(" (exponent)") if bit < fraction + exponent else Sentence(" (sign)")


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    return int(next(group for group in match.groups() if group is not None)) if match else None


def _to_bfloat16(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Rounded to nearest even, as float32."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (words + (0x7FFF + ((words >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.astype(np.uint32).view(np.float32), values).astype(np.float32)


def _to_float16(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)
