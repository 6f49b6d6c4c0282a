"""Nothing is called equal of which a part was taken away: one side of real small runs is damaged in every way that a place of its files
allows (a key deleted, a list or an object emptied, a value made null, a file cut off, removed or renamed), and every command must answer
with another code than 0. What may go without a word is listed in `NOT_COMPARED`, each with its reason."""

from __future__ import annotations

import copy
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import warm

from msprobe_engine.cli.main import main

Way = tuple[str | int, ...]
Damage = Callable[[Path], object]

DUMP_COMMANDS = {
    "compare": "compare -tp {target} -gp {golden} -o {out} --workers 1",
    "tables": "compare -tp {target} -gp {golden} -o {out} --workers 1 --no_diagnose",
    "first difference": "compare -da -tp {target} -gp {golden} -o {out}",
    "diagnose": "diagnose {target} {golden} -o {out}",
    "graph": "graph {target} {golden} -o {out} --format html --workers 1",
}
NOT_COMPARED = {
    "dump": {
        r"(del|null) (task|level|framework|summary_mode)": "what it stands for without the key is what the dump is, or the records say it",
        r"(del|null) (rank|world_size)": "of one rank nothing else is asked; a dump without them does not say how many ranks the run had",
        r"(del|null) (dump_data_dir|nonfinite_counts)": "says where files lie and who wrote; no number",
        r"\S+ (written_with|run_began|step_ended)\S*": "says who wrote it, and when; no number",
        r"\S+ \S+\.requires_grad": "True and False are told apart; a flag that is not known is no number",
        r"\S+ data\.Distributed\S*\.async": "says when the result is waited for, not what it is",
        r"(del|null|empty) data\.\S+\.input_kwargs": "only of calls that have none, or none with a value",
        r"\S+ data\.\S+\.generator\S*": "a generator has no value that can be compared",
        r"(del|empty|pop|null) data\.\S+\.(Max|Min|Mean|Norm)": "a checksum, or the saved tensor, says more than the statistics",
    },
    "accepted": {
        r"(del|null|empty|pop) data\.Functional\.forward\.input_(args|kwargs)\S*": "an argument of a call whose result is the same",
        r"null data\.\w+\.forward\.input_args\.#": "a tensor that one run alone gives to a call whose result is the same",
        r"null data\.\w+\.forward\.output\.#": "a result whose numbers stand in another record, too",
        r"del data\.(Functional|Module)\.(forward|backward)": "a call of one run alone, where what others are given is the same",
    },
    "pack": {
        r"del msprobe/system/\S+#\w+#\w+": "values of one machine that are harmless: the release of its system, the number of its processors",  # noqa: E501
        r"del msprobe/hyperparameters/\S+#\S+#(origin|where|framework)": "where a value comes from; two runs may say it in two places",
        r"\S+ msprobe/hyperparameters/\S+#optimizer\.\w+(#value)?": "what a run does not say is the framework's default, which is known",
        r"del msprobe/hyperparameters/\S+#(world_size|model.parameters_of_rank)(#value)?": "follows from the ranks and the layout",
        r"del msprobe/(meta|ranks/rank\*).json#(host|node|step_unit|rank|world_size|local_rank|process)": "where the run was; the file has the rank in its name",  # noqa: E501
        r"del msprobe/dataset/\S+#samples": "digests of the rows, beside that of the whole batch",
        r"del msprobe/system/\S+#flags#(autocast.cpu|autocast.cuda|mkldnn.enabled)": "null where it is off; harmless by the rules of the system",  # noqa: E501
        r"del msprobe/system/\S+#(devices|drivers)": "empty on a machine without devices",
        r"del msprobe/weights/\S+#\S+#kind": "says parameter or buffer",
        r"\S+ weights/\S+": "the existing tool's statistics, beside digests of the same tensors",
        r"\S+ dataset/\S+": "the existing tool's statistics, beside digests of the same samples",
        r"\S+ hyperparameters/hyperparameters_dynamic.json\S*": "the existing tool's form of what is there rank by rank",
        r"\S+ env#?\S*": "the existing tool's form of what is there rank by rank",
    },
}


def _kind(name: str) -> str:
    family = next(word for word in ("Module", "Distributed", "") if name.startswith(word)) or "Functional"
    return f"{family}.{'gradients' if 'parameters_grad' in name else 'backward' if 'backward' in name else 'forward'}"


