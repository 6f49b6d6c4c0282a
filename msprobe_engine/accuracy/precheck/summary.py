"""What a pre-check found, in words: counts, the worst calls with the source line that made them, and why calls were skipped."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msprobe_engine.accuracy.results import (
    ERROR,
    NOT_CHECKED,
    NOT_JUDGED,
    NOT_RUN,
    PASS,
    SKIP,
    UNREADABLE,
    WARNING,
    CallResult,
    TensorResult,
)
from msprobe_engine.core.log import one_line

WORST = 20
"""Calls that are listed."""
_REASONS = 12
_EXPECTED = (
    *("communication", "draws random numbers", "is in black_list", "is not in white_list"),
    *("has no result that can be compared", "is not checked by the existing tool"),
)
"""In the reasons for which calls are not checked on purpose."""
_OF_OLD_RULES = {
    "cosine": "cosine", "max_abs": "largest error", "hundredth": "share within 1/100", "thousandth": "within 1/1000",
    "ten_thousandth": "within 1/10000", "error_rate": "share that differs",
}  # fmt: skip
"""Metrics by which the existing tool gives a status."""
_NUMBER = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\.[0-9]+\b")
_FRAME = re.compile(r'File "?(?P<file>.+?)"?, line (?P<line>[0-9]+), in (?P<function>[^,\n]+)')
_OURS = ("/msprobe_integrations/", "/msprobe_engine/", "/site-packages/torch/")


@dataclass
class Tally:
    """Results of a pre-check as they come, without the tensors of those that pass.

    Attributes:
        forward, backward: calls by status.
        found: results that are an error or a warning.
        reasons: why calls were skipped, and how many.
        broken: calls that their process did not live through.
        devices: what is tested, with how and against what (`options.About`).
        unjudged: calls on which the check itself has failed.
        unreadable: calls with saved tensors that cannot be read.
    """

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    found: list[CallResult] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    broken: list[CallResult] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    unjudged: list[CallResult] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def add(self, result: CallResult) -> None:
        self.forward[result.forward] += 1
        self.backward[result.backward] += 1
        if UNREADABLE in result.message:
            self.unreadable.append(result.name)
        if not result.passed:
            self.found.append(result)
        elif result.skipped and result.message.startswith(NOT_JUDGED):
            self.unjudged.append(result)
        elif result.skipped:
            # without the numbers of calls, so that equal reasons are one
            self.reasons[_NUMBER.sub("API", (result.message.strip().splitlines() or ["no reason given"])[0])[:160]] += 1

    @property
    def checked(self) -> int:
        """Calls of which something was compared."""
        return sum(self.forward.values()) - self.reasons.total() - len(self.unjudged)

    @property
    def incomplete(self) -> bool:
        """Were there calls that ought to have been checked and were not, or not with their own inputs?"""
        return bool(self.broken or self.unjudged or self.unreadable)

    @property
    def errors(self) -> int:
        """Calls that are an error in one direction at least."""
        return sum(ERROR in (result.forward, result.backward) for result in self.found)


def text(tally: Tally, stacks: Mapping[str, Sequence[str]], by_old_rules: bool = False) -> str:
    """The summary, several lines.

    Args:
        stacks: of dump.json's records, by name with direction (``Torch.matmul.0.forward``).
        by_old_rules: statuses are those of the existing tool's rules (``--compat``), and so are reasons.
    """
    total = sum(tally.forward.values())
    lines = [f"{', '.join(tally.devices)} {next(iter(tally.devices.values()))}"] if tally.devices else []
    lines += [f"{total:,} calls, {tally.checked:,} checked: {_counts(tally.forward)} forward; {_counts(tally.backward)} backward"]
    if tally.reasons:
        lines.append(f"{tally.reasons.total():,} skipped:")
        ranked_reasons = sorted(tally.reasons.most_common(), key=lambda item: not item[0].startswith(NOT_CHECKED))  # what to mend first
        lines += [f"  {count:6,}  {one_line(reason)}" for reason, count in ranked_reasons[:_REASONS]]
        more = len(tally.reasons) - _REASONS
        lines += [f"          and for {more} more reasons"] if more > 0 else []
    unexpected = sum(count for reason, count in tally.reasons.items() if not any(words in reason for words in _EXPECTED)) + len(
        tally.unjudged
    )
    if 2 * unexpected > total:
        lines.append(f"warning: {unexpected:,} of {total:,} calls could not be checked; what was found holds for the others alone")
    if tally.broken:
        lines.append(f"{len(tally.broken)} took their process down, ran out of time or do not fit into memory:")
        lines += [f"  {one_line(result.name)}: {one_line(result.message)}" for result in tally.broken[:WORST]]
    if tally.unjudged:
        lines.append(f"{len(tally.unjudged):,} calls could not be judged: a fault of the check, not of the operators; please report it:")
        lines += [
            f"  {one_line(result.name)}: {one_line(result.message.removeprefix(f'{NOT_JUDGED}: '))}" for result in tally.unjudged[:WORST]
        ]
    if tally.unreadable:
        first = ", ".join(map(one_line, tally.unreadable[:3])) + (", ..." if len(tally.unreadable) > 3 else "")
        lines.append(f"saved tensors of {len(tally.unreadable):,} calls cannot be read (see Message); inputs are drawn instead: {first}")
    if tally.found:
        ranked = sorted(tally.found, key=_rank)
        calls = "1 call does not pass:" if len(ranked) == 1 else f"{len(ranked)} calls do not pass, the worst first:"
        lines.append(calls if len(ranked) <= WORST else f"{len(ranked)} calls do not pass, the worst {WORST}:")
        for result in ranked[:WORST]:
            lines += _format_call(result, stacks, by_old_rules)
    return "\n".join(lines)


def _counts(counts: Mapping[str, int]) -> str:
    words = ((ERROR, "error"), (WARNING, "warning"), (PASS, "pass"), (SKIP, "skipped"))
    words_of_status = [f"{counts[status]:,} {word}" for status, word in words if counts.get(status)]
    return ", ".join(words_of_status) or "none"


def _rank(result: CallResult) -> tuple[bool, float, str]:
    """Errors before warnings, then by how far off the worst tensor is."""
    units = [tensor.units for tensor in result.tensors if tensor.units is not None]
    far = max((math.inf if math.isnan(unit) else unit for unit in units), default=math.inf)
    return ERROR not in (result.forward, result.backward), -far, result.name


def _old_reason(tensor: TensorResult) -> str:
    """The numbers that the existing tool's rules look at."""
    shown = ((name, tensor.metrics.get(key)) for key, name in _OF_OLD_RULES.items())
    told = ", ".join(f"{name} {value:.6g}" for name, value in shown if value is not None)
    return f"by the existing tool's rule{f': {told}' if told else ', which compares no such types or shapes'}"


