"""Programs in processes of their own, forked by one that has imported MindSpore."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

import warm


def run(
    program: Path, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a file as ``python program arguments`` does; with `check` it has to end with 0."""
    done = warm.run(warm.script(program), *arguments, cwd=cwd, env=env, timeout=200)
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done
