"""`PrecisionDebugger` in distributed runs: when the rank becomes known, which ranks are wanted, wrapped models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
from debug_model import Net, config, names, x
from torch.nn.parallel import DistributedDataParallel

from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = pytest.mark.framework


def one_step(debugger: PrecisionDebugger, net: torch.nn.Module) -> None:
    debugger.start(net)
    net(x()).sum().backward()
    debugger.stop()
    debugger.step()


def without_launcher() -> dict[str, str]:
    return {key: os.environ.pop(key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def group_in_the_middle(path: Path, box: Path, old: bool) -> None:
    """The process group comes up between the forward and the backward pass of the second step."""
    launcher = without_launcher()
    debugger = PrecisionDebugger(str(path))
    net = Net()
    if old and launcher["RANK"] == "0":  # what an earlier run left in the place of this one
        left = box / "dump" / "step1" / "rank0"
        left.mkdir(parents=True)
        (left / "dump.json").write_text("{}")
        (left / "stack.json").write_text("{}")
    for step in range(3):
        debugger.start(net)
        y = net(x())
        if step == 1:
            os.environ.update(launcher)
            pr.start_group(box)
        y.sum().backward()
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()


@pytest.mark.parametrize("old", [False, True])
def test_group_in_the_middle_of_a_step(tmp_path: Path, old: bool) -> None:
    """The open step and the finished ones get the directory of the rank, with a header that names it; what an earlier run left there is
    replaced; nothing stays in proc directories."""
    done = pr.run(group_in_the_middle, config(tmp_path, "L0", "tensor"), tmp_path, old, ranks=2, group=False, directory=tmp_path)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0, 1, 2]
    for step in dump.steps:
        assert sorted(p.name for p in (tmp_path / "dump" / f"step{step}").iterdir()) == ["rank0", "rank1"]
        for rank in (0, 1):
            loaded = dump.load(step, rank)
            assert loaded.complete
            assert "Module.a.Linear.backward.0" in loaded.entries or "Module.b.Sequential.backward.0" in loaded.entries
            directory = tmp_path / "dump" / f"step{step}" / f"rank{rank}"
            assert json.loads((directory / "dump.json").read_text())["dump_data_dir"] == str(directory / "dump_tensor_data")
            assert (directory / "dump_tensor_data" / "Module.a.Linear.forward.0.output.0.pt").exists()
    assert not any("cannot get the name" in o.log for o in done)
    assert bool(done[0].lines("earlier run")) == old


def group_between(path: Path, box: Path) -> None:
    """The process group comes up after the construction and before the first start."""
    launcher = without_launcher()
    debugger = PrecisionDebugger(str(path))
    os.environ.update(launcher)
    pr.start_group(box)
    one_step(debugger, Net())
    debugger.run.at_exit()


def test_group_after_construction(tmp_path: Path) -> None:
    """The rank is asked for when a step begins."""
    pr.run(group_between, config(tmp_path, "L0"), tmp_path, ranks=2, group=False, directory=tmp_path)
    assert sorted(p.name for p in (tmp_path / "dump" / "step0").iterdir()) == ["rank0", "rank1"]


def launched(path: Path) -> None:
    one_step(PrecisionDebugger(str(path)), Net())
    PrecisionDebugger._instance.run.at_exit()  # type: ignore[union-attr]


def test_launcher_without_group(tmp_path: Path) -> None:
    """What a launcher says about the rank counts when there is no process group (yet)."""
    pr.run(launched, config(tmp_path, "L0", rank=[1]), ranks=2, group=False, directory=tmp_path)
    assert open_dump(tmp_path / "dump").ranks(0) == [1]


def test_rank_that_does_not_exist(tmp_path: Path) -> None:
    """A listed rank that the job does not have is named once, on rank 0; the other listed ranks are dumped."""
    done = pr.run(launched, config(tmp_path, "L0", rank=[1, 2, 7]), ranks=2, directory=tmp_path)
    assert open_dump(tmp_path / "dump").ranks(0) == [1]
    assert len(done[0].lines("'rank' lists 2, 7, but the ranks of this run are 0 to 1")) == 1
    assert not done[1].lines("'rank' lists")


def test_no_listed_rank_exists(tmp_path: Path) -> None:
    """When none exists rank 0 says it, and no rank takes the empty dump for its own fault."""
    done = pr.run(launched, config(tmp_path, "L0", rank=[5]), ranks=2, directory=tmp_path)
    assert not (tmp_path / "dump").exists()
    assert len(done[0].lines("'rank' lists 5, but the ranks of this run are 0 to 1")) == 1
    assert not done[1].log


@pytest.mark.parametrize(("rank", "dumps"), [([0], True), (["0-3"], True), ([], True), ([1], False)])
@pytest.mark.usefixtures("own_debugger")
def test_rank_list_without_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: Any, dumps: bool) -> None:
    """A run without ranks counts as rank 0 (the existing tool dumps nothing and says nothing); a list without 0 leaves the dump empty,
    which is said with the reason."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", rank=rank))
    one_step(debugger, Net())
    debugger.run.at_exit()
    assert bool((tmp_path / "dump").exists() and names(tmp_path)) == dumps
    said = capsys.readouterr().err
    assert ("'rank' is [1] and this process has no rank, which counts as rank 0" in said) == (not dumps)


def wrapped(path: Path) -> dict[str, bytes]:
    net = DistributedDataParallel(Net())
    debugger = PrecisionDebugger(str(path)) if path.suffix else None
    for _ in range(2):
        if debugger:
            one_step(debugger, net)
        else:
            net(x()).sum().backward()
    if debugger:
        debugger.run.at_exit()
    return {n: p.grad.numpy().tobytes() for n, p in net.named_parameters()}  # type: ignore[union-attr]


def test_wrapped_model(tmp_path: Path) -> None:
    """The wrapper is no record, its content is, below ``module``; gradients are the same bit by bit as without the debugger."""
    plain = pr.run(wrapped, tmp_path, ranks=2, directory=tmp_path)
    done = pr.run(wrapped, config(tmp_path, "mix"), ranks=2, directory=tmp_path)
    assert [o.value for o in done] == [o.value for o in plain]
    for rank in (0, 1):
        found = set(open_dump(tmp_path / "dump").load(1, rank).entries)
        assert {
            "Module.module.Net.forward.0",
            "Module.module.a.Linear.forward.0",
            "Module.module.b.0.Linear.backward.0",
            "Module.module.a.Linear.parameters_grad.0",
        } <= found
