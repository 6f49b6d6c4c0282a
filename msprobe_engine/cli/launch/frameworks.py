"""Say which of the supported training frameworks are installed here, and whether everything is there that the probe relies on in them.

It is read from their source; a framework is imported only where that does not answer, or with ``--import``, in a process of its own, so
that a broken one does not spoil the others. What a version lacks is said with what that takes away; everything else of the probe works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import UsageError

INTEGRATIONS = "msprobe_integrations"
"""Where the integrations are: those with a file reliance.py have a table of what they rely on. Nothing of it is imported here."""
GROUP = "msprobe.reliance"
"""Entry points of integrations that live somewhere else: name of a framework, module with its table."""
RUNNER = "msprobe_integrations.framework_report"
"""What writes the report of such a module; started, not imported."""
SECONDS = 300
"""Longer than any import takes."""
EXAMPLES = """\
examples:
  msprobe frameworks
  msprobe frameworks torch deepspeed
  msprobe frameworks --import          also: can it be imported? takes as long as the imports
  msprobe frameworks --json

exit codes: 0 everything is there, 1 something is not, 2 wrong usage"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (torch, megatron, deepspeed, ...); default: all")
    parser.add_argument("--import", dest="imports", action="store_true", help="import each framework, too: a broken installation shows")
    parser.add_argument("--json", action="store_true", help="print everything that is relied on, as JSON")
    parser.epilog = EXAMPLES


def run(args: argparse.Namespace) -> int:
    """Check the tables and print what they say.

    Raises:
        UsageError: there is no framework of that name.
    """
    from msprobe_engine.core.io.progress import bar

    modules = _modules(args.names)
    with bar("looking", len(modules)) as advance, ThreadPoolExecutor(2) as pool:

        def one(name: str) -> dict[str, Any]:
            each = check(name, modules[name], imports=args.imports)
            advance(name)
            return each

        reports = list(pool.map(one, modules))
    print(json.dumps(reports, indent=2) if args.json else "\n".join(lines(reports)))
    return int(any(is_degraded(report) for report in reports))


def _modules(names: Sequence[str]) -> dict[str, str]:
    """Module of each framework, by its name."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    spec = find_spec(INTEGRATIONS)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    known = {path.parent.name: f"{INTEGRATIONS}.{path.parent.name}.reliance" for place in places for path in place.glob("*/reliance.py")}
    known.update({point.name: point.value for point in entry_points(group=GROUP)})
    unknown = [name for name in names if name.lower() not in known]
    if unknown:
        raise UsageError(f"unknown framework '{unknown[0]}'; allowed: {', '.join(sorted(known))}")
    return {name: known[name] for name in ([name.lower() for name in names] or sorted(known))}


def check(name: str, module: str, *, imports: bool = False) -> dict[str, Any]:
    """The report of one framework, from a process of its own; see `msprobe_integrations.framework_report.report`."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        environment = {**os.environ, "MSPROBE_AUTOLOAD": "0"}
        command = [sys.executable, "-m", RUNNER, module, str(file), *(["import"] if imports else [])]
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
                env=environment,
                errors="replace",
            )
            report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return report
        except subprocess.TimeoutExpired:
            why = f"the import took longer than {SECONDS} s"
        except (OSError, ValueError):
            last = process.stderr.strip().splitlines()
            why = last[-1] if last and process.returncode > 0 else f"the process that imports it ended with exit code {process.returncode}"
    return {"name": name, "package": "", "version": "", "installed": True, "error": why, "rows": []}


def is_degraded(report: dict[str, Any]) -> bool:
    """Is something not there that should be?"""
    return bool(report["error"]) or any(row["state"] == "lost" for row in report["rows"])


def lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The reports as text: a line per framework, then what is missing."""
    installed = [report for report in reports if report["installed"]]
    width = max((len(report["name"]) for report in installed), default=0) + 2
    said = []
    for report in installed:
        rows = [row for row in report["rows"] if row["state"] in ("there", "lost")]
        lost = sum(row["state"] == "lost" for row in rows)
        later = sum(row["state"] == "in training" for row in report["rows"])
        parts = [f"{lost} of {len(rows)} names are missing" if lost else f"all {len(rows)} names are there"] if rows else []
        parts += [f"{later} {'more ' if rows else ''}of objects that only a training has: checked when one begins"] if later else []
        state = "does not work here" if report["error"] else "; ".join(parts)
        said.append(f"{report['name']:{width}}{report['version'] or '(unknown)':12}  {state}")
    for report in installed:
        if is_degraded(report):
            said += ["", f"{report['name']} {report['version']}".rstrip() + ":"]
            said += [f"  {report['error']}"] if report["error"] else []
            for row in report["rows"]:
                if row["state"] == "lost" and not report["error"]:
                    said.append(f"  has no {row['on']}: without it: no {row['needed_for']} (known in: {row['versions'] or 'unknown'})")
    absent = [report["name"] for report in reports if not report["installed"]]
    if absent:
        said += ["", f"not installed: {', '.join(absent)}"]
    return said
