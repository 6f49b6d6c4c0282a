"""`msprobe show`, the overview behind it, and ``msprobe show RUN --why NAME``: why is it not in my dump?"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.names import name_in_records
from msprobe_engine.formats.run.overview import read_overview
from msprobe_integrations.torch.capture.api_names import ApiNames


def test_the_latest_launch_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where launches lie in directories of their own, the one that ``latest`` leads to is named; a link that leads elsewhere is none."""
    for name in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        (tmp_path / name / "dump" / "step0" / "rank0").mkdir(parents=True)
        (tmp_path / name / "dump" / "step0" / "rank0" / "dump.json").write_text("{}")
    (tmp_path / "latest").symlink_to("20260102-000000-bbbb")
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "latest: 20260102-000000-bbbb"
    assert read_overview(tmp_path).to_json()["latest"] == "20260102-000000-bbbb"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path.parent)
    assert read_overview(tmp_path).latest == ""


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output directory with one of everything."""
    for step, rank in [(0, "rank0"), (0, "rank10"), (0, "rank2"), (12, "rank0")]:
        here = tmp_path / "dump" / f"step{step}" / rank
        here.mkdir(parents=True)
        (here / "dump.json").write_text("{}")
    (tmp_path / "dump/step12/rank0/dump_tensor_data").mkdir()
    (tmp_path / "dump/step12/rank0/dump_tensor_data/a.pt").write_bytes(b"1234")
    (tmp_path / "dump/step12/rank1").mkdir()
    (tmp_path / "dump/step12/rank1/.incomplete").write_text("")
    (tmp_path / "dump/step13/proc77").mkdir(parents=True)
    (tmp_path / "incidents/step12").mkdir(parents=True)
    (tmp_path / "incidents/step12/incident.json").write_text('{"step": 12, "rank": 1, "rule": "nan_inf", "x": [1]}')
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor/actv_0-9.csv").write_text("")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events.out.tfevents.1.host").write_text("")
    return tmp_path


def test_everything_is_listed(output: Path) -> None:
    """Dumped steps with their ranks in numeric order, marks of incomplete ranks, incidents, tables and event files are listed."""
    assert read_overview(output).text().splitlines() == [
        str(output),
        "dump: 3 steps, 12 B",
        "  step 0: rank0, rank2, rank10",
        "  step 12: rank0 (1 tensor, 4 B), rank1 (INCOMPLETE)",
        "  step 13: proc77 (no dump.json)",
        "incidents: 1",
        "  incidents/step12: step 12, rank 1, rule nan_inf",
        "tables monitor: 1 CSV file",
        f"TensorBoard tensorboard: tensorboard --logdir {output}/tensorboard",
    ]


def test_json_holds_the_same(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the listing as data."""
    assert main(["show", str(output), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    empty = {"tensors": 0, "bytes": 0, "tensor_bytes": 0, "packed": False, "not_saved": 0, "lost": ""}
    assert tree["dumps"]["dump"]["12"][1] == {"rank": "rank1", "files": [], "incomplete": True, **empty}
    assert tree["dumps"]["dump"]["12"][0]["tensor_bytes"] == 4
    assert tree["incidents"][0]["incident"]["x"] == [1]
    assert tree["tables"] == {"monitor": 1}


def test_a_step_directory_itself_can_be_shown(output: Path) -> None:
    """Given a step directory, its ranks are listed."""
    assert [r.name for r in read_overview(output / "dump/step0").dumps["."][0]] == ["rank0", "rank2", "rank10"]


def test_a_damaged_incident_is_still_listed(output: Path) -> None:
    """An unreadable incident.json does not hide the incident."""
    (output / "incidents/step12/incident.json").write_text("{")
    assert read_overview(output).incidents == [("incidents/step12", {})]


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    """A path that is no directory is answered with what to give."""
    with pytest.raises(UsageError, match="no such file or directory"):
        read_overview(tmp_path / "x")


def rank(root: Path, *, tensors: dict[str, str], **files: str) -> Path:
    here = root / "step3" / "rank0"
    (here / "dump_tensor_data").mkdir(parents=True)
    for name, text in {"dump.json": "{}", **files}.items():
        (here / name).write_text(text)
    for name, text in tensors.items():
        (here / "dump_tensor_data" / name).write_text(text)
    return here


def test_a_tensor_of_several_names_takes_its_room_once(tmp_path: Path) -> None:
    """Hard links are counted as names, and once in the size."""
    folder = rank(tmp_path, tensors={"a.pt": "x" * 1500}) / "dump_tensor_data"
    (folder / "b.pt").hardlink_to(folder / "a.pt")
    assert read_overview(tmp_path).text().splitlines()[1:] == ["dump: 1 step, 1.5 kB", "  step 3: rank0 (2 tensors, 1.5 kB)"]


def test_packed_tensors_are_counted_in_the_index(tmp_path: Path) -> None:
    """Packed files show how many names their index has; without an index (killed run) that is said."""
    index = json.dumps({"tensors": {"a": {}, "b": {}}, "aliases": {"c": "a"}})
    folder = rank(tmp_path, tensors={"pack-00000.safetensors": "x" * 2000, "index.json": index}) / "dump_tensor_data"
    assert "rank0 (3 tensors, packed, 2.1 kB)" in read_overview(tmp_path).text()
    (folder / "index.json").unlink()
    assert "rank0 (tensors without index, packed, 2.0 kB)" in read_overview(tmp_path).text()
    (folder / "index.json").write_text("[")
    assert read_overview(tmp_path).dumps["."][3][0].tensors == -1


def test_what_was_not_saved_is_shown(tmp_path: Path) -> None:
    """The list of tensors that could not be saved is counted; a damaged one does not stop the listing."""
    listed = [{"name": "a.pt", "bytes": 8, "reason": "max_disk_gb is used up"}] * 3
    here = rank(tmp_path, tensors={}, **{"not_saved.json": json.dumps({"not_saved": listed}), "shapes.json": "{}"})
    assert "  step 3: rank0 (3 NOT SAVED)" in read_overview(tmp_path).text().splitlines()
    assert read_overview(tmp_path).dumps["."][3][0].files == ("dump.json", "shapes.json", "not_saved.json")
    (here / "not_saved.json").write_text("[[[")
    assert read_overview(tmp_path).dumps["."][3][0].not_saved == 0


def test_odd_files_do_not_stop_the_listing(tmp_path: Path) -> None:
    """Links that lead nowhere, directories in place of files and names with line breaks are listed, not followed."""
    here = rank(tmp_path, tensors={"a\nb.pt": "x"})
    (here / "stack.json").symlink_to("/nonexistent")
    (here / "construct.json").mkdir()
    (here / "dump_tensor_data" / "c.pt").symlink_to(tmp_path)
    (monitor := tmp_path / "monitor" / "Nov21_10-00-00-rank0-0123abcd").mkdir(parents=True)
    (monitor / "actv_0-9.csv").write_bytes(b"vpp_stage,name,step\r0,w,3\r\n\xff\x00")
    assert "actv" in read_overview(tmp_path).text()
    found = read_overview(tmp_path).dumps["."][3][0]
    assert (found.tensors, found.tensor_bytes) == (2, 1)
    assert found.files == ("dump.json", "stack.json", "construct.json")


def monitored(root: Path, rank: int, steps: range, alerts: int = 0, *, numbers: bool = True) -> None:
    """The files of one rank of a monitored run, as the CSV sink names them."""
    here = root / "monitor" / f"Nov21_10-00-0{rank}-rank{rank}-0123abcd"
    here.mkdir(parents=True)
    (here / "run.json").write_text("{}")
    (here / "grad_reduced_0-99.csv").write_text("vpp_stage,name,step,norm\n")
    if numbers:
        (here / "scalars_0-99.csv").write_text("step,name,value\n" + "".join(f"{step},loss,1.5\n" for step in steps))
    if alerts:
        (here / "alerts.jsonl").write_text("{}\n" * alerts + '{"extra":{"over":true}}\n')


def test_a_monitored_run(tmp_path: Path) -> None:
    """All ranks of a monitor are one line: steps that are there (not those of the file names), families, files, alerts. Other sinks and
    what was made of the run afterwards have a line each; ranks of TensorBoard are one directory."""
    monitored(tmp_path, 0, range(3, 41), alerts=2)
    monitored(tmp_path, 1, range(3, 42))
    for rank in range(2):
        (tmp_path / f"tensorboard/rank{rank}").mkdir(parents=True)
        (tmp_path / f"tensorboard/rank{rank}/events.out.tfevents.1.host").write_text("")
        (tmp_path / "jsonl").mkdir(exist_ok=True)
        (tmp_path / f"jsonl/rank{rank}.jsonl").write_text("{}\n")
        (tmp_path / f"anomaly_detected/rank{rank}").mkdir(parents=True)
        (tmp_path / f"anomaly_detected/rank{rank}/anomaly.json").write_text("{}")
    (tmp_path / "report.html").write_text("<html>")
    (tmp_path / "trends.html").write_text("<html>")
    (tmp_path / "graph_20260101120000.html").write_text("<html>")
    (tmp_path / "compare_20260101120000.vis.db").write_text("")
    (tmp_path / "rank0.trend.db").write_text("")
    lines = read_overview(tmp_path).text().splitlines()
    assert lines[1].startswith("monitor: 2 ranks, steps 3 to 41: grad_reduced (7 files, ")
    assert lines[1].endswith("); 2 alerts")
    assert lines[2:] == [
        "JSON lines jsonl: 2 files, 6 B",
        "alerts in the existing format anomaly_detected: 2 files, 4 B",
        "graph page graph_20260101120000.html: 6 B",
        "graphs for TensorBoard compare_20260101120000.vis.db: 0 B",
        "report report.html: 6 B",
        "trend data base rank0.trend.db: 0 B",
        "trends page trends.html: 6 B",
        f"TensorBoard tensorboard: tensorboard --logdir {tmp_path}/tensorboard",
    ]
    found = read_overview(tmp_path / "monitor").to_json()["monitors"]["."]
    assert (found["ranks"], found["steps"], found["alerts"]) == ([0, 1], [3, 41], 2)


def test_a_monitor_without_numbers_of_the_steps(tmp_path: Path) -> None:
    """The existing tool's directories have no such file: steps are those of the tables, else of their names. Damage hides nothing."""
    monitored(tmp_path, 0, range(0), numbers=False)
    assert "monitor: 1 rank, step 0: grad_reduced" in read_overview(tmp_path).text()
    here = next((tmp_path / "monitor").iterdir())
    (here / "grad_reduced_0-99.csv").write_text("vpp_stage,name,step,norm\n" + "".join(f'0,"a,b",{step},1.0\n' for step in range(4, 31)))
    assert "monitor: 1 rank, steps 4 to 30: grad_reduced" in read_overview(tmp_path).text()
    (here / "scalars_0-99.csv").write_bytes(b"step,name\n\xff\xfe,\n" + b"9" * 5000)
    assert "monitor: 1 rank, step 0: grad_reduced" in read_overview(tmp_path).text()


def test_packs_and_further_runs(output: Path) -> None:
    """A pack of the run, the one before it, and a run that was here at the same time, with what it wrote."""
    for name, size in (("config_check_pack.zip", 7), ("config_check_pack.previous.zip", 3), ("run-2/config_check_pack.zip", 5)):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(bytes(size))
    (output / "run-2/dump/step0/rank0").mkdir(parents=True)
    (output / "run-2/dump/step0/rank0/dump.json").write_text("{}")
    (output / "run-3").mkdir()
    (output / "rerun-4").mkdir()
    lines = read_overview(output).text().splitlines()
    assert lines[1].startswith("further runs: run-2, run-3 (")
    assert "configuration pack: 2 files, 10 B" in lines
    assert "configuration pack run-2/config_check_pack.zip: 5 B" in lines
    assert "dump run-2/dump: 1 step, 2 B" in lines
    assert read_overview(output).to_json()["runs"] == ["run-2", "run-3"]


@pytest.mark.parametrize("files", [(), ("train.py", "notes/loss.txt")])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_directory_without_anything_of_ours_is_wrong_usage(
    files: tuple[str, ...], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that asks for a listing is not told that all is well where there is nothing to list."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert main(["show", str(tmp_path), *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{tmp_path}: nothing that msprobe writes is here" in shown.err


Capture = pytest.CaptureFixture[str]
PLAIN = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "requires_grad": False, "Max": 1, "Min": 1, "Mean": 1, "Norm": 1}
BASE = ("Functional.linear.0.forward", "Functional.linear.1.forward", "Functional.linear.0.backward", "Module.fc.Linear.forward.0")


def write(root: Path, step: int, rank: int, records: tuple[str, ...] = BASE, construct: tuple[str, ...] = (), **header: Any) -> Path:
    """One rank of one step."""
    place = root / f"step{step}" / f"rank{rank}"
    place.mkdir(parents=True)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None, **header}
    data = {name: {"input_args": [PLAIN], "input_kwargs": {}, "output": [PLAIN]} for name in records}
    (place / "dump.json").write_text(json.dumps({**head, "data": data}))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys((*records, *construct))))
    return root


