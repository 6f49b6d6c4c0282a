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
    differences: list[tuple[tuple[int, ...], Difference]] = []
    for ranks, golden_facts, target_facts in difference.pairs(bench, cmp, facts):
        both = {
            name for name in golden_facts if golden_facts[name] and name in target_facts and target_facts[name]
        }  # a part that was not collected says nothing
        golden, target = (facts({name: side[name] for name in side if name in both}) for side in (golden_facts, target_facts))
        sheet.compared = max(sheet.compared, len(set(golden) | set(target)))
        differences += [(ranks, fact_difference) for fact_difference in _differences(golden, target)]
    sheet.differences = merge_ranks(differences, tuple(set(bench) & set(cmp)))
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


def _differences(golden: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[Difference]:
    for name in sorted(set(golden) | set(target)):
        golden_value, target_value = golden.get(name), target.get(name)
        if normalize.same(normalize.plain(golden_value), normalize.plain(target_value)):
            continue
        severity, why = classify_fact(name)
        if (name in golden) != (name in target) and severity != HARMLESS:
            severity, why = MAY, Sentence("{0}; the {1} side does not say it", why, SIDES["cmp" if name in golden else "bench"])
        yield Difference(
            SYSTEM, name, name, _format_fact(name in golden, golden_value), _format_fact(name in target, target_value), severity, why
        )


def classify_fact(name: str) -> tuple[str, str]:
    """Severity and sentence of a fact."""
    return next(((severity, why) for pattern, severity, why in _RULES if pattern.search(name)), (HARMLESS, _OF_MACHINE))


def _format_fact(known: bool, value: Any) -> str:
    return normalize.show_value(value) if known else "not known"
