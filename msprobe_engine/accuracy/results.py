"""What came of checking one API call: plain data that travels between processes and into result files."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.core.errors import UsageError

PASS, WARNING, ERROR, SKIP, NOT_RUN = "pass", "Warning", "error", "SKIP", " "
"""Statuses, spelled as the existing tool's files (version 8.1.1) have them. `NOT_RUN` is that of a backward that was not asked for."""

STATUSES = (PASS, WARNING, ERROR, SKIP, NOT_RUN)
UNREADABLE = "the saved tensor cannot be read"
"""Stands in the message of a call whose dump names a tensor file that is damaged or not there."""
NOT_JUDGED = "could not be judged"
"""Begins the message of a call on which the check itself has failed (`not_judged`)."""
NOT_CHECKED = "not checked: "
"""Begins the message of a call that its formula is not made for: an argument, or a value of one, that it does not know."""
_GRAVITY = {NOT_RUN: 0, SKIP: 1, PASS: 2, WARNING: 3, ERROR: 4}

Metric = float | bool | None
"""Value of a metric; None where it is not defined (a standard that is not the API's, one element, no finite value)."""


@dataclass(frozen=True, slots=True)
class TensorResult:
    """Verdict of one output or gradient.

    Attributes:
        name: ``"Torch.matmul.0.forward.output.0"``, ``"Torch.matmul.0.backward.output.0"``.
        shape: of the device's tensor; () for scalars.
        bench_dtype, device_dtype: as text, ``"torch.float32"``; of a scalar the name of its Python type.
        metrics: values by key of `metrics.COLUMNS`; keys that are not there are not defined.
        standard: by which standard the API is judged, one of `standards.STANDARDS`; empty where there is none.
        status: one of `STATUSES`.
        message: why; several reasons on lines of their own; empty where all is well.
        old_status: verdict of the existing tool's rules (`compat`).
        units: largest error of an element, as a multiple of what round-off makes of it given the condition of the operator
            (`condition`); None where no error of that kind exists (integers, scalars, other shape, nothing finite).
    """

    name: str
    shape: tuple[int, ...]
    bench_dtype: str
    device_dtype: str
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    standard: str = ""
    status: str = PASS
    message: str = ""
    old_status: str = PASS
    units: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values (NaN and Infinity as Python's `json` writes them)."""
        return {
            "name": self.name, "shape": list(self.shape), "bench_dtype": self.bench_dtype, "device_dtype": self.device_dtype,
            "metrics": dict(self.metrics), "standard": self.standard, "status": self.status, "message": self.message,
            "old_status": self.old_status, "units": self.units,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TensorResult:
        """The reverse of `to_json`.

        Raises:
            UsageError: a key is missing or unknown.
        """
        try:
            return cls(**{**values, "shape": tuple(values["shape"])})
        except (TypeError, KeyError) as error:
            raise UsageError(f"this is no result of a tensor: {error}") from None


@dataclass(frozen=True, slots=True)
class CallResult:
    """Verdict of one API call.

    Attributes:
        name: ``"Torch.matmul.0"``.
        forward, backward: one of `STATUSES`; `NOT_RUN` where there is no backward to check.
        message: why the call was skipped or is no pass; empty else.
        tensors: one for each output and gradient that was compared, in order.
        seconds: time that both sides and the comparison took.
    """

    name: str
    forward: str
    backward: str = NOT_RUN
    message: str = ""
    tensors: tuple[TensorResult, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "name": self.name, "forward": self.forward, "backward": self.backward, "message": self.message,
            "tensors": [tensor.to_json() for tensor in self.tensors], "seconds": self.seconds,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CallResult:
        """The reverse of `to_json`.

        Raises:
            UsageError: a key is missing or unknown.
        """
        try:
            return cls(**{**values, "tensors": tuple(TensorResult.from_json(tensor) for tensor in values["tensors"])})
        except (TypeError, KeyError) as error:
            raise UsageError(f"this is no result of a call: {error}") from None

    @property
    def passed(self) -> bool:
        """Neither direction is an error or a warning."""
        return not {self.forward, self.backward} & {WARNING, ERROR}

    @property
    def skipped(self) -> bool:
        """Nothing was compared."""
        return self.forward == SKIP and self.backward in (SKIP, NOT_RUN)


def build_skipped_result(name: str, reason: str) -> CallResult:
    """Result of a call that is not checked, with the reason that the files give."""
    return CallResult(name, SKIP, NOT_RUN, reason, ())


def not_judged(name: str, error: Exception) -> CallResult:
    """Result of a call on which the check itself has failed; the message says where. Not for what an operator says of its arguments."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if "msprobe_" in frame.filename:
            place = f" ({os.path.basename(frame.filename)}:{frame.lineno})"
    text = (str(error).splitlines() or [""])[0][:300]
    return build_skipped_result(name, f"{NOT_JUDGED}: {type(error).__name__}: {text}{place}")


def worst(tensors: tuple[TensorResult, ...] | list[TensorResult]) -> str:
    """Status of a direction of a call: the worst of its tensors; `SKIP` where nothing was compared."""
    return max((tensor.status for tensor in tensors), key=_GRAVITY.__getitem__, default=SKIP)


def bare_name(name: str) -> str:
    """``"matmul"`` of the call ``"Torch.matmul.0"``, ``"linalg.inv"`` of ``"Torch.linalg.inv.0"``."""
    parts = name.split(".")
    return ".".join(parts[1:-1]) if len(parts) > 2 else parts[-1]
