"""Which errors of the system are about files of the user, and which are bugs of ours."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.analysis import diagnose
from msprobe_engine.cli.main import main

Capture = pytest.CaptureFixture[str]


def said_of(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> tuple[int, str]:
    """How a command ends that runs into the error; the user named two inputs and an output."""

    def run(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(diagnose, "run", run)
    code = main(["diagnose", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "a" / "out")])
    return code, capsys.readouterr().err


CASES: dict[str, tuple[int, str, int, str]] = {
    "an input": (errno.EACCES, "a", 3, "a: Permission denied; check the name, owner and mode"),
    "below an input": (errno.EIO, "b/step0/rank0/dump.json", 3, "dump.json: Input/output error; check the name, owner and mode"),
    "an output": (errno.EROFS, "a/out", 2, "out: Read-only file system; the file system is read-only"),
    "below an output": (errno.EACCES, "a/out/page.html", 2, "page.html: Permission denied; no permission"),
    "a name that begins alike": (errno.EACCES, "ab/dump.json", 4, "This is a bug"),
    "a path of ours": (errno.ENOENT, "elsewhere/module.js", 4, "This is a bug"),
    "a full disk at an output": (errno.ENOSPC, "a/out/page.html", 2, "page.html: No space left on device; the disk is full ("),
    "a full disk elsewhere": (errno.ENOSPC, "tmp/part", 2, "cannot write all of the output"),
    "an input that is too large": (errno.EFBIG, "b/dump.json", 3, "dump.json: File too large; check the name"),
    "a quota": (errno.EDQUOT, "a/out/page.html", 2, "cannot write all of the output"),
}


@pytest.mark.parametrize("case", CASES)
def test_whose_file_it_is(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    number, path, code, sentence = CASES[case]
    error = OSError(number, os.strerror(number), str(tmp_path / path))
    ended, said = said_of(error, tmp_path, monkeypatch, capsys)
    assert (ended, sentence in said) == (code, True), said
    assert ("This is a bug" in said) == (sentence == "This is a bug")
    assert str(tmp_path / path) in said or "bug" in said


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), FileNotFoundError(errno.ENOENT, "No such file", "step0")])
def test_an_error_without_a_file_of_the_user_is_a_bug(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """No file, or a relative path that was computed wrongly."""
    monkeypatch.chdir(tmp_path)
    assert said_of(error, tmp_path, monkeypatch, capsys)[0] == 4
    assert "This is a bug" in said_of(error, tmp_path, monkeypatch, capsys)[1]


@pytest.mark.parametrize("name", ["a=b", "a\0b", "", "~"])
def test_odd_names_of_options(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """None of them makes a second error of the first."""

    def run(_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr(diagnose, "run", run)
    assert main(["diagnose", name]) == 4
    assert "Permission denied" in capsys.readouterr().err
