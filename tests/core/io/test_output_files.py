"""Files that survive a killed process and a full disk."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io import output_files
from msprobe_engine.core.io.output_files import AppendFile, make_directory, replace_file


def test_modes(tmp_path: Path) -> None:
    """Directories are 0750 and files 0640, parents too."""
    old = os.umask(0)
    try:
        make_directory(tmp_path / "a" / "b", "test")
        AppendFile(tmp_path / "a" / "b" / "f").close()
    finally:
        os.umask(old)
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("a", "a/b", "a/b/f")] == [0o750, 0o750, 0o640]


@pytest.mark.parametrize("looks", [0.0, 1000.0])
def test_a_file_that_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, looks: float) -> None:
    """What would go into a file that nobody can see any more is an error, at the next look for it or when it is closed; a file that was
    moved goes on."""
    monkeypatch.setattr(output_files, "_LOOKS", looks)
    file = AppendFile(tmp_path / "f")
    file.append(b"1")
    (tmp_path / "f").rename(tmp_path / "g")
    file.append(b"2")
    assert (tmp_path / "g").read_bytes() == b"12"
    (tmp_path / "g").unlink()
    with contextlib.nullcontext() if looks else pytest.raises(SinkError, match="was deleted"):
        file.append(b"3")
    file.close()
    file.close()
    assert caplog.text.count("was deleted while it was written") == (1 if looks else 0)


def test_a_block_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    """When the file may not grow any more, the error names the file, and the file ends with the block before."""
    code = f"""
import resource, signal
from pathlib import Path
from msprobe_engine.core.io.output_files import AppendFile
from msprobe_engine.core.errors import SinkError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = AppendFile(Path({str(tmp_path / "f")!r}))
file.append(b"x" * 1000)
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
try:
    file.append(b"y" * 1000)
except SinkError as error:
    assert "/f" in str(error), error
    print("refused", file.size)
"""
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == ["refused", "1000"]
    assert (tmp_path / "f").read_bytes() == b"x" * 1000
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1500  # this process is not limited


def test_replace_is_all_or_nothing(tmp_path: Path) -> None:
    """The new content is there as a whole, with the mode asked for, and no temporary file stays."""
    replace_file(tmp_path / "a.prom", b"one", 0o644)
    replace_file(tmp_path / "a.prom", b"two", 0o644)
    assert [(p.name, p.read_bytes(), stat.S_IMODE(p.stat().st_mode)) for p in tmp_path.iterdir()] == [("a.prom", b"two", 0o644)]
    with pytest.raises(SinkError, match="cannot write"):
        replace_file(tmp_path / "missing" / "a.prom", b"")


def test_directory_in_the_way(tmp_path: Path) -> None:
    """A file where a directory is needed is an error that names it."""
    (tmp_path / "a").write_text("")
    with pytest.raises(SinkError, match=str(tmp_path / "a")):
        make_directory(tmp_path / "a" / "b", "csv sink")
