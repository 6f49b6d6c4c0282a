"""Columns and cells of the result files: those of the existing tool (``--compat``), and ours, which begin with the same.

Formats: spec of the pre-check, a.9; mindstudio-probe 8.1.1 and 26.2.0. Numbers of the existing tool's form are cut as it cuts them: what
it computes in float32 is written as such, all else with a fixed number of decimals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msprobe_engine.accuracy.results import SKIP, WARNING, CallResult, Metric, TensorResult
from msprobe_engine.accuracy.verdict import standards
from msprobe_engine.accuracy.verdict.existing import select_written_metrics
from msprobe_engine.accuracy.verdict.metrics import COLUMNS
from msprobe_engine.core.dtypes import float_type, plain_name
from msprobe_engine.core.io.safe_cells import safe_cell, utf8
from msprobe_engine.core.log import printable

BLANK = " "
"""Cell of a metric that is not defined."""
RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
DETAILS_COLUMNS = ("API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *COLUMNS.values(), "Status", "Message")
OUR_RESULT_COLUMNS = ("Units", "Source Line")
OUR_DETAILS_COLUMNS = ("Units", "Standard", "Old Status", "Source Line")

_ALWAYS = frozenset(("cosine", "max_abs", "hundredth", "thousandth", "ten_thousandth", "error_rate"))
"""Metrics that our form shows though the existing tool stops before it has them; the others say by their absence what a standard is."""
_IN_WORKING_TYPE = frozenset(("max_abs", "max_rel", "mean_rel"))
_ULPS = frozenset(("max_ulp", "mean_ulp"))
_SCALARS = frozenset(("bool", "int", "float", "complex", "str"))


@dataclass(frozen=True)
class Form:
    """What the two files look like.

    Attributes:
        compat: version of the existing tool; empty: our form.
        precision: decimals of numbers in the existing tool's form.
    """

    result_columns: tuple[str, ...] = RESULT_COLUMNS + OUR_RESULT_COLUMNS
    details_columns: tuple[str, ...] = DETAILS_COLUMNS + OUR_DETAILS_COLUMNS
    compat: str = ""
    precision: int = 14

    def result_row(self, result: CallResult, source: str = "") -> list[str]:
        """Cells of a call; `source`: the line of the training that made it."""
        if self.compat:
            backward = SKIP if result.skipped and not result.tensors else result.backward
            message = result.message if SKIP in (result.forward, backward) else ""
            return [*map(text_cell, (result.name, self._status(result.forward), self._status(backward), message))]
        units = max((t.units for t in result.tensors if t.units is not None), default=None)
        cells = (result.name, result.forward, result.backward, result.message)
        return [*map(text_cell, cells), number(units), text_cell(source)]

    def details_rows(self, result: CallResult, source: str = "") -> list[list[str]]:
        """Cells of its results; of a call that was skipped one row, with the reason."""
        tensors = result.tensors
        if not tensors and result.forward == SKIP:
            reason = result.message if self.compat or result.message else "nothing was compared"
            tensors = (TensorResult(f"{result.name}.forward.output.0", (), "", "", status=SKIP, message=reason, old_status=SKIP),)
        return [self._details_row(tensor, source) for tensor in tensors]

    def _details_row(self, tensor: TensorResult, source: str) -> list[str]:
        numbers = self._compat_cells(tensor) if self.compat else _our_cells(tensor)
        status = tensor.old_status if self.compat else tensor.status
        kinds = _kind(tensor.bench_dtype), _kind(tensor.device_dtype)
        if self.compat and kinds[0] != kinds[1] and any(map(_scalar, kinds)):
            kinds = BLANK, BLANK  # it stops before it looks at them
        shape = str(tensor.shape) if tensor.device_dtype and not _scalar(tensor.device_dtype) else BLANK
        cells = [*map(text_cell, (tensor.name, *kinds, shape)), *numbers, text_cell(self._status(status)), text_cell(tensor.message)]
        if self.compat:
            return cells
        return [*cells, number(tensor.units), *map(text_cell, (tensor.standard, tensor.old_status, source))]

    def _status(self, status: str) -> str:
        return status.lower() if self.compat == standards.NEW and status == WARNING else status

    def _compat_cells(self, tensor: TensorResult) -> list[str]:
        api = bare_api(tensor.name)
        standard = standards.standard_of(api, tensor.device_dtype, self.compat)
        size = int(np.prod(tensor.shape)) if tensor.shape else 1
        keys = select_written_metrics(tensor.metrics, standard, tensor.device_dtype, size, tensor.old_status, self.compat)
        return [self._compat_cell(key, tensor.metrics.get(key), tensor) if key in keys else BLANK for key in COLUMNS]

    def _compat_cell(self, key: str, value: Metric, tensor: TensorResult) -> str:
        if value is None or isinstance(value, bool):
            return BLANK if value is None else str(value)
        if isinstance(value, int):
            return str(value)
        narrow = "float64"
        if key in _ULPS:
            narrow = "float64" if plain_name(tensor.device_dtype) == "float32" else "float32"
        elif key in _IN_WORKING_TYPE and (tensor.shape or key == "max_abs" or self.compat == standards.NEW):
            narrow = _working_type(tensor)  # numpy 1, which 8.1.1 runs with, widens results without dimensions
        if narrow != "float64":
            # As numpy 1 writes a number of that type
            exact = np.dtype(narrow).type(value)
            text = str(exact)
            return np.format_float_positional(exact, unique=True, trim="0") if "e+" in text and abs(value) < 1e16 else text
        return f"{value:.{self.precision}f}"


def form_of(compat: str | None, precision: int = 14) -> Form:
    """The form of a version of the existing tool, or ours for None.

    Args:
        compat: one of `standards.VERSIONS`, or None.
        precision: decimals (setting ``precision``).
    """
    return Form() if compat is None else Form(RESULT_COLUMNS, DETAILS_COLUMNS, compat, precision)


def bare_api(name: str) -> str:
    """``"Torch.linalg.inv.0.forward.output.0"`` -> ``"linalg.inv"``; so also of the name of a call."""
    head = name
    for direction in (".forward", ".backward"):
        head = head.partition(f"{direction}.")[0].removesuffix(direction)
    return ".".join(head.split(".")[1:-1])


def number(value: Metric) -> str:
    """A number with all its digits; a blank for None."""
    return BLANK if value is None else repr(value)


def _our_cells(tensor: TensorResult) -> list[str]:
    size = int(np.prod(tensor.shape)) if tensor.shape else 1
    keys = select_written_metrics(tensor.metrics, tensor.standard, tensor.device_dtype, size, tensor.old_status) | _ALWAYS
    return [number(tensor.metrics.get(key)) if key in keys else BLANK for key in COLUMNS]


def _working_type(tensor: TensorResult) -> str:
    """Type that numpy gives a mix of both sides."""
    if plain_name(tensor.device_dtype) == "bfloat16":
        return "float32"
    widths = {53: "float64", 24: "float32", 11: "float16"}
    kinds = [float_type(dtype) for dtype in (tensor.bench_dtype, tensor.device_dtype)]
    return widths[max(24 if kind is None or kind.bits < 11 or kind.name == "bfloat16" else kind.bits for kind in kinds)]


def _scalar(dtype: str) -> bool:
    return dtype in _SCALARS or dtype.startswith("<class")


def _kind(dtype: str) -> str:
    return f"<class '{dtype}'>" if dtype in _SCALARS else dtype or BLANK


def text_cell(text: str) -> str:
    """A cell that no spreadsheet runs and no terminal obeys; line breaks stay."""
    return safe_cell(printable(utf8(text)))


def join(cells: Sequence[str]) -> bytes:
    """One line of a file."""
    return (",".join(cells) + "\r\n").encode()
