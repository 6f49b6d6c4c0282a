"""The suspects that numbers of a monitor name, what they are called, and the launch line that shows more."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msprobe_engine.find import findings
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.launch_line import again_alone, again_both
from msprobe_engine.find.monitor.number_pairs import Number
from msprobe_engine.find.monitor.other_batches import without_call
from msprobe_engine.find.nonfinite.report import again_with_operators
from msprobe_engine.find.nonfinite.trace import module_path

MOST_SUSPECTS = 20


def suspect_of(item: Number, why: str, limit: float | None = None) -> Suspect:
    row = row_of(item.family, item.key.name)
    return Suspect(
        record=row,
        module=module_of(item.key.name),
        rank=item.rank,
        step=item.step,
        kind="series",
        why=why,
        tensor=f"{row}.{item.op}",
        numbers={"target": {"row": row, item.op: item.target}} | ({"golden": {"row": row, item.op: item.golden}} if limit else {}),
        distance=item.distance if limit else None,
        limit=limit,
    )


def row_of(family: str, name: str) -> str:
    """``grad_reduced/layers.0.weight``; the loss, which is a family of its own, as it is."""
    return name if name == family else f"{family}/{name}"


_TENSOR = re.compile(r"(\.(weight|bias)(\.\d+)?|[.:](input|output)([._][^ ]*)?)$")
_CALL = re.compile(r"(.+\.(?:forward|backward)(?:\.\d+)?)\.(?:input|output)(?:[._].*)?", re.DOTALL)


def record_of(name: str) -> str:
    """The record of a call that the monitor watches, without the tensor; other names as they are."""
    call = _CALL.fullmatch(name)
    return call[1] if call else name


def module_of(name: str) -> str:
    """Path of the module that a parameter or activation belongs to (``layers.0.act`` of ``layers.0.act.output_1 #2``); "" of a function."""
    record = record_of(name)
    if record != name:
        return module_path(record)
    return _TENSOR.sub("", without_call(name)) if "." in name else ""


def say_again(step: int, ranks: Sequence[int], finding: str, golden: bool = False) -> list[str]:
    """What would name the operator: a dump of the step, which numbers of the monitor do not replace; of a NaN, which another run may have
    in another step, the operators of the last steps."""
    if finding == findings.NONFINITE and not golden:
        return again_with_operators()
    options = f"--preset dump --set 'dump.step=[{step}]' --set 'dump.rank=[{','.join(map(str, ranks))}]'"
    if golden:
        return again_both(options)
    return again_alone(options)
