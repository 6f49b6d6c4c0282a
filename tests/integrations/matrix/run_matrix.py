"""The version matrix: ``python tests/integrations/matrix/run_matrix.py [--again] [part of a name ...]`` (see `make test-matrix`).

Runs the core checks of each row of versions.yaml and keeps the results in results.json. Environments are kept in .venvs/matrix-*; a row
that has run with this code is not run again without ``--again``, so a call that was interrupted goes on with the row it had reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Tree
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PLACE = ROOT / ".venvs"
RESULTS = HERE / "results.json"
LIMIT = 900
"""Seconds for the tests of one row."""
ASK = """
import importlib.metadata as m, sys
for name in sys.argv[1:]:
    print(m.version(name).partition("+")[0])
import torch
"""


class Row(NamedTuple):
    """One row of versions.yaml."""

    name: str
    framework: str
    install: tuple[str, ...]
    beside: tuple[str, ...]
    tests: tuple[str, ...]
    variables: dict[str, str]

    @property
    def directory(self) -> Path:
        """Where it is installed."""
        return PLACE / f"matrix-{self.name}"


def rows() -> dict[str, Row]:
    """By name, in the order of the file."""
    found = {}
    for item in yaml.safe_load((HERE / "versions.yaml").read_text(encoding="utf-8")):
        install, beside, tests = (tuple(item.get(key, ())) for key in ("install", "with", "tests"))
        found[item["name"]] = Row(item["name"], item.get("framework", ""), install, beside, tests, dict(item.get("set", {})))
    return found


def installed(row: Row) -> str:
    """Makes the directory of a row unless it is there; why it cannot be made, empty when it is there."""
    stamp = row.directory / ".installed"
    wanted = " ".join(row.install)
    if not row.install or (stamp.exists() and stamp.read_text() == wanted):
        return ""
    shutil.rmtree(row.directory, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
    command += ["--target", str(row.directory), *row.install]
    done = subprocess.run(command, env={**os.environ, **row.variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(row.directory, ignore_errors=True)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return (errors or ["pip failed"])[-1].removeprefix("ERROR: ")[:200]
    stamp.write_text(wanted)
    return ""


def environment(row: Row, every: dict[str, Row]) -> dict[str, str]:
    """Variables of the tests: the row's directory first on the path, then those beside it."""
    places = [str(one.directory) for one in (row, *(every[name] for name in row.beside)) if one.install]
    own = {key: value.format(dir=row.directory if row.install else "") for key, value in row.variables.items()}
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **own}


def ran(row: Row, every: dict[str, Row]) -> dict[str, Any]:
    """Install and test: the row's result."""
    version = row.name.rpartition("-")[2]
    result: dict[str, Any] = {
        "framework": row.framework, "version": version, "torch": "", "python": ".".join(platform.python_version_tuple()[:2]),
        "status": "cannot install", "why": "", "passed": 0, "failed": 0, "skipped": 0, "tests": list(row.tests),
    }  # fmt: skip
    for one in (*(every[name] for name in row.beside), row):
        result["why"] = installed(one)
        if result["why"]:
            return result
    variables = environment(row, every)
    asked = subprocess.run([sys.executable, "-c", ASK, "torch"], env=variables, capture_output=True, text=True, check=False)
    if asked.returncode:
        return {**result, "status": "does not import", "why": asked.stderr.strip().splitlines()[-1][:200]}
    result["torch"] = asked.stdout.strip()
    missing = [test for test in row.tests if not (ROOT / test.partition("::")[0]).exists()]
    if missing:
        return {**result, "status": "no checks", "why": f"{', '.join(missing)} is not there"}
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *row.tests]
        if not ended(command, variables, PLACE / f"matrix-{row.name}.log"):
            return {**result, "status": "failed", "why": f"no end within {LIMIT} s"}
        return {**result, **counted(report)}


def ended(command: list[str], variables: dict[str, str], log: Path) -> bool:
    """Run; False when it took too long. Nothing that the command has started is left, also when this program is interrupted."""
    with log.open("w", encoding="utf-8") as text:
        running = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=text, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            running.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return True


