"""The cells of the comparison on torch (task x level x summary mode x ranks, and some variants)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rules import RULES
from suite import OURS, Suite

TASKS = ("statistics", "tensor", "structure")
LEVELS = ("L0", "L1", "mix", "debug")
MODES = ("statistics", "md5", "xor")


@dataclass(frozen=True)
class Variant:
    """What a cell does besides its task, level, mode and ranks.

    Attributes:
        does: see training.py.
        common, section: further keys of config.json and of its task section.
        only: the version that has it; empty: both.
    """

    does: tuple[str, ...] = ()
    common: tuple[tuple[str, Any], ...] = ()
    section: tuple[tuple[str, Any], ...] = ()
    only: str = ""


VARIANTS = {
    "": Variant(),
    "p2p": Variant(does=("p2p",), only="26.2.0"),  # 8.1.1 waits for ever on gloo
    "inplace": Variant(does=("inplace",)),
    "recompute": Variant(does=("recompute",)),
    "nan": Variant(does=("nan",)),
    "default_risk": Variant(common=(("risk_level", None),), only="26.2.0"),
    "core_risk": Variant(common=(("risk_level", "CORE"),), only="26.2.0"),
    "no_extra": Variant(common=(("extra_info", False),), only="26.2.0"),
    "list": Variant(section=(("list", ["attention", "cross_entropy"]),)),
    "scope": Variant(section=(("scope", ["Module.blocks.0.Block.forward.0", "Module.blocks.1.mlp.Mlp.forward.0"]),)),
    "tensor_list": Variant(section=(("tensor_list", ["head", "softmax"]),)),
    "forward_input": Variant(section=(("data_mode", ["forward", "input"]),)),
    "backward": Variant(section=(("data_mode", ["backward"]),)),
    "output": Variant(section=(("data_mode", ["output"]),)),
    "one_step": Variant(common=(("step", ["1-2"]), ("rank", [1]))),
}
_VARIANTS_OF_MIX = tuple(name for name in VARIANTS if name)


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    level: str
    mode: str
    ranks: int
    variant: str = ""
    kind: Variant = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", VARIANTS[self.variant])

    def __str__(self) -> str:
        return "-".join([self.task, self.level, self.mode, str(self.ranks), *([self.variant] if self.variant else [])])

    def job(self, out: Path, tool: str) -> dict[str, Any]:
        """The job for training.py. ``risk_level`` says ALL where a tool knows it, because the default of 26.2.0 hides calls."""
        common: dict[str, Any] = {"task": self.task, "dump_path": "./dump", "rank": [], "step": [], "level": self.level}
        if tool != "8.1.1":
            common["risk_level"] = "ALL"
        common |= dict(self.kind.common)
        if common.get("risk_level", "") is None:
            # 26.2.0 has FOCUS when it is not told; here it is ALL, so the same has to be asked for
            common.pop("risk_level") if tool != OURS else common.update(risk_level="FOCUS")
        common[self.task] = {"scope": [], "list": [], "summary_mode": self.mode, **dict(self.kind.section)}
        return {"out": str(out / str(self)), "config": common, "ranks": self.ranks, "does": list(self.kind.does)}


def cells(version: str) -> list[Cell]:
    """All cells that a version has."""
    modes = [m for m in MODES if m != "xor" or version != "8.1.1"]
    found = [Cell(task, level, mode, ranks) for ranks in (1, 2) for task in TASKS for level in LEVELS for mode in modes]
    for name in _VARIANTS_OF_MIX:
        if VARIANTS[name].only in ("", version):
            found.append(Cell("statistics", "mix", "statistics", 2 if name in ("p2p", "one_step", "nan") else 1, name))
    return found


KEPT = {
    "26.2.0": [
        (Cell("statistics", "L0", "statistics", 1), 0, 0),
        (Cell("statistics", "mix", "statistics", 2), 0, 1),
        (Cell("statistics", "debug", "md5", 1), 0, 0),
        (Cell("statistics", "L0", "xor", 2), 0, 1),
        (Cell("tensor", "L0", "md5", 1), 0, 0),
        (Cell("structure", "mix", "statistics", 1), 0, 0),
    ],
    "8.1.1": [
        (Cell("statistics", "mix", "statistics", 1), 0, 0),
        (Cell("tensor", "debug", "statistics", 1), 0, 0),
    ],
}
"""Version -> cells with the step and the place of the rank directory that is kept."""
FACTS = (
    Cell("statistics", "mix", "statistics", 2),
    Cell("statistics", "L1", "md5", 1),
    Cell("statistics", "debug", "statistics", 1),
    Cell("tensor", "mix", "md5", 1),
    Cell("tensor", "debug", "statistics", 1),
    Cell("structure", "L0", "statistics", 1),
    Cell("statistics", "mix", "statistics", 1, "no_extra"),
    Cell("statistics", "mix", "statistics", 1, "tensor_list"),
)
"""Cells of test_facts.py."""
RUN = tuple(dict.fromkeys((*FACTS, *(cell for cases in KEPT.values() for cell, _, _ in cases))))
"""What test_facts.py and the comparison with kept dumps look at, in one run."""


def read(path: Path) -> tuple[object, object, bytes]:
    """Dtype, shape and bytes of a saved tensor."""
    tensor = torch.load(path, weights_only=True)
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SUITE = Suite(
    name="compat",
    framework="torch",
    script=Path(__file__).with_name("training.py"),
    cells=cells,
    kept=KEPT,
    rules=RULES,
    stack_rule="stack-frames",
    read=read,
    floating=r"torch\.(b?float|complex)",
)
