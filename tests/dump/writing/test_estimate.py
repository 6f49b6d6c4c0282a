"""`msprobe.dump.estimate`: what a dump will cost, against what the writer really writes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import dump_frames as frames
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe import dump
from msprobe_engine.core.errors import DumpFormatError, ProbeError, SettingsError, UsageError
from msprobe_engine.core.records import Entry, Frame, Opaque, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows as R
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.probe.estimate import disk
from msprobe_engine.probe.estimate.cost import Range
from msprobe_engine.probe.estimate.forecast import Estimate
from msprobe_engine.probe.sinks.dump.dump_files import DumpSink

FIXTURES = Path(__file__).parents[2] / "fixtures"
F32 = TensorDescription("torch.Tensor", "torch.float32", (16, 8), True)
MODULE = "Module.layers.{}.mlp.MLP.forward.0"


def training_frame(step: int = 0, layers: int = 12, digest: bool = False) -> Frame:
    """A step of modules and APIs, in order of completion, with statistics of many lengths; the input of each call is the output of
    the one before (same row), so half of the tensors are names of another one."""
    rng = np.random.default_rng(step)
    values = [rng.normal(size=8).astype(np.float32) for _ in range(4 * layers + 1)]
    values[3] = np.array([1.0, math.nan], np.float32)
    values[4] = np.zeros(3, np.float32)
    rows = np.concatenate([frames.row_of(v, digest=int(rng.integers(1 << 62)) if digest else None) for v in values])
    entries = []
    for i in range(layers):
        x, y, z = (TensorRef(4 * i + k, F32) for k in range(3))
        mask = TensorRef(4 * i + 3, TensorDescription("torch.Tensor", "torch.bool", (16,), False))
        module = MODULE.format(i)
        scale = {"scale": Opaque({"type": "float", "value": 0.1 * i}), "mask": mask}
        entries.append(Entry(f"Functional.linear.{i}.forward", {"input_args": [x, z], "input_kwargs": scale, "output": [y]}, module, i % 5))
        entries.append(
            Entry(f"Tensor.view.{i}.forward", {"input_args": [y, Opaque({"type": "int", "value": 3})], "output": [y]}, module, 1)
        )
        entries.append(Entry(module, {"input_args": [x], "output": [y], "parameters": {"weight": z}}, None, 2))
        entries.append(Entry(module.replace("forward", "backward"), {"input": [y], "output": [x]}))
        entries.append(Entry(f"Module.layers.{i}.mlp.MLP.parameters_grad.0", {"weight": [z]}))
    stacks = [[f"File /job/net.py, line {line}, in forward, \n y = f(x)" for line in range(n, n + 9)] for n in range(5)]
    return Frame(step, 0, rows, entries, stacks=stacks, level="mix")


def write(root: Path, frame: Frame, rank: int = 0, **how: Any) -> Path:
    """Write a frame; returns the rank directory."""
    DumpSink(root, **{"level": "mix", "rank": rank, **how}).write(frame)
    return root / f"step{frame.step}" / f"rank{rank}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A statistics dump of level mix."""
    write(tmp_path / "source", training_frame())
    return tmp_path / "source"


def one(made: Estimate) -> Any:
    (cost,) = made.per_rank.values()
    return cost


@pytest.mark.parametrize("mode", ["statistics", "md5", "xor", "digest"])
@pytest.mark.parametrize("data_mode", [("all",), ("forward", "output"), ("backward",)])
def test_json_files_of_another_step(source: Path, tmp_path: Path, mode: str, data_mode: tuple[str, ...]) -> None:
    """The size of each JSON file, for every summary_mode and data_mode, is within 5 % of what the writer writes in another step."""
    frame = training_frame(step=7, digest=mode == "digest")
    flag = {"md5": R.HAS_CRC, "xor": R.HAS_XOR}.get(mode, 0)
    R.as_int64(frame.rows)[:, R.FLAGS] |= flag
    frame.entries[:] = [e for e in frame.entries if Options(data_mode).sections(e)]  # as the recorder does
    real = write(tmp_path / "real", frame, summary_mode=mode, data_mode=data_mode)
    cost = one(dump.estimate(source, summary_mode=mode, data_mode=list(data_mode)))
    for name, expected in cost.json_bytes.items():
        assert expected == pytest.approx((real / name).stat().st_size, rel=0.05, abs=60), name
    document = json.loads((real / "dump.json").read_text())
    assert cost.records == len(document["data"])
    assert cost.files == 3


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_levels_from_mix(source: Path, tmp_path: Path, level: str) -> None:
    """A mix dump tells what L0 (modules and parameter gradients) and L1 (functions, empty construct.json) will write."""
    frame = training_frame(step=7)
    kept = [e for e in frame.entries if e.name.startswith("Module.") == (level == "L0")]
    narrow = Frame(7, 0, frame.rows, [e._replace(parent=None) for e in kept], stacks=frame.stacks, level=level)
    real = write(tmp_path / "real", narrow, level=level)
    cost = one(dump.estimate(source, level=level))
    assert cost.records == len(kept)
    for name, expected in cost.json_bytes.items():
        assert expected == pytest.approx((real / name).stat().st_size, rel=0.1, abs=60), name


