"""Runs trainings of megatron-core for the set of bugs from the field.

Runs are made by a process of their own, for the shim that lets megatron-core run on a CPU changes torch. `form` of a setting holds the
arguments of the training, as ``--tp 2 --sp``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from reported_bugs.case import Fault, Healthy, nothing
from reported_bugs.training import Setting

ANSWER = "field bugs: "
FAULT_SET = Path(__file__).parents[1]


def of(form: str) -> Setting:
    return Setting("megatron", "bf16" if "--bf16" in form else "fp32", form=form)


def golden_of(setting: Setting, level: str, runs: Path, plant: Any = nothing) -> Path:
    name = "" if plant is nothing else plant.__name__
    word = hashlib.sha1((setting.form + name).encode()).hexdigest()[:10]
    return runs / "golden" / f"megatron-{word}-{level}"


def ask(case: Fault | Healthy, level: str, runs: Path, where: Path) -> tuple[int, str, dict[str, Any], float]:
    from reported_bugs.runs import diagnose

    golden = None
    if not getattr(case, "alone", False) and not (isinstance(case, Healthy) and case.other is None):
        golden = golden_of(case.setting, level, runs, case.golden)
        _made(golden, case.name, level, "golden")
    _made(where, case.name, level, "run")
    kind = "monitor" if level == "monitor" else "dump"
    found = diagnose(where / kind, golden / kind if golden else None, where / "report")
    (where / "answer.txt").write_text(found[1])
    return found


@cache
def _server() -> subprocess.Popen[str]:
    """The process that trains: it imports megatron-core once, and forks ranks for every run."""
    found = os.pathsep.join(filter(None, (str(FAULT_SET), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "reported_bugs.run_megatron"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": found})


def _made(where: Path, name: str, level: str, role: str) -> None:
    if (where / "done").exists():
        return
    where.mkdir(parents=True, exist_ok=True)
    server = _server()
    assert server.stdin
    assert server.stdout
    print(json.dumps([name, level, str(where), role]), file=server.stdin, flush=True)
    for line in server.stdout:
        if line.startswith(ANSWER):
            if (said := line[len(ANSWER) :].strip()) != "ok":
                raise RuntimeError(said)
            return
    raise RuntimeError("the process that trains has ended")


def _train(name: str, level: str, where: str, role: str) -> None:
    import fault_megatron
    from reported_bugs.every_case import FAULTS, HEALTHY

    case: Any = next(case for case in (*FAULTS, *HEALTHY) if case.name == name)
    setting = case.other if role == "run" and getattr(case, "other", None) else case.setting
    words = setting.form.split()
    sizes = {key: int(words[words.index(f"--{key}") + 1]) if f"--{key}" in words else 1 for key in ("tp", "pp", "dp")}
    experts = int(words[words.index("--ep") + 1]) if "--ep" in words else 1
    argv = " ".join(word for i, word in enumerate(words) if word != "--dp" and (i == 0 or words[i - 1] != "--dp"))
    plant = case.plant if role == "run" else case.golden
    ranks = max(math.prod(sizes.values()), experts)
    fault_megatron.dump(Path(where), ranks, argv, plant, level, 12 if level == "monitor" else 3)


def _serve() -> None:
    """Make the runs that are asked for, a line each, until there are no more."""
    for line in sys.stdin:
        said = "ok"
        try:
            _train(*json.loads(line))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"[-400:].replace("\n", " ")
        print(f"\n{ANSWER}{said}", flush=True)


if __name__ == "__main__":
    _serve()
