"""Two sides of a comparison that are hardly meant: the same files, and different steps. Both are said, and no exit code changes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from msprobe_engine.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "diagnose"))
from written_monitor import Monitor

FIXTURE = Path(__file__).parents[1] / "fixtures" / "8.1.1" / "L1"
SAME = "are the same files: that they are equal says nothing"


def dump(root: Path, *steps: int) -> Path:
    for step in steps:
        rank = root / "dump" / f"step{step}" / "rank0"
        rank.mkdir(parents=True)
        source = next(FIXTURE.rglob("dump.json")).parent
        for name in ("dump.json", "stack.json", "construct.json"):
            shutil.copy(source / name, rank / name)
    return root


def checkpoint(root: Path) -> Path:
    root.mkdir()
    save_file({"w": np.ones(4, np.float32)}, root / "model.safetensors")
    return root


def pack(root: Path) -> Path:
    root.mkdir()
    assert main(["config_check", "-d", "-o", str(root / "config_check_pack.zip")]) == 0
    return root


def log(root: Path) -> Path:
    root.mkdir()
    (root / "slime.log").write_text("arguments\n  lr .......... 1e-4\n")
    return root / "slime.log"


SIDES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "compare": (lambda root: dump(root, 0), ["compare", "{a}", "{b}", "-o", "{out}"]),
    "diagnose": (lambda root: dump(root, 0), ["diagnose", "{a}", "{b}", "-o", "{out}"]),
    "graph": (lambda root: dump(root, 0), ["graph", "{a}", "{b}", "-o", "{out}"]),
    "diagnose monitors": (lambda root: Monitor(root).write(), ["diagnose", "{a}", "{b}", "-o", "{out}"]),
    "trends": (lambda root: Monitor(root).write(), ["trends", "{a}", "{b}", "-o", "{out}.html"]),
    "config_check": (pack, ["config_check", "-c", "{a}", "{b}", "-o", "{out}"]),
    "config_check --verify": (pack, ["config_check", "--verify", "{a}", "{b}"]),
    "checkpoints of config_check": (checkpoint, ["config_check", "-c", "{a}", "{b}", "-o", "{out}.json"]),
    "ckpt diff": (checkpoint, ["ckpt", "diff", "{a}", "{b}"]),
}
WAYS: dict[str, Callable[[Path, Path], Path]] = {
    "the same path": lambda made, _: made,
    "another spelling": lambda made, _: made.parent / "." / made.name,
    "a link to the directory": lambda made, other: other.symlink_to(made) or other,  # type: ignore[func-returns-value]
    "links to the files": lambda made, other: shutil.copytree(made, other, copy_function=os.link),
}


def call(words: list[str], a: Path, b: Path, out: Path) -> int:
    return main([word.format(a=a, b=b, out=out) for word in words])


@pytest.mark.parametrize("command", SIDES)
def test_the_same_files_on_both_sides_are_said(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, whatever the way to the same files; a copy is another side. The exit code is that of equal sides."""
    make, words = SIDES[command]
    made = make(tmp_path / "made")
    copied = shutil.copytree(made, tmp_path / "copy")
    capsys.readouterr()
    expected = call(words, made, copied, tmp_path / "out of copies")
    assert SAME not in capsys.readouterr().err
    for i, (way, other) in enumerate(WAYS.items()):
        code = call(words, made, other(made, tmp_path / f"other{i}"), tmp_path / f"out{i}")
        assert (code, capsys.readouterr().err.count(SAME)) == (expected, 1), way


def test_logs_that_are_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "logs")
    main(["config_check", "-sc", str(path), str(path), "-o", str(tmp_path / "out")])
    assert SAME in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "diagnose"])
def test_a_dump_against_itself_is_no_all_clear(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line says that nothing was compared."""
    path = str(dump(tmp_path / "a", 0))
    assert main([command, path, path, "-o", str(tmp_path / "out")]) == 3, "this dump lacks what a whole one has"
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith("Nothing was compared: both sides are the same directory or file")
    assert "All numbers are the same" not in said


STEPS = {
    "directories of steps": ("{a}/dump/step0", "{b}/dump/step1"),
    "directories of ranks": ("{a}/dump/step0/rank0", "{b}/dump/step1/rank0"),
    "files": ("{a}/dump/step0/rank0/dump.json", "{b}/dump/step1/rank0/dump.json"),
    "dumps of one step": ("{a}", "{b}"),
}


@pytest.mark.parametrize("command", ["compare", "compare -da", "diagnose", "graph"])
@pytest.mark.parametrize("paths", STEPS)
def test_other_steps_stand_in_the_first_lines(command: str, paths: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No option asks for it, so it may be an oversight; it stands right behind the finding."""
    a, b = dump(tmp_path / "a", 0), dump(tmp_path / "b", 1)
    target, golden = (path.format(a=a, b=b) for path in STEPS[paths])
    name, *flags = command.split()
    main([name, target, golden, "-o", str(tmp_path / "out"), *flags])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Attention: step 0 is compared with step 1 of the golden run"), lines
    main([name, target.replace("step0", "step1") if "step0" in target else str(b), golden, "-o", str(tmp_path / "out2"), *flags])
    assert "Attention" not in capsys.readouterr().out


def test_steps_that_both_have_are_no_other_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", str(dump(tmp_path / "a", 0, 1)), str(dump(tmp_path / "b", 1)), "-o", str(tmp_path / "out")])
    assert "Attention" not in capsys.readouterr().out
