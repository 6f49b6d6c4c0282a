"""The cells of the comparison on MindSpore (net x task x level x summary mode, and variants), and how they are run under either tool."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPT = HERE / "ms_training.py"
VERSIONS = {"8.1.1": "MSPROBE_EXISTING_MS_81", "26.2.0": "MSPROBE_EXISTING_MS_26"}
"""Version -> variable that names a virtual environment with it and mindspore."""
OURS = "ours"
STEPS = 2


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


def environment(version: str) -> Path | None:
    """The virtual environment that holds an existing version, None when none is named."""
    named = os.environ.get(VERSIONS[version])
    return Path(named).absolute() if named else None


def run(tool: str, python: str | Path, wanted: list[Cell], out: Path, limit: float = 600.0) -> Path:
    """Run cells under the tool of an interpreter; returns ``out``.

    Raises:
        AssertionError: a training did not end with 0.
    """
    out.mkdir(parents=True, exist_ok=True)
    jobs = out / "jobs.json"
    jobs.write_text(json.dumps([cell.job(out, tool) for cell in wanted]))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "RANK_ID", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "GLOG_v": "3"} | ({} if tool == OURS else {"MSPROBE_COMPAT_NORM": "1"})
    ran = subprocess.run(
        [str(python), str(SCRIPT), str(jobs)], capture_output=True, text=True, timeout=limit, check=False, env=env, cwd=out
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for cell in wanted:
        ended = (out / str(cell) / "code.json").read_text()
        assert ended == "0", f"{tool} {cell}: ended with {ended}:\n{(out / str(cell) / 'log').read_text()[-3000:]}"
    return out


@lru_cache
def existing(version: str, venv: Path) -> Path:
    """The dumps of all cells made by an existing version; kept in MSPROBE_COMPAT_CACHE, if that names a directory, until the training
    or the cells change."""
    wanted = cells(version)
    jobs = json.dumps([cell.job(Path(), version) for cell in wanted])
    key = hashlib.sha256(SCRIPT.read_bytes() + jobs.encode()).hexdigest()[:16]
    cache = os.environ.get("MSPROBE_COMPAT_CACHE")
    out = (Path(cache) if cache else Path(tempfile.mkdtemp(prefix="compat"))) / f"mindspore-{version}-{key}"
    if not (out / "done").exists():
        run(version, venv / "bin" / "python", wanted, out)
        (out / "done").touch()
    return out


@lru_cache
def ours(wanted: tuple[Cell, ...]) -> Path:
    """The dumps of cells made by this project."""
    return run(OURS, sys.executable, list(wanted), Path(tempfile.mkdtemp(prefix="compat")) / OURS)


def rank_directories(out: Path, cell: Cell, step: int) -> list[Path]:
    """The directory of one step, in a list; empty when the step was not dumped."""
    step_directory = out / str(cell) / "dump" / f"step{step}"
    return sorted(step_directory.iterdir()) if step_directory.is_dir() else []
