"""What a run stands on besides its packages: machine, Python, drivers, the program's own commit. Only files are read."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.config.collect.repository import state
from msprobe_engine.config.secrets.masking import mask_setting, masked_arguments

_NVIDIA = Path("/proc/driver/nvidia/version")
_ASCEND = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_ASCEND_ROOT = Path("/usr/local/Ascend")


def collect(started: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of this host and process, as nested dicts; what cannot be told is not there.

    Args:
        started: the program that the pack is about, see `program_of`; None: this process is it.
    """
    information: dict[str, Any] = {
        "host": platform.node(),
        "os": {"system": platform.system(), "kernel": platform.release(), "libc": " ".join(platform.libc_ver()).strip()},
        "machine": {"architecture": platform.machine(), "cpu": cpu_name(), "cpus": os.cpu_count()},
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "drivers": drivers(),
        "program": program() if started is None else dict(started),
    }
    return information


def program_of(script: str | os.PathLike[str]) -> dict[str, Any]:
    """Of a program that is not running (this process is msprobe, whose arguments and commit are not those of the training)."""
    git = state(os.path.dirname(os.path.abspath(script)))
    return {"git": git} if git else {}


def program() -> dict[str, Any]:
    """The script, its arguments (secrets masked) and the repository it is in."""
    script = sys.argv[0] if sys.argv else ""
    place = os.path.dirname(os.path.abspath(script)) if script and os.path.exists(script) else os.getcwd()
    found: dict[str, Any] = {"script": script, "arguments": masked_arguments(sys.argv[1:]), "directory": os.getcwd()}
    git = state(place, loaded=True)
    if git:
        found["git"] = git
    return found


def in_short(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a run says of itself beside its numbers, of what was collected, as it may be written: command, directory, commit and digests of
    the files, versions. Names of files are in the pack."""
    program, python = facts.get("program", {}), facts.get("python", {})
    git = {name: value for name, value in program.get("git", {}).items() if not name.endswith("_files")}
    short = {
        "command": [program.get("script", ""), *program.get("arguments", [])],
        "directory": program.get("directory", ""),
        "git": git,
        "versions": {"python": python.get("version", ""), **facts.get("versions", {})},
        "drivers": facts.get("drivers", {}),
    }
    return {name: mask_setting(name, value) for name, value in short.items() if value}


def cpu_name() -> str:
    """As the kernel says it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("model name", "Model", "CPU part")):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def drivers() -> dict[str, str]:
    """Versions of kernel drivers and toolkits: ``nvidia``, ``cuda_toolkit``, ``ascend``, ``ascend_firmware``, ``cann``."""
    versions: dict[str, str] = {}
    text = _read_text(_NVIDIA)
    if m := re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9][0-9.]+)", text):
        versions["nvidia"] = m[1]
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if m := re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([^"]+)"', _read_text(Path(cuda) / "version.json")):
        versions["cuda_toolkit"] = m[1]
    for name, place in (("ascend", "driver"), ("ascend_firmware", "firmware")):
        if m := re.search(r"(?im)^\s*version\s*=\s*(\S+)", _read_text(_ASCEND_ROOT / place / "version.info")):
            versions[name] = m[1]
    for home in [*(os.environ[name] for name in _ASCEND if os.environ.get(name)), str(_ASCEND_ROOT / "ascend-toolkit/latest")]:
        if version := _cann(Path(home)):
            versions["cann"] = version
            break
    return versions


def _cann(home: Path) -> str:
    for place in (home / "version.cfg", home / "compiler/version.info", home / "runtime/version.info", home / "toolkit/version.info"):
        text = _read_text(place)
        if m := re.search(r"(?im)^\s*(?:version|toolkit_installed_version|toolkit_running_version)\s*=\s*\[?([^\]\s]+)", text):
            return m[1]
    for place in sorted(home.glob("*/ascend_toolkit_install.info")) if home.is_dir() else ():
        if m := re.search(r"(?im)^\s*version\s*=\s*(\S+)", _read_text(place)):
            return m[1]
    return ""


def _read_text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""
