"""Comparison with an earlier dump while dumping: which records are written, and when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.records import Entry, Frame, Opaque, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink
from msprobe_engine.probe.sinks.dump.earlier_dump import Bench, DifferenceSink

F32 = TensorDescription("torch.Tensor", "torch.float32", (2, 3), False)
F16 = F32._replace(dtype="torch.float16")
WORDS = {"md5": (R.CRC, R.HAS_CRC), "xor": (R.XOR, R.HAS_XOR), "digest": (R.DIGEST, R.HAS_DIGEST)}


class Made:
    """A frame in the making: every tensor is told by its checksum."""

    def __init__(self, mode: str = "md5", step: int = 0) -> None:
        self.mode, self.step = mode, step
        self.sums: list[int] = []
        self.entries: list[Entry] = []

    def ref(self, checksum: int | None, description: TensorDescription = F32) -> TensorRef:
        """A tensor; None: without values."""
        if checksum is None:
            return TensorRef(-1, description)
        self.sums.append(checksum)
        return TensorRef(len(self.sums) - 1, description)

    def call(self, name: str, given: Any, made: Any, **more: Any) -> None:
        """A record: one input and one output, and further sections."""
        refs = {k: {n: self.ref(v) for n, v in s.items()} for k, s in more.items()}
        inputs = {"input": [self.ref(given)]} if ".backward" in name else {"input_args": [self.ref(given)], "input_kwargs": {}}
        self.entries.append(Entry(name, {**inputs, "output": [self.ref(made)], **refs}))

    def gradients(self, name: str, **sums: int) -> None:
        """A record of parameter gradients."""
        self.entries.append(Entry(name, {n: [self.ref(v)] for n, v in sums.items()}))

    def frame(self) -> Frame:
        """The frame."""
        rows = R.empty(len(self.sums))
        word, flag = WORDS[self.mode]
        ints = R.as_int64(rows)
        ints[:, R.COUNT], ints[:, R.FLAGS], ints[:, word] = 6, R.WRITTEN | flag, self.sums
        rows[:, R.MIN], rows[:, R.MAX] = 0.0, 1.0
        return Frame(self.step, 0, rows, self.entries, level="mix")


LINEAR, MODULE = "Functional.linear.0", "Module.fc.Linear"


def usual(mode: str = "md5", step: int = 0, **change: int) -> Made:
    """Forward and backward of one layer; `change` gives tensors other values, and what follows from them."""
    s = {"x": 1, "w": 2, "y": 3, "relu": 4, "gy": 5, "gx": 6, "gw": 7, **change}
    made = Made(mode, step)
    made.call(f"{LINEAR}.forward", s["x"], s["y"])
    made.call(f"{MODULE}.forward.0", s["x"], s["y"], parameters={"weight": s["w"]})
    made.call("Functional.relu.0.forward", s["y"], s["relu"])
    made.call("Functional.relu.0.backward", s["gy"], s["gy"])
    made.call(f"{LINEAR}.backward", s["gy"], s["gx"])
    made.gradients(f"{MODULE}.parameters_grad.0", weight=s["gw"])
    made.call(f"{MODULE}.backward.0", s["gy"], s["gx"])
    return made


def compare(tmp_path: Path, made: Made, mode: str = "md5", most: int = -1, bench: Made | None = None, rank: int | None = 0) -> list[str]:
    """Names of the records that are written of `made` against `bench`."""
    DumpSink(tmp_path / "bench", level="mix", rank=rank, summary_mode=mode).write((bench or usual(mode)).frame())
    files = DumpSink(tmp_path / "out", level="mix", rank=rank, summary_mode=mode)
    files.begin_step(made.step)
    DifferenceSink(files, files, Bench(tmp_path / "bench", most), None, lambda: rank).write(made.frame(), ())
    return list(open_dump(tmp_path / "out").load(made.step).entries)


def report(tmp_path: Path, step: int = 0) -> dict[str, Any]:
    """What bench.json says."""
    (file,) = (tmp_path / f"out/step{step}").glob("*/bench.json")
    return dict(json.loads(file.read_text()))


@pytest.mark.parametrize("mode", list(WORDS))
def test_equal_runs(tmp_path: Path, mode: str) -> None:
    """Two equal runs leave no record, with every kind of checksum."""
    assert compare(tmp_path, usual(mode), mode) == []
    said = report(tmp_path)
    assert said["bench_path"] == str(tmp_path / "bench")
    assert (said["equal"], said["differing"], said["inherited"], said["absent"], said["undecided"]) == (7, 0, 0, 0, 0)


@pytest.mark.parametrize("mode", list(WORDS))
def test_the_call_that_makes_the_difference(tmp_path: Path, mode: str) -> None:
    """A call with equal inputs and another output is written, and the module around it; calls that are given the difference are not."""
    assert compare(tmp_path, usual(mode, y=30, relu=40, gx=60), mode) == [f"{LINEAR}.forward", f"{MODULE}.forward.0"]
    said = report(tmp_path)
    assert said["differing"] == 2
    assert said["inherited"] == 3  # relu forward is given it, both backwards depend on the forward that differs
    (sums,) = said["records"][f"{LINEAR}.forward"].values()
    assert sums["here"] != sums["bench"]


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"x": 10, "y": 30}, []),  # the input differs already
        ({"w": 20}, []),  # a parameter is an input, and the output is the same
        ({"gx": 60}, [f"{LINEAR}.backward", f"{MODULE}.backward.0"]),
        ({"gy": 50, "gx": 60, "gw": 70}, []),
        ({"gw": 70}, [f"{MODULE}.parameters_grad.0"]),  # the gradient of a weight, summed in another order
        ({"gx": 60, "gw": 70}, [f"{LINEAR}.backward", f"{MODULE}.backward.0"]),
        ({"relu": 40}, ["Functional.relu.0.forward"]),
    ],
)
def test_who_is_written(tmp_path: Path, change: dict[str, int], written: list[str]) -> None:
    """Inputs are arguments, parameters and arriving gradients; a backward record also depends on its forward call; a parameter gradient
    on the records of its module."""
    assert compare(tmp_path, usual(**change)) == written


def test_shape_and_type_differ(tmp_path: Path) -> None:
    """Another shape or type of an output is a difference too; of an input it is passed on."""
    bench, made = Made(), Made()
    for m, shape, dtype in ((bench, F32, F32), (made, F32._replace(shape=(2, 4)), F16)):
        m.entries.append(Entry("Torch.a.0.forward", {"input_args": [m.ref(1)], "input_kwargs": {}, "output": [m.ref(2, shape)]}))
        m.entries.append(Entry("Torch.b.0.forward", {"input_args": [m.ref(1)], "input_kwargs": {}, "output": [m.ref(2, dtype)]}))
        m.entries.append(Entry("Torch.c.0.forward", {"input_args": [m.ref(1, dtype)], "input_kwargs": {}, "output": [m.ref(3)]}))
    assert compare(tmp_path, made, bench=bench) == ["Torch.a.0.forward", "Torch.b.0.forward"]
    assert report(tmp_path)["records"]["Torch.b.0.forward"] == {"output.0": {"here": "torch.float16", "bench": "torch.float32"}}


def test_absent_and_undecided(tmp_path: Path) -> None:
    """A record that the earlier dump lacks, and one whose input has no checksum there, are counted and not written. What the call never
    read says nothing."""
    bench, made = usual(), usual()
    bench.call("Torch.u.0.forward", None, 9)
    made.call("Torch.u.0.forward", 8, 90)
    bench.call("Torch.out.0.forward", 8, 9)
    made.call("Torch.out.0.forward", None, 90)
    made.call("Torch.new.0.forward", 1, 2)
    assert compare(tmp_path, made, bench=bench) == ["Torch.out.0.forward"]
    said = report(tmp_path)
    assert (said["absent"], said["undecided"], said["not_in_bench"]) == (1, 1, ["Torch.new.0.forward"])


def test_nested_arguments(tmp_path: Path) -> None:
    """Tensors inside lists and keyword arguments are inputs and outputs like the others."""

    def step(kwarg: int, nested: int) -> Made:
        made = Made()
        sections = {"input_args": [[made.ref(1)]], "input_kwargs": {"m": {"k": made.ref(kwarg)}}, "output": [[made.ref(nested)]]}
        made.entries.append(Entry("Torch.f.0.forward", sections))
        return made

    assert compare(tmp_path / "a", step(2, 30), bench=step(2, 3)) == ["Torch.f.0.forward"]
    assert compare(tmp_path / "b", step(20, 30), bench=step(2, 3)) == []


def test_numbers_among_the_arguments(tmp_path: Path) -> None:
    """Of a differing record the account also has numbers and texts that differ: they are why."""

    def step(p: float, out: int) -> Made:
        made = Made()
        plain = Opaque({"type": "float", "value": p})
        same = Opaque({"type": "str", "value": "x"})
        sections = {"input_args": [made.ref(1), [plain, same]], "input_kwargs": {"p": plain}, "output": [made.ref(out)]}
        made.entries.append(Entry("Functional.dropout.0.forward", sections))
        return made

    assert compare(tmp_path, step(0.5, 30), bench=step(0.1, 3)) == ["Functional.dropout.0.forward"]
    places = report(tmp_path)["records"]["Functional.dropout.0.forward"]
    assert set(places) == {"output.0", "input.1.0", "kwargs.p"}
    assert places["kwargs.p"] == {"here": '{"type": "float", "value": 0.5}', "bench": '{"type": "float", "value": 0.1}'}


def test_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After diff_nums records nothing more is written, and directories of later steps go."""
    bench = DumpSink(tmp_path / "bench", level="mix", rank=0, summary_mode="md5")
    files = DumpSink(tmp_path / "out", level="mix", rank=0)
    left = Bench(tmp_path / "bench", 3)
    sink = DifferenceSink(files, files, left, None, lambda: 0)
    for step in range(4):
        bench.write(usual(step=step).frame())
    for step in range(4):
        frame = usual(step=step, y=30).frame()
        files.begin_step(step)
        files.write_log(frame)
        sink.write(frame, ())
        assert left.done == (step >= 1)
    dump = open_dump(tmp_path / "out")
    assert [list(dump.load(step).entries) for step in dump.steps] == [[f"{LINEAR}.forward", f"{MODULE}.forward.0"], [f"{LINEAR}.forward"]]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["step0", "step1"]
    assert capsys.readouterr().err.count("diff_nums") == 1