def test_structure_dumps_carry_what_is_needed(source: Path, tmp_path: Path) -> None:
    """A structure dump leaves dump.json without records; its shapes.json gives the same estimate as a statistics dump, and knows
    which tensors are the same one."""
    directory = write(tmp_path / "structure", training_frame(), task="structure")
    assert json.loads((directory / "dump.json").read_text())["data"] == {}
    known, guessed = dump.estimate(tmp_path / "structure", task="tensor"), dump.estimate(source, task="tensor")
    for name, expected in one(known).json_bytes.items():
        assert expected == pytest.approx(one(guessed).json_bytes[name], rel=0.05), name
    low, high = one(known).tensor_bytes
    assert low == high
    assert one(guessed).tensor_bytes.low <= low <= one(guessed).tensor_bytes.high
    assert one(known).saved == one(guessed).saved
    assert "the run itself noted which tensors are the same one; they are counted once" in known.notes
    assert any("no statistics" in note for note in known.notes)
    own = one(dump.estimate(tmp_path / "structure", task="structure")).json_bytes
    for name, expected in own.items():
        assert expected == pytest.approx((directory / name).stat().st_size, rel=0.05, abs=60), name


def test_a_frame_log_is_enough(source: Path, tmp_path: Path) -> None:
    """The log of a killed run gives the same sizes, and knows which tensors are the same one."""
    sink = DumpSink(tmp_path / "killed", level="mix", rank=0)
    sink.write_log(training_frame())
    log = tmp_path / "killed" / "step0" / "rank0" / ".frame.bin"
    for path in (log, tmp_path / "killed"):
        made, same = dump.estimate(path, task="tensor"), dump.estimate(source, task="tensor")
        assert one(made).json_bytes == pytest.approx(one(same).json_bytes, rel=0.01)
        assert one(made).tensor_bytes.low == one(made).tensor_bytes.high
        assert (made.source_step, made.source_ranks) == (0, 1)


def test_tensor_files(source: Path) -> None:
    """Bytes of tensor files follow from dtypes and shapes: each name its own file at most, each content one at least; packed ones
    save the head of each file."""
    made = one(dump.estimate(source, task="tensor"))
    assert made.saved == made.tensors == 12 * (4 + 2 + 3 + 2 + 1)
    content = 12 * (11 * 512 + 16)
    assert made.tensor_bytes.high == made.saved * 1577 + content
    assert made.tensor_bytes.low < made.tensor_bytes.high / 1.5
    assert made.files == made.saved + 3
    assert made.disk_bytes.high >= made.saved * 4096
    packed = one(dump.estimate(source, task="tensor", tensor_format="packed"))
    assert made.tensor_bytes.high / 2 > packed.tensor_bytes.high > content
    assert packed.files == 3 + 2
    nothing = one(dump.estimate(source))
    assert (nothing.saved, nothing.tensor_bytes) == (0, Range(0, 0))


def test_tensor_list_saves_some(source: Path) -> None:
    """With tensor_list the records that it names are saved although the task is statistics."""
    made = one(dump.estimate(source, tensor_list=["Tensor.view"]))
    assert made.saved == 2 * 12
    assert one(dump.estimate(source, tensor_list=["nothing"])).saved == 0


