"""Plants every defect of the fault set into a real training, asks `msprobe diagnose` about it, and prints a table.

    python benchmarks/faults.py [--keep DIR] [--only WORD] [--level mix|L0|L1]
    python benchmarks/faults.py --existing /path/to/venv-of-26.2.0      # the existing tool's answer to the same pairs beside ours

Exit code 1 when fewer than 90 % are named first, or a harmless variation is not called round-off.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_cases import CASES, HARMLESS, Case, Harmless
from fault_dumps import directory_name, dump
from fault_mixture import DEFECTS, Defect
from fault_mixture import dump as dump_mixture

from msprobe_engine.diagnose.run import diagnose
from msprobe_engine.errors import ProbeError
from msprobe_engine.progress import progress


def golden(root: Path, case: Case | Harmless | Defect, level: str) -> Path:
    """The right training beside a case; made once."""
    if isinstance(case, Defect):
        path = root / "golden-mixture"
        if not path.exists():
            dump_mixture(path, lambda _: None, level)
        return path
    shape = case.golden if isinstance(case, Harmless) else case.shape
    path = root / f"golden-{directory_name(repr(shape))}"[:180]
    dump(path, shape, lambda _: None, level)
    return path


def existing(venv: Path, target: Path, right: Path, step: int) -> str:
    """What ``compare -da`` of 26.2.0 names first; "-" for nothing, and the last line of its output when it fails."""
    with tempfile.TemporaryDirectory() as out:
        line = ["compare", "-tp", str(target / f"step{step}"), "-gp", str(right / f"step{step}"), "-da", "-o", out]
        done = subprocess.run([venv / "bin" / "msprobe", *line], capture_output=True, text=True, timeout=600)
        for file in sorted(Path(out).glob("diff_analyze_*.json")):
            named = [item["op_name"] for items in json.loads(file.read_text()).values() for item in items]
            if named:
                return str(named[0])
        return "-" if done.returncode == 0 else f"exit code {done.returncode}"


def ask(root: Path, case: Case | Harmless | Defect, level: str) -> tuple[str, str, int | None, float]:
    """(finding, first record, step, seconds) of one case."""
    path = root / directory_name(case.name)
    if not isinstance(case, Defect):
        dump(path, case.shape, case.plant, level)
    elif not path.exists():
        dump_mixture(path, case.plant, level)
    right = golden(root, case, level)
    begin = time.perf_counter()
    try:
        found = diagnose(path, right)
    except ProbeError as error:
        return f"error: {error}"[:80], "", None, time.perf_counter() - begin
    first = found.first_suspect
    return found.finding, first.record if first else "", first.step if first else None, time.perf_counter() - begin


def is_right(case: Case | Harmless | Defect, finding: str, record: str, step: int | None) -> bool:
    """Is that the truth about a case?"""
    if isinstance(case, Harmless):
        return finding == "none"
    patterns, kinds = ((case.truth,), (case.finding,)) if isinstance(case, Defect) else (case.truth, case.finding)
    return any(re.fullmatch(pattern, record) for pattern in patterns) and step == case.step and finding in kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="directory for the dumps; those that are there are not made again")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--level", default="mix", choices=("L0", "L1", "mix"))
    parser.add_argument("--existing", type=Path, help="virtual environment of mindstudio-probe 26.2.0")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        cases = [case for case in (*CASES, *DEFECTS, *HARMLESS) if arguments.only in case.name]
        lines, right = [], [0, 0]  # defects, harmless variations
        for case in progress(cases, "faults"):
            finding, record, step, seconds = ask(root, case, arguments.level)
            ok = is_right(case, finding, record, step)
            right[isinstance(case, Harmless)] += ok
            cells = [
                case.name,
                training_of(case),
                "yes" if ok else "**no**",
                finding,
                record or "-",
                f"{seconds:.2f}",
            ]
            if arguments.existing:
                pair = root / directory_name(case.name), golden(root, case, arguments.level)
                cells.append(existing(arguments.existing, *pair, getattr(case, "step", 0)))
            lines.append("| " + " | ".join(cells) + " |")
    columns = ["case", "training", "right", "finding", "first suspect", "seconds", *(["26.2.0 -da"] if arguments.existing else [])]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    print("\n".join(lines))
    harmless = sum(isinstance(case, Harmless) for case in cases)
    faults = len(cases) - harmless
    print(f"\n{right[0]} of {faults} defects named first, {right[1]} of {harmless} harmless variations called round-off.")
    return 0 if right[0] >= 0.9 * faults and right[1] == harmless else 1


def training_of(case: Case | Harmless | Defect) -> str:
    """What is trained, in one word."""
    return "mixture" if isinstance(case, Defect) else "harmless" if isinstance(case, Harmless) else case.shape.parallel


if __name__ == "__main__":
    sys.exit(main())
