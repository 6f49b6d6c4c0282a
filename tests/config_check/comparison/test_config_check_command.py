"""``msprobe config_check``: exit codes as a gate, files, and what it does to what is there already."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.config.collect import packages, system
from msprobe_engine.config.environment import variables as environment
from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.formats.pack import entries
from msprobe_engine.report.config import files as xlsx
from msprobe_engine.report.config.tables import Table

PACKS = Path(__file__).parents[2] / "fixtures" / "config_packs" / "26.2.0"
BASE, AGAIN, PLANTED = (str(PACKS / f"{name}.zip") for name in ("base", "again", "planted"))


def _sheets(path: Path) -> dict[str, str]:
    """Name to the XML of the sheets of a workbook."""
    with zipfile.ZipFile(path) as book:
        return {name: book.read(name).decode() for name in book.namelist() if name.startswith("xl/")}


def test_exit_code_is_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 without a difference that matters, 1 with one, 2 when it cannot tell; the first line is the verdict."""
    out = str(tmp_path / "out")
    assert main(["config_check", "-c", BASE, AGAIN, "-o", out]) == 0
    assert capsys.readouterr().out.startswith("No difference that matters (3 harmless).")
    assert main(["config_check", "-c", BASE, PLANTED, "-o", out]) == 1
    said = capsys.readouterr().out
    assert said.startswith("The configurations differ: lr 1e-4, golden 3e-4; 7 change the numbers, 4 may change them")
    assert "learning_rate / lr: 1e-4, golden 3e-4; every update is scaled by it" in said
    assert main(["config_check", "-c", str(tmp_path / "none.zip"), BASE, "-o", out]) == 2
    assert main(["config_check"]) == 2
    assert main(["config_check", "-c", BASE, AGAIN, "--ranks", BASE]) == 2


def test_run_and_golden_as_in_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RUN GOLDEN is ``-c GOLDEN RUN``."""
    said = []
    for words in (("-c", BASE, PLANTED), (PLANTED, BASE)):
        assert main(["config_check", *words, "-o", str(tmp_path / "out")]) == 1
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["config_check", BASE]) == 2
    assert "compared with what? give RUN and GOLDEN" in capsys.readouterr().err
    assert main(["config_check", BASE, AGAIN, "-c", BASE, AGAIN]) == 2


def test_two_launch_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What they set is compared without packs of each, and what is not compared is said; no file is left. One script beside a pack is told
    the command that collects one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_VARIABLE_OF_THIS_SHELL", "x")
    Path("run.sh").write_text("export NCCL_ALGO=Tree\npython train.py --lr 2e-4 --seed 3\n")
    Path("good.sh").write_text("export NCCL_ALGO=Ring\npython train.py --lr 1e-4 --seed 3\n")
    assert main(["config_check", "run.sh", "good.sh"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("The configurations differ: lr 2e-4, golden 1e-4")
    assert "NCCL_ALGO: Tree, golden Ring" in said
    assert "packages, machine and variables that no script sets" in said
    assert "SOME_VARIABLE_OF_THIS_SHELL" not in said
    Path("good.sh").write_text("python train.py --lr 2e-4\n")
    Path("run.sh").write_text("python train.py --lr 2e-4 # another comment\n")
    assert main(["config_check", "run.sh", "good.sh"]) == 0
    assert capsys.readouterr().out.startswith("No difference")
    assert sorted(os.listdir()) == ["good.sh", "run.sh"]
    assert main(["config_check", "run.sh", BASE]) == 2
    said = capsys.readouterr().err
    assert "msprobe config_check -d run.sh -o run.zip" in said
    assert "checkpoint" not in said


@pytest.mark.parametrize("kind", ["a link", "a directory", "a named pipe", "no such file"])
@pytest.mark.parametrize("first", [False, True])
def test_a_script_that_is_none_is_to_blame(kind: str, first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the one beside it, which is."""
    good, odd = tmp_path / "good.sh", tmp_path / "odd.sh"
    good.write_text("torchrun train.py --lr 1e-3\n")
    if kind == "a link":
        odd.symlink_to("nowhere")
    elif kind == "a directory":
        odd.mkdir()
    elif kind == "a named pipe":
        os.mkfifo(odd)
    assert main(["config_check", *map(str, (odd, good) if first else (good, odd))]) == 2
    said = capsys.readouterr().err
    assert f"{odd}: " in said
    assert kind in said
    assert str(good) not in said


