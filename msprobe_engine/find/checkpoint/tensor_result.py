"""One pair of tensors of two checkpoints, and how it came out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from msprobe_engine.align.parameters.parameter_kinds import OTHER, kind_of, layer_of
from msprobe_engine.formats.checkpoint.model import MODEL, OPTIMIZER

EQUAL, WITHIN, DIFFERENT, SHAPE, INCOMPLETE, UNREADABLE = "equal", "within tolerance", "different", "shape", "incomplete", "unreadable"
"""How a pair of tensors came out. `INCOMPLETE`: what both sides have is the same, but a side has not all of it."""

BITS, VALUES, ROUNDED, CRC, DIGEST = "bits", "values", "rounded", "crc32", "digest"
"""What two tensors were found equal by: VALUES when their element types differ, ROUNDED where one side saved only the float32 copies of
weights that it trains in 16 bits, CRC with ``--quick``, DIGEST against a manifest."""


@dataclass(slots=True)
class TensorResult:
    """One pair of tensors.

    Attributes:
        name: of side A, with the part of a fused parameter in brackets.
        name_a, name_b: what the checkpoints call them.
        shape_a, shape_b, dtype_a, dtype_b: as stored.
        numel: elements compared.
        group, state: see `StoredTensor`. layer, kind: see `kinds`.
        status: one of the constants of this module.
        by: what `status` equal rests on.
        l2, cos, max_abs, max_at, rel_norm, norm_a, norm_b, changed, beyond, unrounded: see `metrics`; None where they do not exist: other
            shapes, unknown element types, no data read.
        nan_a, nan_b, inf_a, inf_b: elements.
        missing_a, missing_b: elements that no file of the side holds.
        drift_a, drift_b: elements in which replicas of the side (copies on other ranks) differ from each other; and the files.
        files_a, files_b: changed elements by the file they lie in.
        note: of the pair (what was assumed), or why it could not be read.
        hint: what the difference looks like.
    """

    name: str
    name_a: str
    name_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: str
    dtype_b: str
    numel: int
    group: str = MODEL
    state: str = ""
    status: str = EQUAL
    by: str = BITS
    l2: float | None = None
    cos: float | None = None
    max_abs: float | None = None
    max_at: tuple[int, ...] | None = None
    rel_norm: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    changed: int | None = None
    beyond: int | None = None
    unrounded: int | None = None
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    missing_a: int = 0
    missing_b: int = 0
    drift_a: int = 0
    drift_b: int = 0
    drift_files: tuple[str, ...] = ()
    files_a: dict[str, int] = field(default_factory=dict)
    files_b: dict[str, int] = field(default_factory=dict)
    note: str = ""
    hint: str = ""

    @property
    def equal(self) -> bool:
        return self.status in (EQUAL, WITHIN)

    @property
    def share(self) -> float | None:
        """Of the elements that changed."""
        return None if self.changed is None else self.changed / self.numel if self.numel else 0.0

    @property
    def layer(self) -> int | None:
        return layer_of(self.name)

    @property
    def kind(self) -> str:
        return kind_of(self.name) if self.group in (MODEL, OPTIMIZER) else OTHER

    @property
    def rounded(self) -> bool:
        """One side is the other, rounded to a narrower element type."""
        return self.dtype_a != self.dtype_b and bool(self.changed) and self.unrounded == 0

    def to_json(self) -> dict[str, Any]:
        """As the report has it: numbers that JSON lacks (NaN, Inf) are null, names that say nothing new are left out."""
        data = {key: _plain(value) for key, value in asdict(self).items()}
        data.update(equal=self.equal, share=_plain(self.share), layer=self.layer, kind=self.kind, shape=list(self.shape_a))
        for key in ("note", "hint", "drift_files", "files_a", "files_b", "missing_a", "missing_b", "drift_a", "drift_b"):
            if not data[key]:
                del data[key]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorResult:
        """That of `to_json`.

        Raises:
            TypeError, ValueError, KeyError: it is not.
        """
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        for key in ("shape_a", "shape_b", "max_at", "drift_files"):
            if known.get(key) is not None:
                known[key] = tuple(known[key])
        return cls(**known)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value
