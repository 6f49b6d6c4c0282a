"""Opening files beside a training: what is no regular file is refused without a wait, and a stricter umask wins."""

from __future__ import annotations

import errno
import os
import pickle
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.input_files import OddInputError, open_input, read_input
from msprobe_engine.core.io.output_files import AppendFile, WholeFile, make_directory, replace_file, write_file, write_plain
from msprobe_engine.core.io.regular_files import OddFileError, explain, make_directories, open_regular

ROOT = Path(__file__).parents[3]
ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (lambda path: os.mkfifo(path), "a named pipe (FIFO)"),
    "socket": (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "a socket"),
    "directory": (lambda path: path.mkdir(), "a directory"),
    "link": (lambda path: path.symlink_to("precious"), "a link"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "a link"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "a link"),
}
WAYS: dict[str, Callable[[Path], object]] = {
    "read": lambda path: open_regular(path),
    "read all": lambda path: read_input(path, 10, follow=False),
    "append": lambda path: open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    "lock": lambda path: open_regular(path, os.O_RDWR | os.O_CREAT),
    "in place": lambda path: write_plain(path, [b"x"]),
    "whole": lambda path: write_file(path, [b"x"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file(tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of opening says what is there and what to do; what a link leads to stays as it was, and no file stays open."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    (tmp_path / "precious").write_bytes(b"theirs")
    make, name = ODD[kind]
    make(Path("odd"))
    before = sorted(os.listdir())
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OddFileError, match=re.escape(f"{name} is where a regular file belongs: move it away")) as caught:
        WAYS[way](Path("odd"))
    assert explain(caught.value, "set x to another one").endswith("move it away, or set x to another one")
    assert len(os.listdir("/proc/self/fd")) == files
    assert sorted(os.listdir()) == before
    assert (tmp_path / "precious").read_bytes() == b"theirs"


def test_the_error_crosses_processes(tmp_path: Path) -> None:
    """Workers of a pool give it back; one that cannot be read there breaks the pool."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OddInputError) as caught:
        open_input(tmp_path / "pipe")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.mode) == (OddInputError, str(caught.value), caught.value.mode)


def test_a_pipe_with_a_reader(tmp_path: Path) -> None:
    """A pipe that somebody reads could be opened at once; it is refused all the same."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(SinkError, match=r"cannot open .*/pipe: a named pipe \(FIFO\) is where"):
        AppendFile(tmp_path / "pipe")
    os.close(reader)


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "link to a device"])
def test_inputs_behind_a_link(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of users are followed, and what is behind them is looked at as well as what is named itself."""
    monkeypatch.chdir(tmp_path)
    ODD[kind][0](Path("odd"))
    Path("link").symlink_to("odd")
    for name in ("link", "odd"):
        with pytest.raises(OddFileError, match="is where a regular file belongs: move it away"):
            open_input(name)
    Path("file").write_bytes(b"content")
    Path("good").symlink_to("file")
    assert read_input("good", 7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_input("good", 6)
    with pytest.raises(OSError, match="null byte"):
        open_input("a\0b")


@pytest.mark.parametrize("place", ["odd", "odd/below", "odd/below/it"])
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "directory"])
def test_no_directory(tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is where a directory (or a parent of it) belongs is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(b"theirs")
    make, name = ODD[kind]
    make(Path("odd"))
    with pytest.raises(OSError, match="odd"):
        make_directories(str(tmp_path / place))
    with pytest.raises(
        SinkError, match=re.escape(f"test: cannot create directory {tmp_path / 'odd'}: {name} is where a directory belongs")
    ):
        make_directory(tmp_path / place, "test")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077], ids="{:03o}".format)
def test_a_stricter_umask_wins(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        make_directory(tmp_path / "a" / "b", "test")
        replace_file(tmp_path / "a" / "replaced", b"")
        replace_file(tmp_path / "a" / "shown", b"", 0o644)
        write_plain(tmp_path / "a" / "plain", [b""])
        AppendFile(tmp_path / "a" / "appended").close()
        with WholeFile(tmp_path / "a" / "whole") as whole:
            whole.file.write(b"")
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert modes.pop("b") == 0o750 & ~umask
    assert modes.pop("shown") == 0o644 & ~umask
    assert set(modes.values()) == {0o640 & ~umask}


def test_a_whole_file_that_fails(tmp_path: Path) -> None:
    """What stood there stays, and nothing else."""
    write_file(tmp_path / "f", [b"before"])

    def fail() -> None:
        with WholeFile(tmp_path / "f") as whole:
            whole.file.write(b"half")
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"f": b"before"}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files(code: int) -> None:
    """Another place or a free disk would not help."""
    said = explain(OSError(code, os.strerror(code)), "set x to another one")
    assert "raise that number" in said
    assert "free some space" not in said
    assert "set x" not in said


def test_nobody_else_opens_outputs() -> None:
    """Outputs are made in core.io only: elsewhere a file is neither opened for writing, nor put aside and renamed, nor given a mode."""
    ways = re.compile(
        r"\bmkstemp\(|\bfchmod\(|\.chmod\("
        r"|\bos\.open\((?!.*(NEW_FILE|O_RDONLY|devnull))"
        r"|\bopen\([^)\n]*[\"'][wax]b?[\"']|(?<!\bfiles)\.write_(text|bytes)\("
    )
    known = {
        "accuracy/online/certificates/authority.py",  # the directory of keys is for its owner alone
        "accuracy/online/directory/client.py",  # the folder that a server of the same group removes from
        "accuracy/precheck/worker.py",  # standard output
        "core/io/output_files.py",
        "core/io/regular_files.py",
        "probe/estimate/disk.py",  # measures a disk
        "probe/incident/node_notify.py",  # a file of one owner in shared memory, which ranks of a node read
        "probe/hot_settings.py",  # a settings file keeps its own mode
        "msprobe_integrations/framework_report.py",  # makes a page of this repository
        "probe/rules/document.py",  # the same
        "workflow/doctor.py",  # a file that the user names, asked before the checks
    }
    found = {}
    for path in sorted((ROOT / "msprobe_engine").rglob("*.py")) + sorted((ROOT / "msprobe_integrations").rglob("*.py")):
        name = path.relative_to(ROOT / "msprobe_engine").as_posix() if "msprobe_engine" in path.parts else path.relative_to(ROOT).as_posix()
        if name in known or "msprobe_integrations/doctor/" in name:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ways.search(line):
                found[f"{name}:{number}"] = line.strip()
    assert not found
