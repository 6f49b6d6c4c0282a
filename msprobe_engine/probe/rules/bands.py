"""``bands.json``: what `msprobe monitor learn` found in healthy runs, and rule ``learned`` holds a run against.

::

    {"msprobe_bands": 1,
     "about": {...},                                      free: runs, steps, summary
     "knots": [0, 10, 40, ...],                           steps, ascending
     "patience": 3,                                       steps in a row outside of a band before it counts
     "scalars": {"loss": {"log": true, "low": [...], "high": [...]}},
     "samples": {"grad_reduced": {"norm": {"0 -1 reduced  layers.0.weight": {...}}}},
     "relations": {"parameters_change": ["0 layers.0.weight", ...], "gradients_finite": true, "loss_scale_falls_only_on_overflow": true}}

A band has one low and one high value per knot; between knots it is a straight line, before the first and behind the last it stays.
With ``log`` the values are natural logarithms of the absolute value. The file is data of somebody else: everything is checked.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.records import FAMILIES, Sample
from msprobe_engine.core.text.words import shorten_text

VERSION = 1
MAX_BYTES = 256 << 20
MAX_KNOTS = 64
OPS = ("norm", "zeros")
"""Statistics of samples that have bands: the norm (logarithm) and the share of zeros."""


class Band(NamedTuple):
    """Allowed range of one metric.

    Attributes:
        low, high: one value per knot.
        log: they are logarithms.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    log: bool


@dataclass
class Bands:
    """The content of a file.

    Attributes:
        samples: family -> op -> key (`sample_key`) -> band.
        changing: parameters (``{vpp_stage} {name}``) that changed with every step.
        finite: gradients were finite in every step.
        scale: the loss scale fell only where an update was skipped.
    """

    knots: tuple[int, ...]
    patience: int = 3
    scalars: dict[str, Band] = field(default_factory=dict)
    samples: dict[str, dict[str, dict[str, Band]]] = field(default_factory=dict)
    changing: tuple[str, ...] = ()
    finite: bool = False
    scale: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.scalars) + sum(len(keys) for ops in self.samples.values() for keys in ops.values())


def sample_key(vpp_stage: int, micro_step: int, phase: str, detail: str, name: str) -> str:
    """What a sample of a family is called in the file."""
    return f"{vpp_stage} {micro_step} {phase} {detail} {name}"


def key_of(sample: Sample) -> str:
    """The same for a sample of a frame."""
    extra = sample.extra
    detail = str(extra.get("state") or extra.get("tag") or "") if extra else ""
    return sample_key(sample.vpp_stage, sample.micro_step, sample.phase, detail, sample.name)


def save_bands(bands: Bands, path: Path) -> None:
    """Write the file, mode 0640, in one piece.

    Raises:
        SinkError: it cannot be written.
    """
    from msprobe_engine.core.io.output_files import replace_file

    relations: dict[str, Any] = {
        "parameters_change": list(bands.changing),
        "gradients_finite": bands.finite,
        "loss_scale_falls_only_on_overflow": bands.scale,
    }
    tree = {
        "msprobe_bands": VERSION,
        "about": bands.about,
        "knots": list(bands.knots),
        "patience": bands.patience,
        "scalars": {name: _tree(band) for name, band in bands.scalars.items()},
        "samples": {
            family: {op: {key: _tree(band) for key, band in keys.items()} for op, keys in ops.items()}
            for family, ops in bands.samples.items()
        },
        "relations": relations,
    }
    replace_file(path, json.dumps(tree, allow_nan=False, separators=(",", ":")).encode() + b"\n")


