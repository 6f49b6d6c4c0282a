"""Similarities, suspects, pictures; damaged and hostile directories."""

from __future__ import annotations

import csv
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grad_training import collect

from msprobe import GradComparator
from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.statistics import rows
from msprobe_engine.formats.grad_probe import compare, signs
from msprobe_engine.formats.grad_probe.files import Gradient, StepFiles

P, N, Z, X = signs.POSITIVE, signs.NEGATIVE, signs.ZERO, signs.NAN


def write(path: Path, steps: dict[int, dict[str, list[int]]], rank: int = 0, loose: bool = True) -> Path:
    """A run whose gradients have these signs."""
    for step, gradients in steps.items():
        made = [Gradient(name, (len(codes),), i, signs.pack(codes)) for i, (name, codes) in enumerate(gradients.items())]
        StepFiles(path / f"rank{rank}", "L1", [], loose).write(step, made, rows.empty(len(made)))
    return path


def forget_packed(path: Path) -> Path:
    """What the existing tool would have written."""
    for file in path.rglob("*.signs"):
        file.unlink()
    return path


def similarities(path: Path) -> list[list[str]]:
    return list(csv.reader((path / "similarities.csv").read_text("utf-8-sig").splitlines()))


def test_layout_of_the_table(tmp_path: Path) -> None:
    """Header, one row per parameter, summary weighted by elements, as the existing tool has them."""
    a = write(tmp_path / "a", {0: {"w": [P] * 8, "b": [N] * 2}, 3: {"w": [P] * 8, "b": [N] * 2}})
    b = write(tmp_path / "b", {0: {"w": [P] * 8, "b": [N] * 2}, 3: {"w": [P] * 6 + [N] * 2, "b": [N, P]}})
    suspects = GradComparator.compare_distributed(a, b, tmp_path / "out", plots=False)
    assert similarities(tmp_path / "out/rank0") == [
        ["step", "0", "3"],
        ["w", "1.0", "0.75"],
        ["b", "1.0", "0.5"],
        ["summary", "1.0", "0.7"],
    ]
    assert [(s.rank, s.step, s.parameter) for s in suspects] == [(0, 3, "b"), (0, 3, "w")]


def test_zero_negative_and_nan_are_told_apart(tmp_path: Path) -> None:
    """An all-NaN gradient is like nothing, not like an all-negative one; from files of the existing tool only > 0 is known."""
    a = write(tmp_path / "a", {0: {"nan": [X] * 4, "zero": [Z] * 4, "same": [P, N, Z, Z]}})
    b = write(tmp_path / "b", {0: {"nan": [N] * 4, "zero": [N] * 4, "same": [P, N, Z, Z]}})
    suspects = GradComparator.compare(a / "rank0", b / "rank0", tmp_path / "out", plots=False)
    assert [row[1] for row in similarities(tmp_path / "out")[1:]] == ["0.0", "0.0", "1.0", str(4 / 12)]
    assert "NaN in 100.00% of the first and 0.00% of the second" in next(s for s in suspects if s.parameter == "nan").why
    forget_packed(b)
    assert GradComparator.compare(a / "rank0", b / "rank0", tmp_path / "out", plots=False) == []
    assert [row[1] for row in similarities(tmp_path / "out")[1:]] == ["1.0"] * 4


@pytest.mark.parametrize(("values", "found"), [
    ([1.0, 0.98, 0.96, 0.94], []), ([0.97, 0.97], []), ([0.96, 0.96], [0]), ([1.0, 0.9, 0.9, 0.5], [1, 3]), ([0.9, 1.0, 0.96], [0, 2]),
])  # fmt: skip
def test_rule_of_thumb(values: list[float], found: list[int]) -> None:
    """Suspect: below 0.97 in the first step, or a fall of more than 0.03 from one step to the next."""
    agreements = [signs.Agreement(100, round(100 * v), (0, 0)) for v in values]
    result = compare.RankResult(list(range(len(values))), {"w": agreements}, [])
    assert [s.step for s in compare.find_suspects(result)] == found


def test_first_nan_is_suspect() -> None:
    """NaN is said in the step it comes in, once, even where hardly an element changes."""
    agreements = [signs.Agreement(1000, 1000, (0, 0)), *[signs.Agreement(1000, 999, (1, 0))] * 3]
    (suspect,) = compare.find_suspects(compare.RankResult([4, 5, 6, 7], {"w": agreements}, []))
    assert (suspect.step, suspect.why.split(";")[0]) == (5, "first NaN")


