"""The dump sink: files, markers, recovery, failures."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import dump_frames as frames
import numpy as np
import pytest

from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.io import output_files
from msprobe_engine.core.records import Entry, Frame, Opaque, TensorDescription, TensorRef
from msprobe_engine.formats.dump import layout, world
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.dump.writing import text
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink


def tensor(row: int, dtype: str = "torch.float32", grad: bool | None = False, **extra: Any) -> TensorRef:
    return TensorRef(row, TensorDescription("torch.Tensor", dtype, (2,), grad, "cpu", tuple(extra.items())))


def small_frame(step: int = 0, **changes: Any) -> Frame:
    """A module that calls a function, its backward and its gradients."""
    rows = np.concatenate([
        frames.row_of(np.array([1.0, -2.0], np.float32)),
        frames.row_of(np.array([1, 2**60])),
        frames.row_of(np.array([True, False])),
        frames.row_of(np.array([np.nan, np.inf], np.float32)),
        frames.row_of(np.array([3 + 4j])),
        frames.row_of(np.array([], np.float32)),
        frames.row_of(np.array([0.1, 0.2], np.float32), 0xABC),
    ])  # fmt: skip
    entries = [
        Entry("Functional.linear.0.forward", {"input_args": [tensor(0), tensor(1, "torch.int64"), tensor(2, "torch.bool")],
              "input_kwargs": {"alpha": Opaque({"type": "float", "value": 0.5})}, "output": [tensor(3)]}, "Module.fc.Linear.forward.0", 0),
        Entry("Module.fc.Linear.forward.0", {"input_args": [tensor(0)], "input_kwargs": {}, "output": [tensor(4, "torch.complex64")],
              "parameters": {"weight": tensor(5, placements=[{"Shard": {"dim": 0}}])}}, None, 1, 0, {"is_recompute": True}),
        Entry("Module.fc.Linear.backward.0", {"input": [tensor(6)], "output": [None]}, None, -1, 1),
        Entry("Module.fc.Linear.parameters_grad.0", {"weight": [tensor(-1)]}),
        Entry("Tensor.mul_.0.forward", {"input_args": [], "input_kwargs": {}, "output": []}, "optimizer", 1),
    ]  # fmt: skip
    stacks = [["File /job/a.py, line 1, in f, \n x"], ["File /job/b.py, line 2, in g, \n y"]]
    return Frame(**{"step": step, "rank": 3, "rows": rows, "entries": entries, "stacks": stacks, "level": "mix", **changes})


def sink(root: Path, **changes: Any) -> DumpSink:
    return DumpSink(root, **{"level": "mix", "rank": 3, **changes})


def test_the_three_files(tmp_path: Path) -> None:
    """A frame becomes dump.json, stack.json and construct.json in the schema of the existing tool."""
    made = sink(tmp_path)
    assert isinstance(made, Sink)
    made.write(small_frame(), [])
    made.flush()
    made.close()
    path = tmp_path / "step0" / "rank3"
    assert sorted(p.name for p in path.iterdir()) == ["construct.json", "dump.json", "stack.json"]
    doc = json.loads((path / "dump.json").read_text())
    assert list(doc) == ["task", "level", "framework", "dump_data_dir", "nonfinite_counts", "written_with", "micro_steps", "data"]
    assert (doc["task"], doc["level"], doc["framework"], doc["dump_data_dir"]) == ("statistics", "mix", "pytorch", None)
    linear = doc["data"]["Functional.linear.0.forward"]
    first = {
        "type": "torch.Tensor",
        "dtype": "torch.float32",
        "shape": [2],
        "Max": 1.0,
        "Min": -2.0,
        "Mean": -0.5,
        "Norm": 5**0.5,
        "requires_grad": False,
    }
    assert linear["input_args"][0] == first
    assert list(linear["input_args"][0]) == list(first)
    ints, bools = linear["input_args"][1:]
    assert (ints["Max"], ints["Min"]) == (2**60, 1)
    assert (bools["Max"], bools["Min"], bools["Mean"], bools["Norm"]) == (True, False, None, None)
    assert linear["input_kwargs"] == {"alpha": {"type": "float", "value": 0.5}}
    assert (linear["output"][0]["nan_count"], linear["output"][0]["inf_count"]) == (1, 1)
    module = doc["data"]["Module.fc.Linear.forward.0"]
    assert module["is_recompute"] is True
    assert module["output"][0]["Norm"] == 5.0
    assert [module["parameters"]["weight"][k] for k in ("Max", "Min", "Mean", "Norm")] == [None] * 4
    assert module["parameters"]["weight"]["placements"] == [{"Shard": {"dim": 0}}]
    assert doc["data"]["Module.fc.Linear.backward.0"]["input"][0]["digest"] == "0000000000000abc"
    assert doc["data"]["Module.fc.Linear.backward.0"]["tags"]["micro_step"] == 1
    assert json.loads((path / "stack.json").read_text()) == {
        "0": [["Functional.linear.0.forward"], ["File /job/a.py, line 1, in f, \n x"]],
        "1": [["Module.fc.Linear.forward.0", "Tensor.mul_.0.forward"], ["File /job/b.py, line 2, in g, \n y"]],
    }
    assert json.loads((path / "construct.json").read_text()) == {
        "Functional.linear.0.forward": "Module.fc.Linear.forward.0",
        "Module.fc.Linear.forward.0": None,
        "Module.fc.Linear.backward.0": None,
        "optimizer": None,
        "Tensor.mul_.0.forward": "optimizer",
    }
    assert stat.S_IMODE((path / "dump.json").stat().st_mode) & 0o137 == 0
    assert stat.S_IMODE(path.stat().st_mode) & 0o027 == 0


def test_the_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    """Reading a written frame gives the same records, descriptions, statistics, stacks and parents."""
    frame = small_frame()
    sink(tmp_path).write(frame)
    dump = open_dump(tmp_path).load(0, 3)
    assert list(dump.entries) == [e.name for e in frame.entries]
    assert dump.complete
    assert not dump.recovered
    statistics = {r.name: r.statistics for r in frame.records()}
    seen = 0
    for entry in dump.entries.values():
        for place, t in entry.tensors():
            s = statistics.get(f"{entry.name}.{place}") or statistics.get(f"{entry.name}.{place}.0")
            if s is None or t.description.dtype == "torch.bool":
                continue
            seen += 1
            np.testing.assert_equal([t.max, t.min, t.mean, t.norm], [s.max, s.min, s.mean, s.norm])
            assert (t.nan_count, t.inf_count) == (s.nans, s.infs)
    assert seen == 7
    assert dump.entries["Functional.linear.0.forward"].parent == "Module.fc.Linear.forward.0"
    assert dump.entries["Functional.linear.0.forward"].stack == tuple(frame.stacks[0])
    assert dump.entries["Module.fc.Linear.backward.0"].micro_step == 1
    assert dump.entries["Module.fc.Linear.forward.0"].tags == {"is_recompute": True}


def test_a_second_step_with_other_rows_and_values(tmp_path: Path) -> None:
    """When only numbers and row indices change, the reused template shows the new numbers."""
    made = sink(tmp_path)
    for step in range(3):
        frame = frames.big_frame(step, 20, seed=step, shift=step)
        made.write(frame)
        dump = open_dump(tmp_path).load(step, 3)
        expected = {r.name: r.statistics.norm for r in frame.records()}
        assert {f"{e.name}.{place}": t.norm for e in dump.entries.values() for place, t in e.tensors()} == expected
        scale = dump.entries["Functional.linear.0.forward"].sections["input_kwargs"]["scale"]
        assert scale.json == {"type": "float", "value": 0.5 + step}
    assert len(made._text._cache._layouts) == 1


def test_killed_after_the_log(tmp_path: Path) -> None:
    """A process that dies after write_log and before write loses nothing: the reader makes the same dump from the log."""
    first, second = sink(tmp_path / "a"), sink(tmp_path / "b")
    first.write(small_frame())
    second.begin_step(0)
    second.write_log(small_frame())
    assert not (tmp_path / "b/step0/rank3/dump.json").exists()
    written, recovered = open_dump(tmp_path / "a").load(0), open_dump(tmp_path / "b").load(0)
    assert recovered.recovered
    assert recovered.complete
    assert repr(recovered.entries) == repr(written.entries)
    assert recovered.stacks == written.stacks
    assert recovered.construct == written.construct


def test_killed_before_the_log(tmp_path: Path) -> None:
    """A step that was begun and never finished is there, marked, and empty; earlier steps are whole."""
    made = sink(tmp_path)
    made.write(small_frame(0))
    made.begin_step(1)
    marker = json.loads((tmp_path / "step1/rank3/.incomplete").read_text())
    assert (marker["step"], marker["rank"], marker["pid"]) == (1, 3, os.getpid())
    dump = open_dump(tmp_path)
    assert dump.steps == [0, 1]
    assert dump.load(0).complete
    assert not dump.load(1).complete
    assert dump.load(1).entries == {}


@pytest.mark.parametrize("keep", [0, 10, 60, 90, 200, -1])
def test_a_log_cut_off_is_not_believed(tmp_path: Path, keep: int) -> None:
    """A frame log that was cut at any place leaves the step incomplete, not wrong."""
    made = sink(tmp_path)
    made.begin_step(0)
    made.write_log(small_frame())
    log = tmp_path / "step0/rank3/.frame.bin"
    log.write_bytes(log.read_bytes()[:keep])
    dump = open_dump(tmp_path).load(0)
    assert not dump.complete
    assert dump.entries == {}


def test_a_dump_json_cut_off_is_recovered_from_the_log(tmp_path: Path) -> None:
    """When dump.json is damaged and the frame log is there, the log is read."""
    made = sink(tmp_path)
    made.write_log(small_frame())
    (tmp_path / "step0/rank3/dump.json").write_text('{"task": "stat')
    dump = open_dump(tmp_path).load(0)
    assert dump.recovered
    assert len(dump.entries) == 5


def test_log_then_write(tmp_path: Path) -> None:
    """After write the log and the marker are gone and the files are those of a write without log."""
    one, two = sink(tmp_path / "a"), sink(tmp_path / "b")
    one.write(small_frame())
    two.begin_step(0)
    two.write_log(frame := small_frame())
    two.write(frame)
    for name in ("dump.json", "stack.json", "construct.json"):
        assert (tmp_path / "a/step0/rank3" / name).read_bytes() == (tmp_path / "b/step0/rank3" / name).read_bytes()
    assert len(list((tmp_path / "b/step0/rank3").iterdir())) == 3


def test_an_incomplete_frame_keeps_its_marker(tmp_path: Path) -> None:
    """A frame that was cut off (an exception in the step) is written, says so in its header, and keeps the marker."""
    sink(tmp_path).write(small_frame(complete=False, lost={"queue_full": 2}))
    assert (tmp_path / "step0/rank3/.incomplete").exists()
    dump = open_dump(tmp_path).load(0)
    assert not dump.complete
    assert dump.header["lost"] == {"queue_full": 2}
    assert len(dump.entries) == 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("victim", ["stack.json", "dump.json"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, victim: str) -> None:
    """When a file cannot be written, the error names path, errno and what to do; no partial file stays; earlier steps are untouched."""
    made = sink(tmp_path)
    made.write(small_frame(0))
    before = (tmp_path / "step0/rank3/dump.json").read_bytes()
    real = output_files.write_all

    def full(fd: int, parts: Any) -> None:
        if victim in os.readlink(f"/proc/self/fd/{fd}"):
            os.write(fd, b"half")
            raise OSError(code, os.strerror(code))
        real(fd, parts)

    monkeypatch.setattr(output_files, "write_all", full)
    with pytest.raises(SinkError, match=rf"{victim}.*{errno.errorcode[code]}.*dump_path") as caught:
        made.write(small_frame(1))
    assert isinstance(caught.value, layout.DumpWriteError)
    assert caught.value.errno == code
    left = {p.name for p in (tmp_path / "step1/rank3").iterdir()}
    assert ".incomplete" in left
    assert not {name for name in left if name.endswith(".tmp") or name == victim}
    assert (tmp_path / "step0/rank3/dump.json").read_bytes() == before


def test_a_full_disk_at_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame log that cannot be written leaves nothing behind, and the files can still be written later."""
    made = sink(tmp_path)
    made.begin_step(0)

    def full(fd: int, _: Any) -> None:
        os.write(fd, b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(output_files, "write_all", full)
        with pytest.raises(SinkError, match="ENOSPC"):
            made.write_log(small_frame())
    assert [p.name for p in (tmp_path / "step0/rank3").iterdir()] == [".incomplete"]
    made.write(small_frame())
    assert open_dump(tmp_path).load(0).complete


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    """A dump_path that is a file is reported with what to do."""
    (tmp_path / "out").write_text("")
    with pytest.raises(SinkError, match=r"ENOTDIR.*dump_path"):
        sink(tmp_path / "out").write(small_frame())


def test_data_of_an_earlier_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new run replaces the files of the steps it writes, tensors too, says so once, and leaves other steps and files alone."""
    old = sink(tmp_path, task="tensor")
    for step in range(3):
        old.write(small_frame(step))
        (tmp_path / f"step{step}/rank3/dump_tensor_data").mkdir()
        (tmp_path / f"step{step}/rank3/dump_tensor_data/Functional.linear.0.forward.input.0.pt").write_bytes(b"x")
    (tmp_path / "step0/rank3/notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING):
        new = sink(tmp_path)
        for step in range(2):
            new.begin_step(step)
            assert not open_dump(tmp_path).load(step).complete
            new.write(small_frame(step))
            new.write(small_frame(step))
    assert len([r for r in caplog.records if "earlier run" in r.getMessage()]) == 1
    assert sorted(p.name for p in (tmp_path / "step0/rank3").iterdir()) == ["construct.json", "dump.json", "notes.txt", "stack.json"]
    assert (tmp_path / "step2/rank3/dump_tensor_data/Functional.linear.0.forward.input.0.pt").exists()


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (["forward", "input"], {"Functional.linear.0.forward": ["input_args", "input_kwargs"],
                                "Module.fc.Linear.forward.0": ["input_args", "input_kwargs"]}),
        (["backward"], {"Module.fc.Linear.backward.0": ["input", "output"], "Module.fc.Linear.parameters_grad.0": ["weight"]}),
        (["output"], {"Functional.linear.0.forward": ["output"], "Module.fc.Linear.forward.0": ["output", "parameters"],
                      "Module.fc.Linear.backward.0": ["output"], "Module.fc.Linear.parameters_grad.0": ["weight"]}),
    ],
)  # fmt: skip
def test_data_mode(tmp_path: Path, mode: list[str], kept: dict[str, list[str]]) -> None:
    """data_mode keeps the directions and sections that it names, with their own numbers."""
    frame = small_frame()
    sink(tmp_path, data_mode=mode).write(frame)
    dump = open_dump(tmp_path).load(0)
    found = {name: list(e.sections) for name, e in dump.entries.items() if name != "Tensor.mul_.0.forward"}
    assert found == kept
    statistics = {r.name: r.statistics for r in frame.records()}
    for entry in dump.entries.values():
        for place, t in entry.tensors():
            s = statistics.get(f"{entry.name}.{place}")
            assert s is None or s.norm is None or np.isnan(s.norm) or t.norm in (s.norm, None)


def test_levels_and_extra_info(tmp_path: Path) -> None:
    """At L1 construct.json is empty, without extra_info only dump.json is written, at level debug only debug.json."""
    sink(tmp_path / "a").write(small_frame(level="L1"))
    assert json.loads((tmp_path / "a/step0/rank3/construct.json").read_text()) == {}
    sink(tmp_path / "b", extra_info=False).write(small_frame())
    assert [p.name for p in (tmp_path / "b/step0/rank3").iterdir()] == ["dump.json"]
    headers = [json.loads((tmp_path / name / "step0/rank3/dump.json").read_text()) for name in "ab"]
    assert [header.get("written_with") for header in headers] == [["stack.json", "construct.json"], None]
    saved = [Entry("logits.0.debug", {"": tensor(0)}), Entry("pair.0.debug", {"": [Opaque({"type": "int", "value": 1}), {"k": tensor(1)}]})]
    sink(tmp_path / "c", level="debug").write(small_frame(level="debug", entries=saved))
    assert [p.name for p in (tmp_path / "c/step0/rank3").iterdir()] == ["debug.json"]
    dump = open_dump(tmp_path / "c").load(0)
    assert dump.entries["logits.0.debug"].sections[""].max == 1.0
    assert [place for place, _ in dump.entries["pair.0.debug"].tensors()] == ["1.k"]
    sink(tmp_path / "d", task="structure").write(small_frame())
    assert open_dump(tmp_path / "d").load(0).entries == {}
    assert len(open_dump(tmp_path / "d").load(0).construct) == 5


def test_micro_steps_in_construct(tmp_path: Path) -> None:
    """On request construct.json has the form of 26.2.0 with Megatron, and the reader takes both forms."""
    sink(tmp_path, construct_micro_steps=True).write(small_frame())
    doc = json.loads((tmp_path / "step0/rank3/construct.json").read_text())
    assert doc["Functional.linear.0.forward"] == ["Module.fc.Linear.forward.0", 0]
    assert doc["megatron_micro_step_number"] == 2
    dump = open_dump(tmp_path).load(0)
    assert dump.construct["Functional.linear.0.forward"] == "Module.fc.Linear.forward.0"
    assert "megatron_micro_step_number" not in dump.construct


def test_without_a_rank(tmp_path: Path) -> None:
    """Outside a distributed run the directory is proc{pid}, and the reader needs no rank to find it."""
    DumpSink(tmp_path, level="L0").write(small_frame(5))
    assert (tmp_path / f"step5/proc{os.getpid()}/dump.json").exists()
    assert len(open_dump(tmp_path).load(5).entries) == 5


def test_an_earlier_run_without_a_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory of a process that has ended is not replaced, so it is named once; one of a process beside this one is not, be it
    older or younger."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, beside = tmp_path / f"step0/proc{ended.pid}", tmp_path / f"step0/proc{os.getppid()}"
    for path in (old, beside):
        path.mkdir(parents=True)
        os.utime(path, (1, 1))
    with caplog.at_level(logging.WARNING):
        made = DumpSink(tmp_path, level="L0")
        (tmp_path / "step0/proc999999999").mkdir()
        os.utime(tmp_path / "step0/proc999999999", (4e9, 4e9))
        made.write(small_frame(0))
        made.write(small_frame(1))
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1
    assert f"step0 holds {old.name} of an earlier run without ranks; it stays beside proc{os.getpid()}" in said[0]
    assert old.exists()


def test_an_odd_value_does_not_cost_the_step(tmp_path: Path) -> None:
    """A value that json cannot write, a structure too deep and a record seen twice leave the rest of the step whole."""
    deep: Any = tensor(0)
    for _ in range(200):
        deep = [deep]
    odd = [
        Entry("Torch.a.0.forward", {"input_args": [Opaque({"type": "complex", "value": np.complex64(1j)}), tensor(0)]}),
        Entry("Torch.b.0.forward", {"input_args": [deep, tensor(6)]}),
        Entry("Torch.a.0.forward", {"input_args": [tensor(6)]}),
    ]
    made = sink(tmp_path)
    for step in range(2):
        made.write(small_frame(step, entries=odd))
        dump = open_dump(tmp_path).load(step)
        assert [e.name for e in dump.entries.values()] == ["Torch.b.0.forward", "Torch.a.0.forward"]
        assert dict(dump.entries["Torch.b.0.forward"].tensors())["input.1"].digest == "0000000000000abc"


def test_frames_without_entries_are_left_out(tmp_path: Path) -> None:
    """A frame of monitor samples only makes no directory; one whose step was begun is finished."""
    made = sink(tmp_path)
    made.write(small_frame(0, entries=[]))
    assert list(tmp_path.iterdir()) == []
    made.begin_step(1)
    made.write(small_frame(1, entries=[]))
    assert open_dump(tmp_path).load(1).complete


@pytest.mark.parametrize(
    "bad", [{"level": "L9"}, {"task": "x"}, {"data_mode": ["all", "input"]}, {"data_mode": ["inputs"]}, {"summary_mode": "md6"}]
)
def test_bad_arguments(tmp_path: Path, bad: dict[str, Any]) -> None:
    """A wrong argument is named with what is allowed."""
    with pytest.raises(UsageError, match=next(iter(bad))):
        sink(tmp_path, **bad)


def test_module_is_importable_without_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the C implementation the files are the same."""
    sink(tmp_path / "c").write(small_frame())
    monkeypatch.setattr(text, "_load_native", lambda: None)
    sink(tmp_path / "python").write(small_frame())
    assert (tmp_path / "c/step0/rank3/dump.json").read_bytes() == (tmp_path / "python/step0/rank3/dump.json").read_bytes()


@pytest.mark.parametrize(
    ("rank", "size", "chosen", "expected"),
    [
        (0, 4, (), {0, 1, 2, 3}),
        (1, 4, (1, 3, 9), {1, 3}),
        (0, 1, (), {0}),
        (None, 1, (), set()),  # no rank: nothing is known
        (3, 1, (), set()),  # a number given by hand is none of the job's
    ],
)
def test_which_ranks_the_run_had(rank: int | None, size: int, chosen: tuple[int, ...], expected: set[int], tmp_path: Path) -> None:
    """The header says it in front of the records, and readers look no further."""
    made = DumpSink(tmp_path, level="mix", rank=rank)
    made.tell_world(world.of_process(rank, size, chosen))
    made.write(small_frame())
    assert world.Head(made.directory(0)).expected_ranks() == expected
    assert open_dump(tmp_path).load(0).header.get("world_size") == (size if expected else None)


@pytest.mark.parametrize(
    "text", ['{"world_size": 99999999999, "data": {}}', '{"data": {"world_size": 3}}', '{"world_size": "3"}', "", "[1"]
)
def test_a_header_that_says_no_ranks(text: str, tmp_path: Path) -> None:
    """Damage, and what stands in a record, is no number of ranks."""
    (tmp_path / "dump.json").write_text(text)
    assert world.Head(tmp_path).expected_ranks() == frozenset()