def test_a_flag_that_one_script_lost_is_not_taken_for_a_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of settings alone do not say that the program is Megatron: what Megatron takes by itself cannot be told of it. Where the value
    is another one, the setting is named."""
    flags = "--lr 1e-4 --num-layers 2 --hidden-size 64 --seed 42"
    for name, more in (("whole", "--clip-grad 1.0 --dropout 0.0"), ("lost", "--dropout 0.0"), ("other", "--clip-grad 1.0")):
        (tmp_path / f"{name}.sh").write_text(f"torchrun train.py {flags} {more}\n")
    whole, lost, other = (str(tmp_path / f"{name}.sh") for name in ("whole", "lost", "other"))
    assert main(["config_check", whole, lost]) == main(["config_check", lost, whole]) == 3
    assert "cannot be compared (clip-grad)" in capsys.readouterr().out
    assert main(["config_check", whole, other]) == 1
    assert "dropout 0.0, golden 0.1" in capsys.readouterr().out


def test_variables_of_two_launch_scripts_that_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both scripts are here: a value that is left out is compared all the same, without a key of the user."""
    scripts = [tmp_path / name for name in ("run.sh", "good.sh", "same.sh")]
    for script, seed in zip(scripts, (7, 8, 7)):
        script.write_text(f"export MY_SEED={seed}\ntorchrun train.py --tp 2\n", encoding="utf-8")
    run, good, same = map(str, scripts)
    assert main(["config_check", run, good]) == 1
    assert "env: MY_SEED: set, not shown, golden set, not shown" in capsys.readouterr().out
    assert main(["config_check", run, same]) == 0
    assert capsys.readouterr().out.startswith("No difference.")