def _places(node: Any, at: Way = ()) -> Iterator[Way]:
    if at:
        yield at
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _places(child, (*at, key))


def _at(document: Any, way: Way) -> Any:
    for key in way:
        document = document[key]
    return document


def _damaged(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what was done, the text) for one place of each kind in a dump.json."""
    done = set()
    for way in _places(document):
        value, last = _at(document, way), way[-1]
        shown = ["*" if k > 2 and way[k - 1] == "parameters" else "#" if isinstance(key, int) else str(key) for k, key in enumerate(way)]
        if way[0] == "data" and len(way) > 1:
            shown[1] = _kind(str(way[1]))
        kinds = ["del" if isinstance(last, str) else "pop", "null", *(["empty"] if value and isinstance(value, (list, dict)) else [])]
        for kind in kinds:
            name = f"{kind} {'.'.join(shown)}"
            if name in done or (kind == "null" and value is None):
                continue
            done.add(name)
            other = copy.deepcopy(document)
            parent = _at(other, way[:-1])
            if kind in ("del", "pop"):
                del parent[last]
            else:
                parent[last] = None if kind == "null" else type(value)()
            yield name, json.dumps(other, indent=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `two_rank_runs.py` has trained."""
    root = tmp_path_factory.mktemp("runs")
    done = warm.run((Path(__file__).parents[1] / "two_rank_runs.py").read_text(), root, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def run(command: str, target: Path, golden: Path, out: Path) -> int:
    """The exit code."""
    shutil.rmtree(out, ignore_errors=True)
    return main([part.format(target=target, golden=golden, out=out) for part in command.split()])


def unexplained(names: list[str], part: str) -> list[str]:
    """Damages without a word that `NOT_COMPARED` does not list."""
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in NOT_COMPARED[part])]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "diagnose"])
@pytest.mark.parametrize(("task", "side"), [("statistics", "target"), ("statistics", "golden"), ("md5", "target"), ("tensor", "golden")])
def test_a_place_of_a_dump(task: str, side: str, command: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of place in dump.json of one rank and step; what leads to the same numbers is accepted, and named."""
    sides = {name: tmp_path / name for name in ("target", "golden")}
    for place in sides.values():
        shutil.copytree(runs / task / "step0/rank0", place / "step0/rank0")
    sides = {name: place / "step0/rank0" for name, place in sides.items()}
    assert run(DUMP_COMMANDS[command], sides["target"], sides["golden"], tmp_path / "out") == 0
    file = sides[side] / "dump.json"
    document, silent = json.loads(file.read_text()), []
    for name, text in _damaged(document):
        file.write_text(text)
        code = run(DUMP_COMMANDS[command], sides["target"], sides["golden"], tmp_path / "out")
        named = re.search(r"(was|were) not compared: what is made of|^  only in ", capsys.readouterr().out, re.MULTILINE)
        if code == 0 and not (named and not unexplained([name], "accepted")):
            silent.append(name)
    assert not unexplained(silent, "dump")


def _text(change: Callable[[str], str], *names: str) -> Damage:
    def apply(root: Path) -> None:
        for name in names:
            for file in root.glob(name):
                file.write_text(change(file.read_text()))

    return apply


def _removed(name: str) -> Damage:
    return lambda root: [shutil.rmtree(place) if place.is_dir() else place.unlink() for place in root.glob(name)]


def _renamed(name: str, other: str) -> Damage:
    return lambda root: (root / name).rename(root / other)


def _copied(name: str, other: str) -> Damage:
    return lambda root: shutil.copytree(root / name, root / other)


DUMP_FILES: dict[str, tuple[str, Damage]] = {
    "a file cut off": ("statistics", _text(lambda text: text[: len(text) // 2], "step0/rank0/dump.json")),
    "no dump.json": ("statistics", _removed("step0/rank0/dump.json")),
    "no rank": ("statistics", _removed("step0/rank1")),
    "another name of a rank": ("statistics", _renamed("step0/rank1", "step0/rank_1")),
    "another rank": ("statistics", _renamed("step0/rank1", "step0/rank7")),
    "two directories of a rank": ("statistics", _copied("step0/rank0", "step0/rank00")),
    "no step": ("statistics", _removed("step1")),
    "another step": ("statistics", _renamed("step1", "step7")),
    "another name of a step": ("statistics", _renamed("step1", "steps1")),
    "structure": ("statistics", _text(lambda text: text.replace('"task": "statistics"', '"task": "structure"'), "step*/rank*/dump.json")),
    "no checksums": ("md5", _text(lambda text: re.sub(r',\s*"md5": "[^"]*"', "", text), "step*/rank*/dump.json")),
    "no names of files": ("tensor", _text(lambda text: re.sub(r',\s*"data_name": "[^"]*"', "", text), "step*/rank*/dump.json")),
    "no saved tensors": ("tensor", _removed("step0/rank0/dump_tensor_data")),
    "one saved tensor less": ("tensor", _removed("step0/rank0/dump_tensor_data/Functional.linear.0.forward.output.0.*")),
}


def _cells() -> Iterator[Any]:
    """Every damage, side and command; in the fast tier each damage on either side, each command on either side."""
    for (i, damage), (j, side), (k, command) in product(*(enumerate(part) for part in (DUMP_FILES, ("target", "golden"), DUMP_COMMANDS))):
        yield pytest.param(damage, side, command, marks=[pytest.mark.slow] if (i + 2 * j + k) % 4 else [])


@pytest.mark.parametrize(("damage", "side", "command"), _cells())
def test_files_of_a_dump(damage: str, side: str, command: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file or directory that was removed, renamed or cut off, and what all records of a side lack."""
    task, change = DUMP_FILES[damage]
    for name in ("target", "golden"):
        shutil.copytree(runs / task, tmp_path / name)
    change(tmp_path / side)
    code = run(DUMP_COMMANDS[command], tmp_path / "target", tmp_path / "golden", tmp_path / "out")
    assert code == 3, "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["compare", "diagnose", "graph"])
def test_numbers_that_neither_side_has(command: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nulls on both sides are not the same numbers."""
    sides = {name: tmp_path / name for name in ("target", "golden")}
    for place in sides.values():
        shutil.copytree(runs / "statistics/step0/rank0", place / "step0/rank0")
        file = place / "step0/rank0/dump.json"
        file.write_text(re.sub(r'"(Max|Min|Mean|Norm)": [^,}]+', r'"\1": null', file.read_text()))
    code = run(DUMP_COMMANDS[command], sides["target"], sides["golden"], tmp_path / "out")
    said = "".join(capsys.readouterr())
    assert code in (2, 3), said
    assert code == 2 or "no number on either side" in said


GELU, DROPOUT, LINEAR, SUM = (
    "Functional.gelu.0.forward",
    "Functional.dropout.0.forward",
    "Module.first.Linear.forward.0",
    "Distributed.all_reduce.0.forward",
)
SAVED = f"step0/rank0/dump_tensor_data/{GELU}.output.0.pt"


def _set(*way: Any, step: int = 0, rank: int = 0) -> Damage:
    """Put a value, the last argument, into a record of dump.json; "header" in place of its name: into the file itself."""

    def apply(root: Path) -> None:
        file = root / f"step{step}/rank{rank}/dump.json"
        document = json.loads(file.read_text())
        parent = _at(document, way[1:-2] if way[0] == "header" else ("data", *way[:-2]))
        parent[way[-2]] = way[-1]
        file.write_text(json.dumps(document, indent=1))

    return apply


def _kept(*names: str) -> Damage:
    def apply(root: Path) -> None:
        file = root / "step0/rank0/dump.json"
        document = json.loads(file.read_text())
        document["data"] = {name: record for name, record in document["data"].items() if name in names}
        file.write_text(json.dumps(document, indent=1))

    return apply


def _saved(change: Callable[[Any], Any]) -> Damage:
    def apply(root: Path) -> None:
        torch = pytest.importorskip("torch")
        torch.save(change(torch.load(root / SAVED)), root / SAVED)

    return apply


def _dangling(name: str) -> Damage:
    def apply(root: Path) -> None:
        shutil.rmtree(root / name)
        (root / name).symlink_to("nowhere")

    return apply


def _numbers(value: Any, *names: str, section: str = "") -> Damage:
    """Another value, or no key, in place of the statistics of some records, or of one section of them."""
    new = "" if value == "gone" else rf'"\1": {json.dumps(value)},'

    def put(content: Any) -> Any:
        return json.loads(re.sub(r'"(Max|Min|Mean|Norm)": [^,}]+,', new, json.dumps(content)))

    def apply(root: Path) -> None:
        file = root / "step0/rank0/dump.json"
        document = json.loads(file.read_text())
        for name in names:
            record = document["data"][name]
            document["data"][name] = record | {section: put(record[section])} if section else put(record)
        file.write_text(json.dumps(document, indent=1))

    return apply


def _without(*names: str) -> Damage:
    def apply(root: Path) -> None:
        file = root / "step0/rank0/dump.json"
        document = json.loads(file.read_text())
        document["data"] = {name: record for name, record in document["data"].items() if name not in names}
        file.write_text(json.dumps(document, indent=1))

    return apply


def _with_call(*shape: int) -> Damage:
    """A call behind all others, of the loss, with a result that no other record holds."""

    def apply(root: Path) -> None:
        file = root / "step0/rank0/dump.json"
        document = json.loads(file.read_text())
        loss = document["data"]["Tensor.mean.0.forward"]["output"][0]
        given = loss | {"shape": list(shape), "requires_grad": False, "Max": 7.0, "Min": 5.0, "Mean": 6.0, "Norm": 9.0}
        document["data"]["Torch.exp.0.forward"] = {"input_args": [loss], "input_kwargs": {}, "output": [given]}
        file.write_text(json.dumps(document, indent=1))

    return apply


CHANGED: dict[str, tuple[str, int, Damage]] = {
    "an argument": ("statistics", 1, _set(GELU, "input_kwargs", "approximate", "value", "none")),
    "an argument beside checksums": ("md5", 1, _set(GELU, "input_kwargs", "approximate", "value", "none")),
    "an argument beside saved tensors": ("tensor", 1, _set(GELU, "input_kwargs", "approximate", "value", "none")),
    "the type of an argument": ("statistics", 1, _set(DROPOUT, "input_kwargs", "p", {"type": "str", "value": "0.1"})),
    "the dtype of an output": ("statistics", 1, _set(GELU, "output", 0, "dtype", "torch.bfloat16")),
    "the dtype of an output beside checksums": ("md5", 1, _set(GELU, "output", 0, "dtype", "torch.bfloat16")),
    "the dtype of what goes in": ("statistics", 1, _set(GELU, "input_args", 0, "dtype", "torch.float64")),
    "the dtype of a parameter": ("statistics", 1, _set(LINEAR, "parameters", "weight", "dtype", "torch.float64")),
    "the shape of an output": ("statistics", 1, _set(GELU, "output", 0, "shape", [4, 3])),
    "the shape of what goes in": ("statistics", 1, _set(LINEAR, "input_args", 0, "shape", [6, 3])),
    "the shape of what goes into a collective": ("statistics", 1, _set(SUM, "input_args", 0, "shape", [6, 4])),
    "a result that nothing else holds": ("statistics", 3, _set("Tensor.add_.5.forward", "output", 0, None)),
    "no call of a function": ("statistics", 0, _without(GELU)),
    "no call of a module": ("statistics", 0, _without("Module.norm.LayerNorm.forward.0")),
    "no backward call": ("statistics", 0, _without("Functional.gelu.0.backward")),
    "no gradients of parameters": ("statistics", 1, _without("Module.last.Linear.parameters_grad.0")),
    "a call for a log": ("statistics", 0, _with_call()),
    "a call whose result nothing else holds": ("statistics", 3, _with_call(4, 2)),
    "a frozen parameter": ("statistics", 1, _set(LINEAR, "parameters", "weight", "requires_grad", False)),
    "a detached output": ("statistics", 1, _set(GELU, "output", 0, "requires_grad", False)),
    "the ranks of a collective": ("statistics", 1, _set(SUM, "tags", "group_ranks", [0])),
    "no ranks of a collective": ("statistics", 3, _set(SUM, "tags", {})),
    "a reduction": ("statistics", 1, _set(SUM, "reduce", "avg")),
    "no reduction": ("statistics", 3, _set(SUM, "reduce", None)),
    "a wait": ("statistics", 0, _set(SUM, "async", True)),
    "the class of a tensor": ("statistics", 0, _set(GELU, "input_args", 0, "type", "torch.nn.parameter.Parameter")),
    "the level in the header": ("statistics", 0, _set("header", "level", "L1")),
    "the task in the header": ("statistics", 3, _set("header", "task", "tensor")),
    "all but the first call of a function": ("statistics", 1, _kept("Functional.linear.0.forward")),
    "all but one record": ("md5", 1, _kept(GELU)),
    "what goes into a module": ("statistics", 1, _numbers(7.0, LINEAR, section="input_args")),
    "what goes into a module holds NaN": ("statistics", 1, _numbers("NaN", LINEAR, section="input_args")),
    "a saved tensor of another shape": ("tensor", 3, _saved(lambda tensor: tensor.reshape(4, 3))),
    "a saved tensor of fewer elements": ("tensor", 3, _saved(lambda tensor: tensor[:2])),
    "a saved tensor of another type": ("tensor", 3, _saved(lambda tensor: tensor.double())),
}  # fmt: skip
SAID = {0: r"No difference beyond round-off( in steps? .+)?\.", 1: "(?!No difference).+", 3: r"No difference in what could be compared; .+"}


def _sides() -> Iterator[Any]:
    """Every change on either side; in the fast tier on one, in turn."""
    for (i, change), (j, side) in product(enumerate(CHANGED), enumerate(("target", "golden"))):
        yield pytest.param(change, side, marks=[pytest.mark.slow] if (i + j) % 2 else [])


@pytest.mark.parametrize(("change", "side"), _sides())
def test_commands_agree(change: str, side: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What records say beside numbers: one answer of all three commands, and the first line says what the code says."""
    task, expected, apply = CHANGED[change]
    for name in ("target", "golden"):
        shutil.copytree(runs / task / "step0", tmp_path / name / "step0")
    apply(tmp_path / side)
    for command in ("compare", "diagnose", "graph"):
        code = run(DUMP_COMMANDS[command], tmp_path / "target", tmp_path / "golden", tmp_path / "out")
        said = capsys.readouterr().out
        assert (command, code) == (command, expected), said
        assert re.fullmatch(SAID[expected], said.split("\n")[0]), (command, said)


def test_values_of_one_run_are_one_sentence(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many steps and ranks have them."""
    for name in ("target", "golden"):
        shutil.copytree(runs / "statistics", tmp_path / name)
    for step, rank in product(range(2), range(2)):
        _set(GELU, "output", 0, None, step=step, rank=rank)(tmp_path / "target")
    assert run(DUMP_COMMANDS["diagnose"], tmp_path / "target", tmp_path / "golden", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert said.count("what is made of them was compared") == 1
    assert "In steps 0-1, 4 values that only one of the runs has" in said
    assert f"The first is {GELU}.output.0." in said


def _no_sum(root: Path) -> None:
    """All ranks get twice the sum."""
    for rank in (0, 1):
        file = root / f"step0/rank{rank}/dump.json"
        document = json.loads(file.read_text())
        record = document["data"]["Distributed.all_reduce.2.forward"]  # of the weight of a norm, whose mean is not 0
        record["output"][0] |= {name: 2 * record["output"][0][name] for name in ("Max", "Min", "Mean", "Norm")}
        file.write_text(json.dumps(document, indent=1))


ALONE: dict[str, tuple[int, str, Damage]] = {
    "nothing": (0, "", lambda _: None),
    "null": (3, "a tensor without numbers", _numbers(None, GELU)),
    "text": (3, "a tensor without numbers", _numbers("?", GELU)),
    "no key": (3, "a tensor without numbers", _numbers("gone", GELU)),
    "the text NaN": (1, "gelu", _numbers("NaN", GELU)),
    "null in a collective": (3, "a tensor without numbers", _numbers(None, SUM)),
    "null in a parameter": (3, "a tensor without numbers", _numbers(None, LINEAR)),
    "a rank of one step": (3, "no directory of ranks 1, which other steps have", _removed("step0/rank1")),
    "a rank of all steps": (3, "no directory of ranks 1, which the run had", _removed("step*/rank1")),
    "a rank that is a link to nothing": (3, "no dump.json in rank1", _dangling("step0/rank1")),
    "a step that is a link to nothing": (3, "no dump.json in the directories of steps 1", _dangling("step1")),
}


@pytest.mark.parametrize(
    "command", ["nan_analyze -i {target} -o {out}", "diagnose {target} -o {out}", "graph {target} -o {out} --format html --workers 1"]
)
@pytest.mark.parametrize("damage", ALONE)
def test_one_run(damage: str, command: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search for NaN says of which records it had no numbers and which ranks are not there."""
    expected, phrase, change = ALONE[damage]
    shutil.copytree(runs / "statistics", tmp_path / "target")
    change(tmp_path / "target")
    code = run(command, tmp_path / "target", tmp_path / "target", tmp_path / "out")
    said = "".join(capsys.readouterr())
    assert code == expected, said
    assert phrase in said
    assert expected != 3 or re.search("warnings? says? what could not be looked at", said.split("\n")[0])


@pytest.mark.parametrize("damage", ["a rank of one step", "a rank of all steps", "a rank that is a link to nothing"])
def test_what_both_runs_lack(damage: str, runs: Path, tmp_path: Path) -> None:
    """A rank that neither side has in one step, or in any."""
    for side in ("target", "golden"):
        shutil.copytree(runs / "statistics", tmp_path / side)
        ALONE[damage][2](tmp_path / side)
    for command in ("compare", "diagnose", "graph"):
        assert run(DUMP_COMMANDS[command], tmp_path / "target", tmp_path / "golden", tmp_path / "out") == 3, command


def test_ranks_that_were_not_chosen(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that the settings leave out is not missing."""
    chosen, out = runs / "chosen", tmp_path / "out"
    again = shutil.copytree(chosen, tmp_path / "again")
    assert [place.name for place in (chosen / "step0").iterdir()] == ["rank0"]
    for command in (*DUMP_COMMANDS.values(), "nan_analyze -i {target} -o {out}", "diagnose {target} -o {out}"):
        assert run(command, chosen, again, out) == 0, "".join(capsys.readouterr())


@pytest.mark.parametrize(("asynchronous", "code"), [(False, 1), (True, 0)])
def test_a_sum_that_is_none(asynchronous: bool, code: int, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean of what a sum gives is the sum of the means that went in; what was read before the call was done says nothing."""
    shutil.copytree(runs / "statistics", tmp_path / "target")
    _no_sum(tmp_path / "target")
    for rank in (0, 1):
        _set("Distributed.all_reduce.2.forward", "async", asynchronous, rank=rank)(tmp_path / "target")
    assert run("diagnose {target} -o {out}", tmp_path / "target", tmp_path / "target", tmp_path / "out") == code
    assert ("A collective gives a wrong result" in capsys.readouterr().out) is not asynchronous


def test_numbers_of_two_structures(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two dumps of task structure hold no numbers: nothing is said of these."""
    code = run(DUMP_COMMANDS["diagnose"], runs / "structure", runs / "structure", tmp_path / "out")
    assert code in (2, 3)
    assert "numbers are the same" not in "".join(capsys.readouterr())


def _entries(pack: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(pack) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _store(pack: Path, entries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(pack, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def _damaged_packs(entries: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Entries of all ranks removed, emptied or cut off; keys of the entries of rank 0, two levels deep, removed."""
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(re.sub(r"rank\d", "rank*", name), []).append(name)
    for group, names in groups.items():
        yield f"del {group}", {name: content for name, content in entries.items() if name not in names}
        yield f"empty {group}", entries | dict.fromkeys(names, b"{}")
        yield f"half {group}", entries | {name: entries[name][: len(entries[name]) // 2] for name in names}
        name = names[0]
        document = json.loads(entries[name]) if entries[name][:1] == b"{" else {}
        for key, value in document.items():
            yield f"del {group}#{key}", entries | {name: json.dumps({k: v for k, v in document.items() if k != key}).encode()}
            for inner in value if isinstance(value, dict) else ():
                less = {k: v for k, v in value.items() if k != inner}
                yield f"del {group}#{key}#{inner}", entries | {name: json.dumps(document | {key: less}).encode()}


@pytest.mark.slow
@pytest.mark.parametrize("pack", ["pack.zip", "monitored/config_check_pack.zip"])
@pytest.mark.parametrize("side", ["target", "golden"])
def test_a_place_of_a_pack(side: str, pack: str, runs: Path, tmp_path: Path) -> None:
    """Packs of a ConfigChecker and of a probe."""
    entries, silent = _entries(runs / pack), []
    command = "config_check -c {golden} {target} -o {out}"
    places = {name: tmp_path / f"{name}.zip" for name in ("target", "golden")}
    for place in places.values():
        _store(place, entries)
    assert run(command, places["target"], places["golden"], tmp_path / "out") == 0
    for name, damaged in _damaged_packs(entries):
        _store(places[side], damaged)
        if run(command, places["target"], places["golden"], tmp_path / "out") == 0:
            silent.append(name)
    assert not unexplained(silent, "pack")


BOTH_PACKS = [
    *(f"{way} msprobe/{name}" for way in ("del", "empty") for name in ("meta.json", *(f"{p}/rank*.json" for p in ("ranks", "env", "withheld", "system")))),  # noqa: E501
    "del hyperparameters/hyperparameters_dynamic.json", "empty msprobe/hyperparameters/rank*.json", "del env", "del pip", "empty pip",
]  # fmt: skip


def test_both_packs_damaged(runs: Path, tmp_path: Path) -> None:
    """What a pack must have is missed on both sides, too, and when its ranks are held against each other."""
    damaged = dict(_damaged_packs(_entries(runs / "pack.zip")))
    for name in BOTH_PACKS:
        for side in ("target", "golden"):
            _store(tmp_path / f"{side}.zip", damaged[name])
        sides = tmp_path / "target.zip", tmp_path / "golden.zip"
        assert run("config_check -c {golden} {target} -o {out}", *sides, tmp_path / "out") == 3, name
        assert run("config_check --ranks {target}", *sides, tmp_path / "out") == 3, name


@pytest.mark.parametrize("key", ["values", "tensors", "counts"])
def test_a_manifest(key: str, runs: Path, tmp_path: Path) -> None:
    """A manifest of digests of which a part was taken away is not equal to its checkpoint."""
    manifest = tmp_path / "digests.json"
    assert main(["ckpt", "digest", str(runs / "checkpoint.pt"), "-o", str(manifest)]) == 0
    assert main(["ckpt", "diff", str(manifest), str(runs / "checkpoint.pt")]) == 0
    document = json.loads(manifest.read_text())
    for emptied in ({}, {name: value for k, (name, value) in enumerate(document[key].items()) if k}):
        manifest.write_text(json.dumps(document | {key: emptied}, indent=1))
        assert main(["ckpt", "diff", str(manifest), str(runs / "checkpoint.pt")]) in (1, 2, 3)


def test_a_checkpoint_without_a_section(runs: Path, tmp_path: Path) -> None:
    """A value at the top that the other checkpoint of the same format has."""
    torch = pytest.importorskip("torch")
    saved = torch.load(runs / "checkpoint.pt")
    for name in ("iteration", "lr"):
        torch.save({key: value for key, value in saved.items() if key != name}, tmp_path / "less.pt")
        assert main(["ckpt", "diff", str(tmp_path / "less.pt"), str(runs / "checkpoint.pt")]) == 3


MONITORED: dict[str, tuple[Damage, int, str]] = {
    "nothing": (lambda _: None, 1, "First alert: step 5"),
    "no file of alerts": (_removed("monitor/*/alerts.jsonl"), 3, "have no alerts.jsonl"),
    "an empty file of alerts": (_text(lambda _: "", "monitor/*/alerts.jsonl"), 3, "0 alerts are in it"),
    "nor an incident": (lambda root: [_removed("monitor/*/alerts.jsonl")(root), _removed("incidents")(root)], 3, "says that"),
    "no run.json either": (lambda root: [_removed("monitor/*/alerts.jsonl")(root), _removed("monitor/*/run.json")(root)], 3, "has an incident"),  # noqa: E501
    "alerts cut off": (_text(lambda text: text[:20], "monitor/*/alerts.jsonl"), 3, "in what could be read"),
}  # fmt: skip


@pytest.mark.parametrize("damage", MONITORED)
def test_alerts_of_a_run(damage: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That there are no alerts is said of what was looked at, and not where the run itself says that there were some."""
    shutil.copytree(runs / "monitored", tmp_path / "run")
    change, code, phrase = MONITORED[damage]
    change(tmp_path / "run")
    assert main(["monitor", "analyze", str(tmp_path / "run")]) == code
    assert phrase in "".join(capsys.readouterr())