def test_slices_cut_sizes(source: Path) -> None:
    """A cut along dimension 0 divides the bytes of the tensors that have it."""
    whole = one(dump.estimate(source, task="tensor", tensor_format="packed"))
    cut = one(dump.estimate(source, task="tensor", tensor_format="packed", slice=[{"dim": 0, "size": 16, "begin": 0, "end": 4}]))
    assert cut.tensor_bytes.high < whole.tensor_bytes.high
    assert cut.read_bytes.high == whole.read_bytes.high / 4
    assert cut.json_bytes["dump.json"] > whole.json_bytes["dump.json"], "the whole shape stays in the record"


@pytest.mark.parametrize(
    ("chosen", "records"),
    [
        ({"list": ["linear.3."]}, ["Functional.linear.3.forward"]),
        ({"list": ["layers.3."], "level": "L0"}, [MODULE.format(3), MODULE.format(3).replace("forward", "backward"), "grad"]),
        ({"list": ["layers.3.mlp.MLP.forward"]}, ["Functional.linear.3.forward", "Tensor.view.3.forward", MODULE.format(3)]),
        ({"list": ["re:linear\\.[12]\\."]}, ["Functional.linear.1.forward", "Functional.linear.2.forward"]),
        ({"scope": [MODULE.format(2), MODULE.format(3)]}, ["linear", "view", "module"] * 2 + ["backward", "grad"]),
        ({"scope": ["Functional.linear.2.forward", "Tensor.view.2.forward"], "level": "L1"}, ["linear", "view"]),
        ({"risk_level": "CORE", "level": "L1"}, [f"Functional.linear.{i}.forward" for i in range(12)]),
        ({"risk_level": "FOCUS"}, ["all but view"] * 4 * 12),
    ],
)  # fmt: skip
def test_filters(source: Path, chosen: dict[str, Any], records: list[str]) -> None:
    """scope, list (a module at level mix with all inside it) and risk_level leave as many records as they would in the run."""
    assert one(dump.estimate(source, **chosen)).records == len(records)


def test_totals(source: Path, tmp_path: Path) -> None:
    """Totals are steps times ranks times the mean of the ranks that were read; files of settings give both numbers."""
    write(tmp_path / "source", training_frame(), rank=1)
    single = dump.estimate(source, steps=1, ranks=1)
    many = dump.estimate(source, steps=10, ranks=64)
    assert many.total_bytes.high == pytest.approx(640 * single.total_bytes.high)
    assert many.total_files == 640 * 3
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"task": "statistics", "level": "mix", "dump_path": str(tmp_path), "rank": ["0-3"], "step": [1, "5-8"]}))
    made = dump.estimate(source, config)
    assert (made.steps, made.ranks, list(made.per_rank)) == (5, 4, [0, 1])
    assert any("taken to be like the mean of rank 0, 1" in note for note in made.notes)
    assert dump.estimate(source, config, steps=2, ranks=2).total_files == 2 * 2 * 3


def test_it_does_not_fit(source: Path) -> None:
    """Beyond max_disk_gb the estimate says so, does not promise more than the limit, and offers what fits, largest first."""
    made = dump.estimate(source, task="tensor", steps=100, max_disk_gb=0.001)
    assert not made.fits
    assert "max_disk_gb allows 1.0 MB" in made.problems[0]
    assert made.total_bytes.high < 100 * 3 * 60_000 + 5e6, "JSON files, and tensor files of 1.5 kB in blocks of 4 kB"
    assert [c.nbytes.high for c in made.changes] == sorted((c.nbytes.high for c in made.changes), reverse=True)
    words = {c.settings for c in made.changes}
    assert "task: statistics" in words
    fewer = next(int(w.split()[1]) for w in words if w.startswith("dump "))
    assert dump.estimate(source, task="tensor", steps=fewer, max_disk_gb=0.001).fits
    assert not dump.estimate(source, task="tensor", steps=fewer + 1, max_disk_gb=0.001).fits


