"""Reading dumps: those of the existing tool, any path level, and damaged or hostile files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dump_frames as frames
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import DumpFormatError, ProbeError, UsageError
from msprobe_engine.core.records import Opaque
from msprobe_engine.formats.dump import frame_log
from msprobe_engine.formats.dump.completeness import missing_ranks, missing_steps
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.writing.text import Template
from msprobe_engine.probe.estimate.recorded_step import elements
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSIONS = ["8.1.1", "26.2.0"]


TENSOR = '{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "shape": [1], '


def rank_directory(root: Path, dump: str, stack: str | None = None, construct: str | None = None) -> Path:
    path = root / "step0" / "rank0"
    path.mkdir(parents=True)
    for name, text in (("dump.json", dump), ("stack.json", stack), ("construct.json", construct)):
        if text is not None:
            (path / name).write_text(text)
    return path


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["L0", "L1", "mix", "tensor", "debug", "two_ranks"])
def test_every_dump_of_the_existing_tool(version: str, kind: str) -> None:
    """Every record and every tensor object in the files of both versions arrives with its statistics."""
    dump = open_dump(FIXTURES / version / kind)
    for step in dump.steps:
        for rank in dump.ranks(step):
            loaded = dump.load(step, rank)
            path = dump.path(step, rank)
            file = path / ("debug.json" if kind == "debug" else "dump.json")
            raw = json.loads(file.read_text())
            assert list(loaded.entries) == list(raw["data"])
            expected: list[Any] = []

            def collect(node: Any, found: list[Any] = expected) -> None:
                if isinstance(node, dict) and "dtype" in node:
                    found.append([node[k] for k in ("Max", "Min", "Mean", "Norm")])
                elif isinstance(node, (dict, list)):
                    for child in node.values() if isinstance(node, dict) else node:
                        collect(child)

            collect(raw["data"])
            got = [[t.max, t.min, t.mean, t.norm] for e in loaded.entries.values() for _, t in e.tensors()]
            assert len(got) > 2
            np.testing.assert_equal(got, expected)
            assert loaded.complete
            assert not loaded.recovered
            assert loaded.framework == "pytorch"


@pytest.mark.parametrize("version", VERSIONS)
def test_values_of_the_existing_tool(version: str) -> None:
    """Integers stay integers, bools bools, NaN NaN; counts are None because that tool does not count."""
    dump = open_dump(FIXTURES / version / "L1").load(0)
    nan = dict(dump.entries["Torch.mul.1.forward"].tensors())["input.0"]
    assert math.isnan(float(nan.max or 0))
    assert nan.nonfinite
    assert nan.nan_count is None
    flag = dict(dump.entries["Torch.isnan.0.forward"].tensors())["output.0"]
    assert flag.max is False
    assert dict(dump.entries["Torch.add.0.forward"].tensors())["input.1"].max == 2**40
    assert dump.entries["Torch.mul.0.forward"].sections["input_args"][1] == Opaque({"type": "float", "value": 1e300})
    assert dump.entries["Torch.add.0.forward"].stack[0].startswith("File ")
    recompute = dump.entries["Torch.add.0.forward"].tags
    assert recompute == ({"is_recompute": False} if version == "8.1.1" else {})


@pytest.mark.parametrize("version", VERSIONS)
def test_parents_and_tensor_files(version: str) -> None:
    """Parents come from construct.json, and saved tensors are found next to the file whatever dump_data_dir says."""
    mix = open_dump(FIXTURES / version / "mix").load(0)
    assert mix.entries["Functional.linear.4.forward"].parent == "Module.head.Linear.forward.0"
    assert mix.construct["optimizer"] is None
    saved = open_dump(FIXTURES / version / "tensor").load(0)
    paths = [None if t.data_name is None else saved.files.source(t.data_name).path for e in saved.entries.values() for _, t in e.tensors()]
    assert len(paths) == 8
    assert all(p is not None and p.is_file() for p in paths)


def test_renamed_process_directories() -> None:
    """Steps that 26.2.0 left in proc{pid} get the rank that the renamed directory of the first step proves."""
    dump = open_dump(FIXTURES / "26.2.0" / "late")
    assert dump.ranks(0) == [0, 1]
    assert dump.ranks(1) == [0, 1]
    first = json.loads((dump.path(0, 1) / "dump.json").read_text())["dump_data_dir"]
    assert dump.path(1, 1).name in first
    assert dump.load(1, 1).rank == 1


def test_every_path_level(tmp_path: Path) -> None:
    """Root, step directory, rank directory and dump.json give the same records."""
    DumpSink(tmp_path, level="mix", rank=2).write(frames.big_frame(7, 4))
    expected = list(open_dump(tmp_path).load(7, 2).entries)
    for path in ("step7", "step7/rank2", "step7/rank2/dump.json"):
        dump = open_dump(tmp_path / path)
        assert (dump.steps, dump.ranks(7)) == ([7], [2])
        assert list(dump.load(7).entries) == expected


def test_steps_and_ranks_sort_as_numbers(tmp_path: Path) -> None:
    """Step 10 comes after step 9 and rank 10 after rank 2; wrong ones are refused with what there is."""
    for step in (10, 9):
        for rank in (2, 10):
            DumpSink(tmp_path, level="mix", rank=rank).write(frames.big_frame(step, 2))
    dump = open_dump(tmp_path)
    assert (dump.steps, dump.ranks(9)) == ([9, 10], [2, 10])
    with pytest.raises(UsageError, match="steps 9, 10"):
        dump.load(3, 2)
    with pytest.raises(UsageError, match="ranks 2, 10; choose one"):
        dump.load(9)
    with pytest.raises(UsageError, match="ranks 2, 10; not 5"):
        dump.load(9, 5)


def test_old_stack_layout_and_micro_steps(tmp_path: Path) -> None:
    """The older stack.json, parents with micro steps, an empty parent, and statistics written as words are understood."""
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "Max": "NaN", "Min": "-Infinity", "Mean": "N/A", "Norm": None}
    doc = {"task": "statistics", "data": {"Torch.f.0.forward": {"input_args": [tensor], "output": [{}]}}}
    stack, construct = (
        {"Torch.f.0.forward": ["File a", "File b"]},
        {"Torch.f.0.forward": ["Module.a.B.forward.0", 2], "Module.a.B.forward.0": ["", 0]},
    )
    rank_directory(tmp_path, json.dumps(doc), json.dumps(stack), json.dumps({**construct, "megatron_micro_step_number": 3}))
    dump = open_dump(tmp_path).load(0, 0)
    entry = dump.entries["Torch.f.0.forward"]
    assert (entry.stack, entry.parent, entry.micro_step) == (("File a", "File b"), "Module.a.B.forward.0", 2)
    assert dump.construct == {"Torch.f.0.forward": "Module.a.B.forward.0", "Module.a.B.forward.0": None}
    ((_, found),) = entry.tensors()
    assert math.isnan(float(found.max or 0))
    assert found.min == -math.inf
    assert found.mean is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"task": "statistics",\n "data": {"Torch', r"dump\.json: line 2: .*cut off"),
        ('{"data": {"Torch.f.0.forward": tru}}', "line 1: .*damaged"),
        ("[]", "JSON object is needed"),
        ("{}", "'data' is missing"),
        ('{"data": []}', "no JSON object"),
        ('{"data": {"Torch.f.0.forward": 3}}', "must be a JSON object"),
        ('{"data": {"Torch.f.0.forward": {"output": ' + "[" * 120 + "]" * 120 + "}}}", "nested deeper"),
        ('{"data": ' + "[" * 200_000, "nested too deeply|cut off"),
        (TENSOR + '"Max": ' + "9" * 10_000 + "}]}}}", "trust|64 bits"),
        (TENSOR + '"Max": ' + "9" * 100 + "}]}}}", "64 bits"),
        ('{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "shape": [1], "Max": "abc"}]}}}', "Max = 'abc'"),
        ('{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "shape": [-2]}]}}}', "shape"),
        ('{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "nan_count": -1}]}}}', "nan_count"),
        ('{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "data_name": "../../x.pt"}]}}}', "plain file name"),
        ("\ufeff{}\x00\x01", "line 1|'data' is missing"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, text: str, message: str) -> None:
    """A damaged or hostile dump.json gives a DumpFormatError that names the file and what is wrong."""
    path = rank_directory(tmp_path, text)
    with pytest.raises(DumpFormatError, match=message) as caught:
        open_dump(tmp_path).load(0, 0)
    assert str(path) in str(caught.value)


def test_symbolic_sizes_are_read(tmp_path: Path) -> None:
    """A size that a tracer only knew as a symbol is written as -1: the dump is read, and such a tensor costs nothing in an estimate."""
    rank_directory(tmp_path, '{"data": {"Torch.f.0.forward": {"output": [{"type": "t", "dtype": "d", "shape": [-1, 4]}]}}}')
    entry = open_dump(tmp_path).load(0, 0).entries["Torch.f.0.forward"]
    assert [tensor.description.shape for _, tensor in entry.tensors()] == [(-1, 4)]
    assert elements((-1, 4)) == 0
    assert elements((2, 4)) == 8


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": [1, 2'])
def test_damaged_stack_file(tmp_path: Path, text: str) -> None:
    """A damaged stack.json is named."""
    rank_directory(tmp_path, '{"data": {}}', text)
    with pytest.raises(DumpFormatError, match=r"stack\.json"):
        open_dump(tmp_path).load(0, 0)


KEYS = st.sampled_from(["type", "dtype", "shape", "Max", "value", "data_name", "k"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(KEYS, c, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(json_values, json_values, json_values)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: Any, stack: Any, construct: Any) -> None:
    """Arbitrary JSON in the three files gives a StepDump or a ProbeError, nothing else."""
    root = tmp_path_factory.mktemp("dump")
    doc = {"data": {"Torch.f.0.forward": data, "Module.a.B.forward.0": {"input_args": [data]}, "x.0.debug": data}}
    rank_directory(root, json.dumps(doc), json.dumps(stack), json.dumps(construct))
    try:
        loaded = open_dump(root).load(0, 0)
    except ProbeError:
        return
    assert len(loaded.entries) == 3
    assert all(isinstance(place, str) for e in loaded.entries.values() for place, _ in e.tensors())


def test_no_dump_here(tmp_path: Path) -> None:
    """A directory without a dump, or none at all, is refused with what is expected."""
    (tmp_path / "logs").mkdir()
    with pytest.raises(DumpFormatError, match=r"expected step.*logs"):
        open_dump(tmp_path)
    with pytest.raises(DumpFormatError, match="no such file or directory"):
        open_dump(tmp_path / "nothing")


@pytest.fixture
def log(tmp_path: Path) -> bytes:
    sink = DumpSink(tmp_path, level="mix", rank=0)
    sink.write_log(frames.big_frame(0, 4))
    return (tmp_path / "step0/rank0/.frame.bin").read_bytes()


@given(st.data())
def test_a_changed_byte_in_the_log_is_noticed(log: bytes, data: st.DataObject) -> None:
    """Any changed byte of a frame log is noticed by its checksums."""
    at, value = data.draw(st.integers(0, len(log) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(log)
    changed[at] ^= value
    with pytest.raises(DumpFormatError):
        frame_log.decode(bytes(changed), "x")


def test_the_log_decodes(log: bytes) -> None:
    """An unchanged frame log gives the text of dump.json."""
    frame = frame_log.decode(log, "x")
    assert (frame.step, frame.rank) == (0, 0)
    assert len(json.loads(frame.dump_json())["data"]) == 4


def test_a_log_that_would_grow_without_end_is_refused() -> None:
    """Text is made of operations; those of a file of some kilobytes could make gigabytes of it."""
    template = Template(b"{}", np.tile(np.array([1, 0, 2, 0], np.int32), (100_000, 1)))
    packed = frame_log.pack(template, b"{}", b"{}")
    parts = frame_log.encode(packed, 0, 0, b'{\n "data": ', np.zeros(1, np.int32), np.zeros(0), np.zeros((1, 16)))
    with pytest.raises(DumpFormatError, match="header of the frame log is damaged"):
        frame_log.decode(b"".join(bytes(part) for part in parts), "x")


def test_root_that_is_called_as_a_step(tmp_path: Path) -> None:
    """A root of the name step1 is a root: what is inside counts."""
    rank_directory(tmp_path / "step1", '{"task": "statistics", "level": "L1", "data": {"Torch.f.0.forward": {"output": []}}}')
    dump = open_dump(tmp_path / "step1")
    assert (dump.steps, dump.ranks(0)) == ([0], [0])


def written_by(root: Path, began: float, ended: float, *places: str) -> None:
    for place in places:
        (root / place).mkdir(parents=True, exist_ok=True)
        times = f'"run_began": {began}, "step_ended": {ended}, ' if ended else ""
        (root / place / "dump.json").write_text(f'{{"task": "statistics", {times}"data": {{}}}}')


def read_places(root: Path) -> list[str]:
    dump = open_dump(root)
    return [str(dump.path(step, rank).relative_to(root)) for step in dump.steps for rank in dump.ranks(step)]


def test_what_an_earlier_run_has_left_is_not_read(tmp_path: Path) -> None:
    """Ranks and steps that the later run has not replaced; a step of it can be read by its directory."""
    written_by(tmp_path, 100, 110, *(f"step{step}/rank{rank}" for step in range(4) for rank in range(3)))
    written_by(tmp_path, 200, 210.5, *(f"step{step}/rank{rank}" for step in range(2) for rank in range(2)))
    assert read_places(tmp_path) == [f"step{step}/rank{rank}" for step in range(2) for rank in range(2)]
    dump = open_dump(tmp_path)
    assert missing_steps(dump) == [f"{tmp_path}: of an earlier run in this directory, and not read: steps 2, 3"]
    assert missing_steps(dump, [0]) == []
    assert missing_ranks(dump, 1) == [f"{tmp_path}, step 1: of an earlier run in this directory, and not read: rank2"]
    with pytest.raises(UsageError, match="step 2 is of an earlier run; give its directory to read it alone; there are steps 0, 1"):
        dump.ranks(2)
    assert open_dump(tmp_path / "step2").ranks(2) == [0, 1, 2]


def test_a_process_that_began_late_is_of_the_same_run(tmp_path: Path) -> None:
    """Processes without a group do not wait for one another; the one that was first had not ended when the other one began."""
    written_by(tmp_path, 100, 101, "step0/rank0")
    written_by(tmp_path, 102, 103, "step0/rank1")
    written_by(tmp_path, 100, 105, "step1/rank0")
    written_by(tmp_path, 102, 105, "step1/rank1")
    assert read_places(tmp_path) == [f"step{step}/rank{rank}" for step in range(2) for rank in range(2)]


def test_a_killed_process_of_an_earlier_run(tmp_path: Path) -> None:
    """Its frame log tells, too."""
    DumpSink(tmp_path, level="mix", rank=1, began=100.0).write_log(frames.big_frame(0, 2))
    written_by(tmp_path, 1e11, 2e11, "step0/rank0")
    assert read_places(tmp_path) == ["step0/rank0"]


def test_processes_without_ranks_of_two_runs(tmp_path: Path) -> None:
    written_by(tmp_path, 100, 110, "step0/proc7", "step1/proc7")
    written_by(tmp_path, 200, 210, "step0/proc33")
    assert read_places(tmp_path) == ["step0/proc33"]


@pytest.mark.parametrize(
    ("began", "ended", "place"),
    [
        (109.9, 120.0, "step0/rank1"),  # it began before the other one had ended the step
        (200.0, 210.0, "step1/rank0"),  # a run that goes on
        (0.0, 0.0, "step0/rank1"),  # the existing tool's
    ],
)
def test_what_may_be_of_one_run_is_read(tmp_path: Path, began: float, ended: float, place: str) -> None:
    written_by(tmp_path, 100, 110, "step0/rank0")
    written_by(tmp_path, began, ended, place)
    assert read_places(tmp_path) == ["step0/rank0", place]