def _format_call(result: CallResult, stacks: Mapping[str, Sequence[str]], by_old_rules: bool) -> list[str]:
    bad = [tensor for tensor in result.tensors if tensor.status in (ERROR, WARNING)]
    sides = ", ".join(
        f"{side} {status}" for side, status in (("forward", result.forward), ("backward", result.backward)) if status in (ERROR, WARNING)
    )
    lines = [f"  {one_line(result.name)}: {sides}"]
    for tensor in sorted(bad, key=lambda tensor: -(tensor.units or 0.0))[:2]:
        why = next((line.strip() for line in tensor.message.splitlines() if line.strip()), "")
        if not why and by_old_rules:
            why = _old_reason(tensor)
        elif not why and tensor.units is not None:
            why = f"{tensor.units:.3g} times what round-off makes of it"
        place = tensor.name.removeprefix(f"{result.name}.")
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        lines.append(f"      {place} ({tensor.device_dtype.removeprefix('torch.')} {shape}){f': {one_line(why)}' if why else ''}")
    if not bad and result.message:
        lines.append(f"      {one_line(result.message)}")
    if place := source_line(stacks.get(f"{result.name}.forward", ())):
        lines.append(f"      called in {one_line(place)}")
    return lines


def source_line(stack: Sequence[str]) -> str:
    """``train.py:12 in forward`` of the innermost frame of a recorded stack that is the user's; empty where there is none."""
    first = ""
    for line in stack:
        if found := _FRAME.search(line):
            place = f"{found['file']}:{found['line']} in {found['function'].strip()}"
            if not any(part in found["file"].replace("\\", "/") for part in _OURS):
                return place
            first = first or place
    return first


__all__ = ["NOT_RUN", "Tally", "source_line", "text"]
