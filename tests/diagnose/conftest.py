"""Hand-made dumps with a known fault: a small builder for the JSON files of one rank."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import warm

from msprobe_engine.find.nonfinite import trace as facts
from msprobe_engine.find.nonfinite.flags import Trace
from msprobe_engine.formats.dump.read_table import read_side

_here = Path(__file__).parent
for _place in (str(_here.parent / "monitor_pages"), str(_here)):
    if _place not in sys.path:
        sys.path.insert(0, _place)


@pytest.fixture(scope="module")
def small_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `small_run.py` has trained."""
    root = tmp_path_factory.mktemp("small") / "dump"
    done = warm.run((_here / "small_run.py").read_text(), root, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


_VALUES = {
    "nan": (math.nan, math.nan, math.nan, math.nan),
    "inf": (math.inf, -1.0, math.inf, math.inf),
    "-inf": (1.0, -math.inf, -math.inf, math.inf),
    "unknown": (None, None, None, None),
}


def tensor(kind: str = "ok", shape: tuple[int, ...] = (2, 4), dtype: str = "torch.float32", seed: float | None = None) -> dict[str, Any]:
    """One tensor object; every healthy tensor has its own numbers."""
    x = random.random() if seed is None else seed
    top, low, mean, norm = _VALUES.get(kind, (1 + x, -1 - x, x, 3 * x))
    return {
        "type": "torch.Tensor",
        "dtype": dtype,
        "shape": list(shape),
        "Max": top,
        "Min": low,
        "Mean": mean,
        "Norm": norm,
        "requires_grad": True,
    }


def _item(value: Any) -> Any:
    if isinstance(value, str):
        return tensor(value)
    if isinstance(value, (list, tuple)):
        return [_item(child) for child in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return {"type": type(value).__name__, "value": value}
    return value


class RankDump:
    """Records of one rank, in order of completion. Strings stand for tensors: ok, nan, inf, -inf, unknown."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.construct: dict[str, Any] = {}
        self.stack: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    @staticmethod
    def number(kind: str) -> dict[str, Any]:
        """A tensor of one element without dimensions."""
        return tensor(kind, ())

    def api(
        self, name: str, ins: Any = (), outs: Any = ("ok",), *, parent: str | None = None, direction: str = "forward", kwargs: Any = None
    ) -> str:
        n = self._counts.get(name + direction, 0)
        self._counts[name + direction] = n + 1
        full = f"{name}.{n}.{direction}"
        if direction == "forward":
            record = {
                "input_args": _item(list(ins)),
                "input_kwargs": {k: _item(v) for k, v in (kwargs or {}).items()},
                "output": _item(list(outs)),
            }
        else:
            record = {"input": _item(list(ins)), "output": _item(list(outs))}
        self.data[full] = record
        self.construct[full] = parent
        return full

    def comm(self, op: str, ins: Any, outs: Any, *, group: list[int] | None = None, **kwargs: Any) -> str:
        if group is not None:
            kwargs["group"] = {"type": "torch.ProcessGroup", "group_ranks": group, "group_id": "0"}
        return self.api(f"Distributed.{op}", ins, outs, kwargs=kwargs)

    def module(
        self,
        name: str,
        ins: Any = ("ok",),
        outs: Any = ("ok",),
        *,
        parent: str | None = None,
        params: Any = None,
        n: int = 0,
        direction: str = "forward",
    ) -> str:
        full = f"Module.{name}.{direction}.{n}"
        if direction == "forward":
            record = {
                "input_args": _item(list(ins)),
                "input_kwargs": {},
                "output": _item(list(outs)),
                "parameters": {k: _item(v) for k, v in (params or {}).items()},
            }
        else:
            record = {"input": _item(list(ins)), "output": _item(list(outs))}
        self.data[full] = record
        self.construct[full] = parent
        return full

    def grads(self, name: str, **params: str) -> str:
        full = f"Module.{name}.parameters_grad.0"
        self.data[full] = {key: [_item(value)] for key, value in params.items()}
        return full

    def trace(self, rank: int = 0, step: int = 0) -> Trace:
        with tempfile.TemporaryDirectory() as directory:
            self.write(Path(directory) / f"rank{rank}")
            dump = read_side(Path(directory) / f"rank{rank}" / "dump.json")
            return facts.trace(dump, step=step, rank=rank)

    def write(self, directory: Path, level: str = "mix") -> None:
        directory.mkdir(parents=True)
        head = {"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None, "data": self.data}
        (directory / "dump.json").write_text(json.dumps(head))
        (directory / "construct.json").write_text(json.dumps(self.construct))
        (directory / "stack.json").write_text(json.dumps(self.stack))


@pytest.fixture(scope="session")
def rank_dump() -> type[RankDump]:
    return RankDump
