"""Starts launch lines below ``msprobe run`` as a user would, and what the processes they start say of themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SETTINGS = "monitor: {gradients: true}\nsinks: {csv: {enabled: true}}\n"
SEEN = """\
import json, os, sys
sys.path[:] = [e for e in sys.path if e != os.environ.get("SEEN_WITHOUT")]
finder = next((f for f in sys.meta_path if type(f).__module__ == "msprobe_integrations.autoload.imports"), None)
request = sys.modules.get("msprobe_integrations.autoload.request")
asked = request.current() if request else None
print(json.dumps({
    "waits": finder is not None and "torch" in sys.modules["msprobe_integrations.autoload.imports"]._before,
    "config": asked and asked.config,
    "changes": asked and list(asked.changes),
    "argv": sys.argv,
    "cwd": os.getcwd(),
    "path": sys.path,
    "own": sys.modules["sitecustomize"].__file__ if "sitecustomize" in sys.modules else None,
    "modules": [m for m in sys.modules if m.startswith("msprobe")],
    "seen": getattr(sys, "seen", []),
    "pythonpath": os.environ.get("PYTHONPATH"),
}))
"""
"""A program that says whether a probe waits in its process, and what it finds around it."""


def environment(**variables: str | None) -> dict[str, str]:
    """That of this process, with the packages of this checkout; None takes a variable away."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return {name: value for name, value in found.items() if value is not None}


CLOSING_WORDS = "msprobe: the run is over"
LAST_WORDS = (
    "msprobe run: no training was found",
    "msprobe run: the program itself ended",
    "msprobe run: the program was interrupted before a training",
    "msprobe run: what to do",
)
FIRST_WORDS = "msprobe run: MSPROBE_SET"


def place(directory: Path) -> Path:
    """A directory with settings and the program `SEEN`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "probe.yaml").write_text(SETTINGS)
    (directory / "seen.py").write_text(SEEN)
    return directory


def msprobe(*words: str, cwd: Path, **keys: Any) -> subprocess.CompletedProcess[str]:
    """``msprobe ...`` in a process of its own."""
    keys.setdefault("env", environment())
    command = [sys.executable, "-m", "msprobe_engine.cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240, **keys)


def run(*command: str, cwd: Path, options: tuple[str, ...] = ("--config", "probe.yaml"), **keys: Any) -> subprocess.CompletedProcess[str]:
    """``msprobe run --config probe.yaml -- command``."""
    return msprobe("run", *options, "--", *command, cwd=cwd, **keys)


def without_last_words(text: str) -> str:
    """The standard error of a launch line without what is said at its end: by ``msprobe run`` where no training was found, else by the
    probe."""
    before, _, block = text.partition(CLOSING_WORDS)
    if block:
        lines = before.splitlines(keepends=True)[:-1] + [line for line in block.splitlines(keepends=True)[1:] if not line.startswith("  ")]
        text = "".join(lines)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith((FIRST_WORDS, *LAST_WORDS)))


def wait_for(what: Callable[[], bool]) -> None:
    """Return when ``what()`` is true; fails after a minute."""
    until = time.monotonic() + 60
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What the programs `SEEN` of a launch line have said; the launch line has to have worked, without a word of ours but that they train
    nothing."""
    assert done.returncode == 0, done.stderr
    assert "msprobe" not in without_last_words(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
