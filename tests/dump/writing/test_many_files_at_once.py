"""Many files at once: C and Python give the same files and the same errors."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from msprobe_engine.core.io import file_batches
from msprobe_engine.core.io.file_batches import Job

Way = Callable[[int, list[Job]], list[int]]
MEMORY = ctypes.create_string_buffer(b"0123456789" * 20_000)


@pytest.fixture
def directory(tmp_path: Path) -> int:
    return os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)


@pytest.fixture(params=["compiled", "python"])
def way(request: pytest.FixtureRequest) -> Way:
    """Both implementations."""
    if request.param == "python":
        return file_batches.write_files_python
    found: Way = pytest.importorskip("msprobe_engine.native._filewrite", reason="the extension was not built").write_files
    return found


def test_files(tmp_path: Path, directory: int, way: Way) -> None:
    """Head, memory and tail, one after the other, under the name or the temporary name; mode 0640; old content is replaced."""
    os.umask(before := os.umask(0o022))
    (tmp_path / "c").write_bytes(b"old")
    address = ctypes.addressof(MEMORY)
    jobs = [
        Job(b".a.tmp", b"a", b"head", address, 200_000, b"tail"),
        Job(b".b.tmp", None, b"", address + 1, 3, b""),
        Job(b".c.tmp", b"c", b"", 0, 0, b""),
        Job(b".d.tmp", "\u00fc".encode(), b"x", 0, 0, b"y"),
    ]
    assert way(directory, jobs) == [0] * 4
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "a": b"head" + MEMORY.raw[:200_000] + b"tail",
        ".b.tmp": b"123",
        "c": b"",
        "\u00fc": b"xy",
    }
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o640 & ~before}


def test_errors(tmp_path: Path, directory: int, way: Way) -> None:
    """Each file has its own error, the others are written; nothing of a failed one stays; links are not followed."""
    (tmp_path / "there").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    jobs = [
        Job(b"there", None, b"", 0, 0, b""),
        Job(b"link", None, b"", 0, 0, b""),
        Job(b".a.tmp", b"nowhere/a", b"", 0, 0, b""),
        Job(b".b.tmp", b"x" * 300, b"", 0, 0, b""),
        Job(b".good.tmp", b"good", b"yes", 0, 0, b""),
    ]
    assert way(directory, jobs) == [errno.EEXIST, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, 0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "link", "there"]
    assert (tmp_path / "there").read_bytes() == b"mine"
    assert way(directory, []) == []
    os.close(directory)
    assert way(directory, jobs[-1:]) == [errno.EBADF]


def test_a_name_with_a_null_byte(directory: int, way: Way) -> None:
    """It never reaches the system as another name."""
    for job in (Job(b"a\0b", None, b"", 0, 0, b""), Job(b".a.tmp", b"a\0b", b"", 0, 0, b"")):
        with pytest.raises(ValueError, match="null"):
            way(directory, [job])