def answer(root: Path, name: str, capsys: Capture) -> tuple[int, str]:
    code = main(["show", str(root), "--why", name])
    return code, capsys.readouterr().out


CASES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "it is there": ("Functional.linear.0.forward", {}, 0, "is in the dump: step 0, rank 0\n  record     Functional.linear.0.forward"),
    "a part of its name": ("linear", {}, 0, "record     Functional.linear.1.forward"),
    "fewer calls": ("Functional.linear.7.forward", {}, 1, "in step 0 of rank0 it has calls 0-1 and no call 7 (forward)"),
    "no gradient": ("Functional.linear.1.backward", {}, 1, "it has calls 0 and no call 1 (backward)"),
    "no backward pass": ("Module.fc.Linear.backward.0", {}, 1, "no gradient went through it (no grad mode, detached"),
    "a name as Python has it": ("torch.nn.functional.linear", {}, 0, "record     Functional.linear.0.forward"),
    "a class as Python has it": ("torch.nn.Linear", {}, 0, "record     Module.fc.Linear.forward.0"),
    "the pass of a class": ("nn.Linear.forward", {}, 0, "record     Module.fc.Linear.forward.0"),
    "a pass that was not recorded": ("torch.nn.Linear.backward", {}, 3, "like it    Functional.linear.0.backward"),
    "a name that nothing is like": ("gibberish", {}, 3, "perhaps    it has another name: no record of this dump is called so, or like it"),
    "an operator below Python": ("torch.ops.aten.linear", {"records": ("Aten.linear.0.forward",)}, 0, "record     Aten.linear.0.forward"),
    "no operation": ("torch.Tensor.item", {}, 1, "item is never recorded: it is no operation on the data of a tensor"),
    "a name as Python has it, level L0": (
        "torch.nn.functional.relu",
        {"level": "L0"},
        1,
        "level L0 records modules, and this is a call of a function",
    ),
    "level L0": ("Functional.relu.0.forward", {"level": "L0"}, 1, "level L0 records modules, and this is a call of a function"),
    "level L1": ("Module.norm.LayerNorm.forward.0", {"level": "L1"}, 1, "level L1 records calls of functions, and this is a module"),
    "a list": ("Functional.relu.0.forward", {"selection": {"list": ["fc"]}}, 1, "dump.list keeps only what ['fc'] names"),
    "a scope": (
        "Functional.relu.0.forward",
        {"selection": {"scope": ["a", "b"]}},
        1,
        "dump.scope keeps only what happens from ['a', 'b'] on",
    ),
    "a risk level": (
        "Torch.relu.0.forward",
        {"selection": {"risk_level": "CORE"}},
        1,
        "dump.risk_level CORE records a part of the functions",
    ),
    "a direction": (
        "Torch.relu.0.backward",
        {"selection": {"data_mode": ["forward"]}},
        1,
        "dump.data_mode ['forward'] leaves out what is backward",
    ),
    "a node": (
        "Functional.relu.0.forward",
        {"construct": ("Functional.relu.0.forward",)},
        1,
        "it was called, and is a node of construct.json",
    ),
    "overflows": ("Functional.relu.0.forward", {"task": "overflow_check"}, 1, "task overflow_check records calls with NaN or Inf"),
    "nothing is known": ("Functional.linaer.0.forward", {}, 3, "perhaps    it was called with no tensor among its arguments and results"),
    "mistyped": ("Functional.linaer.0.forward", {}, 3, "like it    Functional.linear.0.forward"),
}


