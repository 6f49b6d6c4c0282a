"""Kernel dumps of Ascend devices, ``{type}.{name}.{task}[.{stream}].{time}``: read by ``msaccucmp.py`` of the installed CANN.

The format is CANN's own, and so is the program that reads it; without CANN such files cannot be read.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.log import printable

SCRIPT = "msaccucmp.py"
_BELOW = Path("tools", "operator_cmp", "compare", SCRIPT)
_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_DEFAULT = Path("/usr/local/Ascend/ascend-toolkit/latest")
_KERNEL = re.compile(r"[A-Za-z0-9_-]+\.[^/]+\.[0-9]+(\.[0-9]+)?\.[0-9]{1,255}")
_FORMAT = re.compile(r"[A-Za-z0-9_]{1,64}")


def is_kernel_dump(name: str) -> bool:
    """Is this the name of a kernel dump file?"""
    return _KERNEL.fullmatch(name) is not None


def find_script(given: str | Path | None = None) -> Path:
    """Where ``msaccucmp.py`` is: as given, below ``ASCEND_TOOLKIT_HOME`` or ``ASCEND_HOME_PATH``, or where CANN installs it.

    Raises:
        UsageError: there is none, what was given is not that program, or others may change it.
    """
    if given is not None:
        path = Path(given)
        if path.name != SCRIPT or not path.is_file():
            raise UsageError(f"{path}: is no file {SCRIPT}; give the path of that file of CANN")
        return _check_owner(path)
    homes = [Path(os.environ[name]) for name in _HOMES if os.environ.get(name)]
    for home in (*homes, _DEFAULT):
        if (home / _BELOW).is_file():
            return _check_owner(home / _BELOW)
    looked = ", ".join(str(home / _BELOW) for home in (*homes, _DEFAULT))
    raise UsageError(
        f"a kernel dump of Ascend is read by {SCRIPT} of CANN, which is not here ({looked}); run this where CANN is installed, "
        "set ASCEND_TOOLKIT_HOME, or name the file"
    )


def _check_owner(path: Path) -> Path:
    """It will be run: it must be the user's or root's, and nobody else's to change."""
    path = path.resolve()
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0) or stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(f"{path}: belongs to somebody else, or others may write to it, so it is not run; mend owner and mode")
    return path


def convert(source: Path, output: Path, script: Path, kind: str | None = None, data_format: str | None = None) -> None:
    """Convert one kernel dump, or all of a directory, into files in `output`.

    Args:
        kind: ``npy`` or ``pt``; None: what the program makes by itself (``npy``).
        data_format: ``NCHW``, ``ND``, ...; None: as the data are.

    Raises:
        DumpFormatError: the program says that it failed.
    """
    if data_format is not None and not _FORMAT.fullmatch(data_format):
        raise UsageError(f"format {data_format!r}: letters, digits and _ are allowed (NCHW, NHWC, ND, FRACTAL_NZ, NC1HWC0, ...)")
    line = ["convert", "-d", str(source), "-out", str(output)]
    _run(script, line + (["-t", kind] if kind else []) + (["-f", data_format] if data_format else []))


def compare(target: Path, golden: Path, output: Path, script: Path) -> None:
    """Compare two directories of kernel dumps; the result goes to `output`.

    Raises:
        DumpFormatError: the program says that it failed.
    """
    _run(script, ["compare", "-m", str(target), "-g", str(golden), "-out", str(output)])


def _run(script: Path, line: Sequence[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, str(script), *line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    for text in process.stdout:
        print(printable(text.rstrip("\n")))
    if process.wait() != 0:
        raise DumpFormatError(f"{script} {line[0]} ended with code {process.returncode}; its own lines above say why")