@pytest.mark.parametrize("flags", [("-c", BASE, "{empty}"), ("-c", "{empty}", BASE), ("--verify", "{empty}"), ("--ranks", "{empty}")])
def test_a_directory_without_a_pack_is_said(flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output directory in which no run has left a pack is a wrong path (2), not a damaged pack."""
    (tmp_path / "empty").mkdir()
    words = [word.format(empty=tmp_path / "empty") for word in flags]
    assert main(["config_check", *words, *(["-o", str(tmp_path / "out")] if "--ranks" not in flags else [])]) == 2
    assert f"no config_check_pack.zip in {tmp_path / 'empty'}" in capsys.readouterr().err


def test_the_older_form_with_a_framework_is_taken(tmp_path: Path) -> None:
    """``msprobe -f pytorch config_check`` of 8.1.1 works, and its TRUE/FALSE can be asked for."""
    assert main(["-f", "pytorch", "config_check", "-c", BASE, PLANTED, "-o", str(tmp_path), "--columns", "8.1.1"]) == 1
    summary = _sheets(tmp_path / "result.xlsx")["xl/worksheets/sheet1.xml"]
    assert 't="b"' in summary


def test_all_forms_of_the_result_are_written(tmp_path: Path) -> None:
    """A workbook, a JSON and a page that say the same."""
    assert main(["config_check", "-c", BASE, PLANTED, "-o", str(tmp_path / "out")]) == 1
    data = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert (data["equal"], data["verdict"], len(data["differences"])) == (False, "error", 11)
    assert all(one["why"] and one["severity"] for one in data["differences"] + data["harmless"])
    page = (tmp_path / "out" / "result.html").read_text(encoding="utf-8")
    assert "learning_rate" in page
    names = _sheets(tmp_path / "out" / "result.xlsx")["xl/workbook.xml"]
    order = [names.index(f'name="{sheet}"') for sheet in ("summary", "env", "pip", "dataset", "weights", "hyperparameters", "random")]
    assert order == sorted(order)


def test_an_earlier_result_does_not_show_and_nothing_of_the_user_is_gone(tmp_path: Path) -> None:
    """A file of the user's in the directory stays; a sheet of an earlier comparison does not."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep", encoding="utf-8")
    main(["config_check", "-c", BASE, PLANTED, "-o", str(out)])
    small = [tmp_path / "a.zip", tmp_path / "b.zip"]
    for path in small:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("pip", "torch=2.7.0\n")
    assert main(["config_check", "-c", *map(str, small), "-o", str(out)]) == 0
    assert (out / "mine.txt").read_text(encoding="utf-8") == "keep"
    assert 'name="weights"' not in _sheets(out / "result.xlsx")["xl/workbook.xml"]
    assert set(json.loads((out / "result.json").read_text(encoding="utf-8"))["summary"]) == {"pip"}


def test_json_and_page_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json -`` prints nothing but JSON; ``--html`` names a file."""
    assert main(["config_check", "-c", BASE, AGAIN, "-o", str(tmp_path), "--json", "-", "--html", str(tmp_path / "x.html")]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert (tmp_path / "x.html").stat().st_mode & 0o777 == 0o640


def test_collect_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of now passes against now; another script or variable does not, and what only a run has is not asked for."""
    script, good = tmp_path / "run.sh", tmp_path / "good.zip"
    script.write_text("export NCCL_ALGO=Ring\ntorchrun --nproc_per_node 2 t.py --lr 1e-4 --seed 1\n", encoding="utf-8")
    assert main(["config_check", "-d", str(script), "-o", str(good)]) == 0
    assert main(["config_check", "--verify", str(good), "-d", str(script)]) == 0
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert main(["config_check", "--verify", str(good), "-d", str(script)]) == 1
    assert "NVIDIA_TF32_OVERRIDE" in capsys.readouterr().out
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    script.write_text(script.read_text().replace("1e-4", "2e-4").replace("Ring", "Tree"), encoding="utf-8")
    assert main(["config_check", "--verify", str(good), "-d", str(script)]) == 1
    said = capsys.readouterr().out
    assert "lr: 2e-4, golden 1e-4" in said
    assert "NCCL_ALGO: Tree, golden Ring" in said
    assert main(["config_check", "--verify", BASE, PLANTED]) == 1
    assert not (tmp_path / "config_check_result").exists()


def test_scripts_are_read_with_the_environment_and_arguments_they_would_start_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of this environment are known, secrets and what is not set here are not; `--script-args` are the script's arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LR", raising=False)
    monkeypatch.setenv("MY_TOKEN", "of-a-service-1")
    script = (
        '[ -v LR ] && X=set\ntorchrun --nproc_per_node 8 --nnodes $SLURM_NNODES a.py --lr ${LR:-3e-4} --seed "$1" --auth $MY_TOKEN --x $X\n'
    )
    Path("run.sh").write_text(script, encoding="utf-8")
    collect = ["config_check", "-d", "run.sh", "-o", "good.zip", "--script-args"]
    verify = ["config_check", "--verify", "good.zip", "-d", "run.sh", "--script-args"]
    assert main([*collect, "'1 2'"]) == 0
    said = capsys.readouterr()
    assert "MY_TOKEN" in said.err  # names are no secrets
    values = read_pack("good.zip").json("msprobe/static.json")["values"]
    assert {name: values[name]["value"] for name in ("lr", "seed", "nnodes")} == {"lr": "3e-4", "seed": "1 2", "nnodes": "$SLURM_NNODES"}
    assert not any(b"of-a-service-1" in read_pack("good.zip").raw(name) for name in read_pack("good.zip").names)
    assert main([*verify, "'1 2'"]) == 0
    assert main([*verify, "3"]) == 1
    monkeypatch.setenv("LR", "1e-3")
    capsys.readouterr()
    assert main([*verify, "'1 2'"]) == 1
    assert "lr: 1e-3, golden 3e-4" in capsys.readouterr().out
    assert main([*verify, "'1 2"]) == 2
    assert main(["config_check", "--verify", "good.zip", "--script-args", "1"]) == 2


def test_secrets_are_in_no_pack_and_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the environment or of a script is not in what is collected, nor in what is made of a foreign pack that has it."""
    secret = "hf_" + "Zq" * 15
    monkeypatch.setenv("HF_TOKEN", secret)
    (tmp_path / "run.sh").write_text(f"torchrun t.py --hub_token {secret} --lr 1\n", encoding="utf-8")
    main(["config_check", "-d", str(tmp_path / "run.sh"), "-o", str(tmp_path / "p.zip")])
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert all(secret.encode() not in archive.read(name) for name in archive.namelist())
    foreign = [tmp_path / f"{name}.zip" for name in "ab"]
    for number, path in enumerate(foreign):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("env", json.dumps({"HF_TOKEN": f"{secret}{number}", "URL": f"https://u:{secret}{number}@h/x"}))
            archive.writestr("hyperparameters/hyperparameters_static.json", json.dumps({"hub_token": f"{secret}{number}", "lr": number}))
    main(["config_check", "-c", *map(str, foreign), "-o", str(tmp_path / "out")])
    for path in (tmp_path / "out").iterdir():
        content = "".join(_sheets(path).values()) if path.suffix == ".xlsx" else path.read_text(encoding="utf-8")
        assert secret not in content, path.name


def test_ranks_that_have_not_written_are_not_taken_for_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank of the job without anything, or without what the others have, is exit code 3 in the first line; a difference is still 1."""

    def written(name: str, *ranks: dict[str, object]) -> str:
        path = tmp_path / f"{name}.zip"
        for rank, one in enumerate(ranks):
            whole = one | {"system": {"machine": {"cpus": 1}}, "withheld": {"key_id": "", "values": 1, "names": 0, "variables": {}}}
            of_rank: dict[str, object] = {f"msprobe/{part}/rank{rank}.json": content for part, content in whole.items()}
            of_rank |= {"env": one["env"], "pip": "numpy=2.1.0\n"} if rank == 0 else {}
            PackWriter(path, rank=rank, world_size=2, framework="pytorch", run="r").add(of_rank)
        return str(path)

    whole: dict[str, object] = {"env": {"A": "1"}, "weights/step0": {"w": {"digest": "aa", "shape": [1], "dtype": "float32"}}}
    assert main(["config_check", "--ranks", written("whole", whole, whole)]) == 0
    capsys.readouterr()
    assert main(["config_check", "--ranks", written("one", whole)]) == 3
    assert capsys.readouterr().out.startswith("Cannot tell: the job has 2 ranks, and rank 1 has written nothing.")
    assert main(["config_check", "--ranks", written("less", whole, {"env": {"A": "1"}})]) == 3
    assert capsys.readouterr().out.startswith("Cannot tell: rank 1 has written no weights, which others have.")
    assert main(["config_check", "--ranks", written("other", whole, {"env": {"NCCL_ALGO": "Tree"}}), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], len(found["missing"])) == (False, 1)


def test_what_only_a_run_knows_is_not_asked_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that a program sets in its code stand under "not compared"; those that the script says are compared, with the arguments
    that the run was started with where nothing else shows them."""
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "3e-4", "--width", "8"])
    code = {"optimizer.lr": 3e-4, "optimizer.class": "AdamW", "model.class": "Net"}
    entry = {name: {"value": value, "origin": "code", "where": "", "framework": "torch"} for name, value in code.items()}
    good, script = tmp_path / "good.zip", tmp_path / "run.sh"
    about = environment.collect()
    parts = {"system": system.collect(), "env": about.values, "withheld": about.entry(), "hyperparameters": entry}
    whole = {f"msprobe/{part}/rank0.json": content for part, content in parts.items()}
    existing = {"env": about.values, "pip": packages.text(), entries.DYNAMIC: {}}
    PackWriter(good, rank=0, world_size=1, framework="pytorch").add({**whole, **existing})
    for arguments, code_expected, expected in (
        ("--width 8 --lr 3e-4", 0, "do not say: optimizer.class, model.class"),
        ("--width 8 --lr 1e-4", 1, "lr / optimizer.lr: 1e-4, golden 0.0003"),
        ("--lr 3e-4 --width 9", 1, "width: 9, golden 8"),
        ("--lr 3e-4", 1, "width: not set, golden 8"),
        ("--lr 3e-4 --width 8 --fault dtype", 1, "fault: dtype, golden not set"),
    ):
        script.write_text(f"python train.py {arguments}\n", encoding="utf-8")
        assert main(["config_check", "--verify", str(good), "-d", str(script)]) == code_expected
        assert expected in capsys.readouterr().out


def test_the_text_names_what_is_harmless_what_is_not_installed_and_what_neither_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to five names of harmless differences; a package of one side; no samples and random calls in packs of runs. A variable that may
    change the numbers is a warning."""
    for name, pip in (("a", "torch=2.0\n"), ("b", "torch=2.0\ntriton=3.0\n" + "".join(f"zz{i}=1\n" for i in range(7)))):
        about = {"ACCELERATE_USE_CPU": str(name == "a")}
        PackWriter(tmp_path / f"{name}.zip", rank=0, world_size=1, framework="pytorch").add({"pip": pip, "env": about})
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "pip: triton: 3.0, golden not installed" in said
    assert "env warning" in said
    assert "pip zz0, pip zz1, pip zz2, pip zz3, pip zz4 and 2 more" in said
    assert "neither pack has samples and random calls" in said


def test_hostile_text_in_a_pack_is_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Formulas, markup and what a terminal obeys are shown, not obeyed."""
    for name, value in (("a", "=cmd|'/c calc'!A1"), ("b", "<script>alert(1)</script>\x1b[2J")):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("hyperparameters/hyperparameters_static.json", json.dumps({"some-level": value}))
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "out")]) == 1
    assert "\x1b" not in capsys.readouterr().out
    assert "<script>alert" not in (tmp_path / "out" / "result.html").read_text(encoding="utf-8")
    assert "<f>" not in "".join(_sheets(tmp_path / "out" / "result.xlsx").values())


def test_damaged_entries_are_said_and_the_rest_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry that is no JSON is a problem in words; the other checkers go on."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("env", "{")
        archive.writestr("pip", "torch=1\n")
    shutil.copy(BASE, tmp_path / "b.zip")
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "entry env is no JSON" in said
    assert "only the target pack has weights" in said


@pytest.mark.parametrize("value", [None, True, 3, 1.5, float("nan"), "x" * 40_000, "\ud800", ["a", {"b": []}]])
def test_any_value_of_a_foreign_pack_can_be_shown(value: Any, tmp_path: Path) -> None:
    """Values of any kind and size come out in all forms."""
    for name, one in (("a", value), ("b", 7)):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("hyperparameters/hyperparameters_static.json", json.dumps({"some-level": one, "lr": 1}))
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "out")]) == 1
    json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))


def test_long_sheets_are_split(tmp_path: Path) -> None:
    """A sheet has at most so many rows; the rest goes into further ones, as the existing tool names them."""
    xlsx.write_book(tmp_path / "x.xlsx", [Table("weights", ("a",), [(i,) for i in range(7)])], most_rows=4)
    names = _sheets(tmp_path / "x.xlsx")["xl/workbook.xml"]
    assert all(f'name="weights_part_{i}"' in names for i in range(3))


def test_without_the_package_of_workbooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The gate works without xlsxwriter; an older workbook is not left to be taken for the result."""
    main(["config_check", "-c", BASE, PLANTED, "-o", str(tmp_path)])
    monkeypatch.setattr(xlsx, "available", lambda: False)
    assert main(["config_check", "-c", BASE, AGAIN, "-o", str(tmp_path)]) == 0
    assert not (tmp_path / "result.xlsx").exists()
    assert (tmp_path / "result.earlier.xlsx").exists()
    assert "msprobe-integrations[xlsx]" in capsys.readouterr().out


def test_logs_of_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``-vc``, ``-vv`` and ``-sc`` compare settings that a run has printed; what a log does not have fails no check of wanted ones."""
    monkeypatch.chdir(tmp_path)
    head, end = "------------------------ arguments ------------------------", "-------------------- end of arguments ---------------------"
    for name, rate in (("a", "1e-4"), ("b", "2e-4")):
        Path(f"{name}.log").write_text(f"{head}\n  lr ........ {rate}\n  seed ...... 1\n{end}\n", encoding="utf-8")
        verl = {"actor_rollout_ref": {"actor": {"shuffle": False, "lr": float(rate)}}, "data": {"shuffle": name == "b"}}
        Path(f"verl_{name}.log").write_text(f"(main pid=1) {verl}\n(main pid=1) next\n(main pid=1) next\n", encoding="utf-8")
    shutil.copy("a.log", "again.log")
    assert main(["config_check", "-sc", "a.log", "again.log"]) == 0
    assert main(["config_check", "-sc", "a.log", "b.log"]) == 1
    assert Path("slime_param_compare_result/hyper_params_compare.csv").exists()
    assert "lr: 0.0001 in the first log, 0.0002 in the second" in capsys.readouterr().out
    assert main(["config_check", "-vc", "verl_a.log", "verl_b.log", "-o", "out"]) == 1
    assert main(["config_check", "-vv", "verl_a.log"]) == 0
    assert main(["config_check", "-vv", "verl_b.log"]) == 1
    assert "data/shuffle: False in wanted, True in the log" in capsys.readouterr().out
    assert main(["config_check", "-vv", "a", "b", "c"]) == 2
    assert main(["config_check", "-vc", "a.log", "none.log"]) == 2


def test_two_checkpoints_as_the_existing_tool_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``-c CKPT CKPT -o out.json``: weights by name with l2, cos, numel and shape; a file that is there is not written over."""
    import numpy as np
    from safetensors.numpy import save_file

    for name, shift in (("a", 0.0), ("b", 3.0)):
        save_file(
            {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.full(1, shift, np.float32)}, tmp_path / f"{name}.safetensors"
        )
    a, b, out = (str(tmp_path / name) for name in ("a.safetensors", "b.safetensors", "out.json"))
    assert main(["config_check", "-c", a, b, "-o", out]) == 1
    data = json.loads(Path(out).read_text(encoding="utf-8"))
    assert data["w"] == {"l2": 0.0, "cos": pytest.approx(1.0), "numel": 12, "shape": [3, 4]}
    assert data["v"]["l2"] == 3.0
    assert main(["config_check", "-c", a, b, "-o", out]) == 2
    assert "exists" in capsys.readouterr().err
    again = shutil.copy(a, tmp_path / "again.safetensors")
    assert main(["config_check", "-c", a, str(again), "-o", str(tmp_path / "same.json")]) == 0


def test_output_directories_mean_the_packs_in_them(tmp_path: Path) -> None:
    """``-c``, ``--verify`` and ``--ranks`` take what a probe has left in the output directory of a run."""
    for name, pack in (("a", BASE), ("again", BASE), ("b", PLANTED)):
        (tmp_path / name).mkdir()
        shutil.copy(pack, tmp_path / name / "config_check_pack.zip")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert main(["config_check", "-c", a, b, "-o", str(tmp_path / "out")]) == 1
    assert main(["config_check", "--verify", a, str(tmp_path / "again")]) == 0
    assert main(["config_check", "--ranks", a]) == 0


def test_settings_of_mindspore_are_known_and_the_first_line_says_what_is_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learning rate, class and form of an optimizer change the numbers; where many of a kind are one line, the count says so."""
    for name, factor in (("a", 1), ("b", 2)):
        values: dict[str, Any] = {"optimizer.lr": 0.01 * factor, "optimizer.class": "Adam" if factor == 1 else "Momentum"}
        values |= {"optimizer.nesterov": factor == 2, "optimizer.loss_scale": float(factor)}
        values |= {f"own.choice{i}": i * factor for i in range(1, 6)}
        entry = {key: {"value": value, "origin": "code", "where": "", "framework": "mindspore"} for key, value in values.items()}
        PackWriter(tmp_path / f"{name}.zip", rank=0, world_size=1, framework="mindspore").add({"msprobe/hyperparameters/rank0.json": entry})
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "out")]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    counts = "4 change the numbers, 5 may change them (in 1 line: many of a kind are one)"
    assert first == f"The configurations differ: optimizer.class Momentum, golden Adam; {counts}."
    for words in ("optimizer.lr: 0.02, golden 0.01; every update", "optimizer.class: Momentum, golden Adam; the update rule"):
        assert any(words in line for line in lines)


@pytest.mark.parametrize("script_first", [True, False])
def test_a_script_is_held_against_every_rank_of_a_run(script_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that ran with another value than its launch script says is named."""
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 3 train.py --lr 1e-3\n", encoding="utf-8")
    assert main(["config_check", "-d", str(tmp_path / "run.sh"), "-o", str(tmp_path / "script.zip")]) == 0
    rates = {0: 0.001, 1: 0.01, 2: 0.001}
    settings = {rank: {"optimizer.lr": {"value": lr, "origin": "code", "where": "", "framework": "torch"}} for rank, lr in rates.items()}
    contents = {entries.of_rank("hyperparameters", rank): found for rank, found in settings.items()}
    PackWriter(tmp_path / "run.zip").add(contents | {entries.of_rank("ranks", rank): {"host": "a"} for rank in rates})
    packs = [str(tmp_path / "script.zip"), str(tmp_path / "run.zip")][:: 1 if script_first else -1]
    assert main(["config_check", "--verify", *packs]) == 1
    expected = "optimizer.lr / lr, rank 1: 0.01, golden 1e-3" if script_first else "lr / optimizer.lr, rank 1: 1e-3, golden 0.01"
    said = capsys.readouterr().out
    assert expected in said
    assert said.count(", rank 1: ") == 1
    assert "of these ranks" not in said  # a script has no ranks that could be missing


def test_one_is_said_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One value that is left out, one thing in which a rank differs."""
    (tmp_path / "run.sh").write_text("torchrun train.py --hf-token hunter22\n", encoding="utf-8")
    assert main(["config_check", "-d", str(tmp_path / "run.sh"), "-o", str(tmp_path / "script.zip")]) == 0
    assert "1 value is left out or masked: its name" in capsys.readouterr().err
    variables = {rank: {"NCCL_ALGO": "Tree" if rank == 1 else "Ring"} for rank in range(3)}
    about = {rank: environment.collect(found) for rank, found in variables.items()}
    contents = {entries.of_rank("env", rank): found.values for rank, found in about.items()}
    PackWriter(tmp_path / "run.zip").add(contents | {entries.of_rank("withheld", rank): found.entry() for rank, found in about.items()})
    assert main(["config_check", "--ranks", str(tmp_path / "run.zip")]) == 1
    assert "rank 1 differs from the others in 1 thing." in capsys.readouterr().out


def _commit(place: Path, text: str) -> None:
    (place / "train.py").write_text(text, encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True, timeout=240)


@pytest.mark.parametrize(("text", "code", "word"), [("print()", 0, "No difference that matters"), ("print(1)", 1, "program.git.commit")])
def test_the_program_of_a_script_is_what_it_starts(
    text: str, code: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gate before a launch compares the commit of the training, not that of msprobe: another one is a difference, the same is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("python train.py --lr 1e-3\n", encoding="utf-8")
    _commit(tmp_path, "print()")
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1e-3"])
    about = environment.collect({**os.environ})
    contents: dict[str, Any] = {entries.ENV: about.values, entries.PIP: packages.text(), entries.DYNAMIC: {"optimizer_lr": 0.001}}
    contents[entries.of_rank("withheld", 0)] = about.entry()
    settings = {"optimizer.lr": {"value": 0.001, "origin": "code", "where": "", "framework": "torch"}}
    contents |= {entries.of_rank("system", rank): system.collect() for rank in range(2)}
    contents |= {entries.of_rank("hyperparameters", rank): settings for rank in range(2)}
    PackWriter(tmp_path / "good.zip").add(contents)
    if text != "print()":
        _commit(tmp_path, text)
    monkeypatch.setattr("sys.argv", ["msprobe", "config_check"])
    assert main(["config_check", "--verify", "good.zip", "-d", "run.sh"]) == code
    assert word in capsys.readouterr().out


def test_one_commit_with_other_changes_in_the_tree_is_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packs of a tree in which the same file is changed, each time to something else: the file is named, and the exit code is 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("python train.py --lr 1e-3\n", encoding="utf-8")
    _commit(tmp_path, "print()")
    for name, text in (("golden", "print(1)"), ("same", "print(1)"), ("other", "print(2)")):
        (tmp_path / "train.py").write_text(text, encoding="utf-8")
        assert main(["config_check", "-d", "run.sh", "-o", f"{name}.zip"]) == 0
    assert main(["config_check", "same.zip", "golden.zip"]) == 0
    assert main(["config_check", "other.zip", "golden.zip"]) == 1
    assert "program.git: train.py" in capsys.readouterr().out


def test_scripts_that_differ_where_a_variable_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two scripts that differ in a branch that an unset variable decides cannot be told; a remark is nothing."""
    branch = 'ARGS="--lr 1e-4"\nif [ "$NO_SUCH_VARIABLE" = 1 ]; then ARGS="$ARGS --sequence-parallel"; fi\npython train.py $ARGS\n'
    scripts = {"with": branch, "without": 'ARGS="--lr 1e-4"\npython train.py $ARGS\n', "remark": f"# said\n{branch}"}
    for name, text in scripts.items():
        (tmp_path / f"{name}.sh").write_text(text)
    with_branch, without, remark = (str(tmp_path / f"{name}.sh") for name in scripts)
    assert main(["config_check", without, with_branch]) == 3
    assert f"{without}, line 2: here the scripts differ" in capsys.readouterr().out
    assert main(["config_check", with_branch, without]) == 3
    assert main(["config_check", remark, with_branch]) == 0
