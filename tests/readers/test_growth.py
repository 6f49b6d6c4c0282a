"""Files of a few MB that somebody made so that reading them takes the square of their size: every command ends, in seconds.

The bound is that of the fuzzer, half a minute of a core, and generous: what was quadratic took minutes. Each sample is a shape of names or
of nesting, not a random one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from attack import Attack
from targets import Target

from msprobe_engine.align.calls.call_tree import MOST_LEVELS, ROOT, _without_circles

A, B = "{in}/a", "{in}/b"
COMMANDS = {
    "compare": ("compare", A, B, "-o", "{out}", "--csv"),
    "diagnose": ("diagnose", A, B, "-o", "{out}"),
    "diagnose-one": ("diagnose", A, "-o", "{out}"),
    "nan_analyze": ("nan_analyze", "-i", A, "-o", "{out}"),
    "graph": ("graph", A, B, "-o", "{out}"),
    "trends": ("trends", A, "-o", "{out}/t.html"),
}


def tensor(value: float) -> dict[str, Any]:
    return {
        "type": "torch.Tensor", "dtype": "torch.float32", "shape": [4], "Max": value, "Min": -1.0, "Mean": 0.5, "Norm": 2.0,
        "requires_grad": True,
    }  # fmt: skip


def records(names: Sequence[str], value: float = 1.0) -> dict[str, Any]:
    return {name: {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(value)]} for name in names}


def chain(count: int) -> list[str]:
    return [f"Module.m{i}.L.forward.0" for i in range(count)]


def inside_each_other(names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, (None, *names)))


NESTED = ["Module." + ".".join(["m"] * level) + ".L.forward.0" for level in range(1, 1200)]
SAMPLES: dict[str, Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "a name of a million levels": lambda: (records(["Module." + "b." * 1_000_000 + "L.forward.0"]), {}),
    "modules within modules": lambda: (records(NESTED), inside_each_other(NESTED)),
    "modules within modules, by their names": lambda: (records(NESTED), {}),
    "a chain of parents": lambda: (records(chain(8000)), inside_each_other(chain(8000))),
    "a chain of parents, all NaN": lambda: (records(chain(8000), float("nan")), inside_each_other(chain(8000))),
}


def cells() -> Iterator[Any]:
    """Every sample and command; in the fast tier every third pair."""
    for (i, sample), (j, command) in product(enumerate(SAMPLES), enumerate(COMMANDS)):
        yield pytest.param(sample, command, marks=[pytest.mark.slow] if (i + j) % 3 else [])


@pytest.mark.fast_cells(
    "a name of a million levels-compare", "a name of a million levels-nan_analyze", "modules within modules-diagnose-one"
)
@pytest.mark.parametrize(("sample", "command"), cells())
def test_a_dump_that_would_take_the_square(sample: str, command: str, tmp_path: Path) -> None:
    """See the module."""
    data, construct = SAMPLES[sample]()
    header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    text = json.dumps({**header, "data": data}, indent=1)

    def make(root: Path) -> None:
        for side in ("a", "b"):
            place = root / side / "step0" / "rank0"
            place.mkdir(parents=True)
            (place / "dump.json").write_text(text)
            (place / "construct.json").write_text(json.dumps(construct))
            (place / "stack.json").write_text("{}")

    attack = Attack(Target(sample, make, COMMANDS[command], ("*/a/*/dump.json",)), tmp_path)
    assert attack.fault({}) == ""


def test_records_that_enclose_each_other_without_an_end() -> None:
    """What is deeper than Python can call hangs below the root, so that a walk up from every record is no square."""
    parents = _without_circles([ROOT, *range(8000)])
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == ROOT else depth[parent] + 1)
    assert max(depth) == MOST_LEVELS
    assert parents.count(ROOT) == 8001 // (MOST_LEVELS + 1) + 1
