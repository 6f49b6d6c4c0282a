"""Plants the defects of the fault set into parallel trainings and compares them with the right training of one process.

    python benchmarks/layouts.py [--keep DIR] [--only WORD] [--layouts tp,sp,dp,micro]

Exit code 1 when fewer than 75 % of all are named first, or a layout alone is not called round-off.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_cases import ACCUMULATED, CASES, DP, SINGLE, SP, TP, Case
from fault_dumps import directory_name, dump
from fault_model import Shape

from msprobe_engine.diagnose.findings import Diagnosis
from msprobe_engine.diagnose.run import diagnose
from msprobe_engine.errors import ProbeError
from msprobe_engine.progress import progress

LAYOUTS: dict[str, Shape] = {"tp": TP, "sp": SP, "dp": DP, "micro": ACCUMULATED}


def planted(layouts: list[str]) -> list[tuple[str, Case | None]]:
    """(layout, case): each layout as it is, what belongs to the layout, and every defect of one process."""
    found: list[tuple[str, Case | None]] = []
    for layout in layouts:
        shape = LAYOUTS[layout]
        found.append((layout, None))
        found += [(layout, replace(case, shape=shape)) for case in CASES if case.shape in (SINGLE, shape)]
    return found


def ask(root: Path, layout: str, case: Case | None) -> Diagnosis:
    """What `diagnose` says of one training beside that of one process.

    Raises:
        RuntimeError: the defect does not fit into this layout.
        ProbeError: the dumps cannot be compared.
    """
    golden, path = root / "golden", root / layout / (directory_name(case.name) if case else "right")
    dump(golden, SINGLE, lambda _: None)
    dump(path, LAYOUTS[layout], case.plant if case else lambda _: None)
    return diagnose(path, golden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="directory for the dumps; those that are there are not made again")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    lines, right, asked, quiet = [], 0, 0, True
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.keep or Path(scratch)
        chosen = [(layout, case) for layout, case in planted(arguments.layouts.split(",")) if arguments.only in (case.name if case else "")]
        for layout, case in progress(chosen, "layouts"):
            name = case.name if case else "nothing but the layout"
            try:
                found = ask(root, layout, case)
            except (ProbeError, RuntimeError) as error:
                lines.append(f"| {name} | {layout} | - | {type(error).__name__} | - |")
                continue
            first = found.first_suspect
            if case is None:
                ok = found.finding == "none"
                quiet &= ok
            else:
                ok = first is not None and first.step == case.step and any(re.fullmatch(pattern, first.record) for pattern in case.truth)
                asked, right = asked + 1, right + ok
            lines.append(f"| {name} | {layout} | {'yes' if ok else '**no**'} | {found.finding} | {first.record if first else '-'} |")
    print("| defect | layout, beside one process | right | finding | first suspect |\n|---|---|---|---|---|")
    print("\n".join(lines))
    print(f"\n{right} of {asked} named first; layouts alone are {'' if quiet else 'not all '}called round-off.")
    return 0 if quiet and right >= 0.75 * asked else 1


if __name__ == "__main__":
    sys.exit(main())