def load_bands(path: Path) -> Bands:
    """Read and check a file.

    Raises:
        UsageError: it is not there, no regular file, too large, of another version, or not what `save_bands` writes; the message names
            the place.
    """
    try:
        text = read_input(path, MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; msprobe monitor learn makes it") from error
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise UsageError(f"{path}: is no JSON: {error}; expected a file of msprobe monitor learn") from None
    return _Reader(path).bands(tree)


def _tree(band: Band) -> dict[str, Any]:
    return {"log": band.log, "low": [_short(value) for value in band.low], "high": [_short(value) for value in band.high]}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


class _Reader:
    """Checks a tree; every message names the file and the place in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._knots = 0

    def bands(self, tree: Any) -> Bands:
        version = self._require_mapping(tree, "the file").get("msprobe_bands")
        if version != VERSION or isinstance(version, bool):
            self._wrong("msprobe_bands", version, f"{VERSION}; made by another version? learn again")
        knots = tree.get("knots")
        whole = isinstance(knots, list) and all(isinstance(k, int) and not isinstance(k, bool) and abs(k) < 1 << 62 for k in knots)
        if not whole or not 1 <= len(knots) <= MAX_KNOTS or any(knot >= next_knot for knot, next_knot in itertools.pairwise(knots)):
            self._wrong("knots", knots, f"1 to {MAX_KNOTS} whole numbers, ascending")
        self._knots = len(knots)
        patience = tree.get("patience")
        if not isinstance(patience, int) or isinstance(patience, bool) or not 1 <= patience <= 1_000_000:
            self._wrong("patience", patience, "a whole number, 1 or more")
        bands = Bands(tuple(knots), patience)
        about = tree.get("about", {})
        bands.about = dict(self._require_mapping(about, "about"))
        for name, band in self._require_mapping(tree.get("scalars", {}), "scalars").items():
            bands.scalars[name] = self._band(band, f"scalars.{name}")
        for family, ops in self._require_mapping(tree.get("samples", {}), "samples").items():
            if family not in FAMILIES:
                self._wrong(f"samples.{family}", family, f"one of {', '.join(FAMILIES)}")
            for op, keys in self._require_mapping(ops, f"samples.{family}").items():
                if op not in OPS:
                    self._wrong(f"samples.{family}.{op}", op, f"one of {', '.join(OPS)}")
                where = f"samples.{family}.{op}"
                read = {key: self._band(band, f"{where}.{key}") for key, band in self._require_mapping(keys, where).items()}
                bands.samples.setdefault(family, {})[op] = read
        relations = self._require_mapping(tree.get("relations", {}), "relations")
        changing = relations.get("parameters_change", [])
        if not isinstance(changing, list) or not all(isinstance(name, str) for name in changing):
            self._wrong("relations.parameters_change", changing, "a list of names")
        bands.changing = tuple(changing)
        bands.finite = self._truth(relations, "gradients_finite")
        bands.scale = self._truth(relations, "loss_scale_falls_only_on_overflow")
        return bands

    def _band(self, node: Any, where: str) -> Band:
        tree = self._require_mapping(node, where)
        low, high = (self._numbers(tree.get(side), f"{where}.{side}") for side in ("low", "high"))
        if any(lower > upper for lower, upper in zip(low, high)):
            self._wrong(where, "low above high", "low below high at every knot")
        return Band(low, high, self._truth(tree, "log", where))

    def _numbers(self, node: Any, where: str) -> tuple[float, ...]:
        fine = isinstance(node, list) and len(node) == self._knots
        if not fine or not all(
            isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) < 1e308 for number in node
        ):
            self._wrong(where, node, f"{self._knots} finite numbers, one per knot")
        return tuple(float(number) for number in node)

    def _truth(self, tree: Mapping[str, Any], key: str, where: str = "relations") -> bool:
        value = tree.get(key, False)
        if not isinstance(value, bool):
            self._wrong(f"{where}.{key}", value, "true or false")
        return bool(value)

    def _require_mapping(self, node: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(node, dict):
            self._wrong(where, node, "an object")
        return node

    def _wrong(self, where: str, value: Any, allowed: str) -> NoReturn:
        raise UsageError(f"{self._path}: {where[:200]} = {shorten_text(repr(value))} (file of msprobe monitor learn): expected {allowed}")
