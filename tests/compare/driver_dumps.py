"""Small dumps for the tests of the driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tensor(value: float) -> dict[str, Any]:
    """A tensor's statistics, all derived from one number."""
    stats = {"Max": value, "Min": -value, "Mean": value / 3, "Norm": value * 4}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], **stats, "requires_grad": True}


def dump(path: Path, calls: int = 6, wrong: int | None = None, extra: dict[str, Any] | None = None) -> Path:
    """Write a rank directory: a chain of linear calls, the output of call `wrong` (and all after it) a third larger."""
    data: dict[str, Any] = {}
    value = 1.0
    for i in range(calls):
        after = (value + 0.25) * (4 / 3 if i == wrong else 1)
        data[f"Functional.linear.{i}.forward"] = {
            "input_args": [tensor(value), tensor(0.5 + i)],
            "input_kwargs": {"flag": {"type": "bool", "value": True}},
            "output": [tensor(after)],
        }
        value = after
    data |= extra or {}
    path.mkdir(parents=True)
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (path / "dump.json").write_text(json.dumps(header | {"data": data}, indent=1))
    (path / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
    (path / "stack.json").write_text(json.dumps({"0": [list(data), ["File train.py, line 1, in f, x"]]}))
    return path


def pair(root: Path, ranks: int = 2, wrong: int | None = None, calls: int = 6) -> tuple[Path, Path]:
    """Two runs with as many ranks; rank 1 of the first (rank 0 when there is one) has a wrong call."""
    for rank in range(ranks):
        dump(root / "target/step0" / f"rank{rank}", calls, wrong if rank == min(1, ranks - 1) else None)
        dump(root / "golden/step0" / f"rank{rank}", calls)
    return root / "target", root / "golden"
