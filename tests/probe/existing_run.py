"""Dumps of one training script made by this project and by the existing tool, and the existing tool's compare of the two.

    PYTHONPATH=tests/frameworks python tests/probe/existing_run.py VENV {L0|L1|mix} OUT_DIR

The script (`--train`) uses public names only and runs unchanged under both. Figures are printed as JSON.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


class _AtOnce(concurrent.futures.ThreadPoolExecutor):
    """Takes its work when it is given: 26.2.0 computes checksums in threads while the training changes the tensors."""

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> concurrent.futures.Future[Any]:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(function(*arguments, **keywords))
        return done


def train(dump_path: str, level: str, keys: str = "{}") -> None:
    """Two steps of the tiny GPT, forward, backward and optimizer inside the window; `keys`: JSON of further keys of the task."""
    import torch

    if importlib.util.find_spec("msprobe_engine") is None:
        concurrent.futures.ThreadPoolExecutor = _AtOnce  # type: ignore[misc]

    from msprobe.pytorch import PrecisionDebugger

    spec = importlib.util.spec_from_file_location("existing_run_gpt", HERE.parents[2] / "benchmarks" / "gpt.py")
    assert spec is not None
    assert spec.loader is not None
    gpt = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = gpt
    spec.loader.exec_module(gpt)
    config = Path(dump_path).parent / f"config_{os.getpid()}.json"
    section: dict[str, Any] = {"scope": [], "list": [], **json.loads(keys)}
    document = {"task": "statistics", "dump_path": dump_path, "rank": [], "step": [], "level": level, "statistics": section}
    config.write_text(json.dumps(document))
    debugger = PrecisionDebugger(config_path=str(config))
    torch.use_deterministic_algorithms(True)
    job = gpt.Job(gpt.Workload("tiny", layers=2, width=16, vocabulary=32, batch=2, length=8, heads=2))
    for _ in range(2):
        debugger.start(model=job.model)
        loss = job.forward()
        loss.backward()
        job.update()
        debugger.stop()
        debugger.step()


def run(python: Path | str, level: str, out: Path, keys: str = "{}") -> Path:
    """Run the script with `python`, with further keys of the task as JSON; returns the dump directory."""
    out.mkdir(parents=True, exist_ok=True)
    from existing_environment import environment_of  # not at the top: the existing tool's Python runs this file too

    command = [str(python), str(HERE), "--train", str(out / "dump"), level, keys]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, cwd=out, env=environment_of(python))
    if ran.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-3000:]}")
    return out / "dump"


def figures(ours: Path, theirs: Path, step: int = 1) -> dict[str, Any]:
    """How the entries and statistics of two dumps of the same run relate.

    Outputs of API backward entries are left out: the existing tool writes the input gradients of the last autograd node that the
    call made, which are those of the call's arguments only when it made one node and passes them on in order. Norms are compared
    without their sign: that tool writes the value itself for a tensor of no dimension. Arguments are compared by place; those
    that are found at different places (positional there, keyword here) are listed in `placed`.
    """
    from msprobe_engine.formats.dump.reader import open_dump

    a, b = open_dump(ours).load(step), open_dump(theirs).load(step)
    common = [n for n in b.entries if n in a.entries]
    worst, compared, different = 0.0, 0, []
    placed: list[str] = []
    for name in common:
        mine, other = dict(a.entries[name].tensors()), dict(b.entries[name].tensors())
        if name.endswith(".backward"):
            mine, other = ({p: t for p, t in side.items() if p.startswith("input")} for side in (mine, other))
        if mine.keys() != other.keys():
            placed.append(f"{name}: {sorted(mine)} and {sorted(other)}")
        for place in mine.keys() & other.keys():
            for what in ("max", "min", "mean", "norm"):
                x, y = getattr(mine[place], what), getattr(other[place], what)
                if x is None or y is None or isinstance(x, bool) or isinstance(y, bool):
                    continue
                if what == "norm":
                    x, y = abs(x), abs(y)
                # a mean near zero is a sum of cancelling numbers: its error is relative to their size
                scale = max(abs(x), abs(y), (mine[place].norm or 0.0) if what == "mean" else 0.0, 1e-12)
                error = 0.0 if x == y else abs(x - y) / scale
                compared += 1
                worst = max(worst, error)
                if error > 1e-5:
                    different.append(f"{name}.{place}.{what}: {x} and {y}")
    return {
        "ours": len(a.entries),
        "theirs": len(b.entries),
        "common": len(common),
        "only_theirs": [n for n in b.entries if n not in a.entries],
        "only_ours": [n for n in a.entries if n not in b.entries],
        "statistics": compared,
        "worst_relative_error": worst,
        "placed": placed,
        "different": different,
    }


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        train(*sys.argv[2:5])
    else:
        venv, level, out = Path(sys.argv[1]).absolute(), sys.argv[2], Path(sys.argv[3]).absolute()
        print(json.dumps(figures(run(sys.executable, level, out / "ours"), run(venv / "bin/python", level, out / "theirs")), indent=1))
