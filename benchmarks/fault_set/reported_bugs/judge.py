"""Asks ``msprobe diagnose`` about a case, and says how good the answer was."""

from __future__ import annotations

import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reported_bugs import run_megatron, run_watched
from reported_bugs.case import Case, Fault, Healthy, nothing
from reported_bugs.faults import beside
from reported_bugs.faults.beside import Beside
from reported_bugs.runs import diagnose, run
from reported_bugs.training import Setting


@dataclass(frozen=True)
class Answer:
    """Exit code and words of `diagnose`, and what became of the case: one of `SCORES`."""

    code: int
    text: str
    score: str
    seconds: float


RIGHT = ("named first", "first three", "right")
SCORES = (*RIGHT, "other place", "MISSED", "exit 3", "ACCUSED", "accused: exit 3", "BROKEN")


def healthy(case: Case | Beside) -> bool:
    """Nothing is wrong in it."""
    return case.healthy if isinstance(case, Beside) else isinstance(case, Healthy)


def identity(case: Case | Beside, level: str) -> str:
    """Name of a case at a level, as a directory may be called."""
    kind = "h" if healthy(case) else "f"
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', case.name.lower()).strip('-')}-{level}"


def framework(case: Case | Beside) -> str:
    s = case.setting
    if s.family == "megatron":
        return f"megatron {s.form}"
    if isinstance(case, Beside):
        return s.family
    return (
        (s.family if s.family == "gpt" else f"hf-{s.family}") + (f" {s.wrap}" if s.wrap else "") + (f" x{s.ranks}" if s.ranks > 1 else "")
    )


def golden_of(setting: Setting, level: str, runs: Path, plant: Any = nothing, name: str = "") -> Path:
    """The right run of a setting, made once; `name` is of a case that has it."""
    word = hashlib.sha1(f"{setting!r} {getattr(plant, '__name__', '')}".encode()).hexdigest()[:10]
    where = runs / "golden" / f"{setting.family}-{setting.dtype}-{setting.wrap or 'one'}-{word}-{level}"
    if level in run_watched.PRESETS:
        run_watched.made(where, name, level, "golden")
    else:
        run(where, setting, plant, level)
    return where


def ask(case: Case | Beside, level: str, runs: Path) -> Answer:
    """Make the runs that are not there yet, and judge what `diagnose` says."""
    where = runs / identity(case, level)
    if isinstance(case, Beside):
        begin = time.perf_counter()
        code, text = beside.ask(case, where)
        return Answer(code, text, judged_beside(case, code, text), time.perf_counter() - begin)
    if case.setting.family == "megatron":
        code, text, found, seconds = run_megatron.ask(case, level, runs, where)
        return Answer(code, text, judged(case, level, code, text, found, modules_of(case, runs) if level == "L1" else {}), seconds)
    watched = level in run_watched.PRESETS
    kind = "monitor" if watched or level == "monitor" else "dump"
    golden = None
    if case.has_golden:
        golden = golden_of(case.setting, level, runs, case.golden, case.name) / kind
    if watched:
        run_watched.made(where, case.name, level, "run")
    else:
        run(where, case.other or case.setting, case.plant, level)
    code, text, found, seconds = diagnose(where / kind, golden, where / "report")
    (where / "answer.txt").write_text(text)
    (where / "code.txt").write_text(str(code))
    return Answer(code, text, judged(case, level, code, text, found, modules_of(case, runs) if level == "L1" else {}), seconds)


def modules_of(case: Case, runs: Path) -> dict[str, str]:
    """Which module each call is in, from the runs at level mix: at L1 a record does not say it. Calls of the golden run have
    ``golden `` before their names."""
    golden = None
    if case.setting.family == "megatron":
        golden = run_megatron.golden_of(case.setting, "mix", runs, case.golden)
    elif isinstance(case, Fault) and not case.alone:
        golden = golden_of(case.setting, "mix", runs, case.golden)
    found: dict[str, str] = {}
    for mark, where in (("", runs / identity(case, "mix")), ("golden ", golden)):
        for step in ("step2", "step1", "step0"):
            file = where / "dump" / step / "rank0" / "construct.json" if where else Path()
            if file.is_file():
                found.update((mark + name, _path(parent)) for name, parent in json.loads(file.read_text()).items())
    return found


def _path(parent: Any) -> str:
    name = parent[0] if isinstance(parent, list) else parent
    return str(name or "")


def judged(case: Case, level: str, code: int, text: str, found: dict[str, Any], modules: dict[str, str]) -> str:
    """One of `SCORES`."""
    if isinstance(case, Healthy):
        return {0: "right", 3: "accused: exit 3"}.get(code, "ACCUSED" if code == 1 else "BROKEN")
    if code != 1:
        return {0: "MISSED", 3: "exit 3"}.get(code, "BROKEN")
    suspects = [found.get("first_suspect") or {}, *found.get("suspects", [])[1:3]]
    words = [" ".join(str(suspect.get(key, "")) for key in ("module", "record", "tensor", "why", "source")) for suspect in suspects]
    marks = ["golden " if "only the golden run" in word else "" for word in words]
    words = [f"{modules.get(mark + str(suspect.get('record')), '')} {word}" for mark, suspect, word in zip(marks, suspects, words)]
    words[0] += " " + " ".join(text.splitlines()[:2])
    words = [re.sub(r"File \S+, line \d+,", "", word) for word in words]
    step = (found.get("first_suspect") or {}).get("step")
    truth = case.coarse if case.coarse and level in ("L0", "monitor", "watch") else case.truth
    if re.search(truth, words[0]) and (case.step < 0 or step is None or step == case.step):
        return "named first"
    return "first three" if any(re.search(truth, word) for word in words[1:]) else "other place"


def judged_beside(case: Beside, code: int, text: str) -> str:
    """One of `SCORES`."""
    right = code in case.codes
    if case.healthy:
        return "right" if right else "ACCUSED"
    if code == 0:
        return "MISSED"
    return "named first" if right and re.search(case.truth, " ".join(text.splitlines()[:10])) else "other place"


def row(case: Case | Beside, level: str, answer: Answer) -> str:
    """A line of a table."""
    said = " / ".join(line.strip() for line in answer.text.splitlines()[:2]).replace("|", "\\|")
    cells = (identity(case, level), framework(case), case.setting.dtype, level, case.name, str(answer.code), answer.score, said[:260])
    return "| " + " | ".join(cells) + " |"