@pytest.mark.parametrize("case", CASES)
def test_why(case: str, tmp_path: Path, capsys: Capture) -> None:
    """What the dump says, and the exit code: 0 it is there, 1 it is missing and known why, 3 it is not known."""
    name, given, code, said = CASES[case]
    ended, text = answer(write(tmp_path, 0, 0, **given), name, capsys)
    assert said in text
    assert ended == code


@pytest.mark.parametrize("place", ["torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor"])
def test_a_name_as_python_has_it_is_the_name_in_records(place: str) -> None:
    """Every public function of these places is asked for under the name that recording gives it."""
    space, known, seen = importlib.import_module(place) if place != "torch.Tensor" else torch.Tensor, ApiNames(), 0
    for name in dir(space):
        function = getattr(space, name)
        if name.startswith("_") or isinstance(function, type) or getattr(function, "__module__", "") == "typing" or not callable(function):
            continue
        if (recorded := known.resolve(function)) is not None:
            seen += 1
            assert name_in_records(f"{place}.{name}") == ".".join(recorded)
    assert seen > 10


def test_another_rank_and_another_step_have_it(tmp_path: Path, capsys: Capture) -> None:
    for step, rank, records in ((0, 0, BASE), (0, 1, BASE[:1]), (1, 0, BASE[:1]), (1, 1, BASE[:1])):
        write(tmp_path, step, rank, records)
    code, text = answer(tmp_path, "Module.fc", capsys)
    assert code == 1
    assert text.splitlines()[0] == "Module.fc is in the dump: step 0, rank 0"
    assert "and not in step 0, rank 1; step 1, ranks 0-1" in text
    assert "it was called in step 0, rank 0" in text


def test_what_cannot_be_read_is_no_answer(tmp_path: Path, capsys: Capture) -> None:
    """A rank whose file is damaged may have it."""
    write(tmp_path, 0, 0)
    (write(tmp_path, 0, 1) / "step0" / "rank1" / "dump.json").write_text("{")
    code, text = answer(tmp_path, "Functional.linear.0.forward", capsys)
    assert code == 3
    assert "unread     " in text


def test_as_json(tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", str(write(tmp_path, 0, 0)), "--why", "relu", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["absent"], told["present"]) == ("relu", {"0": [0]}, {})


def test_without_a_dump(tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", str(tmp_path), "--why", "relu"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_an_empty_name_is_wrong_usage(tmp_path: Path, capsys: Capture) -> None:
    """It is in every record, and says nothing."""
    assert main(["show", str(write(tmp_path, 0, 0)), "--why", ""]) == 2
    assert "--why: no name" in capsys.readouterr().err
