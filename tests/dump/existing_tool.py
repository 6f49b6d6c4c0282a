"""Feeds dumps of this project to the compare command of the existing tool.

    PYTHONPATH=tests/frameworks python tests/dump/existing_tool.py {8.1.1|26.2.0} VENV {L0|L1|mix} OUT_DIR

takes the checked-in dump of that version, writes what it says through `DumpSink`, and compares the two with the `msprobe` command
of VENV. The sheet must have the same rows as when the existing dump is compared with itself.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from existing_environment import environment_of

from msprobe_engine.core import names
from msprobe_engine.core.records import Entry, Frame, TensorRef
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.notebook.step_dump import DumpedTensor, StepDump
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

FIXTURES = Path(__file__).parent.parent / "fixtures"


def frame_of(dump: StepDump) -> Frame:
    """A frame that says what a read dump says, as if it had been observed here."""
    made: list[R.Rows] = []

    def ref(node: Any) -> Any:
        if isinstance(node, DumpedTensor):
            made.append(row_of(node))
            return TensorRef(len(made) - 1, node.description)
        if isinstance(node, list):
            return [ref(child) for child in node]
        if isinstance(node, dict):
            return {key: ref(child) for key, child in node.items()}
        return node

    stacks = list(dict.fromkeys(dump.stacks.values()))
    entries = [
        Entry(e.name, {k: ref(v) for k, v in e.sections.items()}, e.parent, stacks.index(e.stack) if e.stack in stacks else -1, -1, e.tags)
        for e in dump.entries.values()
    ]
    rows = np.concatenate(made) if made else R.empty(0)
    return Frame(dump.step or 0, dump.rank or 0, rows, entries, stacks=[list(s) for s in stacks], level=dump.level)


def row_of(tensor: DumpedTensor) -> R.Rows:
    """A statistics row that reads as the statistics of `tensor`."""
    row = R.empty(1)
    ints = R.as_int64(row)
    count = math.prod(tensor.description.shape)
    ints[0, R.COUNT], ints[0, R.FLAGS] = count, R.WRITTEN
    if tensor.max is None or tensor.min is None or count == 0:
        return row
    if math.isnan(tensor.max):
        ints[0, R.NANS] = count
        return row
    ints[0, R.POS_INF], ints[0, R.NEG_INF] = tensor.max == math.inf, tensor.min == -math.inf
    row[0, R.MAX] = -math.inf if tensor.max == math.inf else tensor.max
    row[0, R.MIN] = math.inf if tensor.min == -math.inf else tensor.min
    if not isinstance(tensor.max, float):
        ints[0, R.IMAX], ints[0, R.IMIN] = int(tensor.max), int(tensor.min)
        ints[0, R.FLAGS] |= R.HAS_INTEGERS
    mean, norm = tensor.mean or 0.0, tensor.norm or 0.0
    if math.isfinite(mean) and math.isfinite(norm):
        row[0, R.SUM], row[0, R.SUMSQ] = mean * count, norm**2
    return row


def compare(version: str, venv: Path, target: Path, golden: Path, out: Path) -> list[dict[str, str]]:
    """The rows of the sheet that the existing tool's compare makes of two dump.json files (8.1.1: with their stacks)."""
    out.mkdir(parents=True, exist_ok=True)
    if version == "8.1.1":
        # Its command line needs packages that only its pre-check uses; the function is what the command calls.
        call = "import json,sys; from msprobe.pytorch import compare; compare(json.loads(sys.argv[1]), sys.argv[2], stack_mode=True)"
        paths = {"npu_json_path": str(target), "bench_json_path": str(golden), "stack_json_path": str(target.parent / "stack.json")}
        command = [str(venv / "bin/python"), "-c", call, json.dumps({**paths, "is_print_compare_log": True}), str(out)]
    else:
        command = [str(venv / "bin/msprobe"), "compare", "-m", "auto", "-tp", str(target), "-gp", str(golden), "-o", str(out)]
    environment = environment_of(venv / "bin/python")
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False, cwd=out)
    print(" ".join(command))
    sheets = [p for p in out.iterdir() if p.name.startswith("compare_result") and p.suffix in (".csv", ".xlsx")]
    # Without the vendor's toolkit 26.2.0 says so at every start; that is no error of the comparison.
    log = "\n".join(line for line in (ran.stdout + ran.stderr).splitlines() if "CANN environment" not in line)
    if ran.returncode or "ERROR" in log or "Traceback" in log or len(sheets) != 1:
        raise AssertionError(f"{' '.join(command)} ended with {ran.returncode}, sheets {sheets}:\n{log[-3000:]}")
    if sheets[0].suffix == ".xlsx":
        reader = "import pandas,sys; pandas.read_excel(sys.argv[1], keep_default_na=False).to_csv(sys.argv[2], index=False)"
        text = sheets[0].with_suffix(".csv")
        subprocess.run([str(venv / "bin/python"), "-c", reader, str(sheets[0]), str(text)], check=True, timeout=240)
        sheets = [text]
    with open(sheets[0], newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def check(version: str, venv: Path, kind: str, out: Path) -> dict[str, int]:
    """Ours against theirs and theirs against ours; returns figures of the sheets.

    Raises:
        AssertionError: an error in the log, or other rows than theirs against itself.
    """
    existing = open_dump(FIXTURES / version / kind)
    dump = existing.load(existing.steps[0])
    DumpSink(out / "ours", level=dump.level, rank=0).write(frame_of(dump))
    ours, theirs = out / "ours/step0/rank0/dump.json", dump.directory / "dump.json"
    itself = compare(version, venv, theirs, theirs, out / "itself")
    figures = {"rows": len(itself)}
    for label, pair in (("ours_target", (ours, theirs)), ("ours_golden", (theirs, ours))):
        sheet = compare(version, venv, *pair, out / label)
        mine, reference = [r["NPU Name"] for r in sheet], [r["NPU Name"] for r in itself]
        unmatched = [r["NPU Name"] for r in sheet if r["Bench Name"] in ("N/A", "")]
        if mine != reference or unmatched != [r["NPU Name"] for r in itself if r["Bench Name"] in ("N/A", "")]:
            raise AssertionError(
                f"{version} {kind} {label}: other rows: {sorted(set(mine) ^ set(reference))[:5]}, unmatched {unmatched[:5]}"
            )
        figures[f"{label}_not_equal"] = sum(r["Result"] not in ("", "pass", "Pass") for r in sheet) - sum(
            r["Result"] not in ("", "pass", "Pass") for r in itself
        )
        figures[f"{label}_stacks"] = sum(r.get("NPU_Stack_Info", "N/A") not in ("N/A", "None", "") for r in sheet)
    assert all(names.parse(name) for name in dump.entries)
    return figures


if __name__ == "__main__":
    print(check(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
