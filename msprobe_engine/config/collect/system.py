"""What a run stands on besides its packages: machine, Python, drivers, the program's own commit. Only files are read.

Which commit of which repository a program runs from, read from the files of git. No program is started: hooks and filters that a
repository names are never run, and a training process is not forked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.config.secrets.masking import mask_text, masked_arguments
from msprobe_engine.core.io.input_files import read_input

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
    git = state(place)
    if git:
        found["git"] = git
    return found


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


MOST_FILES = 100_000
"""An index of more entries is not looked through."""
MOST_BYTES = 2**20
"""A file whose time stamp has changed is hashed up to this size; a larger one counts as changed."""
MOST_OF_GIT = 2**26
"""Of a file of git's own: an index of `MOST_FILES`, references of a large repository."""
SHOWN = 50
"""Changed files that are named."""
_ENTRY = struct.Struct(">10I20sH")
"""ctime, mtime (seconds, nanoseconds each), dev, ino, mode, uid, gid, size, SHA-1, flags (git's Documentation/gitformat-index.txt)."""
_FILE, _LINK = 0o10, 0o12


class _Indexed(NamedTuple):
    path: str
    mtime: tuple[int, int]
    mode: int
    size: int
    sha: bytes


def state(of: str | os.PathLike[str]) -> dict[str, Any]:
    """Repository around `of`: ``commit``, ``branch``, ``remote`` (without user and password), ``changed`` (number of tracked files that
    differ from the index; staged changes are not seen), ``changed_files`` (the first `SHOWN`). Empty where there is none."""
    try:
        root = next((p for p in (Path(of).absolute(), *Path(of).absolute().parents) if (p / ".git").exists()), None)
        if root is None:
            return {}
        git = _directory(root)
        commit, branch = _head(git)
        commit_state: dict[str, Any] = {"commit": commit, "branch": branch, "remote": _remote(_common(git))}
        changed = _list_changed_files(root, git)
    except (OSError, ValueError, struct.error, IndexError):
        return {}
    if changed is not None:
        commit_state.update(changed=len(changed), changed_files=changed[:SHOWN])
    return commit_state


def _text(path: Path) -> str:
    return read_input(path, MOST_OF_GIT).decode("utf-8", "replace")


def _directory(root: Path) -> Path:
    """Of a worktree and of a submodule ``.git`` is a file that says where."""
    git = root / ".git"
    if git.is_dir():
        return git
    name = _text(git).partition("gitdir:")[2].strip()
    return (root / name).resolve()


def _common(git: Path) -> Path:
    try:
        return (git / _text(git / "commondir").strip()).resolve()
    except OSError:
        return git


def _head(git: Path) -> tuple[str, str]:
    text = _text(git / "HEAD").strip()
    if not text.startswith("ref:"):
        return text, ""
    name = text[4:].strip()
    for place in dict.fromkeys((git, _common(git))):
        if ".." not in name and (place / name).is_file():
            return _text(place / name).strip(), name.removeprefix("refs/heads/")
    packed = _common(git) / "packed-refs"
    for line in _text(packed).splitlines() if packed.is_file() else ():
        commit, _, ref = line.partition(" ")
        if ref.strip() == name:
            return commit, name.removeprefix("refs/heads/")
    return "", name.removeprefix("refs/heads/")


def _remote(git: Path) -> str:
    section = ""
    for line in _text(git / "config").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line
        elif section == '[remote "origin"]' and line.partition("=")[0].strip() == "url":
            return mask_text(line.partition("=")[2].strip())
    return ""


def _list_changed_files(root: Path, git: Path) -> list[str] | None:
    """Tracked files that differ from the index; None: too many to look at, or an index of a kind that is not known."""
    entries = _index(git / "index")
    if entries is None:
        return None
    files = []
    for entry in entries:
        try:
            there = os.lstat(root / entry.path)
        except OSError:
            files.append(entry.path)
            continue
        same_time = divmod(there.st_mtime_ns, 10**9) == entry.mtime or (entry.mtime[1] == 0 and int(there.st_mtime) == entry.mtime[0])
        if there.st_size & 0xFFFFFFFF != entry.size or (not same_time and _differs(root / entry.path, entry, there.st_size)):
            files.append(entry.path)
    return files


def _differs(path: Path, entry: _Indexed, size: int) -> bool:
    if size > MOST_BYTES:
        return True
    try:
        data = os.fsencode(os.readlink(path)) if entry.mode >> 12 == _LINK else read_input(path, MOST_BYTES, follow=False)
    except OSError:
        return True  # something else is in its place, or it may not be read
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest() != entry.sha


def _index(path: Path) -> list[_Indexed] | None:
    if not path.is_file():
        return []
    data = read_input(path, MOST_OF_GIT)
    signature, version, count = struct.unpack_from(">4s2I", data)
    if signature != b"DIRC" or version not in (2, 3, 4) or count > MOST_FILES:
        return None
    indexed: list[_Indexed] = []
    position, name = 12, b""
    for _ in range(count):
        _, _, mtime, nanoseconds, _, _, mode, _, _, size, sha, flags = _ENTRY.unpack_from(data, position)
        start = position + _ENTRY.size
        skipped = 0
        if version > 2 and flags & 0x4000:
            skipped = struct.unpack_from(">H", data, start)[0] & 0x4000  # skip-worktree
            start += 2
        if version == 4:  # the name is what it has in common with the last one, and its own end
            back, start = _offset(data, start)
            end = data.index(b"\0", start)
            name = name[: len(name) - back] + data[start:end]
            position = end + 1
        else:
            end = data.index(b"\0", start)
            name = data[start:end]
            position += (end - position + 8) // 8 * 8
        if mode >> 12 in (_FILE, _LINK) and not skipped and not flags & 0x8000:  # assume-valid
            indexed.append(_Indexed(os.fsdecode(name), (mtime, nanoseconds), mode, size, sha))
    return indexed


def _offset(data: bytes, at: int) -> tuple[int, int]:
    value, byte = data[at] & 0x7F, data[at]
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at + 1
