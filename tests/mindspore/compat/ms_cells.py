"""The cells of the comparison on MindSpore (net x task x level x summary mode, and variants)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ms_rules import RULES
from suite import Suite


@dataclass(frozen=True)
class Variant:
    """What a cell does besides its net, task, level and mode.

    Attributes:
        does: see ms_training.py.
        common, section: further keys of config.json and of its task section.
        level: of the variant's cells.
        nets: which it is run on.
        only: the version that has it; empty: both.
    """

    does: tuple[str, ...] = ()
    common: tuple[tuple[str, Any], ...] = ()
    section: tuple[tuple[str, Any], ...] = ()
    level: str = "mix"
    nets: tuple[str, ...] = ("chain",)
    only: str = ""


VARIANTS = {
    "": Variant(),
    "fit": Variant(does=("fit",), level="L0", nets=("chain", "transformer")),
    "listed": Variant(does=("listed",), level="L0"),
    "bfloat16": Variant(does=("bfloat16",), common=(("precision", "high"),), nets=("transformer",), only="26.2.0"),
    "list": Variant(section=(("list", ["layers", "matmul"]),), nets=("chain", "transformer")),
    "scope": Variant(section=(("scope", ["Cell.norm.LayerNorm.forward.0", "Cell.layers.1.0.Dense.forward.0"]),)),
    "tensor_list": Variant(section=(("tensor_list", ["head", "Softmax"]),), nets=("transformer",)),
    "forward_input": Variant(section=(("data_mode", ["forward", "input"]),)),
    "backward": Variant(section=(("data_mode", ["backward"]),)),
    "output": Variant(section=(("data_mode", ["output"]),)),
    "one_step": Variant(common=(("step", ["1-2"]),)),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    net: str
    task: str
    level: str
    mode: str
    variant: str = ""
    ranks = 1
    kind: Variant = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", VARIANTS[self.variant])

    def __str__(self) -> str:
        return "-".join([self.net, self.task, self.level, self.mode, *([self.variant] if self.variant else [])])

    def job(self, out: Path, tool: str) -> dict[str, Any]:
        """The job for ms_training.py. ``risk_level`` says ALL where a tool knows it, as the comparison on torch does."""
        common: dict[str, Any] = {
            "task": self.task,
            "dump_path": str(out / str(self) / "dump"),
            "rank": [],
            "step": [],
            "level": self.level,
        }
        if tool != "8.1.1":
            common["risk_level"] = "ALL"
        common |= dict(self.kind.common)
        common[self.task] = {"scope": [], "list": [], "summary_mode": self.mode, **dict(self.kind.section)}
        return {"out": str(out / str(self)), "config": common, "net": self.net, "does": list(self.kind.does)}


def cells(version: str) -> list[Cell]:
    """All cells that a version has on this platform: 8.1.1 fails on cells with two inputs at L0 and mix."""
    found = []
    for net in ("chain", "transformer"):
        levels = ("L1", "debug") if (net, version) == ("transformer", "8.1.1") else ("L0", "L1", "mix", "debug")
        modes = ("statistics", "md5", "xor") if version != "8.1.1" else ("statistics", "md5")
        found += [Cell(net, "statistics", level, mode) for level in levels for mode in modes]
        found += [Cell(net, "tensor", level, "statistics") for level in levels]
        found += [Cell(net, "structure", level, "statistics") for level in levels if level in ("L0", "mix")]
        for name, variant in VARIANTS.items():
            if name and net in variant.nets and variant.only in ("", version) and variant.level in levels:
                found.append(Cell(net, "statistics", variant.level, "statistics", name))
    return found


KEPT = {
    "26.2.0": [
        (Cell("transformer", "statistics", "mix", "statistics"), 0, 0),
        (Cell("transformer", "statistics", "L0", "md5"), 1, 0),
        (Cell("chain", "statistics", "L1", "statistics"), 1, 0),
        (Cell("chain", "statistics", "L0", "statistics", "fit"), 1, 0),
        (Cell("chain", "tensor", "debug", "statistics"), 0, 0),
        (Cell("chain", "structure", "mix", "statistics"), 0, 0),
    ],
    "8.1.1": [
        (Cell("transformer", "statistics", "L1", "md5"), 0, 0),
        (Cell("chain", "tensor", "mix", "statistics"), 1, 0),
    ],
}
"""Version -> cells with the step and the place of the directory that is kept."""


def read(path: Path) -> tuple[object, object, bytes]:
    """Dtype, shape and bytes of a saved tensor."""
    array = np.load(path)
    return array.dtype, array.shape, array.tobytes()


SUITE = Suite(
    name="compat_mindspore",
    framework="mindspore",
    script=Path(__file__).with_name("ms_training.py"),
    cells=cells,
    kept=KEPT,
    rules=RULES,
    stack_rule="ms-stack-frames",
    read=read,
    floating=r"B?Float|Complex",
)
