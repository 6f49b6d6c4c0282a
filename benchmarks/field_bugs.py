"""Plants bugs that people reported into real trainings, asks `msprobe diagnose` about each, and prints tables.

The programs are a GPT in plain torch, small models of Transformers, DDP, FSDP2, DeepSpeed (ZeRO 1 to 3) and megatron-core in parallel
layouts, most in bfloat16. A golden run is the same program without the fault: the same seed, the same data. Beside the faults stand
healthy pairs, which differ in nothing but rounding, or in nothing, and single runs; some are watched by ``msprobe run`` as people watch
theirs (level watch or nan). Launch scripts, packs and checkpoints are compared by their own commands.
What each case does: `fault_set/reported_bugs/`.

    python benchmarks/field_bugs.py --list
    python benchmarks/field_bugs.py --only "rotary base" --levels mix,L0 --answers
    python benchmarks/field_bugs.py --programs gpt,llama --keep /tmp/field
    python benchmarks/field_bugs.py --keep /tmp/field --table /tmp/field/results.md

A case is scored by the first suspect: ``named first`` when it names the place of the fault (module, call, parameter, setting, data),
``first three`` when the second or third does, ``other place``, ``exit 3`` (nothing found, not all could be compared), ``MISSED`` (exit
code 0). A healthy pair is ``right`` with exit code 0 and accused with any other.

Exit code 1 when a healthy pair is accused, or a fault is missed at a level that can show it (``mix``).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_dumps import scratch_directory
from reported_bugs.case import Case
from reported_bugs.every_case import BESIDE, FAULTS, HEALTHY
from reported_bugs.faults.beside import Beside
from reported_bugs.judge import SCORES, Answer, ask, framework, healthy, identity, row

HEAD = "| case | program | dtype | level | fault | exit code | score | headline |\n|---|---|---|---|---|---|---|---|"


def chosen(only: list[str], levels: list[str], programs: list[str]) -> Iterator[tuple[Case | Beside, str]]:
    """Cases with a level each, in the order of the lists."""
    for case in (*FAULTS, *HEALTHY, *BESIDE):
        name = framework(case)
        if programs and not any(word in name for word in programs):
            continue
        for level in case.levels:
            named = not only or any(word in case.name or word in identity(case, level) for word in only)
            if named and (not levels or level in levels):
                yield case, level


def table(scores: Counter[tuple[str, str, str, str]]) -> str:
    """How many cases have each score, per program, dtype and level."""
    seen = [score for score in SCORES if any(key[3] == score for key in scores)]
    lines = ["| program | dtype | level | " + " | ".join(seen) + " |", "|---" * (3 + len(seen)) + "|"]
    for place in sorted({key[:3] for key in scores}):
        lines.append("| " + " | ".join([*place, *(str(scores[(*place, score)] or "") for score in seen)]) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose name holds this word; may be repeated")
    parser.add_argument(
        "--levels", default="", metavar="LEVEL,...", help="of mix, L1, L0, md5, monitor, watch, nan; default: those of each case"
    )
    parser.add_argument(
        "--programs", default="", metavar="WORD,...", help="programs whose name holds one of these: gpt, llama, ddp, megatron, ..."
    )
    parser.add_argument("--keep", type=Path, help="directory for the runs; those that are there are not made again")
    parser.add_argument("--table", type=Path, help="file that the lines are written into as they come")
    parser.add_argument("--answers", action="store_true", help="print the whole answers")
    parser.add_argument("--list", action="store_true", help="list the cases with where they were seen, and run nothing")
    a = parser.parse_args()
    cases = list(chosen(a.only, [w for w in a.levels.split(",") if w], [w for w in a.programs.split(",") if w]))
    if a.list:
        for case, level in cases:
            print(f"{identity(case, level):70} {framework(case):24} {getattr(case, 'seen', '')}")
        return 0
    scores: Counter[tuple[str, str, str, str]] = Counter()
    wrong = 0
    with ExitStack() as stack:
        runs = a.keep or stack.enter_context(scratch_directory())
        lines = stack.enter_context(a.table.open("w")) if a.table else sys.stdout
        print(HEAD, file=lines, flush=True)
        for case, level in cases:
            begin = time.perf_counter()
            try:
                answer = ask(case, level, runs)
            except RuntimeError as error:  # a training that failed is no answer
                answer = Answer(-1, str(error), "BROKEN", 0.0)
            print(row(case, level, answer), file=lines, flush=True)
            if a.answers or a.table:
                print(f"{identity(case, level)}: {answer.score} ({time.perf_counter() - begin:.0f} s)")
            if a.answers:
                print(answer.text)
            scores[framework(case), case.setting.dtype, level, answer.score] += 1
            wrong += answer.score != "right" if healthy(case) else answer.score in ("MISSED", "BROKEN") and level == "mix"
    print("\n" + table(scores))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