def test_packed_runs_are_enough(tmp_path: Path) -> None:
    """Without .npy files the similarities are the same."""
    for name, loose in (("a", True), ("b", False)):
        write(tmp_path / name, {0: {"w": [P, N, N]}}, loose=loose)
    assert GradComparator.compare_distributed(tmp_path / "a", tmp_path / "b", tmp_path / "out", plots=False) == []


def test_pictures(tmp_path: Path) -> None:
    """One picture per parameter and one of the summary, under the existing names; names with mathematics in them are text."""
    a = write(tmp_path / "a", {s: {"layer.weight": [P, N], "odd$_": [P]} for s in range(3)})
    GradComparator.compare(a / "rank0", a / "rank0", tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out/similarities_picture").iterdir())
    assert names[0] == "layer.weight_similarities.png"
    assert names[2] == "summary_similarities.png"
    assert all((tmp_path / "out/similarities_picture" / n).read_bytes().startswith(b"\x89PNG") for n in names)


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the extra there is one line with the pip command, and the tables."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    a = write(tmp_path / "a", {0: {"w": [P]}})
    GradComparator.compare(a / "rank0", a / "rank0", tmp_path / "out")
    assert capsys.readouterr().err.count("pip install 'msprobe-integrations[plots]'") == 1
    assert (tmp_path / "out/similarities.csv").exists()


def test_missing_parts_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A parameter that one run lacks, or has in another shape, is an empty cell and a line, not the end."""
    a = write(tmp_path / "a", {0: {"w": [P], "only": [P], "shape": [P, P]}, 1: {"w": [P]}})
    b = write(tmp_path / "b", {0: {"w": [P], "shape": [P]}, 1: {"w": [P]}})
    GradComparator.compare(a / "rank0", b / "rank0", tmp_path / "out", plots=False)
    assert similarities(tmp_path / "out")[1:4] == [["w", "1.0", "1.0"], ["only", "nan", "nan"], ["shape", "nan", "nan"]]
    text = capsys.readouterr().err
    assert "only: the second run has no direction of it (1 of 2 steps)" in text
    assert "shape: shapes differ, [2] and [1]" in text


def test_nothing_in_common(tmp_path: Path) -> None:
    """No rank, no step, level L0, no parameter: each says so."""
    a, b = write(tmp_path / "a", {0: {"w": [P]}}), write(tmp_path / "b", {1: {"w": [P]}}, rank=1)
    with pytest.raises(UsageError, match=r"no directory rank\{R\} in common"):
        GradComparator.compare_distributed(a, b, tmp_path / "out")
    with pytest.raises(UsageError, match="no step with gradient directions in common"):
        GradComparator.compare(a / "rank0", b / "rank1", tmp_path / "out")
    collect(tmp_path / "l0", "L0", steps=1)
    with pytest.raises(UsageError, match="level L0 keeps no signs"):
        GradComparator.compare_distributed(a, tmp_path / "l0", tmp_path / "out")
    other = write(tmp_path / "c", {0: {"v": [P]}})
    with pytest.raises(UsageError, match="no parameter can be compared"):
        GradComparator.compare_distributed(a, other, tmp_path / "out")


class Boom:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("boom",)


def spoil_pickle(file: Path) -> None:
    np.save(file, np.array([Boom()], object), allow_pickle=True)


def spoil_cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def spoil_huge(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"(70000,)", b"(7" + b"0" * 12 + b",)"))


def spoil_type(file: Path) -> None:
    np.save(file, np.zeros(70_000, np.uint8))


def spoil_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [spoil_pickle, spoil_cut, spoil_huge, spoil_type, spoil_link])
def test_hostile_arrays(tmp_path: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles, cut files, headers that promise too much, other types and links are refused by name; nothing is executed."""
    monkeypatch.chdir(tmp_path)
    a = forget_packed(write(tmp_path / "a", {0: {"w": [P] * 70_000}}))
    spoil(a / "rank0/step0/w.npy")
    with pytest.raises(DumpFormatError, match=r"w\.npy"):
        GradComparator.compare(a / "rank0", a / "rank0", tmp_path / "out", plots=False)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}", pickle.dumps(Boom())])