def counted(report: Path) -> dict[str, Any]:
    """Status and numbers of a JUnit file; `why` names the first test that failed."""
    if not report.exists():
        return {"status": "failed", "why": "pytest ended without a report"}
    cases = list(Tree.parse(report).getroot().iter("testcase"))  # our own pytest has written it
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    numbers = {"passed": len(cases) - len(failed) - len(skipped), "failed": len(failed), "skipped": len(skipped)}
    if failed:
        return {**numbers, "status": "failed", "why": f"{failed[0].get('name')}: {_first_line(failed[0])}"}
    if not numbers["passed"]:
        return {**numbers, "status": "no checks", "why": _first_line(skipped[0]) if skipped else "no test was found"}
    return {**numbers, "status": "ok", "why": ""}


def _first_line(case: Tree.Element) -> str:
    child = next(iter(case.findall("failure") + case.findall("error") + case.findall("skipped")))
    return " ".join((child.get("message") or "").replace(f"{ROOT}/", "").split())[:160]


def kept() -> list[dict[str, Any]]:
    """The results so far."""
    return list(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else []


def keep(result: dict[str, Any]) -> None:
    """In place of the last result of the same version."""
    own = (result["framework"], result["version"])
    results = [*(r for r in kept() if (r["framework"], r["version"]) != own), result]
    results.sort(key=lambda r: (r["framework"], r["version"]))
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    new.replace(RESULTS)  # whole, also when this program is interrupted


def code() -> str:
    """A hash of the code that is tested, with what is not committed; what runs write among the tests does not belong to it."""
    parts = ["msprobe_engine", "msprobe_integrations", "tests"]
    kept_out = [f":(exclude)tests/integrations/{name}" for name in ("matrix/results.json", "matrix/versions.yaml", "table/cells.jsonl")]
    text = [subprocess.run(["git", *words, "--", *parts, *kept_out], cwd=ROOT, capture_output=True, check=False).stdout for words in (
        ("ls-files", "--stage"), ("diff",))]  # fmt: skip
    return hashlib.sha256(b"".join(text)).hexdigest()


def main(arguments: list[str]) -> int:
    """Run what was asked for (all), say how it went; 1 when a check failed, 130 when interrupted."""
    again = "--again" in arguments
    words = [word for word in arguments if word != "--again"]
    every = rows()
    chosen = [r for r in every.values() if r.tests and (not words or any(w.lower() in f"{r.framework} {r.name}".lower() for w in words))]
    now, lines = code(), []
    PLACE.mkdir(exist_ok=True)
    for number, row in enumerate(chosen, 1):
        stamp = PLACE / f"matrix-{row.name}.done"
        wanted = f"{now} {row}"
        old = [r for r in kept() if (r["framework"], r["version"]) == (row.framework, row.name.rpartition("-")[2])]
        place, begun = f"[{number}/{len(chosen)}] {row.name:21}", time.monotonic()
        again_not = bool(old) and not again and stamp.exists() and stamp.read_text() == wanted
        if again_not:
            result = old[0]
        else:
            print(f"{place} ...", flush=True)
            try:
                result = ran(row, every)
            except KeyboardInterrupt:
                print(f"{place} interrupted; the same call goes on with it")
                break
            keep(result)
            stamp.write_text(wanted)
        line = f"torch {result['torch']:7} {result['status']}: {result['passed']} passed, {result['failed']} failed"
        line += f", {result['skipped']} skipped" + (f" ({result['why']})" if result["why"] else "")
        lines.append((result["status"], f"{row.name:21} {line}"))
        print(f"{place} {line}, " + ("has run before" if again_not else f"{time.monotonic() - begun:.0f} s"), flush=True)
    counts = Counter(status for status, _ in lines)
    print("\n".join(["", *(line for _, line in lines)]))
    print(f"\n{len(lines)} of {len(chosen)} versions: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return 130 if len(lines) < len(chosen) else int(bool(counts["failed"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
