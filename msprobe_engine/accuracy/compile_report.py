"""What came of comparing compiled code with uncompiled code, and its two forms: text and CSV.

Names of the classes, their first fields and the first columns are those of the existing tool (26.2.0). Ours are appended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.safe_cells import safe_cell, utf8

PASSED, FAILED, WARNED, SKIPPED = "PASS", "FAIL", "WARN", "SKIP"
KINDS = ("fwd_input", "fwd_output", "grad_input", "grad_output", "grad_parameter", "graph_output")
COLUMNS = (
    *("module_name", "check_type", "tensor_index", "status", "max_abs_diff", "mean_abs_diff", "max_rel_diff", "shape", "note"),
    *("dtype", "relative_to_scale", "error_eager", "error_compiled", "units", "tensor_name"),
)
_SKIP = ("SKIP", "IGNORED")


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of both runs.

    Attributes:
        max_abs, mean_abs, max_rel: differences of the two, over elements that are finite on both sides.
        allclose: nothing to report.
        shape: of the tensor; of both where they differ.
        status: ``PASS``, ``WARN``, ``FAIL`` or ``SKIP``.
        dtype: ``"torch.bfloat16"``.
        scaled: largest difference by the largest value of the uncompiled run: what a threshold is for.
        error_eager, error_compiled: relative errors (root mean square) of both against float64; None where it was not run.
        units: error of the compiled run in units of round-off times the condition; None where it was not measured.
        name: of a parameter, of a place in the arguments; empty else.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    allclose: bool
    shape: tuple[Any, ...]
    status: str = PASSED
    message: str = ""
    dtype: str = ""
    scaled: float = 0.0
    error_eager: float | None = None
    error_compiled: float | None = None
    units: float | None = None
    name: str = ""

    def __str__(self) -> str:
        flag = {PASSED: "OK", WARNED: "! ", SKIPPED: "--"}.get(self.status, "!!")
        return f"[{flag}] max_abs={self.max_abs:.3e}  mean_abs={self.mean_abs:.3e}  max_rel={self.max_rel:.3e}  shape={self.shape}"


Diffs = list[TensorDiff] | None


@dataclass
class ModuleDiff:
    """One call of a module; None where nothing of a kind was compared.

    Attributes:
        fwd_input, fwd_output, grad_input, grad_output, grad_parameter: by kind of tensor.
        note: why nothing was compared (``SKIP...``, ``IGNORED``), or what else is to be known.
    """

    name: str
    fwd_input: Diffs = None
    fwd_output: Diffs = None
    grad_input: Diffs = None
    grad_output: Diffs = None
    note: str = ""
    grad_parameter: Diffs = None
    graph_output: Diffs = None

    def of(self, kind: str) -> list[TensorDiff]:
        """Tensors of one of `KINDS`."""
        found: Diffs = getattr(self, kind)
        return found or []

    @property
    def skipped(self) -> bool:
        """Nothing was to be compared."""
        return self.note.startswith(_SKIP)

    @property
    def status(self) -> str:
        """The worst of its tensors; ``SKIP`` where nothing was compared, ``FAIL`` where something should have been and was not."""
        found = [diff.status for kind in KINDS for diff in self.of(kind)]
        if FAILED in found or self.note.startswith("FAIL"):
            return FAILED
        if self.skipped or not set(found) - {SKIPPED}:
            return SKIPPED
        return WARNED if WARNED in found or self.note.startswith("MISSING") else PASSED


@dataclass
class CompareResult:
    """What came of one comparison.

    Attributes:
        loss_eager, loss_compiled: NaN where it was not computed.
        diffs: of modules, in the order of execution.
        cast_dtype: autocast type that both ran in; None.
        loss: verdict on the loss; None where one of them was not computed.
    """

    loss_eager: float
    loss_compiled: float
    diffs: list[ModuleDiff] = field(default_factory=list)
    cast_dtype: Any = None
    loss: TensorDiff | None = None
    backend: str = ""

    @property
    def loss_diff(self) -> float:
        """Absolute difference of the losses; NaN where one of them was not computed."""
        return abs(self.loss_eager - self.loss_compiled)

    @property
    def all_pass(self) -> bool:
        """No tensor failed, and something was compared."""
        statuses = [diff.status for diff in self.diffs]
        compared = any(status != SKIPPED for status in statuses) or self.loss is not None
        return compared and FAILED not in statuses and (self.loss is None or self.loss.status != FAILED)

    @property
    def first_failure(self) -> str:
        """Name of the module where it begins, and of what kind: ``"layers.0 fwd_output"``; empty where nothing fails. Gradients, which go
        wrong from the end on, come behind all that is wrong in the forward."""
        last_first = [*(diff for diff in reversed(self.diffs) if diff.name), *(diff for diff in self.diffs if not diff.name)]
        forward = [(diff, kind) for diff in self.diffs for kind in KINDS if not kind.startswith("grad_")]
        backward = [(diff, kind) for diff in last_first for kind in KINDS if kind.startswith("grad_")]
        for diff, kind in (*forward, *backward):
            if any(tensor.status == FAILED for tensor in diff.of(kind)):
                return f"{diff.name} {kind}"
        for diff in self.diffs:
            if diff.status == FAILED:
                return f"{diff.name} {diff.note}"
        return "loss" if self.loss is not None and self.loss.status == FAILED else ""


def text(result: CompareResult, inputs: bool = True) -> str:
    """The result for a terminal.

    Args:
        inputs: show inputs, too.
    """
    cast = f"  autocast {result.cast_dtype}" if result.cast_dtype else ""
    if math.isnan(result.loss_eager):
        head = f"Loss  compiled={result.loss_compiled:.6f}  (eager loss not computed in a single pass)"
    else:
        head = f"Loss  eager={result.loss_eager:.6f}  compiled={result.loss_compiled:.6f}  diff={result.loss_diff:.3e}"
    lines = ["=" * 72, f"  {result.backend}: {head}{cast}", "=" * 72]
    for kind in KINDS if inputs else KINDS[1:]:
        rows = [
            f"  {diff.status:4s}  {diff.name or '(model)':40s}  {' | '.join(map(str, diff.of(kind)))}"
            for diff in result.diffs
            if diff.of(kind)
        ]
        if rows:
            lines += ["", f"  {kind.upper()}", *rows]
    notes = [f"  {diff.status:4s}  {diff.name or '(model)':40s}  {diff.note}" for diff in result.diffs if diff.note]
    if notes:
        lines += ["", "  NOTES", *notes]
    reasons = [
        f"  {diff.name or '(model)'} {kind} {n}: {t.message}"
        for diff in result.diffs
        for kind in KINDS
        for n, t in enumerate(diff.of(kind))
        if t.status == FAILED
    ]
    if reasons:
        lines += ["", "  WHY", *reasons[:20], *([f"  and {len(reasons) - 20} more (see the CSV)"] if len(reasons) > 20 else [])]
    verdict = "ALL PASS" if result.all_pass else f"FAILED, first: {result.first_failure}" if result.first_failure else "NOTHING COMPARED"
    return "\n".join([*lines, "", "=" * 72, f"  RESULT: {verdict}", "=" * 72])


def write_csv(result: CompareResult, path: Path, inputs: bool = True) -> None:
    """One row for the loss, one per tensor, one per note.

    Args:
        inputs: write inputs, too.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [COLUMNS, *_rows(result, inputs)]
    body = "".join(",".join(safe_cell(utf8(cell)) if isinstance(cell, str) else str(cell) for cell in row) + "\n" for row in rows)
    write_file(path, [body.encode()])


