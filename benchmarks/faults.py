"""Plants every defect of the fault set into a real training, asks `msprobe diagnose` about it, and prints tables.

    python benchmarks/faults.py [--keep DIR] [--only WORD] [--settings mix,L0,L1,md5,digest,tensor,bf16 | all] [--markdown FILE]
    python benchmarks/faults.py --existing 26.2.0=VENV/bin/python [--existing 8.1.1=VENV/bin/python]

A defect is named when the first suspect is the record that it is in, or its direct producer, in the step where it shows first (level L0:
the innermost module that holds it, `fault_set/fault_levels.py`). A harmless variation must be called no difference beyond round-off.

``--existing`` asks the existing tool about the same dumps, which it reads (the one process is called rank0, which it wants). It is told the
step. Its answers: the first row that its table marks and the first that it marks as worse (26.2.0: warning, error; 8.1.1: Warning and
yellow; red, No and Different), in the order of the table, over all ranks; what its search for the first difference names (26.2.0:
``compare -da``, 8.1.1: the advice); and of defects that make NaN or Inf, what its search for those names (26.2.0: ``overflow_check``,
8.1.1: ``nan_analyze``). A row stands for its record, which is judged as ours is; any row of the culprit counts, of its inputs too. Beside
that it is said whether the culprit is anywhere among the marked rows, and how many those are. Of a harmless variation all steps are
asked about, and no row may be marked.

With ``--keep`` dumps and answers of the existing tool are kept, and those that are there are not made again. ``--markdown`` writes the
scores and the names of what the first setting gets wrong into a file, between the lines ``<!-- faults -->`` and ``<!-- /faults -->``.

Exit code 1 when fewer than 90 % of the defects are named in a setting, or a harmless variation is not called round-off.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_cases import Harmless
from fault_dumps import scratch_directory
from fault_existing import Existing, Verdict, judge
from fault_mixture import Defect
from fault_settings import SETTINGS, AnyCase, Setting, cases, dumps, truth

from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.progress import progress
from msprobe_engine.find.run import diagnose

NEEDED = 0.9
"""Share of the defects that must be named."""


@dataclass
class Row:
    """One case in one setting.

    Attributes:
        right: our answer is the truth.
        finding, record: it.
        seconds: that it took.
        existing: version -> what its answer is worth.
    """

    case: AnyCase
    right: bool
    finding: str
    record: str
    seconds: float
    existing: dict[str, Verdict] = field(default_factory=dict)

    @property
    def harmless(self) -> bool:
        """Nothing was planted."""
        return isinstance(self.case, Harmless)


def ask(setting: Setting, case: AnyCase, target: Path, golden: Path) -> Row:
    """Our answer to one case."""
    begin = time.perf_counter()
    try:
        found = diagnose(target, golden)
    except ProbeError as error:
        return Row(case, False, f"error: {error}"[:80], "", time.perf_counter() - begin)
    seconds, first = time.perf_counter() - begin, found.first_suspect
    if isinstance(case, Harmless):
        return Row(case, found.finding == "none", found.finding, first.record if first else "", seconds)
    if first is None:
        return Row(case, False, found.finding, "", seconds)
    true = truth(setting, case)
    named = any(re.fullmatch(pattern, first.record) for pattern in true.records) and (not true.ranks or first.rank in true.ranks)
    return Row(case, named and first.step == true.step and found.finding in true.findings, found.finding, first.record, seconds)


def ask_existing(tool: Existing, setting: Setting, case: AnyCase, target: Path, golden: Path) -> Verdict:
    """The existing tool's answer to one case; of a harmless variation that to all of its steps."""
    name = f"{setting.name}-{target.name}"
    if not isinstance(case, Harmless):
        true = truth(setting, case)
        return judge(true, tool.ask(name, target, golden, true.step, bool({"nonfinite", "overflow"} & set(true.findings))))
    answers = [tool.ask(name, target, golden, step) for step in range(len(list(target.glob("step*"))))]
    marked, rows = (sum(numbers) for numbers in zip(*((len(a["marked"]), a["rows"]) for a in answers)))
    return Verdict(False, False, False, False, False, marked, rows, answers[0]["problem"] if not rows else "")


def training_of(case: AnyCase) -> str:
    """What is trained, in one word."""
    return "mixture" if isinstance(case, Defect) else case.shape.parallel


def in_words(row: Row, version: str) -> list[str]:
    """Cells of one version of the existing tool."""
    found = row.existing[version]
    marked = f"{found.marked} of {found.rows}" if found.rows else found.named
    if row.harmless:
        return ["-" if not found.rows else "yes" if not found.marked else "no", marked]
    if not found.rows:
        return ["no", marked]
    return ["yes" if found.best else f"no: {found.named}", marked + (", with it" if found.anywhere else "")]


