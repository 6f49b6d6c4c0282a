"""`msprobe_engine.formats.dump.read`: dumps as objects."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import dump_frames as frames
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe import dump
from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError, ProbeError, UsageError
from msprobe_engine.core.records import Entry, Frame, Opaque, TensorRef
from msprobe_engine.formats.dump.notebook.api import KINDS, Record, Snapshot
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERSIONS = ["8.1.1", "26.2.0"]


def frame_of(entries: list[Entry], step: int = 0, **more: Any) -> Frame:
    """A frame whose tensors all have the statistics of [1, 2]."""
    return Frame(step, 0, frames.row_of([1.0, 2.0]), entries, level="mix", **more)


def call(name: str, parent: str | None = None, **more: Any) -> Entry:
    ref = TensorRef(0, frames.F32)
    section = "input" if names.direction(name) == "backward" else "input_args"
    return Entry(name, {section: [ref], "output": [ref]}, parent, **more)


LAYER, MLP = "Module.layers.1.Layer.forward.0", "Module.layers.1.mlp.MLP.forward.0"
BACK = "Module.layers.1.mlp.MLP.backward.0"
ENTRIES = [
    call("Functional.linear.0.forward", MLP, stack=0),
    call("Distributed.all_reduce.0.forward", MLP),
    call(MLP, LAYER),
    call("Functional.linear.1.forward", LAYER),
    call("Functional.linear.2.forward", "Module.layers.11.Layer.forward.0"),
    call(LAYER),
    call("Functional.linear.3.forward", BACK, tags={"is_recompute": True}, micro_step=1),
    call("Functional.linear.0.backward", BACK),
    call(BACK),
    Entry("Module.layers.1.mlp.MLP.parameters_grad.0", {"weight": [TensorRef(0, frames.F32)]}),
    call("Torch._foreach_norm.0.forward", "clip_grad"),
]


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    DumpSink(tmp_path, level="mix", rank=0).write(frame_of(ENTRIES, step=3, stacks=[["File a.py, line 1, in f, \n y"]]))
    return dump.read(tmp_path)[3, 0]


def found(records: list[Record]) -> list[str]:
    return [r.name for r in records]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["L0", "L1", "mix", "tensor", "debug", "two_ranks"])
def test_every_dump_of_the_existing_tool(version: str, kind: str) -> None:
    """Every record of both versions comes with its kind, its direction, its parent, and children that know it as parent."""
    out = dump.read(FIXTURES / version / kind)
    for snapshot in out:
        assert snapshot.level in ("L0", "L1", "mix", "debug")
        assert (snapshot.complete, snapshot.recovered, snapshot.lost) == (True, False, {})
        assert list(snapshot) == list(snapshot.source.entries)
        for record in snapshot.values():
            assert record.kind in KINDS
            assert record.direction == names.direction(record.name)
            assert [t.place for t in record.tensors.values()] == [place for place, _ in record.source.tensors()]
            assert all(child.parent is not None and child.parent.name == record.name for child in record.children)
        inside = sum(len(record.children) for record in snapshot.values())
        assert inside + len(snapshot.roots) == len(snapshot)
    assert {r.kind for s in out for r in s.values()} >= {{"L1": "api", "debug": "debug"}.get(kind, "module")}


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_tensors_of_the_existing_tool(version: str) -> None:
    """Saved tensors load as numpy arrays whose statistics are those of the dump, and as equal torch tensors."""
    torch = pytest.importorskip("torch")
    (snapshot,) = dump.read(FIXTURES / version / "tensor")
    tensors = [t for record in snapshot.values() for t in record.tensors.values()]
    assert len(tensors) == 8
    for tensor in tensors:
        array = tensor.load()
        assert (array.shape, f"torch.{array.dtype}") == (tensor.shape, tensor.dtype)
        assert tensor.max == pytest.approx(array.max())
        assert tensor.norm == pytest.approx(np.linalg.norm(array.ravel()), rel=1e-6)
        assert torch.equal(tensor.torch(), torch.from_numpy(array))


def test_one_step_one_rank(tmp_path: Path) -> None:
    """dump[step, rank] reads once; dump[step] needs a step with one rank; the message says what there is."""
    for step, rank in [(3, 0), (3, 1), (7, 0)]:
        DumpSink(tmp_path, level="mix", rank=rank).write(frames.big_frame(step, 2))
    out = dump.read(tmp_path)
    assert (out.steps, out.ranks(3), out.ranks(7)) == ([3, 7], [0, 1], [0])
    assert out[3, 1] is out[3, 1]
    assert out[7] is out[7, 0]
    assert repr(out) == f"<Dump {tmp_path}: 2 steps, 3 to 7>"
    assert repr(out[3, 1]) == "<Snapshot step 3, rank 1: statistics, mix, 2 records>"
    with pytest.raises(UsageError, match="ranks 0, 1; choose one"):
        out[3]
    with pytest.raises(UsageError, match="steps 3, 7"):
        out[4, 0]
    with pytest.raises(UsageError, match="not 9"):
        out[3, 9]
    assert [(s.step, s.rank) for s in out] == [(3, 0), (3, 1), (7, 0)]


def test_memory_holds_the_last_four(tmp_path: Path) -> None:
    """A loop over many steps does not keep them all."""
    for step in range(6):
        DumpSink(tmp_path, level="mix", rank=0).write(frames.big_frame(step, 2))
    out = dump.read(tmp_path)
    first = out[0]
    assert all(out[0] is first for step in range(1, 4) if out[step])
    assert out[4] is not None
    assert out[5] is not None
    assert out[1] is not None
    assert out[2] is not None
    assert out[0] is not first


def test_what_a_record_knows(snapshot: Snapshot) -> None:
    """Statistics, parent, children, stack, module, micro step and recomputation of a record."""
    record = snapshot["Functional.linear.0.forward"]
    assert (record.kind, record.direction, record.module, record.micro_step) == ("api", "forward", "layers.1.mlp", 0)
    assert record.stack == ("File a.py, line 1, in f, \n y",)
    assert record.is_recompute is False
    assert record.parent is not None
    assert record.parent.name == MLP
    assert record.parent.parent is not None
    assert found(record.parent.parent.children) == [MLP, "Functional.linear.1.forward"]
    tensor = record.tensor("input.0")
    assert (tensor.max, tensor.min, tensor.mean, tensor.norm) == (2.0, 1.0, 1.5, math.sqrt(5))
    assert (tensor.shape, tensor.dtype, tensor.requires_grad, tensor.extra) == ((4, 128, 256), "torch.float32", True, {})
    assert (tensor.nan_count, tensor.inf_count, tensor.nonfinite, tensor.digest, tensor.md5) == (0, 0, False, None, None)
    assert (tensor.name, tensor.data_name, tensor.path) == ("Functional.linear.0.forward.input.0", None, None)
    again = snapshot["Functional.linear.3.forward"]
    assert (again.is_recompute, again.micro_step, again.tags) == (True, 1, {"is_recompute": True})
    clip = snapshot["Torch._foreach_norm.0.forward"]
    assert (clip.parent, clip.parent_name, clip.module) == (None, "clip_grad", None)
    grads = snapshot["Module.layers.1.mlp.MLP.parameters_grad.0"]
    assert (grads.kind, grads.direction, grads.module, list(grads.tensors)) == ("parameters_grad", "backward", "layers.1.mlp", ["weight"])
    assert [r.name for r in snapshot.roots][-2:] == [grads.name, clip.name]


def test_find(snapshot: Snapshot) -> None:
    """Records are found by pattern, regular expression, kind, direction and module; conditions add up; file order stays."""
    assert found(snapshot.find("Functional.linear.?.forward")) == [f"Functional.linear.{n}.forward" for n in range(4)]
    assert found(snapshot.find("linear")) == []
    assert found(snapshot.find(regex=r"linear\.[01]\.f")) == ["Functional.linear.0.forward", "Functional.linear.1.forward"]
    assert found(snapshot.find(kind="collective")) == ["Distributed.all_reduce.0.forward"]
    assert found(snapshot.find(kind="module", direction="backward")) == [BACK]
    assert len(snapshot.find(direction="backward")) == 3
    inside = ["Functional.linear.0.forward", "Distributed.all_reduce.0.forward", MLP]
    assert found(snapshot.find(module="layers.1.mlp", direction="forward")) == [*inside, "Functional.linear.3.forward"]
    outer = found(snapshot.find(module="layers.1"))
    assert "Functional.linear.1.forward" in outer
    assert "Functional.linear.2.forward" not in outer, "layers.1 is not layers.11"
    assert found(snapshot.find()) == list(snapshot)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [({"kind": "modul"}, "allowed: api, module"), ({"direction": "up"}, "forward, backward"), ({"regex": "("}, "no regular expression")],
)  # fmt: skip
def test_a_wrong_question_is_refused(snapshot: Snapshot, wanted: dict[str, str], message: str) -> None:
    """A misspelt kind or direction and a bad regular expression are errors, not empty answers."""
    with pytest.raises(UsageError, match=message):
        snapshot.find(**wanted)  # type: ignore[arg-type]


def test_a_wrong_place_names_the_right_ones(snapshot: Snapshot) -> None:
    """A tensor that is not there is answered with those that are; an unsaved one with how to save it."""
    with pytest.raises(UsageError, match=r"no tensor at 'output.1'; there are 'input.0', 'output.0'"):
        snapshot[MLP].tensor("output.1")
    with pytest.raises(UsageError, match="task of this dump is 'statistics'; save it with task tensor"):
        snapshot[MLP].tensor("output.0").load()
    with pytest.raises(KeyError, match=r"no record 'Module.mlp.MLP.forward.9' among \d+; the nearest is 'Module"):
        snapshot["Module.mlp.MLP.forward.9"]
    with pytest.raises(UsageError, match=r"no record 'zzz' among \d+; find"):
        snapshot["zzz"]


def test_recomputation_without_the_key() -> None:
    """Where the format does not write is_recompute (26.2.0), a forward call inside a backward one is a recomputation."""
    entries = {"Functional.f.0.forward": {"output": []}, "Functional.f.1.forward": {"output": []}, "Torch.g.0.forward": {}}
    construct = {"Functional.f.0.forward": "Module.a.B.backward.0", "Functional.f.1.forward": "Module.a.B.forward.0"}
    snapshot = _written(entries, construct)
    assert [r.is_recompute for r in snapshot.values()] == [True, False, None]


def _written(data: dict[str, Any], construct: dict[str, Any], root: Path | None = None) -> Snapshot:
    with tempfile.TemporaryDirectory() as temporary:
        path = (root or Path(temporary)) / "step0" / "rank0"
        path.mkdir(parents=True)
        (path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "mix", "data": data}))
        (path / "construct.json").write_text(json.dumps(construct))
        return dump.read(path)[0, 0]


def test_a_killed_run(tmp_path: Path) -> None:
    """A step of which only the frame log was written is read from it; one that was only begun is there, empty and not complete."""
    sink = DumpSink(tmp_path, level="mix", rank=0)
    sink.write_log(frame_of(ENTRIES, step=0))
    sink.begin_step(1)
    out = dump.read(tmp_path)
    assert out[0].recovered
    assert list(out[0]) == [e.name for e in ENTRIES]
    assert (len(out[1]), out[1].complete) == (0, False)
    assert repr(out[1]).endswith("not complete>")


def test_mindspore_header(tmp_path: Path) -> None:
    """A MindSpore dump, with its own types and .npy files, is read; float16 stays float16."""
    name = "Cell.net.fc.Dense.forward.0"
    file = f"{name}.output.0.npy"
    tensor = {"type": "mindspore.Tensor", "dtype": "Float16", "shape": [2], "Max": 2.0, "Min": 1.0, "Mean": 1.5, "Norm": 2.2}
    path = tmp_path / "step0" / "rank3"
    (path / "dump_tensor_data").mkdir(parents=True)
    np.save(path / "dump_tensor_data" / file, np.array([1, 2], np.float16))
    document = {"task": "tensor", "level": "L0", "framework": "mindspore", "dump_data_dir": "/gone"}
    (path / "dump.json").write_text(json.dumps(document | {"data": {name: {"output": [tensor | {"data_name": file}]}}}))
    snapshot = dump.read(tmp_path)[0, 3]
    (record,) = snapshot.values()
    assert (snapshot.framework, record.kind, record.module) == ("mindspore", "module", "net.fc")
    assert record.tensor("output.0").load().tolist() == [1.0, 2.0]
    assert record.tensor("output.0").load().dtype == np.float16
    with pytest.raises(UsageError, match="from_numpy"):
        record.tensor("output.0").torch()


def test_a_structure_dump_has_shapes(tmp_path: Path) -> None:
    """Records of a structure dump are those of its shapes.json: places, dtypes and shapes without statistics."""
    DumpSink(tmp_path, level="mix", rank=0, task="structure").write(frame_of(ENTRIES))
    snapshot = dump.read(tmp_path)[0]
    assert list(snapshot) == [e.name for e in ENTRIES]
    tensor = snapshot[MLP].tensor("input.0")
    assert (tensor.shape, tensor.dtype, tensor.max, tensor.norm) == ((4, 128, 256), "torch.float32", None, None)
    (tmp_path / "step0" / "rank0" / "shapes.json").unlink()
    assert len(dump.read(tmp_path)[0]) == 0


def test_debug_records() -> None:
    """A saved variable is one tensor at place "", or several by key."""
    snapshot = _written({"x.0.debug": {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [], "Max": 1.0}}, {})
    assert snapshot["x.0.debug"].tensor().max == 1.0
    assert (snapshot["x.0.debug"].kind, snapshot["x.0.debug"].direction) == ("debug", None)


def test_arguments_that_are_no_tensors(tmp_path: Path) -> None:
    """Scalars and None stay where they were, as `Opaque` and None."""
    entry = Entry("Torch.f.0.forward", {"input_args": [TensorRef(0, frames.F32), Opaque({"type": "int", "value": 3}), None]})
    DumpSink(tmp_path, level="mix", rank=0).write(frame_of([entry]))
    arguments = dump.read(tmp_path)[0]["Torch.f.0.forward"].arguments["input_args"]
    assert arguments[1:] == [Opaque({"type": "int", "value": 3}), None]


def test_parents_that_go_round() -> None:
    """A damaged construct.json in which calls contain themselves ends no question in a loop."""
    a, b, c = "Torch.a.0.forward", "Torch.b.0.forward", "Torch.c.0.forward"
    snapshot = _written({a: {}, b: {}, c: {}}, {a: b, b: a, c: c})
    assert [r.module for r in snapshot.values()] == [None, None, None]
    assert snapshot.find(module="x") == []
    assert found(snapshot[a].children) == [b]


def test_a_chain_as_long_as_the_dump(tmp_path: Path) -> None:
    """Ten thousand calls, each inside the next: modules are found without a walk per record."""
    chain = [f"Torch.f.{i}.forward" for i in range(10_000)]
    construct = dict(zip(chain, [*chain[1:], "Module.top.Top.forward.0"]))
    snapshot = _written({name: {} for name in chain}, construct, tmp_path)
    assert len(snapshot.find(module="top")) == 10_000
    assert snapshot[chain[0]].module == "top"


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_name_any_pattern(name: str, pattern: str) -> None:
    """Arbitrary record names (path separators, line ends) and patterns give records or a ProbeError."""
    snapshot = _written({name: {"output": []}}, {name: name})
    assert list(snapshot) == [name]
    assert len(snapshot.find(pattern)) <= 1
    assert found(snapshot.find(name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]"))) == [name]
    try:
        snapshot.find(regex=pattern)
    except ProbeError:
        return


def test_a_file_name_that_leaves_the_directory() -> None:
    """A data_name with a path separator is refused when the step is read."""
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "data_name": "../../../etc/passwd"}
    with pytest.raises(DumpFormatError, match="plain file name"):
        _written({"Torch.f.0.forward": {"output": [tensor]}}, {})


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """Importing msprobe_engine.formats.dump brings neither numpy nor torch nor pandas; reading brings no torch and no pandas."""
    code = f"""
import sys
from msprobe import dump
assert not {{"numpy", "torch", "pandas"}} & set(sys.modules)
snapshot = dump.read({str(FIXTURES / "8.1.1" / "tensor")!r})[0]
next(iter(snapshot.values())).tensor("input.0").load()
assert not {{"torch", "pandas"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