@pytest.mark.parametrize("rank", [None, 0])
@pytest.mark.parametrize("theirs", ["rank", "proc77", "rank0"])
def test_which_rank(tmp_path: Path, rank: int | None, theirs: str) -> None:
    """A dump of one process is found whatever its directory is called."""
    DumpSink(tmp_path / "bench", level="mix", rank=5, summary_mode="md5").write(usual().frame())
    (tmp_path / "bench/step0/rank5").rename(tmp_path / "bench/step0" / theirs)
    files = DumpSink(tmp_path / "out", level="mix", rank=rank)
    DifferenceSink(files, files, Bench(tmp_path / "bench", 1), None, lambda: rank).write(usual(relu=40).frame(), ())
    assert list(open_dump(tmp_path / "out").load(0).entries) == ["Functional.relu.0.forward"]


def test_nothing_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step or rank that the earlier dump lacks, and one without checksums, are said; nothing is written of the records."""
    DumpSink(tmp_path / "bench", level="mix", rank=0, summary_mode="digest").write(usual("digest").frame())
    for name, step, rank, said in (("a", 1, 0, "step 1 was not dumped"), ("b", 0, 3, "not 3"), ("c", 0, 0, "no record could be compared")):
        files = DumpSink(tmp_path / name, level="mix", rank=rank)
        DifferenceSink(files, files, Bench(tmp_path / "bench", 1), None, lambda r=rank: r).write(usual(step=step, relu=40).frame(), ())  # type: ignore[misc]
        assert said in capsys.readouterr().err
        assert not any((tmp_path / name).rglob("dump.json")) or open_dump(tmp_path / name).load(step).entries == {}


def test_a_new_run_replaces_the_account(tmp_path: Path) -> None:
    """A run without comparison in the same directory leaves no account of the old one."""
    compare(tmp_path, usual())
    assert (tmp_path / "out/step0/rank0/bench.json").is_file()
    DumpSink(tmp_path / "out", level="mix", rank=0).begin_step(0)
    assert not (tmp_path / "out/step0/rank0/bench.json").exists()