def table(rows: list[Row]) -> str:
    """All cases of a setting."""
    versions = list(rows[0].existing)
    columns = ["case", "training", "right", "finding", "first suspect", "seconds"]
    columns += [text for version in versions for text in (f"{version} right", f"{version} marks")]
    lines = []
    for row in rows:
        cells = [
            row.case.name,
            training_of(row.case),
            "yes" if row.right else "**no**",
            row.finding,
            row.record or "-",
            f"{row.seconds:.2f}",
        ]
        lines.append(cells + [cell for version in versions for cell in in_words(row, version)])
    return _markdown(columns, lines)


def names(rows: list[Row]) -> str:
    """The cases of a setting in which the answer is wrong."""
    said = {
        "Not named": [row for row in rows if not row.right and not row.harmless],
        "Harmless, and a difference was named": [row for row in rows if not row.right and row.harmless],
    }
    return "\n\n".join(f"{what}: {'; '.join(row.case.name for row in found)}." for what, found in said.items() if found)


def scores(done: dict[str, list[Row]]) -> str:
    """One line per setting."""
    versions = next(iter(done.values()))[0].existing
    columns = ["dumped", "defects", "named", "harmless", "called round-off"]
    for version in versions:
        columns += [
            f"{version} first row",
            "worst row",
            "search",
            "NaN search",
            "any of them",
            "among marked rows",
            "rows marked",
            "harmless unmarked",
        ]
    lines = []
    for name, rows in done.items():
        defects, harmless = [r for r in rows if not r.harmless], [r for r in rows if r.harmless]
        cells: list[object] = [
            SETTINGS[name].text,
            len(defects),
            sum(r.right for r in defects),
            len(harmless),
            sum(r.right for r in harmless),
        ]
        for version in versions:
            found, quiet = [r.existing[version] for r in defects], [r.existing[version] for r in harmless]
            cells += [sum(getattr(v, what) for v in found) for what in ("first", "worst", "analysed", "nonfinite", "best", "anywhere")]
            middle = sorted(v.marked for v in found)[len(found) // 2] if found else 0
            cells += [f"{middle} (median)", f"{sum(v.rows > 0 and not v.marked for v in quiet)} of {sum(v.rows > 0 for v in quiet)}"]
        lines.append([str(cell) for cell in cells])
    return _markdown(columns, lines)


def _markdown(columns: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [columns, ["---"] * len(columns), *lines])


def keep(file: Path, text: str) -> None:
    """Put `text` between the marks of a file.

    Raises:
        SystemExit: the file has no marks.
    """
    begin, end = "<!-- faults -->\n\n", "<!-- /faults -->"
    whole = file.read_text()
    if begin not in whole or end not in whole:
        raise SystemExit(f"{file} has no lines {begin.strip()} and {end}: write them where the tables belong.")
    file.write_text(whole.split(begin)[0] + begin + text.rstrip() + "\n\n" + end + whole.split(end, 1)[1])


def passed(done: dict[str, list[Row]]) -> bool:
    """Enough defects named and nothing said of harmless variations, in every setting."""
    for rows in done.values():
        defects = [row.right for row in rows if not row.harmless]
        if sum(defects) < NEEDED * len(defects) or not all(row.right for row in rows if row.harmless):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="directory for dumps and answers; those that are there are not made again")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--settings", default="mix", help=f"of {', '.join(SETTINGS)}, or all; default: %(default)s")
    parser.add_argument("--existing", action="append", default=[], metavar="VERSION=PYTHON", help="Python of its virtual environment")
    parser.add_argument("--markdown", type=Path, help="file whose part between the marks becomes the tables")
    arguments = parser.parse_args()
    wanted = list(SETTINGS) if arguments.settings == "all" else arguments.settings.split(",")
    unknown = sorted(set(wanted) - set(SETTINGS)) + [text for text in arguments.existing if "=" not in text]
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    done: dict[str, list[Row]] = {}
    with ExitStack() as stack:
        root = (arguments.keep or stack.enter_context(scratch_directory())).absolute()
        named = [text.split("=", 1) for text in arguments.existing]
        tools = [stack.enter_context(Existing(version, Path(python).absolute(), root)) for version, python in named]
        work = [(SETTINGS[name], case) for name in wanted for case in cases(SETTINGS[name]) if arguments.only in case.name]
        for setting, case in progress(work, "faults"):
            target, golden = dumps(root, setting, case)
            row = ask(setting, case, target, golden)
            row.existing = {tool.version: ask_existing(tool, setting, case, target, golden) for tool in tools}
            done.setdefault(setting.name, []).append(row)
    tables = [f"{SETTINGS[name].text}:\n\n{table(rows)}" for name, rows in done.items()]
    print("\n\n".join([*tables, scores(done)]))
    if arguments.markdown:
        keep(arguments.markdown, "\n\n".join([scores(done), names(next(iter(done.values())))]))
    rows = [row for some in done.values() for row in some]
    ours = [sum(row.right for row in rows if row.harmless == harmless) for harmless in (False, True)]
    harmless = sum(row.harmless for row in rows)
    print(f"\n{ours[0]} of {len(rows) - harmless} defects named first, {ours[1]} of {harmless} harmless variations called round-off.")
    return 0 if passed(done) else 1


if __name__ == "__main__":
    sys.exit(main())
