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

OTHER_PROGRAM = "the program is another one"
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
    (r"^program\.git\.(commit|files_digest)$", MAY, OTHER_PROGRAM),
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
    r"memory\w*|free|total_memory|branch|remote\w*|path|root)(\.|$)|^program\.git\.(?!commit$|files_digest$)"
)
"""Names of what differs from machine to machine, or from start to start; files of the program are compared by `_compare_files`."""


def compare_system(bench: Mapping[int, Mapping[str, Any]], cmp: Mapping[int, Mapping[str, Any]]) -> Sheet:
    """Compare rank by rank."""
    sheet = Sheet(SYSTEM)
    differences: list[tuple[tuple[int, ...], Difference]] = []
    for ranks, golden_facts, target_facts in difference.pairs(bench, cmp, lambda side: (facts(side), _repository(side))):
        programs = [_repository(side) for side in (golden_facts, target_facts)]
        differences += [(ranks, difference) for difference in _compare_files(*programs)]
        if said := _cannot_tell(*programs):
            sheet.unknown, sheet.not_shown = ("program.git",), 1
            sheet.notes += [said] if said not in sheet.notes else []
        both = {
            name for name in golden_facts if golden_facts[name] and name in target_facts and target_facts[name]
        }  # a part that was not collected says nothing
        golden, target = (facts({name: side[name] for name in side if name in both}) for side in (golden_facts, target_facts))
        sheet.compared = max(sheet.compared, len(set(golden) | set(target)))
        for side in (golden, target):
            side.pop("program.git.files_digest", None)  # said file by file
        differences += [(ranks, fact_difference) for fact_difference in _differences(golden, target)]
    sheet.differences = merge_ranks(differences, tuple(set(bench) & set(cmp)))
    return sheet


def _repository(system: Mapping[str, Any]) -> Mapping[str, Any]:
    program = system.get("program")
    git = program.get("git") if isinstance(program, Mapping) else None
    return git if isinstance(git, Mapping) else {}


def _compare_files(golden: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[Difference]:
    """Files of the program that hold something else, where both run from one commit: of another one that is said already."""
    if golden.get("commit") != target.get("commit"):
        return
    for digest, files, missing in (
        ("files_digest", "changed_files", "as committed"),
        ("untracked_digest", "untracked_files", "not loaded"),
    ):
        whole = golden.get(digest), target.get(digest)
        if whole[0] == whole[1] is not None:
            continue
        both = [_digests_of(side.get(files)) for side in (golden, target)]
        if None in whole:
            both = [dict.fromkeys(one, "changed") for one in both]
        if "files_digest" in golden and "files_digest" in target and None in whole:
            continue  # of a script that does not run, no file is loaded
        names = sorted(name for name in {*both[0], *both[1]} if both[0].get(name, missing) != both[1].get(name, missing))
        for name in names:
            yield _file(name, *(one.get(name, missing) for one in both))
        if not names and None not in whole:
            yield _file(digest, *(str(one) for one in whole))


def _digests_of(files: Any) -> dict[str, str]:
    """Name to digest; a pack of an earlier version has the names alone."""
    if isinstance(files, Mapping):
        return {masking.mask_text(str(name)): str(digest) for name, digest in files.items()}
    return {masking.mask_text(str(name)): "changed" for name in files} if isinstance(files, list) else {}


def _file(name: str, golden: str, target: str) -> Difference:
    name = f"program.git: {name}"
    return Difference(SYSTEM, name, name, golden, target, MAY, Sentence(OTHER_PROGRAM))


def _cannot_tell(golden: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    """Why it is not known whether the program's files are the same; empty where it is, or where the commit is another one."""
    if golden.get("commit") != target.get("commit"):
        return ""
    for side, git, other in (("bench", golden, target), ("cmp", target, golden)):
        if git.get("changed") and "files_digest" not in git:
            return Sentence(
                "the {0} pack is of an earlier version: what its {1} changed files of the program hold is not known",
                SIDES[side],
                git["changed"],
            )
        if git.get("untracked") and "untracked_digest" not in other:
            return Sentence(
                "{1} files of the program that the {0} run has loaded are not in its repository: whether they are the same is not known",
                SIDES[side],
                git["untracked"],
            )
        if git.get("unread"):
            return Sentence(
                "{1} files of the program were too large to be read for the {0} pack: what they hold is not known",
                SIDES[side],
                git["unread"],
            )
    return ""


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
