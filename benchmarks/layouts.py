"""Plants the defects of the fault set into parallel trainings and compares them with the right training of one process.

    python benchmarks/layouts.py [--keep DIR] [--only WORD] [--layouts tp,sp,dp,micro]
    python benchmarks/layouts.py --stages [--keep DIR] [--only WORD]     # stages and experts of megatron-core, beside one process
    python benchmarks/layouts.py --megatron [--keep DIR] [--family WORD]     # trainings of megatron-core, each layout beside each
    python benchmarks/layouts.py --megatron --faults '' [--family bf16] [--layouts 'TP 2,DP 2']     # with defects

Exit code 1 when fewer than 75 % of all are named first, or a layout alone is not called round-off.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "fault_set"))

from fault_cases import ACCUMULATED, CASES, DP, SINGLE, SP, TP, Case
from fault_dumps import directory_name, dump, scratch_directory
from fault_model import Shape
from megatron_dumps import FAMILIES

from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.progress import progress
from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose

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


def megatron(root: Path, family: str, layouts: list[str], faults: str | None) -> int:
    """Every layout beside every other one; with `faults` (a word of their names) these in each layout beside all others instead."""
    from megatron_dumps import LAYOUTS as ALL
    from megatron_dumps import dump_megatron
    from megatron_faults import FAULTS

    root = root / directory_name(family)
    few = "--groups 2" in FAMILIES[family]  # no rank has less than a group
    known = {name: argv for name, argv in ALL.items() if (name in layouts or not layouts) and not (few and "--tp 4" in argv)}
    for name, argv in known.items():
        dump_megatron(root / directory_name(name), f"{argv} {FAMILIES[family]}")
    pairs = [(name, golden, "", "") for name in known for golden in known if name != golden]
    if faults is not None:
        chosen = {name: fault for name, fault in FAULTS.items() if faults in name}
        pairs = [
            (name, golden, title, fault.truth)
            for name, argv in known.items()
            for title, fault in chosen.items()
            if argv.startswith(fault.layouts)
            for golden in known
            if name != golden
        ]
        for name, title in dict.fromkeys((name, title) for name, _, title, _ in pairs):
            dump_megatron(root / directory_name(f"{name} {title}"), f"{known[name]} {FAMILIES[family]}", chosen[title].plant)
    lines, wrong, silent = [], 0, 0
    for name, golden, title, truth in progress(pairs, "layouts"):
        found = diagnose(root / directory_name(f"{name} {title}" if title else name), root / directory_name(golden))
        first = found.first_suspect
        ok = first is not None and bool(re.fullmatch(truth, first.record)) if truth else found.finding == "none"
        wrong += not ok
        silent += bool(truth) and found.finding == "none" and not found.problems
        cells = (f"{name}: {title}" if title else name, golden, "yes" if ok else "**no**", found.finding, first.record if first else "-")
        lines.append(f"| {' | '.join(cells)} |")
    print("| run | golden side | right | finding | first suspect |\n|---|---|---|---|---|")
    print("\n".join(lines))
    told = f", {silent} times nothing was said" if faults is not None else ""
    print(f"\n{family}: {len(pairs) - wrong} of {len(pairs)} pairs right{told}.")
    return wrong


def stages(root: Path, only: str) -> int:
    """The same of stages and experts of megatron-core. Returns 1 when fewer than 90 % are right, or a layout alone is not."""
    from fault_megatron import dump as train
    from fault_stages import LAYOUTS as MEGATRON
    from fault_stages import PLANTED

    chosen = [(layout, None) for layout in MEGATRON] + [(layout, case) for case in PLANTED for layout in case.layouts]
    lines, wrong, quiet = [], 0, True
    for layout, case in progress([one for one in chosen if only in (one[1].name if one[1] else "")], "layouts of Megatron"):
        ranks, argv, alone = MEGATRON[layout]
        name = case.name if case else "nothing but the layout"
        golden = train(root / directory_name(alone), 1, alone)
        found = diagnose(train(root / directory_name(f"{layout} {name}"), ranks, argv, case.plant if case else None), golden)
        first = found.first_suspect
        if case is None:
            ok = quiet = quiet and found.finding == "none"
        else:
            ok = first is not None and bool(re.fullmatch(case.record, first.record) and re.fullmatch(case.module, first.module))
            ok &= first is not None and first.rank == case.ranks[layout]
        wrong += not ok
        told = f"rank {first.rank}: {first.record} ({first.module})" if first else "-"
        lines.append(f"| {name} | {layout} | {'yes' if ok else '**no**'} | {found.finding} | {told} |")
    print("| defect | layout, beside one process | right | finding | first suspect |\n|---|---|---|---|---|")
    print("\n".join(lines))
    print(f"\n{len(lines) - wrong} of {len(lines)} right.")
    return int(10 * wrong > len(lines) or not quiet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="directory for the dumps; those that are there are not made again")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="default: %(default)s")
    parser.add_argument("--megatron", action="store_true", help="trainings of megatron-core in all layouts, each beside each")
    parser.add_argument("--family", default="", help="with --megatron: trainings whose name holds this word")
    parser.add_argument("--faults", metavar="WORD", help="with --megatron: defects whose name holds this word ('' for all), in each layout")
    parser.add_argument("--stages", action="store_true", help="stages and experts of megatron-core, with defects, beside one process")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.megatron:
        with scratch_directory() as scratch:
            families = [name for name in FAMILIES if arguments.family in name]
            chosen_layouts = arguments.layouts.split(",") if arguments.layouts != ",".join(LAYOUTS) else []
            return int(sum(megatron(arguments.keep or scratch, family, chosen_layouts, arguments.faults) for family in families) > 0)
    lines, right, asked, quiet = [], 0, 0, True
    with scratch_directory() as scratch:
        root = arguments.keep or scratch
        if arguments.stages:
            return stages(root, arguments.only)
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
