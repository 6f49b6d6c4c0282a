"""Small dumps for the tests of graphs: records written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.formats.dump.read_table import read_side
from msprobe_engine.report.graph.nodes.build import build
from msprobe_engine.report.graph.nodes.model import Graph

Record = dict[str, Any]


def tensor(norm: float = 4.0, high: float | None = None, low: float | None = None, mean: float = 0.5, **more: Any) -> Record:
    """A tensor of 4 x 4 elements; `more` replaces or adds fields."""
    high = norm / 2 if high is None else high
    stats = {"Max": high, "Min": -high if low is None else low, "Mean": mean, "Norm": norm}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], **stats, "requires_grad": True} | more


def nan(**more: Any) -> Record:
    """A tensor that holds NaN."""
    value = float("nan")
    return tensor(value, value, value, value, **more)


def number(value: Any) -> Record:
    """An argument that is no tensor."""
    return {"type": type(value).__name__, "value": value}


def call(inputs: list[Any], outputs: list[Any], **kwargs: Any) -> Record:
    """A forward call."""
    return {"input_args": inputs, "input_kwargs": kwargs, "output": outputs}


def graph(
    root: Path, records: Mapping[str, Record], parents: Mapping[str, str | None] | None = None, step: int = 0, rank: int = 0
) -> Graph:
    """The graph of a dump of these records, written below `root`."""
    place = root / f"step{step}" / f"rank{rank}"
    place.mkdir(parents=True)
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps(header | {"data": dict(records)}))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys(records) | dict(parents or {})))
    (place / "stack.json").write_text("{}")
    return build(read_side(place / "dump.json"), step, rank)
