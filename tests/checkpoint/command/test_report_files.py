"""Where the reports of checkpoints go: never over an input; full disks, pipes and stale journals; names and saves that are there twice."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402 - torch is asked for first

from msprobe_engine.cli.main import main  # noqa: E402
from msprobe_engine.find.checkpoint.diff import Options, diff  # noqa: E402
from msprobe_engine.formats.checkpoint.open import open_checkpoint  # noqa: E402


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """``a.pt`` and ``b.pt``, equal, and the same in the directory ``hf``."""
    weights = {"w": torch.ones(64), "v": torch.zeros(3)}
    for name in ("a", "b"):
        torch.save(weights, tmp_path / f"{name}.pt")
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    return [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]


def test_no_report_goes_over_what_is_compared(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report named like an input, a link to it, or a file inside of it, and two reports of one name: refused before anything is read."""
    a, b = pair
    inside = str(tmp_path / "hf" / "model.safetensors")
    os.link(b, tmp_path / "linked.json")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words in (
        ["diff", a, b, "--json", b],
        ["diff", a, b, "--html", str(tmp_path / "linked.json")],
        ["diff", a, str(tmp_path / "hf"), "--csv", inside],
        ["diff", a, b, "--json", str(tmp_path / "x"), "--csv", str(tmp_path / "hf" / ".." / "x")],
        ["digest", a, "-o", a],
        ["digest", str(tmp_path / "hf"), "-o", inside],
    ):
        assert main(["ckpt", *words]) == 2
        assert "name another file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):  # reports of one's own, in a checkpoint's directory too, may be written again
        assert main(["ckpt", "diff", a, str(tmp_path / "hf"), "-o", str(tmp_path / "hf"), "--json", str(tmp_path / "x.json")]) == 0


def test_config_check_does_not_write_over_a_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json and --html that name a pack that is read, -o that names a script: exit code 2, and the file is as it was."""
    script, pack = tmp_path / "run.sh", tmp_path / "p.zip"
    script.write_text("torchrun --nproc_per_node 2 train.py --lr 1e-3\n")
    assert main(["config_check", "-d", str(script), "-o", str(pack)]) == 0
    before = pack.read_bytes()
    other = shutil.copy(pack, tmp_path / "other.zip")
    for words in (
        ["--verify", str(pack), "-d", str(script), "--json", str(pack)],
        ["-c", str(pack), str(other), "--html", str(pack)],
        ["--ranks", str(pack), "--json", str(pack)],
        ["-d", str(script), "-o", str(script)],
    ):
        assert main(["config_check", *words]) == 2
        assert "would be written over" in capsys.readouterr().err
    assert pack.read_bytes() == before


def test_no_report_goes_over_a_file_of_another_kind(pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An option takes the next word for its file, which was meant as a script: it stays as it is. A report may be written again."""
    scripts = [tmp_path / f"{name}.sh" for name in "abc"]
    for script in scripts:
        script.write_text("torchrun train.py\n")
    one, two, three = map(str, scripts)
    for words in (
        ["config_check", "--json", one, two, three],
        ["config_check", two, three, "--html", one],
        ["ckpt", "diff", *pair, "--json", one],
        ["ckpt", "diff", *pair, "--csv", one],
        ["ckpt", "digest", pair[0], "-o", one],
        ["doctor", "--brief", "--json", one],
    ):
        assert main(words) == 2
        assert f"{one} is there already and is no" in capsys.readouterr().err
    assert {script.read_text() for script in scripts} == {"torchrun train.py\n"}
    reports = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv"), "--html", str(tmp_path / "r.html")]
    assert [main(["ckpt", "diff", *pair, *reports]) for _ in range(2)] == [0, 0]


