"""Asks ``msprobe diagnose`` about a case, and says how good the answer was."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import field_bugs_megatron
from field_bugs_case import Case, Fault, Healthy, nothing
from field_bugs_runs import diagnose, run
from field_bugs_training import Setting


@dataclass(frozen=True)
class Answer:
    """Exit code and words of `diagnose`, and what became of the case: one of `SCORES`."""

    code: int
    text: str
    score: str
    seconds: float


RIGHT = ("named first", "first three", "right")
SCORES = (*RIGHT, "other place", "MISSED", "exit 3", "ACCUSED", "accused: exit 3", "BROKEN")


def identity(case: Case, level: str) -> str:
    """Name of a case at a level, as a directory may be called."""
    kind = "h" if isinstance(case, Healthy) else "f"
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', case.name.lower()).strip('-')}-{level}"


def framework(case: Case) -> str:
    s = case.setting
    if s.family == "megatron":
        return f"megatron {s.form}"
    return (
        (s.family if s.family == "gpt" else f"hf-{s.family}") + (f" {s.wrap}" if s.wrap else "") + (f" x{s.ranks}" if s.ranks > 1 else "")
    )


def golden_of(setting: Setting, level: str, runs: Path, plant: Any = nothing) -> Path:
    """The right run of a setting, made once."""
    word = hashlib.sha1(f"{setting!r} {getattr(plant, '__name__', '')}".encode()).hexdigest()[:10]
    where = runs / "golden" / f"{setting.family}-{setting.dtype}-{setting.wrap or 'one'}-{word}-{level}"
    run(where, setting, plant, level)
    return where


def ask(case: Case, level: str, runs: Path) -> Answer:
    """Make the runs that are not there yet, and judge what `diagnose` says."""
    where = runs / identity(case, level)
    if case.setting.family == "megatron":
        code, text, found, seconds = field_bugs_megatron.ask(case, level, runs, where)
        return Answer(code, text, judged(case, level, code, text, found, modules_of(case, runs) if level == "L1" else {}), seconds)
    kind = "monitor" if level == "monitor" else "dump"
    golden = None
    if isinstance(case, Healthy):
        if case.other is not None:
            golden = golden_of(case.setting, level, runs, case.golden_plant) / kind
        run(where, case.other or case.setting, case.plant, level)
    else:
        if not case.alone:
            golden = golden_of(case.setting, level, runs, case.golden) / kind
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
        golden = field_bugs_megatron.golden_of(case.setting, "mix", runs)
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
    marks = ["golden " if "only the golden side" in word else "" for word in words]
    words = [f"{modules.get(mark + str(suspect.get('record')), '')} {word}" for mark, suspect, word in zip(marks, suspects, words)]
    words[0] += " " + " ".join(text.splitlines()[:2])
    words = [re.sub(r"File \S+, line \d+,", "", word) for word in words]
    step = (found.get("first_suspect") or {}).get("step")
    truth = case.coarse if case.coarse and level in ("L0", "monitor") else case.truth
    if re.search(truth, words[0]) and (case.step < 0 or step is None or step == case.step):
        return "named first"
    return "first three" if any(re.search(truth, word) for word in words[1:]) else "other place"


def row(case: Case, level: str, answer: Answer) -> str:
    """A line of a table."""
    said = " / ".join(line.strip() for line in answer.text.splitlines()[:2]).replace("|", "\\|")
    cells = (identity(case, level), framework(case), case.setting.dtype, level, case.name, str(answer.code), answer.score, said[:260])
    return "| " + " | ".join(cells) + " |"
