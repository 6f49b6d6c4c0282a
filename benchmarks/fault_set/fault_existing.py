"""The existing tool's answers to the pairs of the fault set, and what they are worth (`existing_answers.py` gets them from it)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_settings import Truth


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth, beside what was planted.

    Attributes:
        first: the first marked row is right; `worst`: the first of those marked worse; `analysed`: what its search for the first
            difference names first; `nonfinite`: what its search for NaN and Inf names first.
        anywhere: the culprit is among the marked rows.
        marked, rows: rows of its tables.
        named: the record of the best answer, or what went wrong.
    """

    first: bool
    worst: bool
    analysed: bool
    nonfinite: bool
    anywhere: bool
    marked: int
    rows: int
    named: str

    @property
    def best(self) -> bool:
        """Any of its answers is right."""
        return self.first or self.worst or self.analysed or self.nonfinite


class Existing:
    """One version of the existing tool. Usable as a context; the answers are kept in files below `root`.

    Args:
        version: as it calls itself.
        python: of the virtual environment that holds it.
        root: where answers are kept.
    """

    def __init__(self, version: str, python: Path, root: Path) -> None:
        self.version, self.root = version, root / "existing" / version
        self.root.mkdir(parents=True, exist_ok=True)
        self._reading = tempfile.TemporaryDirectory()
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # its package has the name of ours
        script = str(Path(__file__).with_name("existing_answers.py").absolute())
        self._process = subprocess.Popen([python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=self.root)

    def __enter__(self) -> Existing:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._reading.cleanup()

    def ask(self, name: str, target: Path, golden: Path, step: int, nonfinite: bool = False) -> dict[str, Any]:
        """Its answer to one step of a pair of dumps; `name`: of the file it is kept in; `nonfinite`: search for NaN and Inf too.

        Raises:
            RuntimeError: it does not run.
        """
        kept = self.root / f"{name}-{step}.json"
        if not kept.exists():
            sides = {side: str(self._readable(path / f"step{step}", side)) for side, path in (("target", target), ("golden", golden))}
            job = {**sides, "nonfinite": nonfinite}
            questions, answers = self._process.stdin, self._process.stdout
            assert questions is not None
            assert answers is not None
            questions.write(json.dumps(job) + "\n")
            questions.flush()
            line = answers.readline()
            if not line:
                raise RuntimeError(f"{self.version}: no answer; is it in that environment?")
            whole = kept.with_suffix(".part")
            whole.write_text(line)
            whole.rename(kept)
        found: dict[str, Any] = json.loads(kept.read_text())
        return found

    def _readable(self, step: Path, side: str) -> Path:
        """A step as it wants it: the directory of the one process called rank0, no links."""
        copy = Path(self._reading.name) / side
        shutil.rmtree(copy, ignore_errors=True)
        for rank in sorted(path for path in step.iterdir() if path.is_dir()):
            name = rank.name if rank.name.startswith("rank") and rank.name != "rank" else "rank0"
            (copy / name).mkdir(parents=True)
            for file in rank.glob("*.json"):
                shutil.copyfile(file, copy / name / file.name)
        return copy


def judge(truth: Truth, answer: dict[str, Any]) -> Verdict:
    """What an answer about a defect is worth."""

    def right(record: str) -> bool:
        return any(re.fullmatch(pattern, record) for pattern in truth.records)

    marked = [(record, grade) for _, _, record, grade in answer["marked"]]
    first = marked[0][0] if marked else ""
    worst = next((record for record, grade in marked if grade == 2), "")
    analysed = answer["analysed"][0] if answer["analysed"] else ""
    nonfinite = answer["nonfinite"][0] if answer["nonfinite"] and {"nonfinite", "overflow"} & set(truth.findings) else ""
    answers = [record for record in (first, worst, analysed, nonfinite) if record]
    named = next((record for record in answers if right(record)), answers[0] if answers else answer["problem"] or "-")
    anywhere = any(right(record) for record, _ in marked)
    return Verdict(right(first), right(worst), right(analysed), right(nonfinite), anywhere, len(marked), answer["rows"], named)