def limited(words: list[str], most: int, output: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``msprobe ckpt diff`` on a disk that takes files of `most` bytes."""
    script = "import sys\nfrom msprobe_engine.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    with open(output or os.devnull, "w") as file:
        return subprocess.run(
            [sys.executable, "-B", "-c", script, "ckpt", "diff", *words],  # a module that is compiled would be kept, cut off
            stdout=file if output else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
        )  # fmt: skip


@pytest.mark.parametrize("more", [[], ["--json", "-"]])
def test_a_full_standard_output_is_no_success(pair: list[str], tmp_path: Path, more: list[str]) -> None:
    """Equal checkpoints whose report cannot be written: exit code 2 and a message, text or JSON."""
    done = limited([*pair, *more], 10, tmp_path / "out")
    assert done.returncode == 2
    assert "cannot write all of the output" in done.stderr


def test_a_full_disk_does_not_take_the_verdict(pair: list[str], tmp_path: Path) -> None:
    """With -o: one line on the journal, the verdict all the same, and exit code 2 as the reports could not be written."""
    done = limited([*pair, "-o", str(tmp_path / "out")], 100)
    assert done.stdout.startswith("equal: 2 tensors")
    assert done.stderr.count("goes on without it") == 1
    assert done.returncode == 2
    assert "cannot write" in done.stderr.splitlines()[-1]


def test_a_report_into_a_pipe(pair: list[str], tmp_path: Path) -> None:
    """A pipe or a device is written to and stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["ckpt", "diff", *pair, "--json", str(pipe)]) == 0
        assert json.loads(os.read(reader, 1 << 20))["equal"] is True
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_results_of_a_file_that_was_written_again_are_not_taken_over(pair: list[str], tmp_path: Path) -> None:
    """Other elements in place, size and time of the last change as before: the journal is of another file."""
    out, (a, b) = tmp_path / "out", map(Path, pair)
    assert diff(a, b, Options(output=out)).code == 0
    assert diff(a, b, Options(output=out)).resumed == 2
    state = b.stat()
    data = b.read_bytes().replace(torch.ones(64).numpy().tobytes(), torch.full((64,), 2.0).numpy().tobytes())
    with b.open("r+b") as file:
        file.write(data)
    os.utime(b, ns=(state.st_atime_ns, state.st_mtime_ns))
    found = diff(a, b, Options(output=out))
    assert (found.resumed, found.code) == (0, 1)


def test_keys_with_dots_are_kept_beside_nested_ones(tmp_path: Path) -> None:
    """``{"a": {"b.c": x}, "a.b": {"c": y}}``: tensors and values of both are compared, with a note; nothing is refused."""
    state = {"model": {"w": torch.ones(2)}, "a": {"b.c": torch.ones(3), "d.e": 1}, "a.b": {"c": torch.zeros(4)}, "a.d": {"e": 2}}
    torch.save(state, tmp_path / "a.pt")
    state["a.b"] = {"c": torch.ones(4)}
    torch.save({**state, "a.d": {"e": 3}}, tmp_path / "b.pt")
    found = open_checkpoint(tmp_path / "a.pt")
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {"w": (2,), "a.b.c": (3,), "a.b.c#2": (4,)}
    assert (found.values["a.d.e"], found.values["a.d.e#2"]) == (1, 2)
    assert sum("several entries of one name" in note for note in found.notes) == 1
    compared = diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [t.name for t in compared.different] == ["a.b.c#2"]
    assert [v.name for v in compared.values] == ["a.d.e#2"]


def test_the_newest_of_the_saves_of_a_run(tmp_path: Path) -> None:
    """``checkpoint-9`` and ``checkpoint-10`` of the Trainer: 10, with a note."""
    for number in (9, 10):
        (tmp_path / "run" / f"checkpoint-{number}").mkdir(parents=True)
        save_file({"w": torch.full((2,), float(number))}, tmp_path / "run" / f"checkpoint-{number}" / "model.safetensors")
    found = open_checkpoint(tmp_path / "run")
    assert found.path == tmp_path / "run" / "checkpoint-10"
    assert "the newest by its number, checkpoint-10, is taken" in found.notes[0]


def test_one_file_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line says that nothing was compared; of tensors of one element that differ it says the numbers."""
    for name, value in (("a", 1.0), ("b", 3.0)):
        torch.save({"w": torch.full((1,), value)}, tmp_path / f"{name}.pt")
    assert main(["ckpt", "diff", str(tmp_path / "a.pt"), str(tmp_path / "a.pt")]) == 0
    assert capsys.readouterr().out.startswith("Nothing was compared: both sides are the same directory or file")
    assert main(["ckpt", "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 1
    assert "the numbers 1 and 3" in capsys.readouterr().out


def test_top_does_not_hide_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--top is of tensors; of values twenty are listed, and how many more there are is said."""
    for name, add in (("a", 0), ("b", 1)):
        torch.save({"model": {"w": torch.ones(2)}, "kept": {f"n{k}": k + add for k in range(25)}}, tmp_path / f"{name}.pt")
    assert main(["ckpt", "diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--top", "3"]) == 1
    said = capsys.readouterr().out
    assert said.count(", golden ") == 21  # one in the first line
    assert "  and 5 more" in said
