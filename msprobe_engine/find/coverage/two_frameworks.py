"""Runs of two frameworks: how much of them was aligned, and which functions are proposed to belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from msprobe_engine.align.calls.call_tree import calls_function
from msprobe_engine.align.frameworks.canonical import Terms
from msprobe_engine.align.frameworks.common_terms import CommonSide, several
from msprobe_engine.align.mapping.api import function_of
from msprobe_engine.core import names
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.text.sentences import Sentence, join_sentences
from msprobe_engine.formats.dump.dump_table import OUTPUT

if TYPE_CHECKING:
    from msprobe_engine.find.difference.divergence import Divergence
    from msprobe_engine.find.difference.walk import DifferenceWalk
    from msprobe_engine.find.findings import Diagnosis

FILE = "api_mapping.yaml"

_HEAD = """\
# Functions of this run and what is likely to be the same on the golden side, where the built-in names do not say so.
# Give the file back with -am; ms_args, pt_args, ms_output and pt_output may name positions that belong together.
"""
_LIKE = 0.4
"""Names that have less in common are not proposed for each other."""


def add_coverage(diagnosis: Diagnosis, divergence: Divergence) -> None:
    """Count what a step has aligned, and look for functions that may belong together."""
    for walker in divergence.walkers.values():
        sides = walker.side, walker.golden.side
        lost = walker.structure.only_target, walker.structure.only_golden
        for word, side, alone in zip(("target", "golden"), sides, lost):
            if not isinstance(side, CommonSide):
                break
            counts = diagnosis.aligned.setdefault(word, {"modules": [0, 0], "functions": [0, 0]})
            missing = set(alone)
            for op, members in enumerate(side.members):
                kind = counts["modules" if _of_module(side.ops[op]) else "functions"]
                kind[0] += 0 if op in missing else len(members)
                kind[1] += len(members)
        else:
            for target_name, golden_name in _alike(walker):
                diagnosis.functions.setdefault(target_name, golden_name)


def _of_module(name: str) -> bool:
    return isinstance(names.parse(name), (names.ModuleName, names.ParametersGradName))


def _alike(walker: DifferenceWalk) -> Iterator[tuple[str, str]]:
    """Functions that were aligned by their numbers or sizes and not by what they mean; and, of those without a partner, the ones that give
    results of one size under names that have something in common."""
    target, golden = Terms(walker.side, walker.golden.side.framework), Terms(walker.golden.side, walker.side.framework)
    for i, j in walker.structure.pairs:
        plain = _is_function(target, i) and _is_function(golden, j)
        if plain and target.words[i] != golden.words[j] and not several(walker.side, i) and not several(walker.golden.side, j):
            yield function_of(walker.side.ops[i]), function_of(walker.golden.side.ops[j])
    free = [j for j in walker.structure.only_golden if _is_function(golden, j)]
    for i in walker.structure.only_target:
        if _is_function(target, i):
            candidates = [j for j in free if target.sizes(i, OUTPUT)[:1] == golden.sizes(j, OUTPUT)[:1]]
            best = max(candidates, key=lambda j: _in_common(target.words[i], golden.words[j]), default=None)
            if best is not None and (len(candidates) == 1 or _in_common(target.words[i], golden.words[best]) >= _LIKE):
                yield function_of(walker.side.ops[i]), function_of(walker.golden.side.ops[best])


def _is_function(terms: Terms, op: int) -> bool:
    kind = terms.tree.kinds[op]
    return calls_function(kind) and "." not in kind[1]  # a mapping has no name for operators that Cells hold


def _in_common(target: str, golden: str) -> float:
    return SequenceMatcher(None, target, golden).ratio()


def report_coverage(diagnosis: Diagnosis) -> None:
    """Add to the evidence how much was aligned."""
    if diagnosis.aligned:
        target_share, golden_share = (_share(diagnosis.aligned[word]) for word in ("target", "golden"))
        template = "Two frameworks, aligned by meaning, numbers and structure: {0} of this run; {1} of the golden run."
        diagnosis.evidence.append(Sentence(template, target_share, golden_share))


def _share(counts: Mapping[str, Sequence[int]]) -> str:
    return join_sentences(
        " and ", (Sentence("{0} of {1} records of {2}", f"{some:,}", f"{of:,}", word) for word, (some, of) in counts.items() if of)
    )


def write(diagnosis: Diagnosis, path: Path) -> Path | None:
    """Write the proposed functions as an api mapping, which ``-am`` takes; None when there are none.

    Raises:
        OSError: it cannot be written.
    """
    if not diagnosis.functions:
        return None
    entries = [{"ms_api": target_name, "pt_api": golden_name} for target_name, golden_name in diagnosis.functions.items()]
    text = _HEAD + yaml.safe_dump(entries, allow_unicode=True, sort_keys=False, width=4096)
    write_file(path, [text.encode("utf-8", "surrogatepass")])
    return path
