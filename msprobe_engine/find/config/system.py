"""What two runs stand on besides packages: drivers, devices, flags of the framework, the program's commit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msprobe_engine.config.secrets import masking
from msprobe_engine.config.settings import normalize
from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config import difference
from msprobe_engine.find.config.difference import SIDES, SYSTEM, Difference, Sheet, merge_ranks

RULES: tuple[tuple[str, str, str], ...] = (
    (
        r"(^|\.)(matmul|cudnn|conv)\.allow_(tf32|hf32)$|float32_matmul_precision|fp32_precision",
        CHANGES,
        "factors of products in float32 are rounded to fewer bits",
    ),
    (r"allow_(bf16|fp16)_reduced_precision_reduction|allow_fp16_accumulation", CHANGES, "sums of products are kept in fewer bits"),
    (r"(^|\.)(default_dtype|autocast\w*)(\.|$)", CHANGES, "numbers are computed in another data type"),
    (
        r"deterministic|cudnn\.benchmark|fill_uninitialized",
        MAY,
        "kernels are deterministic or not, so two runs of one configuration may differ",
    ),
    (r"sdp|attention", MAY, "another kernel sums the attention in another order"),
    (r"^program\.git\.(commit|changed_files)$", MAY, "the program is another one"),
    (
        r"(^|\.)(driver|drivers|cuda|cudnn|nccl|cann|hccl|rocm|hip|miopen|versions?)(\.|$)|_version$",
        MAY,
        "kernels, and with them rounding, change from release to release",
    ),
    (r"(^|\.)(device|devices|gpu|npu|name|capability)(\.|$)", MAY, "another device rounds and adds up in another way"),
    (
        r"(^|\.)(threads|interop_threads|num_threads|blas|mkl|parallel_info|cpu_capability|cpu)(\.|$)",
        MAY,
        "sums on the host are made in other parts",
    ),
    (r"(^|\.)(architecture)$", MAY, "another processor rounds and adds up in another way"),
)
"""The first pattern found in the dotted name decides; what fits none is harmless."""
_RULES = [(re.compile(pattern), severity, Sentence(why)) for pattern, severity, why in RULES]
_OF_MACHINE = Sentence("it is about the machine")
_OF_PLACE = re.compile(
    r"(^|\.)(host|node|pid|process|time|created|started|local_rank|rank|directory|arguments|script|cpus|kernel|uuid|pci\w*|bus\w*|serial|"
    r"memory\w*|free|total_memory|branch|remote\w*|path|root)(\.|$)"
)
"""Names of what differs from machine to machine, or from start to start."""


def compare_system(bench: Mapping[int, Mapping[str, Any]], cmp: Mapping[int, Mapping[str, Any]]) -> Sheet:
    """Compare rank by rank."""
    sheet = Sheet(SYSTEM)
    found: list[tuple[tuple[int, ...], Difference]] = []
    for ranks, mine, theirs in difference.pairs(bench, cmp, facts):
        both = {name for name in mine if mine[name] and name in theirs and theirs[name]}  # a part that was not collected says nothing
        a, b = (facts({name: side[name] for name in side if name in both}) for side in (mine, theirs))
        sheet.compared = max(sheet.compared, len(set(a) | set(b)))
        found += [(ranks, one) for one in _differences(a, b)]
    sheet.differences = merge_ranks(found, tuple(set(bench) & set(cmp)))
    return sheet


def facts(system: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted names, without what differs from place to place."""
    return {name: value for name, value in _flat("", system, 0) if not _OF_PLACE.search(name)}


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and depth < 16:
        for key, child in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), child, depth + 1)
    else:
        yield name, masking.mask_setting(name, value)


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted(set(a) | set(b)):
        x, y = a.get(name), b.get(name)
        if normalize.same(normalize.plain(x), normalize.plain(y)):
            continue
        severity, why = classify_fact(name)
        if (name in a) != (name in b) and severity != HARMLESS:
            severity, why = MAY, Sentence("{0}; the {1} side does not say it", why, SIDES["cmp" if name in a else "bench"])
        yield Difference(SYSTEM, name, name, _format_fact(name in a, x), _format_fact(name in b, y), severity, why)


def classify_fact(name: str) -> tuple[str, str]:
    """Severity and sentence of a fact."""
    return next(((severity, why) for pattern, severity, why in _RULES if pattern.search(name)), (HARMLESS, _OF_MACHINE))


def _format_fact(known: bool, value: Any) -> str:
    return normalize.show_value(value) if known else "not known"