def test_hostile_signs(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signs file of anything else is refused by name, or read as one without parameters."""
    monkeypatch.chdir(tmp_path)
    a = write(tmp_path / "a", {0: {"w": [P]}}, loose=False)
    (a / "rank0/step0.signs").write_bytes(data)
    with pytest.raises((DumpFormatError, UsageError), match=r"step0\.signs|no parameter can be compared"):
        GradComparator.compare(a / "rank0", a / "rank0", tmp_path / "out", plots=False)
    assert not (tmp_path / "boom").exists()


def test_signs_that_do_not_fit_their_shape(tmp_path: Path) -> None:
    """Sizes are checked before anything is unpacked."""
    a = write(tmp_path / "a", {0: {"w": [P] * 9}}, loose=False)
    file = a / "rank0/step0.signs"
    file.write_bytes(file.read_bytes().replace(b"[9]", b"[8]"))
    with pytest.raises(DumpFormatError, match=r"are not the signs of \[8\]"):
        GradComparator.compare(a / "rank0", a / "rank0", tmp_path / "out", plots=False)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 without and 1 with something suspect; rank directories and roots are told apart; names are printable."""
    a = write(tmp_path / "a", {s: {"w": [P] * 4, "odd\x1b": [P]} for s in range(2)})
    b = write(tmp_path / "b", {0: {"w": [P] * 4, "odd\x1b": [P]}, 1: {"w": [P, P, N, N], "odd\x1b": [N]}})
    out = str(tmp_path / "out")
    again = shutil.copytree(a, tmp_path / "again")
    assert main(["grad_probe", "compare", str(a), str(again), "-o", out, "--no-plots"]) == 0
    assert "No gradient is suspect" in capsys.readouterr().out
    assert main(["grad_probe", "compare", str(a), str(b), "-o", out, "--no-plots"]) == 1
    text = capsys.readouterr().out
    assert "rank 0 step 1: w: similarity 0.5000, fell by 0.5000" in text
    assert "First difference: step 1, gradient of " in text
    assert "\x1b" not in text
    assert not (tmp_path / "out/rank0/similarities_picture").exists()
    assert main(["grad_probe", "compare", str(a / "rank0"), str(b / "rank0"), "-o", str(tmp_path / "one"), "--no-plots"]) == 1
    assert (tmp_path / "one/similarities.csv").exists()
    assert (tmp_path / "one/suspects.csv").read_text("utf-8-sig").splitlines()[0] == "step,param_name,similarity,why"
    assert main(["grad_probe", "compare", str(tmp_path / "none"), str(b), "-o", out]) == 2


def test_two_seeds_part_at_once(tmp_path: Path) -> None:
    """Runs that differ from the beginning are suspect in step 0, a run against itself never."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        collect(tmp_path / name, seed=seed)
    assert GradComparator.compare_distributed(tmp_path / "a", tmp_path / "b", tmp_path / "same", plots=False) == []
    suspects = GradComparator.compare_distributed(tmp_path / "a", tmp_path / "c", tmp_path / "other", plots=False)
    assert suspects[0].step == 0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("ranks", "gradients", "code", "phrase"),
    [
        ((0, 7), ({"w": [P], "v": [P]},) * 2, 3, "ranks only in"),
        ((0,), ({"w": [P], "v": [P]},) * 3, 0, "steps only in"),
        ((0,), ({"w": [P]},) * 2, 3, "v: the"),
    ],
    ids=["rank", "step", "parameter"],
)
def test_nothing_is_suspect_only_of_what_was_compared(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    side: int,
    ranks: tuple[int, ...],
    gradients: tuple[dict[str, list[int]], ...],
    code: int,
    phrase: str,
) -> None:
    """What one run alone has is said; ranks and parameters change the exit code, another number of steps does not."""
    plain = write(tmp_path / "plain", {step: {"w": [P], "v": [P]} for step in range(2)})
    other = tmp_path / "other"
    for rank in ranks:
        write(other, dict(enumerate(gradients)), rank)
    sides = (plain, other) if side else (other, plain)
    assert main(["grad_probe", "compare", *map(str, sides), "-o", str(tmp_path / "out"), "--no-plots"]) == code
    said = "".join(capsys.readouterr())
    assert phrase in said, said
    assert "No gradient is suspect" in said
    assert "Compared: ranks 1, steps 2" in said
