"""A command says "nothing found" only of what it has looked at: two runs that are the same, of which one is then damaged or cut down, give
exit code 3 and a sentence about what is missing, whichever command reads them."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from driver_dumps import dump, pair, tensor
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.find.coverage.one_sided_calls import out_of_order

Document = dict[str, Any]
Change = Callable[[Path, Path], object]
"""What is done to the two roots, target and golden."""

PACK = Path(__file__).parents[2] / "fixtures/config_packs/ours/megatron_checked_base.zip"
COMMANDS = {
    "compare": "compare -tp {target} -gp {golden} -o {out}",
    "compat": "compare -tp {target} -gp {golden} -o {out} --compat",
    "first difference": "compare -da -tp {target} -gp {golden} -o {out}",
    "tables": "compare -tp {target} -gp {golden} -o {out} --no_diagnose",
    "diagnose two": "diagnose {target} {golden} -o {out}",
    "diagnose one": "diagnose {target} -o {out}",
    "nan_analyze": "nan_analyze -i {target} -o {out}",
    "graph": "graph {target} {golden} -o {out}",
    "graph of one": "graph {target} -o {out}",
    "trends": "trends {target} -o {out}.html",
    "trends of two": "trends {target} {golden} -o {out}.html",
}
TWO = ("compare", "compat", "first difference", "tables", "diagnose two")
ONE = ("diagnose one", "nan_analyze")
DRAWN = ("graph", "graph of one", "trends")


def run(command: str, target: Path, golden: Path, out: Path) -> int:
    """Exit code of a command of `COMMANDS`."""
    return main([part.format(target=target, golden=golden, out=out) for part in COMMANDS[command].split()])


@dataclass(frozen=True)
class Case:
    """What is damaged, who reads it, and what is said."""

    change: Change
    commands: tuple[str, ...]
    phrase: str
    numbers_alike: bool = False
    """All numbers are there and the same, whatever else is missing."""


def _rank(root: Path, rank: int = 0, step: int = 0) -> Path:
    return root / f"step{step}" / f"rank{rank}"


def edited(change: Callable[[Document], object], *, both: bool = False) -> Change:
    """Change the document of rank 0 of the target, or of both sides."""

    def apply(target: Path, golden: Path) -> None:
        for root in (target, golden) if both else (target,):
            file = _rank(root) / "dump.json"
            document = json.loads(file.read_text())
            change(document)
            document["data"] = document.pop("data")  # the header comes first
            file.write_text(json.dumps(document, indent=1))

    return apply


def tensors(change: Callable[[Document], object]) -> Change:
    """Change every tensor of rank 0 of the target."""

    def walk(node: Any) -> None:
        if isinstance(node, dict) and "Max" in node:
            change(node)
            return
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            walk(child)

    return edited(lambda document: walk(document["data"]))


def without(*keys: str) -> Change:
    return tensors(lambda node: [node.pop(key) for key in keys])


def put(**values: Any) -> Change:
    return tensors(lambda node: node.update(values))


def text(change: Callable[[str], str], *, both: bool = False) -> Change:
    def apply(target: Path, golden: Path) -> None:
        for root in (target, golden) if both else (target,):
            file = _rank(root) / "dump.json"
            file.write_text(change(file.read_text()))

    return apply


def _second_data(content: str) -> str:
    return content.rstrip()[:-1].rstrip() + ',\n "data": {}\n}'


def _twice(content: str) -> str:
    return content.replace("linear.3.", "linear.2.")


def _mark(target: Path, _golden: Path) -> None:
    (_rank(target) / ".incomplete").write_text("{}")


def _of_no_rank(target: Path, golden: Path) -> None:
    edited(lambda document: document.update(written_with=["stack.json", "construct.json"]))(target, golden)
    for file in [*target.rglob("stack.json"), *target.rglob("construct.json")]:
        file.unlink()


def cut(name: str) -> Callable[[Path, Path], None]:
    def change(target: Path, _golden: Path) -> None:
        file = _rank(target) / name
        file.write_text(file.read_text()[:-2])

    return change


def _no_dump_json(target: Path, golden: Path) -> None:
    for root in (target, golden):
        (_rank(root, 1) / "dump.json").unlink()


def _empty_step(target: Path, _golden: Path) -> None:
    _rank(target, step=7).mkdir(parents=True)


SIDES = {
    "no Max": Case(without("Max"), TWO, "18 rows have Max on one side only"),
    "Max is null": Case(put(Max=None), TWO, "18 rows have Max on one side only"),
    "Max is text": Case(put(Max="17"), TWO, "18 rows have Max on one side only"),
    "no Norm and no Mean": Case(without("Norm", "Mean"), TWO, "18 rows have Norm on one side only"),
    "Norm is a list": Case(put(Norm=[1]), TWO, "18 rows have Norm on one side only"),
    "no statistics": Case(put(Max=None, Min=None, Mean=None, Norm=None), TWO, "18 rows have Mean on one side only"),
    "no dtype": Case(without("dtype"), TWO, "18 rows have dtype on one side only"),
    "type of a number": Case(put(type="int"), TWO, "records or values are damaged", numbers_alike=True),
    "one row": Case(
        edited(lambda document: document["data"]["Functional.linear.2.forward"]["output"][0].update(Max=None)),
        TWO,
        "1 row has Max on one side only",
    ),
}
CUT_OFF = "the run ended before this step was whole"
STEPS = {
    "cut off": Case(edited(lambda document: document.update(complete=False)), (*TWO, *ONE, *DRAWN), CUT_OFF),
    "cut off on both sides": Case(edited(lambda document: document.update(complete=False), both=True), (*TWO, *ONE), CUT_OFF),
    "marked": Case(_mark, (*TWO, *ONE, *DRAWN[:2]), CUT_OFF),
    "unknown task": Case(edited(lambda document: document.update(task="guess")), (*TWO, *ONE), "the task 'guess' is not known"),
    "lost": Case(
        edited(lambda document: document.update(lost={"outputs": 3})), (*TWO, *ONE, *DRAWN), "could not keep everything: outputs 3"
    ),
    "no stack.json": Case(
        lambda target, _: (_rank(target) / "stack.json").unlink(), (*TWO, *ONE, "trends"), "stack.json is not there; no line"
    ),
    "no construct.json": Case(
        lambda target, _: (_rank(target) / "construct.json").unlink(), (*TWO, *ONE, "trends"), "construct.json is not there; which call"
    ),
    "half of stack.json": Case(cut("stack.json"), (*TWO, *ONE), "killed process or full disk); no line of code is named"),
    "half of construct.json": Case(cut("construct.json"), (*TWO, *ONE), "killed process or full disk); which call ran in which"),
    "neither": Case(
        lambda target, _: [(_rank(target) / name).unlink() for name in ("stack.json", "construct.json")],
        (*TWO, *ONE),
        "is not there; which call",
    ),
    "neither, as a header says": Case(_of_no_rank, (*TWO, *ONE, *DRAWN), "stack.json, which was written with it, is not there; no line"),
    "no dump.json": Case(_no_dump_json, (*TWO, *ONE, *DRAWN), "no dump.json in rank1"),
    "step without a dump": Case(_empty_step, (*TWO, *ONE, *DRAWN), "no dump.json in the directories of steps 7"),
    "no record": Case(edited(lambda document: document["data"].clear()), (*TWO, *ONE, "trends"), "no record in it"),
    "second data": Case(text(_second_data, both=True), (*TWO, *ONE), "stands there more than once"),
    "second data on one line": Case(text(lambda content: _second_data(content).replace("\n", "")), TWO, "stands there more than once"),
    "repeated records": Case(text(_twice, both=True), (*TWO, *ONE), "1 records stand more than once"),
}


@pytest.mark.parametrize(
    ("name", "command"),
    [(name, command) for name, case in {**SIDES, **STEPS}.items() for command in case.commands],
)
def test_what_is_missing_is_said(name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, the same on both sides; the rest of them is compared and found to be the same, which is not said of what is missing."""
    case = {**SIDES, **STEPS}[name]
    target, golden = pair(tmp_path, 2)
    case.change(target, golden)
    code = run(command, target, golden, tmp_path / "out")
    said = "".join(capsys.readouterr())
    assert code == 3, said
    assert case.phrase in " ".join(said.split()), said
    assert name in STEPS or case.numbers_alike or "All numbers are the same" not in said, said
    shown = [line.removeprefix("warning").strip(": ") for line in map(str.strip, said.splitlines()) if case.phrase in line]
    assert not command.startswith("diagnose") or len(set(shown)) == len(shown), said


