"""What programs were started with, of runs whose frameworks know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.config.collect.resolved import CODE, FLAG, Resolved, entry, to_existing_format
from msprobe_engine.config.environment import variables as environment
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.config.secrets.masking import masked_arguments
from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.find.config.comparison import Comparison
from msprobe_engine.find.config.difference import Difference
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.formats.pack import entries

LR = {"optimizer.lr": Resolved(0.001, CODE, "", "torch")}


def _pack(path: Path, arguments: list[list[str]], settings: dict[str, Resolved] | None = None) -> Path:
    """A pack of a job, with the arguments of each rank."""
    variables = environment.collect({"NCCL_ALGO": "Ring"})
    contents: dict[str, Any] = {
        entries.META: {"format": 1, "rank": 0, "created": "2026-01-01", "run": "r", "framework": "torch", "world_size": len(arguments)},
        entries.ENV: variables.values,
        entries.PIP: "torch==2.7.0",
        entries.DYNAMIC: to_existing_format(settings or LR),
    }
    for rank, words in enumerate(arguments):
        program = {"script": "train.py", "arguments": masked_arguments(words), "directory": str(path.parent)}
        contents[entries.of_rank("system", rank)] = {"program": program, "python": {"version": "3.11"}}
        contents[entries.of_rank("env", rank)] = variables.values
        contents[entries.of_rank("withheld", rank)] = variables.entry()
        contents[entries.of_rank("hyperparameters", rank)] = entry(settings or LR)
        contents[entries.of_rank("ranks", rank)] = {"host": "a"}
    writer = PackWriter(path)
    writer.add(contents)
    return writer.path


def _compare(place: Path, a: str, b: str, *settings: dict[str, Resolved]) -> Comparison:
    packs = [
        _pack(place / f"{name}.zip", [words.split()], settings[number] if settings else None)
        for number, (name, words) in enumerate((("a", a), ("b", b)))
    ]
    return compare_packs(*packs)


def _rows(differences: list[Difference]) -> list[tuple[str, str, str, str]]:
    return [(one.name.removeprefix("train.py arguments: "), one.bench, one.cmp, one.severity) for one in differences]


@pytest.mark.parametrize(
    ("a", "b", "row"),
    [
        ("", "--fault dtype", ("--fault", "not given", "dtype", MAY)),
        ("--fault=dtype", "--steps 2 --fault none_at_all --steps 2", ("--fault", "dtype", "none_at_all", MAY)),
        ("--steps 2 --fp8-margin", "--steps 2", ("--fp8-margin", "True", "not given", MAY)),
        ("--init_method xavier", "--init_method normal", ("--init_method", "xavier", "normal", MAY)),
        ("--set x=1 --set y=2", "--set x=9 --set y=2", ("--set", "['x=1', 'y=2']", "['x=9', 'y=2']", MAY)),
        ("-B 4", "-B 8", ("--B", "4", "8", MAY)),
        ("small", "large", ("argument 1", "small", "large", MAY)),
        ("model.rope=1", "model.rope=2", ("--model.rope", "1", "2", MAY)),
        ("--seed 1", "--seed 2", ("--seed", "1", "2", CHANGES)),
        ("--corpus c4-20260101", "--corpus c4-20260102", ("--corpus", "c4-20260101", "c4-20260102", MAY)),
        ("--lr 1e-3", "--lr 1e-4", ("--lr", "1e-3", "1e-4", CHANGES)),  # the optimizer of both began with another one
    ],
)
def test_an_argument_that_differs_is_a_difference(a: str, b: str, row: tuple[str, str, str, str], tmp_path: Path) -> None:
    """The pack has the arguments, so a run with another one is never "no difference"."""
    settings = {"optimizer.lr": Resolved(0.0, CODE, "", "torch")}
    found = _compare(tmp_path, a, b, settings, settings)
    rows = [(name, x, y, severity) for name, x, y, severity in _rows(found.differences) if name == row[0]]
    assert (rows, found.exit_code) == ([row], 1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("--output-dir /runs/1 --steps 2", "--steps 2 --output-dir /runs/2"),
        ("--logdir a --save /x/1 --tensorboard-dir t1 --ckpt_dir c1", "--logdir b --save /x/2 --tensorboard-dir t2 --ckpt_dir c2"),
        ("--run-name seed1-20260101-120000", "--run-name seed1-20260102-120001"),
        ("--exp_name a --job-id 1 --timestamp 1", "--exp_name b --job-id 2 --timestamp 2"),
        ("--master_port 29500 --local_rank 0", "--master_port 29501 --local_rank 1"),
        ("--init_method tcp://a:1", "--init_method tcp://b:2"),
        ("--results x/20260101-120000", "--results x/20260102-130501"),
        ("--config /tmp/tmp1/model.yaml", "--config /tmp/tmp2/model.yaml"),
        ("--clip 1.0 --x=1e-5", "--x 0.00001 --clip 1"),
        ("/tmp/a/model.yaml", "/tmp/b/model.yaml"),
    ],
)
def test_a_run_that_is_repeated_is_not_accused(a: str, b: str, tmp_path: Path) -> None:
    """Where a run writes, what it is called and where its ranks meet differ from start to start."""
    found = _compare(tmp_path, a, b)
    assert (_rows(found.differences), found.exit_code) == ([], 0)


@pytest.mark.parametrize(
    ("a", "b", "settings", "names"),
    [
        ("--lr 1e-3", "", (LR, LR), []),
        ("--lr 1e-3", "--lr 0.01", (LR, {"optimizer.lr": Resolved(0.01, CODE, "", "torch")}), ["optimizer.lr"]),
        ("--lr 1e-3", "--lr 0.01", (LR, {"optimizer.lr": Resolved(0.02, CODE, "", "torch")}), ["optimizer.lr"]),  # scaled by the program
        (
            "--disable-bias-linear",
            "",
            (
                {"add_bias_linear": Resolved(False, FLAG, "--disable-bias-linear", "megatron")},
                {"add_bias_linear": Resolved(True, CODE, "", "megatron")},
            ),
            ["add_bias_linear"],
        ),
        (
            "--no-rope-fusion",
            "",
            ({"rope_fusion": Resolved(False, CODE, "", "megatron")},) * 2,
            [],
        ),
    ],
)
def test_what_settings_say_is_not_said_again(
    a: str, b: str, settings: tuple[dict[str, Resolved], ...], names: list[str], tmp_path: Path
) -> None:
    """An argument that a framework or an optimizer has taken is compared as its setting, once."""
    assert [one.name for one in _compare(tmp_path, a, b, *settings).differences] == names


def test_masked_arguments_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What says that it is a secret is named as not compared, and no value is shown."""
    a, b = (_pack(tmp_path / f"{number}.zip", [["--hf-token", f"hf_abcdEFGH1234567890abcdEFGH12345{number}"]]) for number in "12")
    assert main(["config_check", "--verify", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "arguments that are masked were not compared: 1 (hf-token)" in said
    assert "abcdEFGH" not in said


def test_the_rank_is_named_and_the_command_line_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank that was started otherwise is named, by both ways to compare two packs."""
    good = _pack(tmp_path / "good.zip", [[], []])
    other = _pack(tmp_path / "other.zip", [[], ["--fault", "dtype"]])
    for command in (["-c", str(good), str(other), "-o", str(tmp_path / "out")], ["--verify", str(good), str(other)]):
        assert main(["config_check", *command]) == 1
        assert "train.py arguments: --fault, rank 1: dtype, golden not given" in capsys.readouterr().out
