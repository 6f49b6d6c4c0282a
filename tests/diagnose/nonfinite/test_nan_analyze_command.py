"""`nan_analyze` on directories, its output file and its command."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.cli.analysis import nan_analyze as command
from msprobe_engine.core.errors import DumpFormatError, NothingCapturedError
from msprobe_engine.core.records import Entry, Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.find.nonfinite.report import write_json
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.writer import write_incident

FIXTURES = Path(__file__).parents[2] / "fixtures"


def bad_step(rank_dump: Any, root: Path, step: int, faulty: int | None = 1, ranks: int = 2) -> None:
    for rank in range(ranks):
        r = rank_dump()
        own = "nan" if rank == faulty else "ok"
        m = "Module.decoder.layers.0.mlp.MLP.forward.0"
        name = r.api("Functional.gelu", ["ok"], [own], parent=m)
        r.stack["0"] = [
            [name],
            [
                "File /venv/lib/python3.11/site-packages/torch/nn/x.py, line 1, in forward, \n y",
                "File /job/model.py, line 42, in forward, \n h = F.gelu(h)",
            ],
        ]
        r.comm("all_reduce", [own], ["ok" if faulty is None else "nan"])
        r.construct["Distributed.all_reduce.0.forward"] = m
        r.module("decoder.layers.0.mlp.MLP", ["ok"], ["ok" if faulty is None else "nan"])
        r.write(root / f"step{step}" / f"rank{rank}")


def test_first_bad_step_wins(tmp_path: Path, rank_dump: Any) -> None:
    """Steps are analysed in order of their number; the first bad one is reported, with everything in the JSON file."""
    for step, faulty in ((2, None), (10, 1), (11, 0)):
        bad_step(rank_dump, tmp_path / "dump", step, faulty)
    result = nan_analyze(tmp_path / "dump")
    assert result.steps == [2, 10]
    place = "step 10, rank 1, forward, module decoder.layers.0.mlp, operator gelu"
    assert result.text.splitlines()[0] == f"First NaN: model.py:42 forward ({place})"
    assert "File /job/model.py, line 42" in result.text
    path = write_json(result.findings, tmp_path / "out")
    assert path.stat().st_mode & 0o777 == 0o640
    content = json.loads(path.read_text())
    assert list(content) == ["rank_1"]
    item = content["rank_1"][0]
    assert item["op_name"] == "Functional.gelu.0.forward"
    assert list(item["data_info"]) == ["input_args", "input_kwargs", "output"]
    assert item["construct_info"] == ["Module.decoder.layers.0.mlp.MLP.forward.0", "Functional.gelu.0.forward"]
    assert len(item["stack_info"]) == 2
    assert item["spread"][0] == {"rank": 1, "op_name": "Distributed.all_reduce.0.forward"}


def test_exit_codes(tmp_path: Path, rank_dump: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """0 nothing found and no file, 1 found, an error when there is no dump."""
    bad_step(rank_dump, tmp_path / "clean", 0, None)
    bad_step(rank_dump, tmp_path / "bad", 0, 0)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = str(tmp_path / "out")
    assert command.run(parser.parse_args(["-i", str(tmp_path / "clean"), "-o", out])) == 0
    assert not Path(out).exists()
    assert command.run(parser.parse_args(["-i", str(tmp_path / "bad/step0"), "-o", out])) == 1
    assert capsys.readouterr().out.count("First NaN") == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpFormatError, match="no dump here"):
        nan_analyze(tmp_path / "empty")
    with pytest.raises(DumpFormatError, match="no such file or directory"):
        nan_analyze(tmp_path / "nowhere")


def test_damaged_rank(tmp_path: Path, rank_dump: Any) -> None:
    """A rank that cannot be read is named; the others are analysed; with none left it is an error."""
    bad_step(rank_dump, tmp_path / "dump", 0, 1)
    (tmp_path / "dump/step0/rank0/dump.json").write_text('{"data": {')
    result = nan_analyze(tmp_path / "dump")
    assert [item["rank"] for item in result.findings] == [1]
    assert "rank0" in result.problems[0]
    (tmp_path / "dump/step0/rank1/dump.json").write_text("")
    with pytest.raises(NothingCapturedError, match="rank1"):
        nan_analyze(tmp_path / "dump")


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_dumps_of_the_existing_tool(version: str, level: str) -> None:
    """Dumps of both versions are read at every level; the NaN that the L1 and mix ones hold is found, at L0 there is none."""
    result = nan_analyze(FIXTURES / version / level)
    assert bool(result.findings) == (level != "L0")
    assert all(item["operator"] == "mul" for item in result.findings)


def test_own_dump_and_incident(tmp_path: Path) -> None:
    """Frames written by the incident writer are analysed: calls where there are some, else samples, and a later captured step."""
    description = TensorDescription("torch.Tensor", "torch.float32", (4,), True)

    def frame(step: int, rank: int, bad: bool, entries: bool) -> Frame:
        table = rows.empty(3)
        words = rows.as_int64(table)
        words[:, rows.COUNT], words[:, rows.FLAGS] = 4, rows.WRITTEN
        table[:, rows.MIN], table[:, rows.MAX] = -1.0, 2.0
        words[1:, rows.NANS] = int(bad)
        ref = [TensorRef(i, description) for i in range(3)]
        entry = Entry("Module.fc.Linear.forward.0", {"input_args": [ref[0]], "input_kwargs": {}, "output": [ref[1]]})
        sample = Sample("grad_unreduced", "fc.weight", ref[2], "accumulated")
        return Frame(
            step, rank, np.ascontiguousarray(table), [entry] if entries else [], [sample], {"loss": 1.0}, level="L0" if entries else ""
        )

    event = Event("step4-nan_inf", 4, "nan_inf", 1, 6)
    for rank in range(2):
        frames = [frame(step, rank, step == 4 and rank == 1, False) for step in (3, 4)]
        write_incident(tmp_path / "samples", frames, [], event=event, rank=rank, world_size=2)
        write_incident(tmp_path / "calls", [frame(4, rank, rank == 1, True)], [], event=event, rank=rank, world_size=2)
        write_incident(tmp_path / "both", [*frames, frame(6, rank, rank == 1, True)], [], event=event, rank=rank, world_size=2)
    first = nan_analyze(tmp_path / "samples").findings
    assert [(i["step"], i["rank"], i["op_name"]) for i in first] == [(4, 1, "grad_unreduced/fc.weight")]
    assert first[0]["tensors"][0]["nans"] == 1
    second = nan_analyze(tmp_path / "calls").findings
    assert [(i["step"], i["rank"], i["op_name"], i["cause"]) for i in second] == [(4, 1, "Module.fc.Linear.forward.0", "module")]
    both = nan_analyze(tmp_path / "both").findings
    assert [(i["step"], i["cause"]) for i in both] == [(4, "sample"), (6, "module")]


def test_a_fault_of_the_update(tmp_path: Path) -> None:
    """Clean calls and a parameter that the update spoils: the update is named, not the norm of all of them, and no call."""
    description = TensorDescription("torch.Tensor", "torch.float32", (4,), True)
    table = rows.empty(3)
    words = rows.as_int64(table)
    words[:, rows.COUNT], words[:, rows.FLAGS] = 4, rows.WRITTEN
    table[:, rows.MIN], table[:, rows.MAX] = -1.0, 2.0
    words[1:, rows.NANS] = 1
    ref = [TensorRef(i, description) for i in range(3)]
    entry = Entry("Module.fc.Linear.forward.0", {"input_args": [ref[0]], "input_kwargs": {}, "output": [ref[0]]})
    samples = [Sample("param_updated", "fc.weight", ref[2]), Sample("update", "fc.weight", ref[1])]
    frame = Frame(4, 0, np.ascontiguousarray(table), [entry], samples, {"loss": 1.0, "update_norm": float("nan")}, level="L0")
    event = Event("step4-nan_inf", 4, "nan_inf", 0, 6)
    write_incident(tmp_path, [frame], [], event=event, rank=0, world_size=1)
    result = nan_analyze(tmp_path)
    assert [(i["step"], i["op_name"], i["cause"]) for i in result.findings] == [(4, "update/fc.weight", "update")]
    assert "step 4, rank 0, optimizer, update" in result.text


@pytest.mark.slow
def test_speed(tmp_path: Path, rank_dump: Any) -> None:
    """Eight ranks with 20,000 calls each, bad from the middle on, are analysed in seconds."""
    r = rank_dump()
    for i in range(5000):
        state = "nan" if i >= 2500 else "ok"
        for op in ("linear", "gelu", "dropout"):
            r.api(f"Functional.{op}", [state, "ok"], [state])
        r.comm("all_reduce", [state], [state])
    r.write(tmp_path / "d/step0/rank0")
    for rank in range(1, 8):
        (tmp_path / f"d/step0/rank{rank}").symlink_to(tmp_path / "d/step0/rank0")
    start = time.process_time()
    result = nan_analyze(tmp_path / "d")
    used = time.process_time() - start
    print(f"8 x 20000 calls: {used:.1f} s CPU")
    assert {item["op_name"] for item in result.findings} == {"Functional.linear.2500.forward"}
    assert used < 30
