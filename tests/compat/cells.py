"""The cells of the comparison (task x level x summary mode x ranks, and some variants), and how they are run under either tool."""

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
SCRIPT = HERE / "training.py"
VERSIONS = {"8.1.1": "MSPROBE_EXISTING_VENV_81", "26.2.0": "MSPROBE_EXISTING_VENV_26"}
"""Version -> variable that names a virtual environment with it."""
OURS = "ours"
TASKS = ("statistics", "tensor", "structure")
LEVELS = ("L0", "L1", "mix", "debug")
MODES = ("statistics", "md5", "xor")
STEPS = 2


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


def environment(version: str) -> Path | None:
    """The virtual environment that holds an existing version, None when none is named."""
    named = os.environ.get(VERSIONS[version])
    return Path(named).absolute() if named else None


def run(tool: str, python: str | Path, wanted: list[Cell], out: Path, limit: float = 900.0) -> Path:
    """Run cells under the tool of an interpreter; returns ``out``.

    Raises:
        AssertionError: a rank did not end with 0.
    """
    out.mkdir(parents=True, exist_ok=True)
    jobs = out / "jobs.json"
    jobs.write_text(json.dumps([cell.job(out, tool) for cell in wanted]))
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    command = [str(python), str(SCRIPT), str(jobs)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env={**env, "OMP_NUM_THREADS": "1"}, cwd=out)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for cell in wanted:
        ended = (out / str(cell) / "codes.json").read_text()
        log = "\n".join(p.read_text()[-2000:] for p in sorted((out / str(cell)).glob("log*")))
        assert json.loads(ended) == [0] * cell.ranks, f"{tool} {cell}: ranks ended with {ended}:\n{log}"
    return out


@lru_cache
def existing(version: str, venv: Path) -> Path:
    """The dumps of all cells made by an existing version; kept in MSPROBE_COMPAT_CACHE, if that names a directory, until the training
    or the cells change."""
    wanted = cells(version)
    jobs = json.dumps([cell.job(Path(), version) for cell in wanted])
    key = hashlib.sha256(SCRIPT.read_bytes() + jobs.encode()).hexdigest()[:16]
    cache = os.environ.get("MSPROBE_COMPAT_CACHE")
    out = (Path(cache) if cache else Path(tempfile.mkdtemp(prefix="compat"))) / f"{version}-{key}"
    done = out / "done"
    if not done.exists():
        run(version, venv / "bin" / "python", wanted, out)
        done.touch()
    return out


@lru_cache
def ours(wanted: tuple[Cell, ...]) -> Path:
    """The dumps of cells made by this project."""
    return run(OURS, sys.executable, list(wanted), Path(tempfile.mkdtemp(prefix="compat")) / OURS)


def rank_directories(out: Path, cell: Cell, step: int) -> list[Path]:
    """The rank directories of one step, by name; a run of one process has one, whatever its name."""
    step_directory = out / str(cell) / "dump" / f"step{step}"
    return sorted(step_directory.iterdir()) if step_directory.is_dir() else []
