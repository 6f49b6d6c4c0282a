"""The state of a repository is read without waiting: named pipes and devices in the place of git's files, or of files of the program."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from msprobe_engine.config.collect import repository as git_state

ODD: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "directory": lambda path: path.mkdir(),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "program"
    root.mkdir()
    for name in ("train.py", "model.py"):
        (root / name).write_text("pass\n")
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"], ["remote", "add", "origin", "https://u:p@host/r"]):
        subprocess.run(["git", *words, *command], cwd=root, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null"})
    return root


def test_a_repository(repository: Path) -> None:
    found = git_state.state(repository)
    assert (found["branch"], found["changed"], len(found["commit"])) == ("main", 0, 40)
    assert "u:p" not in found["remote"]


def test_digests_of_files_tell_contents(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name of a changed file with other contents has another digest; a staged change and an unstaged one of the same content are the
    same program; a loaded file that git does not know is seen, and one that is too large is counted as not read."""
    committed = git_state.state(repository)
    (repository / "train.py").write_text("lr = 1\n")
    one = git_state.state(repository)
    (repository / "train.py").write_text("lr = 2\n")
    two = git_state.state(repository)
    assert list(one["changed_files"]) == list(two["changed_files"]) == ["train.py"]
    assert len({side["files_digest"] for side in (committed, one, two)}) == 3
    assert one["changed_files"] != two["changed_files"]
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    staged = git_state.state(repository)
    assert (staged["changed"], staged["files_digest"], staged["unread"]) == (0, two["files_digest"], 0)
    (repository / "helper.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(repository))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    importlib.import_module("helper")
    assert list(git_state.state(repository, loaded=True)["untracked_files"]) == ["helper.py"]
    monkeypatch.delitem(sys.modules, "helper")
    with (repository / "model.py").open("wb") as file:
        file.truncate(git_state.MOST_BYTES + 1)
    assert git_state.state(repository)["unread"] == 1


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [".git/HEAD", ".git/config", ".git/index", ".git/refs/heads/main", ".git/packed-refs", ".git/commondir"])
def test_odd_files_of_git(repository: Path, name: str, kind: str) -> None:
    """They give less, or nothing; a pipe that nobody writes to would be waited for to the end of the test."""
    (repository / name).unlink(missing_ok=True)
    ODD[kind](repository / name)
    found = git_state.state(repository)
    assert found == {} or found["branch"] == "main"


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_of_the_program_is_a_change(repository: Path, kind: str) -> None:
    (repository / "model.py").unlink()
    ODD[kind](repository / "model.py")
    os.truncate(repository / "train.py", 0)
    assert git_state.state(repository)["changed_files"].keys() == {"model.py", "train.py"}


def test_a_pipe_of_the_size_that_is_expected(repository: Path) -> None:
    """An empty file of the index has the size of a pipe: what is in it would be read."""
    (repository / "empty").touch()
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    (repository / "empty").unlink()
    os.mkfifo(repository / "empty")
    assert git_state.state(repository)["changed_files"].keys() == {"empty"}