def _rows(result: CompareResult, inputs: bool) -> Iterator[Sequence[Any]]:
    status = PASSED if result.all_pass else FAILED
    nothing = ("",) * 6
    if math.isnan(result.loss_eager):
        yield "LOSS", "loss", 0, status, "N/A", "N/A", "N/A", f"compiled={result.loss_compiled:.6f}", "single_pass mode", *nothing
    else:
        shown = f"eager={result.loss_eager:.6f} compiled={result.loss_compiled:.6f}"
        why = result.loss.message if result.loss is not None else ""
        yield "LOSS", "loss", 0, status, f"{result.loss_diff:.6e}", "N/A", "N/A", shown, why, *nothing
    for diff in result.diffs:
        if diff.note:
            yield diff.name, "note", 0, diff.status, "", "", "", "", diff.note, *nothing
        for kind in KINDS if inputs else KINDS[1:]:
            for n, t in enumerate(diff.of(kind)):
                numbers = (f"{t.max_abs:.6e}", f"{t.mean_abs:.6e}", f"{t.max_rel:.6e}")
                own_cells = (
                    t.dtype,
                    f"{t.scaled:.6e}",
                    *("" if e is None else f"{e:.6e}" for e in (t.error_eager, t.error_compiled, t.units)),
                    t.name,
                )
                yield diff.name, kind, n, t.status, *numbers, str(t.shape), t.message, *own_cells
