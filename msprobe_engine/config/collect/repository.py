"""Which commit of which repository a program runs from, and what its files hold, read from the files of git.

No program is started: hooks and filters that a repository names are never run, and a training process is not forked.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.config.secrets.masking import mask_text
from msprobe_engine.core.io.input_files import read_input

MOST_FILES = 100_000
"""An index of more entries is not looked through."""
MOST_BYTES = 2**24
"""A file whose time stamp has changed is hashed up to this size; a larger one counts as changed and as not read."""
MOST_READ = 2**28
"""Bytes of all files of a program that are hashed; those behind count as not read."""
MOST_OF_GIT = 2**26
"""Of a file of git's own: an index of `MOST_FILES`, references of a large repository."""
SHOWN = 50
"""Changed files that are named, and as many untracked ones."""
SHOWN_DIGITS = 16
"""Of a digest of one file; the masker of secrets takes longer ones for keys."""
GONE = "gone"
"""In the place of the digest of a tracked file that is not there."""
_ENTRY = struct.Struct(">10I20sH")
"""ctime, mtime (seconds, nanoseconds each), dev, ino, mode, uid, gid, size, SHA-1, flags (git's Documentation/gitformat-index.txt)."""
_FILE, _LINK = 0o10, 0o12


class _Indexed(NamedTuple):
    path: str
    mtime: tuple[int, int]
    mode: int
    size: int
    sha: bytes


def state(of: str | os.PathLike[str], *, loaded: bool = False) -> dict[str, Any]:
    """Repository around `of`, empty where there is none: ``commit``, ``branch``, ``remote`` (without user and password), and of its files

    * ``changed``: number of tracked files that differ from the index, ``changed_files``: the first `SHOWN`, with the digest of each;
    * ``files_digest``: of path and content of all tracked files as they lie there, so that staged changes count;
    * with `loaded` ``untracked``: number of Python files that this process has loaded from below and that are not tracked (a submodule's,
      too), ``untracked_files``: the first `SHOWN` with the digest of each, ``untracked_digest``: of them all;
    * ``unread``: number of files that were not read, so that no digest says what they hold.
    """
    try:
        root = next((p for p in (Path(of).absolute(), *Path(of).absolute().parents) if (p / ".git").exists()), None)
        if root is None:
            return {}
        git = _directory(root)
        commit, branch = _head(git)
        commit_state: dict[str, Any] = {"commit": commit, "branch": branch, "remote": _remote(_common(git))}
        entries = _index(git / "index")
        return commit_state | (_state_of_files(root, entries, loaded) if entries is not None else {})
    except (OSError, ValueError, struct.error, IndexError):
        return {}


def _state_of_files(root: Path, entries: list[_Indexed], loaded: bool) -> dict[str, Any]:
    reader = _Reader(root)
    changed = {entry.path: digest for entry in entries if (digest := reader.changed(entry)) is not None}
    tracked = {entry.path: entry.sha.hex() for entry in entries} | changed
    found = {"changed": len(changed), "changed_files": _first(changed), "files_digest": _digest_of_all(tracked)}
    if loaded:
        untracked = {path: reader.digest(path) for path in _find_loaded_files(root) if path not in tracked}
        found |= {"untracked": len(untracked), "untracked_files": _first(untracked), "untracked_digest": _digest_of_all(untracked)}
    return {**found, "unread": reader.unread}


def _first(digests: Mapping[str, str]) -> dict[str, str]:
    return {path: digests[path][:SHOWN_DIGITS] for path in sorted(digests)[:SHOWN]}


def _digest_of_all(digests: Mapping[str, str]) -> str:
    whole = hashlib.sha1(usedforsecurity=False)
    for path in sorted(digests):
        whole.update(f"{path}\0{digests[path]}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _find_loaded_files(root: Path) -> Iterable[str]:
    """Python files of loaded modules, relative to `root`; not those of installed packages."""
    start = os.path.join(root, "")
    for module in list(sys.modules.values()):
        try:
            file = object.__getattribute__(module, "__dict__").get("__file__")  # a module that is to be loaded later stays so
        except AttributeError:
            continue
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = os.path.abspath(file)
        if path.startswith(start) and not {"site-packages", "dist-packages"} & {*(parts := Path(path[len(start) :]).parts)}:
            yield "/".join(parts)


class _Reader:
    """Reads files of a program, up to `MOST_READ` bytes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._left = MOST_READ
        self.unread = 0

    def changed(self, entry: _Indexed) -> str | None:
        """The digest of a tracked file that differs from the index, None where it does not."""
        try:
            there = os.lstat(self._root / entry.path)
        except OSError:
            return GONE
        same_time = divmod(there.st_mtime_ns, 10**9) == entry.mtime or (entry.mtime[1] == 0 and int(there.st_mtime) == entry.mtime[0])
        if same_time and there.st_size & 0xFFFFFFFF == entry.size:
            return None
        digest = self.digest(entry.path, entry.mode >> 12 == _LINK)
        return None if digest == entry.sha.hex() else digest

    def digest(self, path: str, link: bool = False) -> str:
        """As git names the content; empty where that is not read."""
        place = self._root / path
        try:
            data = os.fsencode(os.readlink(place)) if link else read_input(place, min(MOST_BYTES, self._left), follow=False)
        except OSError:  # too large, something else is in its place, or it may not be read
            self.unread += 1
            return ""
        self._left -= len(data)
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


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