def test_free_space(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump larger than the free space does not fit; fewer ranks can be offered."""
    monkeypatch.setattr(disk, "space", lambda path: disk.Space(path, 1_000_000, 4096))
    made = dump.estimate(source, ranks=512, dump_path="/data/run")
    assert "are free on /data/run" in made.problems[0]
    assert "rank: [0]" in {c.settings for c in made.changes}
    assert "DOES NOT FIT" in str(made)


def test_time(source: Path) -> None:
    """Times grow with bytes and records; a slower disk takes longer to write; a step beyond the memory budget makes the training wait."""
    modules, everything = dump.estimate(source, level="L0"), dump.estimate(source)
    assert 0 < modules.step_seconds.low <= modules.step_seconds.high < everything.step_seconds.high
    fast, slow = (dump.estimate(source, task="tensor", disk_speed=s).write_seconds.high for s in (1e9, 1e6))
    assert slow > 2 * fast
    big = TensorDescription("torch.Tensor", "torch.float32", (1 << 20, 64), True)
    frame = Frame(0, 0, frames.row_of([1.0, 2.0]), [Entry("Torch.f.0.forward", {"output": [TensorRef(0, big)]})], level="mix")
    write(source.parent / "big", frame)
    waiting = dump.estimate(source.parent / "big", task="tensor", memory_budget_mb=64, disk_speed=1e6)
    assert waiting.wait_seconds.high == pytest.approx(204, rel=0.05)
    assert "waiting for the disk" in str(waiting)


def test_a_measured_disk(source: Path, tmp_path: Path) -> None:
    """Measuring writes into the directory that will be dumped to, leaves nothing there and says that it was measured."""
    target = tmp_path / "new" / "dump"
    made = dump.estimate(source, measure_disk=True, dump_path=str(target))
    assert made.speed.measured
    assert made.speed.bytes_per_second > 1e5
    assert made.space.path == tmp_path
    assert not any("assumed:" in note for note in made.notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
@pytest.mark.parametrize("kind", ["L0", "L1", "mix", "tensor", "debug", "two_ranks"])
def test_dumps_of_the_existing_tool(version: str, kind: str) -> None:
    """Every dump of both versions can be the source; the estimate of its dump.json is near its own size, and at levels L1 and mix
    it says that the existing tool records fewer functions."""
    path = FIXTURES / version / kind
    made = dump.estimate(path, task="statistics")
    directory = next(p for p in path.rglob("d*.json") if p.name in ("dump.json", "debug.json")).parent
    for cost in made.per_rank.values():
        for name in ("dump.json", "debug.json"):
            if name in cost.json_bytes:
                assert cost.json_bytes[name] == pytest.approx((directory / name).stat().st_size, rel=0.25)
    assert any("fewer functions" in note for note in made.notes) == (made.dump.level in ("L1", "mix"))
    assert dump.estimate(path, task="tensor").tensor_bytes.low > 0


def test_a_source_that_does_not_tell(tmp_path: Path, source: Path) -> None:
    """What the source cannot tell is refused with what would: another level, a structure dump without shapes, no dump, no step."""
    write(tmp_path / "L0", Frame(0, 0, frames.row_of([1.0]), [Entry("Module.a.B.forward.0", {"output": [TensorRef(0, F32)]})], level="L0"))
    with pytest.raises(UsageError, match=r"of level L0, which does not tell what level mix would record; give a dump of level mix$"):
        dump.estimate(tmp_path / "L0", level="mix")
    with pytest.raises(UsageError, match="give a dump of level debug"):
        dump.estimate(source, level="debug")
    old = tmp_path / "old" / "step0" / "rank0"
    old.mkdir(parents=True)
    (old / "dump.json").write_text('{"task": "structure", "level": "mix", "data": {}}')
    with pytest.raises(UsageError, match="writes names and no shapes"):
        dump.estimate(tmp_path / "old")
    with pytest.raises(DumpFormatError, match="no such file or directory"):
        dump.estimate(tmp_path / "nothing")
    with pytest.raises(UsageError, match="step 5 was not dumped"):
        dump.estimate(source, from_step=5)
    with pytest.raises(UsageError, match=r"no record 'Torch\.x\.0\.forward'"):
        dump.estimate(source, scope=["Torch.x.0.forward", MODULE.format(3)])
    (old / "dump.json").write_text('{"task": "statistics", "level": "mix", "data": {}}')
    with pytest.raises(DumpFormatError, match="has no records"):
        dump.estimate(tmp_path / "old")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"ranks": True}, "ranks is True"),
        ({"disk_speed": 0.0}, "disk_speed is 0.0"),
        ({"task": "tensors"}, "task: 'tensors'"),
        ({"tensor_formt": "packed"}, "tensor_format"),
        ({"settings": {"monitor": {}}}, "no 'dump' section"),
    ],
)
def test_wrong_arguments(source: Path, arguments: dict[str, Any], message: str) -> None:
    """A wrong number, key or value is named."""
    with pytest.raises((UsageError, SettingsError), match=message):
        dump.estimate(source, **arguments)


def test_a_step_that_was_cut_off(source: Path, tmp_path: Path) -> None:
    """A finished step is taken where there is one; else the estimate says that a whole step takes more."""
    sink = DumpSink(source, level="mix", rank=0)
    sink.begin_step(1)
    assert dump.estimate(source).source_step == 0
    frame = training_frame()
    cut = Frame(0, 0, frame.rows, frame.entries, stacks=frame.stacks, level="mix", complete=False)
    write(tmp_path / "cut", cut)
    assert "step 0 was cut off, a whole one takes more" in dump.estimate(tmp_path / "cut").notes


def test_hostile_shapes(tmp_path: Path) -> None:
    """Shapes of astronomical size, unknown element types and odd names give an estimate that does not fit, not a crash."""
    about = {"type": "torch.Tensor", "dtype": "torch.float32"}
    huge = [about | {"shape": [1 << 62] * 99, "Max": 1.0, "Min": 1, "Mean": math.nan, "Norm": math.inf}]
    odd = [about | {"dtype": "torch.float3", "shape": [7], "Max": 1e300, "Min": -(1 << 63), "Mean": 1e308, "Norm": 1e308}]
    path = tmp_path / "step0" / "rank0"
    path.mkdir(parents=True)
    data = {"Torch.f.0.forward": {"output": huge}, "../../etc/passwd": {"output": odd}, "x" * 400: {"output": odd}}
    (path / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}))
    made = dump.estimate(tmp_path, task="tensor", steps=10)
    assert not made.fits
    assert made.changes
    assert any("element types are unknown" in note for note in made.notes)
    json.dumps(made.to_json())
    assert one(made).saved == 1, "names that cannot be file names get no file"


def test_damaged_shapes(tmp_path: Path) -> None:
    """A shapes.json that is damaged is named; rows that do not belong to it are not believed."""
    directory = write(tmp_path, training_frame(), task="structure")
    good = json.loads((directory / "shapes.json").read_text())
    for rows in ([1], None, ["a"], [1 << 80] * len(good["rows"])):
        (directory / "shapes.json").write_text(json.dumps(good | {"rows": rows}))
        cost = one(dump.estimate(tmp_path, task="tensor"))
        assert cost.tensor_bytes.low == cost.tensor_bytes.high
        assert any("does not tell which tensors are the same" in note for note in dump.estimate(tmp_path, task="tensor").notes)
    for text in ("{", "[]", '{"data": 3}'):
        (directory / "shapes.json").write_text(text)
        with pytest.raises(DumpFormatError, match=r"shapes\.json"):
            dump.estimate(tmp_path)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["type", "dtype", "shape", "Max", "k"]), c, max_size=4), max_leaves=10))  # fmt: skip  # noqa: E501
def test_any_json(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Arbitrary JSON in dump.json gives an estimate or a ProbeError."""
    root = tmp_path_factory.mktemp("any")
    path = root / "step0" / "rank0"
    path.mkdir(parents=True)
    (path / "dump.json").write_text(json.dumps({"level": "mix", "data": {"Torch.f.0.forward": {"output": data}}}))
    try:
        made = dump.estimate(root, task="tensor")
    except ProbeError:
        return
    assert made.total_bytes.high >= 0


def test_a_dump_that_was_narrowed(source: Path, tmp_path: Path) -> None:
    """A dump says in its header what its settings left out; an estimate for other settings says so, one for the same does not."""
    again = tmp_path / "again"
    shutil.copytree(source, again)
    (path,) = again.glob("step*/*/dump.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"selection": {"list": ["linear"]}} | content))
    notes = "\n".join(dump.estimate(again, level="mix").notes)
    assert "the dump holds only what its own settings asked for (list ['linear']): what they left out is missing here too" in notes
    notes = "\n".join(dump.estimate(again, level="mix", list=["linear"]).notes)
    assert "asked for" not in notes
