"""A part of a run is never called the whole: ranks without files, ranks that end before others, steps that were cut off, and steps that
only one of two runs has are named by every command, which then ends with 3 where it found nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.core.process.processes import Process, this_process

Files = Mapping[int, Iterable[int]]


def written(
    root: Path,
    ranks: Files,
    *,
    world: int | None = None,
    monitor: Mapping[str, Any] | None = None,
    cut: Iterable[tuple[int, int]] = (),
    writing: Mapping[int, Process] = MappingProxyType({}),
    numbers: bool = True,
    of_rank: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    kind: str = "",
    launch: str = "1a2b3c4d",
    began: float = 1.0,
) -> Path:
    """Files of one launch: rank -> its steps.

    Args:
        cut: rank and step that were interrupted.
        writing: rank to the process that has not closed its files.
        numbers: with the numbers of the steps, which the existing tool has not.
        of_rank: rank to more of its run.json.
        kind: two more cells of the tensor, shape and data type.
    """
    for rank, steps in ranks.items():
        place = root / "monitor" / f"Dec03_21-34-40-rank{rank}-{launch}"
        place.mkdir(parents=True)
        info = {"rank": rank, "world_size": len(ranks) if world is None else world, "started_unix": began, "monitor": monitor or {}}
        info |= of_rank.get(rank, {})
        (place / "run.json").write_text(json.dumps(info))
        if process := writing.get(rank):
            (place / "losses.json").write_text(json.dumps({"version": 1, "alerts": 0, "lost": {}, "process": str(process)}))
        rows = [f"0,fc.weight,{step},{1 + step},0,{step}{kind and ',' + kind}" for step in steps if (rank, step) not in cut]
        header = "vpp_stage,name,step,norm,min,max" + (",shape,dtype" if kind else "")
        (place / "grad_reduced_0-99.csv").write_text("\n".join([header, *rows]) + "\n")
        rows = [f"{step},{name},{value}" for step in steps for name, value in _numbers(step, (rank, step) in cut)]
        if numbers:
            (place / "scalars_0-99.csv").write_text("\n".join(["step,name,value", *rows]) + "\n")
    return root


def _numbers(step: int, cut: bool) -> list[tuple[str, float]]:
    return [("loss", 2.0 - step / 10), *([("interrupted", 1.0)] if cut else [("learning_rate", 1e-3)])]


COMMANDS = {
    "diagnose {0} -o {1}": "  warning ",
    "monitor analyze {0} -o {1}": "warning: ",
    "monitor report {0} -o {1}.html": "  note: ",
    "trends {0} -o {1}.html": "  note: ",
}
"""Command and how a line of it begins that says what is missing."""


def warnings(text: str, begin: str) -> list[str]:
    """Lines of a command that say what is missing; `diagnose` has the word before the first of them only."""
    lines = text.splitlines()
    if begin != "  warning ":
        return [line for line in lines if line.startswith(begin)]
    at = next((i for i, line in enumerate(lines) if line.startswith(begin)), len(lines))
    return lines[at : at + 1] + list(itertools.takewhile(lambda line: line.startswith("   "), lines[at + 1 :]))


WHOLE: Files = {0: range(6), 1: range(6)}
GONE = this_process()._replace(start="1")
"""Its id is that of another process now."""
ONE_RUN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "whole": ({"ranks": WHOLE}, []),
    "a killed rank": (
        {"ranks": {0: range(5), 1: range(3)}, "cut": [(0, 4)]},
        ["rank 1 ended after step 2, others go on to step 4", "step 4 was interrupted on rank 0"],
    ),
    "a killed rank of the existing tool": (
        {"ranks": {0: range(5), 1: range(3)}, "numbers": False},
        ["rank 1 ended after step 2, others go on to step 4"],
    ),
    "killed ranks": (
        {"ranks": {0: range(6), 1: range(6), 2: range(5)}, "cut": [(1, 5)], "writing": {0: GONE, 1: GONE, 2: GONE}},
        [
            "rank 2 ended after step 4, others go on to step 5",
            "rank 0 did not end: the process was killed or has crashed; the last step that is whole is 5",
            "ranks 1-2 did not end: the process was killed or has crashed; the last step that is whole is 4",
            "step 5 was interrupted on rank 1",
        ],
    ),
    "ranks of another host that did not end": (
        {"ranks": WHOLE, "writing": {1: GONE._replace(host="node7", machine="other")}},
        ["rank 1 did not end, or still runs on node7, which cannot be seen from here; the last step that is whole is 5"],
    ),
    "a gap": ({"ranks": {0: range(6), 1: [0, 1, 4, 5]}}, ["no steps 2-3 of rank 1, which other ranks have"]),
    "a rank without a step": ({"ranks": {0: range(3), 1: ()}}, ["rank 1 wrote no step, others go on to step 2"]),
    "a rank without files": ({"ranks": {0: range(3)}, "world": 2}, ["the run had 2 ranks, and there are no files of rank 1;"]),
    "many ranks without files": ({"ranks": {0: range(3)}, "world": 10**15}, ["no files of ranks 1-16 and 999,999,999,999,983 more;"]),
    "ranks that the settings leave out": ({"ranks": {0: range(3)}, "world": 2, "monitor": {"rank": [0]}}, []),
    "a file of losses that is gone": (
        {"ranks": WHOLE, "of_rank": {0: {"losses": True}, 1: {"losses": True}}, "writing": {0: this_process()._replace(machine="")}},
        ["rank 0 did not end, or still runs on", "losses.json: is not there; it would tell what the run could not write"],
    ),
    "a rank with other settings": (
        {"ranks": {0: range(4), 1: range(4), 2: range(4)}, "of_rank": {2: {"monitor": {"updates": True, "ops": ["norm"]}}}},
        ['rank 2 recorded by other settings than ranks 0-1: monitor.updates true / null, monitor.ops ["norm"] / null; what only'],
    ),
    "a rank with other rules": (
        {"ranks": WHOLE, "of_rank": {0: {"rules": ["nan_inf"]}, 1: {"rules": []}}},
        ['rank 1 recorded by other settings than rank 0: rules [] / ["nan_inf"]; what only some ranks have was not compared'],
    ),
    "a rank of the settings": ({"ranks": {0: range(3)}, "world": 4, "monitor": {"rank": [0, 3]}}, ["there are no files of rank 3;"]),
}


@pytest.mark.parametrize("case", ONE_RUN)
@pytest.mark.parametrize("command", COMMANDS)
def test_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, case: str) -> None:
    """What is missing of one run is named, once, and the answer is 3; of a whole one nothing is said."""
    made, expected = ONE_RUN[case]
    root = written(tmp_path / "run", **made)
    code = main(command.format(root, tmp_path / "out").split())
    said = warnings("".join(capfd.readouterr()), COMMANDS[command])
    assert len(said) == len(expected), said
    assert all(text in line for text, line in zip(expected[::-1], said[::-1])), said
    assert code == (3 if expected else 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str) -> None:
    """That its processes live is said; nothing that they have written is missing."""
    root = written(tmp_path / "run", WHOLE, writing={0: this_process(), 1: this_process()})
    assert main(command.format(root, tmp_path / "out").split()) == 0
    said = "".join(capfd.readouterr())
    assert "ranks 0-1 still run; the last step that is whole so far is 5" in said
    assert "did not end" not in said


def test_a_launch_that_a_later_one_has_gone_on_with_was_not_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first launch was killed, the second came to its end."""
    root = written(tmp_path / "run", WHOLE, writing={0: GONE, 1: GONE})
    written(root, {0: range(4, 9), 1: range(4, 9)}, launch="5e6f7a8b", began=2.0)
    assert main(["monitor", "analyze", str(root)]) == 0
    assert "did not end" not in capfd.readouterr().err


