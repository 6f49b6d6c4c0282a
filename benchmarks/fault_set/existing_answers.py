"""Asks the existing tool about pairs of dumps. Run by the Python of a virtual environment that holds it, 8.1.1 or 26.2.0.

    VENV/bin/python existing_answers.py < jobs > answers

Each line of the input is a job: ``{"target": step directory, "golden": step directory, "nonfinite": search for NaN and Inf too}``. Each
line of the output is its answer:

* ``rows``: rows of the comparison tables of all ranks; ``marked``: ``[position in its table, rank, record, grade]`` of the marked ones, in
  the order of the table. Grade 2: ``error``, or red, or ``No`` or ``Different``; grade 1: ``warning`` or yellow.
* ``analysed``: records that the search for the first difference names (26.2.0: ``compare -da``), or the advice (8.1.1: ``advisor``).
* ``nonfinite``: records that the search for NaN and Inf names in the target (26.2.0: ``overflow_check``, 8.1.1: ``nan_analyze``).
* ``problem``: the last error, when there are no tables.

The functions that its command line calls are called here, in a process forked for each job; importing them takes longer than the work.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

OLD = version("mindstudio-probe") == "8.1.1"
SECONDS = 300
"""A job that takes longer has no answer."""

NEEDED = ("core.compare.auto_compare", "core.compare.find_first.analyzer", "overflow_check.analyzer", "pytorch.compare.pt_compare")
COMPARE = {
    "fuzzy_match": False,
    "data_mapping": None,
    "is_print_compare_log": False,
    "xlsx": False,
    "cell_mapping": None,
    "api_mapping": None,
    "layer_mapping": None,
    "consistent_check": False,
    "backend": None,
    "config": None,
    "rank": None,
    "step": None,
}


def record_of(row: str) -> str:
    """The record that a row of a table is of."""
    whole = re.match(r"(.+?\.(?:forward|backward)(?:\.\d+)?)(?:\.(?:input|output|parameters)(?:\.|$)|$)", row)
    gradient = re.match(r"(.+?\.parameters_grad(?:\.\d+)?)(?:\.|$)", row)
    return (gradient or whole or [row, row])[1]


def compare(target: str, golden: str, out: str) -> None:
    if OLD:
        from msprobe.pytorch import compare_distributed

        compare_distributed(target, golden, out, is_print_compare_log=False)
    else:
        from msprobe.core.compare.auto_compare import compare_auto_mode

        compare_auto_mode(Namespace(target_path=target, golden_path=golden, output_path=out, diff_analyze=False, **COMPARE))


def tables(out: Path) -> tuple[int, list[tuple[int, int, str, int]]]:
    """(rows, marked rows) of what `compare` has written."""
    rows, marked = 0, []
    for file in sorted(out.glob("compare_result*")):
        found = re.search(r"rank(\d+)", file.name)
        rank = int(found[1]) if found else 0
        graded = coloured(file) if file.suffix == ".xlsx" else plain(file)
        rows += len(graded)
        marked += [(at, rank, record_of(name), grade) for at, (name, grade) in enumerate(graded) if grade]
    return rows, sorted(marked, key=lambda row: row[:2])


def plain(file: Path) -> list[tuple[str, int]]:
    with open(file, newline="", encoding="utf-8-sig") as text:
        grades = {"error": 2, "Different": 2, "warning": 1}
        return [(row["NPU Name"], grades.get(row["Result"], 0)) for row in csv.DictReader(text)]


def coloured(file: Path) -> list[tuple[str, int]]:
    import openpyxl

    found = []
    lines = openpyxl.load_workbook(file).active.iter_rows()
    titles = [cell.value for cell in next(lines)]
    verdict = next(titles.index(name) for name in ("Result", "Accuracy Reached or Not") if name in titles)
    for line in lines:
        colour = line[0].fill.start_color.rgb if line[0].fill.fill_type else ""
        grade = 2 if str(colour).endswith("FF0000") or line[verdict].value in ("No", "Different") else 0
        grade = grade or int(str(colour).endswith("FFFF00") or line[verdict].value == "Warning")
        found.append((str(line[0].value), grade))
    return found


def analysed(target: str, golden: str, out: Path) -> list[str]:
    if OLD:
        lines = [line for file in sorted(out.glob("advisor*.txt")) for line in file.read_text().splitlines()]
        named = [line.split(": ", 1)[1].strip() for line in lines if line.startswith("Suspect Nodes: ")]
        return [record_of(name) for name in named if name != "NA"]
    from msprobe.core.compare.find_first.analyzer import DiffAnalyzer

    with tempfile.TemporaryDirectory() as scratch:
        DiffAnalyzer(target, golden, scratch).analyze()
        return named_in(Path(scratch), "diff_analyze_*.json")


def nonfinite(target: str) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        if OLD:
            from msprobe.nan_analyze.analyzer import NanAnalyzer as Analyzer
        else:
            from msprobe.overflow_check.analyzer import OverFlowCheck as Analyzer
        Analyzer(target, scratch).analyze()
        return named_in(Path(scratch), "anomaly_analyze_*.json")


def named_in(out: Path, pattern: str) -> list[str]:
    return [item["op_name"] for file in out.glob(pattern) for items in json.loads(file.read_text()).values() for item in items]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    target, golden = job["target"], job["golden"]
    found: dict[str, Any] = {"rows": 0, "marked": [], "analysed": [], "nonfinite": [], "problem": ""}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        try:
            compare(target, golden, scratch)
            found["rows"], found["marked"] = tables(out)
        except Exception as error:
            found["problem"] = f"{type(error).__name__}: {error}"[:200]
        with contextlib.suppress(Exception):  # a search that fails has found nothing
            found["analysed"] = analysed(target, golden, out)
        with contextlib.suppress(Exception):
            found["nonfinite"] = nonfinite(target) if job["nonfinite"] else []
    return found


def _work(job: dict[str, Any], end: Any) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    end.send(answer(job))


def main() -> None:
    for name in ("nan_analyze.analyzer", "pytorch.compare.distributed_compare") if OLD else NEEDED:
        importlib.import_module(f"msprobe.{name}")
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(json.loads(line), its))
        process.start()
        its.close()
        given: dict[str, Any] = {"rows": 0, "marked": [], "analysed": [], "nonfinite": [], "problem": "no answer"}
        with contextlib.suppress(EOFError):
            if mine.poll(SECONDS):
                given = mine.recv()
        process.kill()
        process.join()
        print(json.dumps(given), flush=True)


if __name__ == "__main__":
    main()
