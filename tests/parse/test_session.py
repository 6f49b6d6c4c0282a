"""The interactive tool: its commands say and write what the spec says, and nothing but the user ends it."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from page_blocks import block, blocks, commands

from msprobe_engine.cli.main import main
from msprobe_engine.formats.legacy.parse import elements
from msprobe_engine.formats.legacy.parse.session import Session


def say(*lines: str) -> tuple[str, int]:
    """What a session answers, and how many commands failed."""
    out = io.StringIO()
    session = Session(io.StringIO("\n".join(lines) + "\n"), out)
    session.prompt = ""
    session.cmdloop()
    return out.getvalue(), session.failed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_end_of_the_input_ends_it() -> None:
    """In a process of its own, with input that ends at once and with a command that fails: both return."""
    for text, code in (("", 0), ("pt\n", 1)):
        done = subprocess.run(
            [sys.executable, "-m", "msprobe", "-f", "pytorch", "parse"], input=text, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == code, done.stderr


def test_a_typo_does_not_end_it() -> None:
    """Unknown commands, missing and wrong arguments, odd quotes and missing files are sentences; the next command runs."""
    np.save("a.npy", np.arange(3.0))
    text, failed = say(
        "foo", "pt", "cn -m a.npy", "cn -m a.npy -g a.npy -p x", "cn -m a.npy -g a.npy -al -1", 'pt -n "a', "pt -n none.npy", "pt -n a.npy"
    )
    assert failed == 7
    assert "foo: no such command; commands: cad, vc, dc, pt, cn" in text
    assert "the following arguments are required: -g" in text
    assert "Traceback" not in text
    assert text.rstrip().endswith("0  0.0 1.0 2.0")


def test_help() -> None:
    """``help`` lists the commands, ``cn -h`` and ``help cn`` their options; pk says that it is not supported."""
    text, failed = say("help", "cn -h", "help cn", "pk -f x.pkl -n y")
    assert all(f"  {name} " in text for name in ("cad", "vc", "dc", "pt", "cn", "pk"))
    assert text.count("relative tolerance (default: 0.001)") == 2
    assert "pk: pkl files of old versions are not supported" in text
    assert failed == 1


def test_pt() -> None:
    """Shape, type, extremes, mean and the first 128 values; the text file has one line per row, and is not written over."""
    array = np.arange(400, dtype=np.float32).reshape(20, 20)
    np.save("a.npy", array)
    text, _ = say("pt -n a.npy", "pt -n 'a.npy'")
    assert "[Shape: (20, 20)] [Dtype: float32] [Max: 399.0] [Min: 0.0] [Mean: 199.5]" in text
    assert "     120  120.0 121.0 122.0 123.0 124.0 125.0 126.0 127.0\n" in text
    assert "128.0" not in text
    assert np.array_equal(np.loadtxt("a.npy.txt"), array)
    assert "a.npy.txt is there already and stays" in text


def test_cn() -> None:
    """Differences beyond al + rl*abs(b) are counted and listed; NaN counts; unequal sizes are filled up with zeros."""
    a = np.ones(50, np.float32)
    b = a.copy()
    b[[3, 7]] = 1.5, np.nan
    np.save("a.npy", a)
    np.save("b.npy", b)
    np.save("c.npy", a[:40])
    text, _ = say("cn -m a.npy -g b.npy -p 1", "cn -m a.npy -g a.npy", "cn -m c.npy -g a.npy -s")
    first, second, third = text.split("NumCnt:")[1:]
    assert first.split("\n")[:2] == ["   50", "AllClose: False"]
    assert "ErrorPer: 0.04  (rl= 0.001, al= 0.001)" in first
    assert text.split("Top Item Table")[0].count("\n") == 4  # intro, title, head, one line
    assert "AllClose: True" in second
    assert "CosSim:   0.99999999" in second or "CosSim:   1.0" in second
    assert "ErrorPer: 0.2" in third
    assert "shapes differ: [40] and [50]; the shorter one is filled up with zeros" in text
    assert Path("c.npy.txt").exists()


def test_cn_agrees_with_a_loop() -> None:
    """The blocks of the vectorised comparison give what a loop over all elements gives, at their edges too."""
    random = np.random.default_rng(0)
    a = random.normal(size=elements._BLOCK + 77).astype(np.float32)
    b = a + random.normal(size=a.size).astype(np.float32) * 2e-3
    found = elements.compare(a, b)
    bad = np.flatnonzero(np.abs(a.astype(float) - b.astype(float)) > 0.001 + 0.001 * np.abs(b.astype(float)))
    assert found.wrong == len(bad)
    assert [line[0] for line in found.errors] == bad[:20].tolist()
    assert found.cosine == pytest.approx(float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b)), rel=1e-5)


def converted(root: Path, shift: float, stamp: int) -> None:
    """What ``cad`` leaves: two operators, the first with two times."""
    for name, time in (("add", stamp), ("add", stamp + 1), ("mul", stamp)):
        at = root / name / str(time)
        at.mkdir(parents=True)
        for n in (2, 10):
            np.save(at / f"T.{name}.1.2.{time}.input.{n}.npy", np.full((2, 2), n + shift, np.float32))


def test_vc_on_converted_directories(here: Path) -> None:
    """Columns and numbers of the table; what has no partner is named and everything else is compared all the same."""
    converted(here / "x", 0.5, 1000)
    converted(here / "y", 0.0, 2000)
    (here / "y" / "only").mkdir()
    text, failed = say("vc -m x -g y -out result", "vc -m x -g x")
    assert failed == 1
    (table,) = (here / "result").iterdir()
    lines = table.read_text().splitlines()
    assert table.name.startswith("batch_compare_")
    assert table.suffix == ".csv"
    assert lines[0] == "NPU File Name,Bench File Name,Mean,Bench Mean,Md5 Consistency,Max Abs Error,Max Relative Error"
    assert lines[1] == "T.add.1.2.1000.input.2.npy,T.add.1.2.2000.input.2.npy,2.5,2.0,False,0.5,0.25"
    assert len(lines) == 7
    assert "operator only: only on the golden side" in text
    assert "the same directory" in text


SCRIPT = """import pathlib, sys
a = sys.argv
out = pathlib.Path(a[a.index("-out") + 1])
name = pathlib.Path(a[a.index("-d") + 1]).name if "-d" in a else "compared"
(out / f"{name}.input.0.npy").write_text(" ".join(a[1:]))
"""


def test_the_commands_that_call_cann(here: Path) -> None:
    """cad sorts by operator and time, dc passes the format on, vc compares kernel dumps: with the flags that the program takes."""
    (here / "dump").mkdir()
    for name in ("Add.add_1.1.2.1000", "Mul.mul_1.1.2.1001", "note.txt"):
        (here / "dump" / name).write_bytes(b"x")
    cann = here / "cann"
    cann.mkdir()
    script = cann / "msaccucmp.py"
    script.write_text(SCRIPT)
    script.chmod(0o600)
    text, failed = say(
        f"cad -m dump -out sorted -asc {script}",
        f"dc -n dump/Add.add_1.1.2.1000 -f NCHW -cmp_path {script}",
        f"vc -m dump -g dump -cmp_path {script}",
    )
    assert failed == 0, text
    assert sorted(str(path.relative_to(here)) for path in (here / "sorted").rglob("*.npy")) == [
        "sorted/add_1/1000/Add.add_1.1.2.1000.input.0.npy",
        "sorted/mul_1/1001/Mul.mul_1.1.2.1001.input.0.npy",
    ]
    assert (here / "parse_data/dump_convert/Add.add_1.1.2.1000.input.0.npy").read_text().endswith("-f NCHW")
    assert (here / "parse_data/compare_result/compared.input.0.npy").read_text() == "compare -m dump -g dump -out parse_data/compare_result"
    assert say("dc -n dump -cmp_path nowhere.py")[1] == 1


def test_page(here: Path) -> None:
    """The lines of docs/guide/parse.md run."""
    (here / "atb_dump").mkdir()
    head = b"$Version=1.0\nformat=2\ndtype=0\ndims=2,3\n$Object.data=0,24\n$End=1\n"
    (here / "atb_dump" / "intensor0.bin").write_bytes(head + bytes(24))
    rank = here / "msprobe_output/dump/step0/rank0/dump_tensor_data"
    rank.mkdir(parents=True)
    torch.save(torch.ones(2), rank / "Functional.linear.0.forward.input.0.pt")
    np.save("a.npy", np.ones(3))
    np.save("b.npy", np.ones(3))
    (script,) = blocks("docs/guide/parse.md", "bash")
    assert [main(line) for line in commands(script)] == [0, 0]
    assert say(*block("docs/guide/parse.md", "text", "## Interactively").splitlines())[1] == 0
