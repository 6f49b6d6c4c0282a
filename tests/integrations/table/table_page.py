"""docs/integrations.md from the kept cells, the reasons and the results of the version matrix."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cell_names import FEATURES, FRAMEWORKS
from cells_file import Cell, Row, number, order
from not_run import Reason, contradictions, rows

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"
RESULTS = Path(__file__).parents[1] / "matrix" / "results.json"
SHORT = {"not run here": "not here", "not supported": "no"}
SHOWN = 2
"""Tests named per cell; the file has all."""
HEAD = """# What works with which framework

Framework x version x parallel layout x feature. Made by `make integrations-table`: tests name the cells that they prove, and a cell
counts when its test has passed. Nothing on this page is written by hand but the reasons.

* **ran (1)**: ran and was correct, in test 1 below the table: compared with whole tensors gathered in float64, with a run in a single
  process, or, for "same bits" and "detach", with the training without the probe.
* **ran* (1)**: ran, and what was asked for was there in the right steps and on the right ranks; test 1 has not compared its values.
* **not here (a)**: could not run on the machine that made the page: reason a.
* **no (b)**: not supported: reason b.

The cells with all their tests are in `tests/integrations/table/cells.jsonl`, the reasons in `tests/integrations/not_run.yaml`.
How to start the probe: [launch](launch.md).

What the features are: `dump` L0, L1, mix are the levels of [a dump](dump.md); `monitor` the families of [monitoring](monitor-families.md);
[grad probe](grad-probe.md), [collectives](collectives.md), [replica check](replicas.md), [incident capture](find-a-nan.md).
"Same bits": losses, weights and random state are bitwise the same with and without the probe. "Detach": after closing, every name that
was replaced is the framework's own again, checked by identity.
"""


class Blank(ValueError):
    """A cell without an answer."""


def page(cells: list[Cell], reasons: list[Reason], results: list[dict[str, Any]]) -> str:
    """The page's text. Raises `Blank` when a cell of a row has neither run nor a reason, ValueError when a reason is wrong."""
    wrong = contradictions(cells, reasons)
    if wrong:
        raise ValueError("these cells have run, and a reason says they have not:\n" + "\n".join(wrong))
    latest = {f: max((c.row.version for c in cells if c.row.framework == f), key=number, default="") for f in FRAMEWORKS}
    every = rows(cells, reasons, latest)
    newest = {row for row in every if row.version == latest[row.framework] or not latest[row.framework]}
    answers = _answers(cells, reasons, every, newest)
    text = [HEAD]
    for framework in FRAMEWORKS:
        mine = sorted((row for row in every if row.framework == framework), key=order)
        if mine:
            text.append(_section(framework, mine, answers))
    text.append(_versions(results))
    return "\n".join(text).rstrip() + "\n"


def _answers(cells: Iterable[Cell], reasons: list[Reason], every: set[Row], newest: set[Row]) -> dict[tuple[Row, str], Cell | Reason]:
    found: dict[tuple[Row, str], Cell | Reason] = {(cell.row, cell.feature): cell for cell in cells}
    blank = []
    for row in sorted(every, key=order):
        for feature in FEATURES:
            if (row, feature) not in found:
                reason = next((r for r in reasons if r.fits(row, feature, newest)), None)
                if reason is None:
                    blank.append(f"{' / '.join(row)} / {feature}")
                else:
                    found[row, feature] = reason
    if blank:
        raise Blank("no test has run and no reason is given for\n" + "\n".join(blank))
    return found


def _section(framework: str, mine: list[Row], answers: dict[tuple[Row, str], Cell | Reason]) -> str:
    tests: dict[str, int] = {}
    whys: dict[tuple[str, str], str] = {}
    lines = [f"## {framework}", "", "| version | layout | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 2) + "|"]
    for row in mine:
        shown = []
        for feature in FEATURES:
            answer = answers[row, feature]
            if isinstance(answer, Cell):
                numbers = sorted(tests.setdefault(test, len(tests) + 1) for test in answer.tests[:SHOWN])
                shown.append(f"ran{'' if answer.compared else '*'} ({', '.join(map(str, numbers))})")
            else:
                letter = whys.setdefault((answer.status, answer.why), _letter(len(whys)))
                shown.append(f"{SHORT[answer.status]} ({letter})")
        lines.append(f"| {row.version} | {row.layout} | " + " | ".join(shown) + " |")
    ran = [a for (row, _), a in answers.items() if row.framework == framework and isinstance(a, Cell)]
    lines.append("")
    if ran:
        torch = sorted({v for cell in ran for v in cell.torch}, key=number)
        python = sorted({v for cell in ran for v in cell.python}, key=number)
        lines += [f"{len(ran)} cells ran, with torch {', '.join(torch)} and Python {', '.join(python)}, gloo, CPU.", ""]
    lines += [f"* ({letter}) {status}: {why}" for (status, why), letter in whys.items()]
    by_file: dict[str, list[str]] = defaultdict(list)
    for test, n in tests.items():
        file, _, name = test.partition("::")
        by_file[file].append(f"({n}) {name}")
    lines += [f"* `{file}`: " + ", ".join(names) for file, names in by_file.items()]
    return "\n".join(lines) + "\n"


def _letter(n: int) -> str:
    return (chr(96 + n // 26) if n >= 26 else "") + chr(97 + n % 26)


def _versions(results: list[dict[str, Any]]) -> str:
    """The section of the version matrix: one line per environment that `make test-matrix` has tried."""
    if not results:
        return ""
    lines = [
        "## Versions",
        "",
        "`make test-matrix` runs the core checks of each integration against released versions, each in an environment of its own",
        "(`tests/integrations/matrix/versions.yaml`). The results that are kept:",
        "",
        "| framework | version | torch | Python | result | core checks |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(
        results, key=lambda r: (list(FRAMEWORKS).index(r["framework"]), [-n if isinstance(n, int) else 1 for n in number(r["version"])])
    ):
        why = f": {r['why']}" if r.get("why") else ""
        lines.append(
            f"| {r['framework']} | {r['version']} | {r['torch']} | {r['python']} | {r['status']}{why} | "
            f"{r['passed']} passed, {r['failed']} failed, {r['skipped']} skipped |"
        )
    return "\n".join(lines) + "\n"


def results(file: Path = RESULTS) -> list[dict[str, Any]]:
    """What the version matrix has kept."""
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