def test_a_step_that_was_done_again_after_a_resume_was_not_cut_off(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second launch repeats the step in which the first one was interrupted."""
    root = written(tmp_path / "run", {0: range(5), 1: range(3)}, cut=[(0, 4)])
    written(root, {0: range(3, 7), 1: range(3, 7)}, launch="5e6f7a8b", began=2.0)
    assert main(["monitor", "analyze", str(root)]) == 0
    assert "interrupted" not in capfd.readouterr().err


TWO_RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "the same": ({"ranks": WHOLE}, {"ranks": WHOLE}, []),
    "one ends earlier": ({"ranks": {0: range(5), 1: range(5)}}, {"ranks": WHOLE}, ["golden: step 5 of ranks 0-1 is not in"]),
    "one begins later": ({"ranks": WHOLE}, {"ranks": {0: range(2, 6), 1: range(2, 6)}}, ["target: steps 0-1 of ranks 0-1 are not in"]),
    "one began later": (
        {"ranks": WHOLE},
        {"ranks": {0: range(2, 6), 1: range(2, 6)}, "of_rank": {0: {"first_step": 2}, 1: {"first_step": 2}}},
        [],
    ),
    "one began later and lacks more": (
        {"ranks": {0: range(6)}},
        {"ranks": {0: range(3, 6)}, "of_rank": {0: {"first_step": 2}}},
        ["target: step 2 of rank 0 is not in"],
    ),
    "another interval": ({"ranks": {0: (0, 2, 4), 1: (0, 2, 4)}}, {"ranks": WHOLE}, []),
    "another interval and an earlier end": ({"ranks": {0: (0, 2)}}, {"ranks": {0: range(6)}}, ["golden: step 4 of rank 0 is not in"]),
    "one step by its settings": ({"ranks": {0: (0,)}, "monitor": {"interval": 3}}, {"ranks": {0: range(4)}}, ["golden: step 3 of rank 0"]),
    "a killed rank": (
        {"ranks": {0: range(5), 1: range(3)}},
        {"ranks": WHOLE},
        ["target: rank 1 ended after step 2", "golden: step 5 of rank 0 is not in", "golden: steps 3-5 of rank 1 are not in"],
    ),
    "killed after the last step": ({"ranks": WHOLE, "writing": {0: GONE}}, {"ranks": WHOLE}, ["target: rank 0 did not end"]),
}


@pytest.mark.parametrize("case", TWO_RUNS)
def test_two_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    """Steps that one of two runs has alone were not compared: they are named. Steps between those of a larger interval are none of them."""
    target, golden, expected = TWO_RUNS[case]
    roots = [written(tmp_path / name, **made) for name, made in (("target", target), ("golden", golden))]
    code = main(["diagnose", *map(str, roots), "-o", str(tmp_path / "out")])
    said = warnings(capfd.readouterr().out, COMMANDS["diagnose {0} -o {1}"])
    assert len(said) == len(expected), said
    assert all(text in line for text, line in zip(expected, said)), said
    assert code == (3 if expected else 0)


def test_trends_of_ranks_that_are_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where ranks or steps are asked for, what is missing of others is no matter."""
    root = written(tmp_path / "run", {0: range(3)}, world=2)
    assert main(["trends", str(root), "--rank", "0"]) == 0
    assert "no files of" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("target", "golden", "headline", "tone"),
    [
        ({"ranks": WHOLE}, {"ranks": WHOLE}, "No difference beyond round-off.", "good"),
        (
            {"ranks": {0: range(6)}},
            {"ranks": {0: range(7)}},
            "No difference in what could be compared; 1 warning says what could not.",
            "warn",
        ),
        (
            {"ranks": {0: range(6)}, "world": 2},
            {"ranks": WHOLE},
            "No difference in what could be compared; 2 warnings say what could not.",  # a rank, and the loss
            "warn",
        ),
        ({"ranks": {0: range(3)}, "world": 2}, None, "; 1 warning says what could not be looked at.", "warn"),
    ],
)
def test_the_first_line_says_that_not_all_was_compared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], target: dict[str, Any], golden: dict[str, Any] | None, headline: str, tone: str
) -> None:
    """Who reads the first line only, or the colour of the page, learns that there are warnings."""
    roots = [written(tmp_path / name, **made) for name, made in (("target", target), ("golden", golden)) if made is not None]
    main(["diagnose", *map(str, roots), "-o", str(tmp_path / "out")])
    assert capfd.readouterr().out.splitlines()[0].endswith(headline)
    assert f"sign {tone}" in (tmp_path / "out" / "diagnosis.html").read_text()


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ('"[4, 8]",torch.float32', 0, ""),
        ('"[4,8]",float32', 0, ""),
        ('"[8, 4]",torch.float32', 1, "its shape is [8,4], in the golden run [4,8]"),
        (
            '"[4, 8]",torch.bfloat16',
            0,
            "2 tensors have data type bfloat16, in the golden run float32; the first is rank 0, grad_reduced/fc.weight",
        ),
        ("", 0, ""),
    ],
)
def test_shapes_and_data_types_of_two_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, code: int, said: str) -> None:
    """Another shape is another structure, whatever the numbers say; another data type is said. A file that has neither says nothing."""
    target = written(tmp_path / "target", WHOLE, kind=kind)
    golden = written(tmp_path / "golden", WHOLE, kind='"[4, 8]",torch.float32')
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path / "out")]) == code
    out = capfd.readouterr().out
    assert said in out
    assert ("data type" in out) == ("data type" in said)