@pytest.mark.parametrize("command", ["compare", "diagnose two"])
def test_records_in_another_order_are_said(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All numbers are the same; that two calls were exchanged no number shows."""
    calls = {
        name: {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(2.0)]}
        for name in ("Torch.neg.0.forward", "Torch.abs.0.forward")
    }
    dump(_rank(tmp_path / "target"), extra=calls)
    dump(_rank(tmp_path / "golden"), extra=dict(reversed(calls.items())))
    assert run(command, tmp_path / "target", tmp_path / "golden", tmp_path / "out") == 0
    said = "".join(capsys.readouterr())
    assert "rank 0: 1 records stand in another order than in the golden run, the first is Torch.neg.0.forward: record 7, there 8" in said


@pytest.mark.parametrize("command", ["compare", "diagnose two"])
@pytest.mark.parametrize("lacking", ["target", "golden"])
def test_a_gradient_that_one_run_alone_has_is_a_difference(
    lacking: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing behind the last step shows that it never came, where the other gradients did. Where a run has none at all, they were kept
    elsewhere, and these are not compared."""
    names = [f"Module.{layer}.Linear.parameters_grad.0" for layer in "ab"]
    records = {name: {"weight": [tensor(number)]} for name, number in zip(names, (70.0, 80.0))}  # that no other record has
    for few, code in ((1, 1), (0, 3)):
        for side in ("target", "golden"):
            kept = names[:few] if side == lacking else names
            dump(_rank(tmp_path / f"{few}" / side), extra={name: records[name] for name in kept})
        found = run(command, tmp_path / f"{few}/target", tmp_path / f"{few}/golden", tmp_path / "out")
        said = "".join(capsys.readouterr())
        assert found == code, said
        assert names[few] in said, said


@given(st.lists(st.integers(0, 30), unique=True, max_size=12))
def test_as_few_records_as_possible_are_out_of_order(places: list[int]) -> None:
    """The rest stands in one order, and no larger rest does."""
    pairs = list(enumerate(places))
    out = out_of_order(pairs)
    rest = [pair for pair in pairs if pair not in out]
    assert rest == sorted(rest, key=lambda pair: pair[1])
    longest = [1] * len(places)
    for i in range(len(places)):
        longest[i] += max((longest[j] for j in range(i) if places[j] < places[i]), default=0)
    assert len(rest) == max(longest, default=0)


@pytest.mark.parametrize("command", [*TWO, *ONE, *DRAWN])
def test_whole_runs_are_clear(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The runs of the other tests before they are damaged."""
    target, golden = pair(tmp_path, 2)
    assert run(command, target, golden, tmp_path / "out") == 0, "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "record",
    [
        tensor(1.0) | {"Max": None, "Min": None, "Mean": None, "Norm": None, "uninitialised": True},
        tensor(1.0) | {"Max": None, "Min": None, "Mean": None, "Norm": None, "ignored": True},
    ],
    ids=["uninitialised", "ignored"],
)
@pytest.mark.parametrize("command", TWO)
def test_memory_that_nobody_has_written_is_no_loss(
    command: str, record: Document, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A side that says so needs no numbers: what the other one has read there is garbage."""
    target, golden = (dump(tmp_path / side / "step0/rank0") for side in ("target", "golden"))
    for directory, output in ((target, record), (golden, tensor(7.0))):
        document = json.loads((directory / "dump.json").read_text())
        document["data"]["Torch.empty.0.forward"] = {"input_args": [], "input_kwargs": {}, "output": [output]}
        (directory / "dump.json").write_text(json.dumps(document, indent=1))
    assert run(command, tmp_path / "target", tmp_path / "golden", tmp_path / "out") == 0, "".join(capsys.readouterr())


def _only(side: str, what: str) -> Change:
    def apply(target: Path, golden: Path) -> None:
        root = {"target": golden, "golden": target}[side]
        if what == "rank":
            shutil.rmtree(_rank(root, 1))
        elif what == "step":
            for run in (target, golden):
                shutil.copytree(run / "step0", run / "step1")
            shutil.rmtree(root / "step1")
        else:
            file = _rank(root) / "dump.json"
            document = json.loads(file.read_text())
            del document["data"]["Functional.linear.3.forward"]
            file.write_text(json.dumps(document, indent=1))

    return apply


@pytest.mark.parametrize("side", ["target", "golden"])
@pytest.mark.parametrize(
    ("what", "command", "codes", "phrase"),
    [
        ("rank", "compare", {3}, "ranks only in the {side}: 1"),
        ("rank", "diagnose two", {3}, "ranks 1 are on one side only"),
        ("record", "compare", {1}, "only in the {side}"),
        ("record", "diagnose two", {1}, "Functional.linear.3.forward"),
        ("step", "compare", {3}, "step 1 is not in"),
        ("step", "diagnose two", {3}, "step 1 is not in"),
    ],
)
def test_what_one_side_alone_has(
    what: str, command: str, codes: set[int], phrase: str, side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank, a step or a record of one side only is said, and changes the code."""
    target, golden = pair(tmp_path, 2)
    _only(side, what)(target, golden)
    code = run(command, target, golden, tmp_path / "out")
    said = "".join(capsys.readouterr())
    assert code in codes, said
    assert phrase.format(side=side) in said, said


def test_an_empty_directory_is_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nothing").mkdir()
    for command in (*TWO, *ONE, *DRAWN):
        assert run(command, tmp_path / "nothing", tmp_path / "nothing", tmp_path / "out") == 2, command
        capsys.readouterr()


def _monitored(path: Path, steps: range, ranks: int = 1) -> Path:
    """The JSON lines of a monitored run."""
    (path / "jsonl").mkdir(parents=True)
    for rank in range(ranks):
        frames = [
            {"step": step, "rank": rank, "time": 1.0, "complete": True, "scalars": {"loss": 1.0 + step}, "samples": [], "alerts": []}
            for step in steps
        ]
        (path / "jsonl" / f"rank{rank}.jsonl").write_text("".join(json.dumps(frame) + "\n" for frame in frames))
    return path


@pytest.mark.parametrize(
    ("command", "golden", "code", "phrase"),
    [
        ("diagnose one", None, 0, "5 numbers"),
        ("diagnose two", range(5), 0, "5 numbers"),
        ("diagnose two", range(3), 3, "3 numbers"),
        ("diagnose two", range(7, 9), 2, "no rank, step and tensor in common"),
        ("trends of two", range(5), 0, "the runs agree"),
        ("trends of two", range(7, 9), 3, "nothing was compared"),
    ],
)
def test_monitored_runs(
    command: str, golden: range | None, code: int, phrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was compared is said in numbers; runs without a common step are not the same."""
    target = _monitored(tmp_path / "target", range(5))
    other = target if golden is None else _monitored(tmp_path / "golden", golden)
    assert run(command, target, other, tmp_path / "out") == code
    said = "".join(capsys.readouterr())
    assert phrase in said, said


def test_a_monitored_run_without_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without a line: the training was killed before its first step. Both commands say so, with the same exit code."""
    target = _monitored(tmp_path / "target", range(0))
    assert run("diagnose one", target, tmp_path, tmp_path / "out") == 3
    said = "".join(capsys.readouterr())
    assert "no alert and no number in it" in said
    assert "no step is there" in said
    assert main(["monitor", "analyze", str(target)]) == 3
    assert "no step is there" in "".join(capsys.readouterr())


_TABLE = "vpp_stage,name,step,norm,nans,dtype,phase\n" + "".join(f"0,a.weight,{step},1.5,0,torch.float32,reduced\n" for step in range(5))


def _tables(path: Path) -> Path:
    """CSV of two families."""
    directory = path / "monitor" / "Nov24_10-00-00-rank0-0000"
    directory.mkdir(parents=True)
    for family in ("grad_reduced", "param_updated"):
        (directory / f"{family}_0-4.csv").write_text(_TABLE)
    return path


@pytest.mark.parametrize(
    ("before", "after", "code", "phrase"),
    [
        ("a.weight,3,", "z.weight,3,", 3, "rank 0, grad_reduced/a.weight, step 3"),
        (_TABLE, "", 3, "5 numbers of steps that both runs have are not in the other run"),
        ("0,a.weight,4,1.5,0,torch.float32,reduced\n", "", 3, "1 number of a step that both runs have is not in the other run"),
        ("a.weight,2,1.5,", "a.weight,2,nan,", 1, "a.weight"),
    ],
)
def test_a_number_of_one_monitored_run_alone(
    before: str, after: str, code: int, phrase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row, a name or a table that only one run has is said."""
    target, golden = _tables(tmp_path / "target"), _tables(tmp_path / "golden")
    assert run("diagnose two", target, golden, tmp_path / "out") == 0
    damaged = next(target.rglob("grad_reduced*"))
    damaged.write_text(damaged.read_text().replace(before, after))
    assert run("diagnose two", target, golden, tmp_path / "out") == code
    assert phrase in "".join(capsys.readouterr())


def _watched(path: Path, begun: int, without: int = -1) -> Path:
    """A run of steps up to 19 that looks at tensors in its first three and in every fifth; `without`: a step whose tensors are gone."""
    directory = path / "monitor" / "Nov24_10-00-00-rank0-0000"
    directory.mkdir(parents=True)
    steps = range(begun, 20)
    looked = [step for step in steps if (step < begun + 3 or step % 5 == 0) and step != without]
    (directory / "scalars_0-99.csv").write_text("step,name,value\n" + "".join(f"{step},loss,{5 - step / 10}\n" for step in steps))
    table = _TABLE.splitlines()[0] + "\n" + "".join(f"0,a.weight,{step},1.5,0,torch.float32,reduced\n" for step in looked)
    (directory / "grad_reduced_0-99.csv").write_text(table)
    monitor = {"start_step": 0, "interval": 5, "first_steps": 3}
    (directory / "run.json").write_text(json.dumps({"rank": 0, "world_size": 1, "first_step": begun, "monitor": monitor}))
    return path


@pytest.mark.parametrize(("without", "code"), [(-1, 0), (15, 3)])
def test_first_steps_of_a_run_that_went_on(without: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It looks at more steps than the whole run, which passes over them by its settings: said, and nothing is missing. A step that both
    look at is."""
    target, golden = _watched(tmp_path / "resumed", 11), _watched(tmp_path / "whole", 0, without)
    assert run("diagnose two", target, golden, tmp_path / "out") == code
    said = "".join(capsys.readouterr())
    assert "looked at tensors in steps 11-13" in said
    assert ("is not in the other run" in said) == bool(code)


def test_counts_of_nan_are_found_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = _tables(tmp_path / "target")
    damaged = next(target.rglob("grad_reduced*"))
    damaged.write_text(damaged.read_text().replace("a.weight,0,1.5,0,", "a.weight,0,1.5,5,"))
    assert run("diagnose one", target, target, tmp_path / "out") == 1
    assert "a.weight" in "".join(capsys.readouterr())


def test_ranks_of_one_monitored_run_alone_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, golden = _monitored(tmp_path / "target", range(5), 2), _monitored(tmp_path / "golden", range(5))
    assert run("diagnose two", target, golden, tmp_path / "out") == 3
    assert "rank 1 is on one side only" in "".join(capsys.readouterr())


@pytest.mark.parametrize("swapped", [False, True])
def test_settings_of_one_pack_alone(swapped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One pack has the settings that the frameworks resolved, the other those of its script alone."""
    whole, part = PACK, tmp_path / "part.zip"
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(part, "w") as copy:
        for name in source.namelist():
            if "hyperparameters" not in name:
                copy.writestr(name, source.read(name))
    sides = (part, whole) if swapped else (whole, part)
    assert main(["config_check", "-c", *map(str, sides), "-o", str(tmp_path / "out")]) == 3
    said = "".join(capsys.readouterr())
    assert said.startswith("Cannot tell")
    assert f"only the {'target' if swapped else 'golden'} pack has hyperparameters_dynamic.json" in said
