"""Saved tensors of whole runs: names and files agree, the training keeps its bits, killed and forked processes, two ranks."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import warm
from keeping import FORMATS
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from msprobe_engine.core.names import tensor_file
from msprobe_engine.core.settings.schema import DumpSettings, IncidentSettings, ProbeSettings
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_engine.formats.tensors.reader import TensorFiles
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
from msprobe_integrations.torch.monitor.probe import TorchProbe


def train(config: dict[str, Any], directory: Path, steps: int = 2, watch: Callable[[int], None] = lambda _: None) -> list[torch.Tensor]:
    """A small training under PrecisionDebugger; returns the parameters."""
    path = directory / "config.json"
    path.write_text(json.dumps({"dump_path": str(directory / "dump"), "level": "mix", **config}))
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(str(path))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        for step in range(steps):
            debugger.start(model)
            loss = model(torch.randn(5, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            debugger.stop()
            debugger.step()
            watch(step)
    finally:
        debugger.run.at_exit()
        PrecisionDebugger._instance = None
    return [p.detach().clone() for p in model.parameters()]


def check(directory: Path, step: int) -> int:
    """Every tensor with values has a name, every name its tensor with the statistics of the record, nothing else is there."""
    dump = open_dump(directory / "dump").load(step)
    assert dump.complete
    backend, used = TorchBackend(), set()
    for record, entry in dump.entries.items():
        for place, tensor in entry.tensors():
            if tensor.max is None:
                continue
            assert tensor.data_name == tensor_file(record, place)
            found = dump.files.load(tensor.data_name, backend)
            used.add(tensor.data_name)
            assert (str(found.dtype), tuple(found.shape)) == (tensor.description.dtype, tensor.description.shape)
            if found.dtype != torch.bool:
                assert found.max().item() == tensor.max
                assert found.min().item() == tensor.min
    assert used == set(dump.files.names())
    return len(used)


@pytest.mark.parametrize("form", FORMATS)
def test_names_and_files_agree(tmp_path: Path, form: str) -> None:
    """Task tensor at level mix: inputs, outputs, parameters, gradients, of modules and APIs."""
    train({"task": "tensor", "tensor": {"tensor_format": form}}, tmp_path)
    assert check(tmp_path, 0) > check(tmp_path, 1) > 60  # in its first step Adam makes its state
    dump = open_dump(tmp_path / "dump").load(0)
    assert dump.task == "tensor"
    assert dump.header["dump_data_dir"] == str(dump.directory / "dump_tensor_data")
    names = dump.files.names()
    assert "Module.0.Linear.forward.0.parameters.weight.pt" in names
    assert "Module.0.Linear.parameters_grad.0.weight.pt" in names
    assert "Functional.linear.0.backward.output.1.pt" in names


def test_same_training(tmp_path: Path) -> None:
    """Dropout, Adam and in-place activations give the same bits whatever is saved."""
    wanted = train({"task": "statistics", "rank": [5]}, tmp_path)
    for form in FORMATS:
        found = train({"task": "tensor", "tensor": {"tensor_format": form, "memory_budget_mb": 1}}, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_tensor_list(tmp_path: Path) -> None:
    """Under task statistics the tensors of the listed records are saved, and only theirs have names."""
    train({"task": "statistics", "statistics": {"tensor_list": ["relu", "Linear.parameters_grad"]}}, tmp_path)
    dump = open_dump(tmp_path / "dump").load(0)
    named = {record for record, entry in dump.entries.items() for _, t in entry.tensors() if t.data_name}
    assert named == {record for record in dump.entries if "relu" in record or "Linear.parameters_grad" in record}
    assert len(dump.files.names()) == sum(len(list(e.tensors())) for r, e in dump.entries.items() if r in named)
    assert dump.header["dump_data_dir"] is not None


@pytest.mark.parametrize(("mode", "words"), [(["forward", "input"], {"input"}), (["backward"], {"input", "output", "parameters_grad"})])
def test_data_mode(tmp_path: Path, mode: list[str], words: set[str]) -> None:
    """What dump.json does not have is not copied either."""
    train({"task": "tensor", "tensor": {"data_mode": mode, "tensor_format": "packed"}}, tmp_path, steps=1)
    check(tmp_path, 0)
    dump = open_dump(tmp_path / "dump").load(0)
    for shard in (dump.directory / "dump_tensor_data").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            assert set(file.keys()) <= set(dump.files.names())
    places = {"parameters_grad" if "parameters_grad" in r else p.split(".")[0] for r, e in dump.entries.items() for p, _ in e.tensors()}
    assert places == words


def test_quota_of_a_run(tmp_path: Path) -> None:
    """Tensors that do not fit have no data_name, are counted in the header and listed, over all steps together."""
    train({"task": "tensor", "tensor": {"max_disk_gb": 0.0001}}, tmp_path, steps=3)
    lost = 0
    for step in range(3):
        dump = open_dump(tmp_path / "dump").load(step)
        named = {t.data_name for e in dump.entries.values() for _, t in e.tensors() if t.data_name}
        assert named == set(dump.files.names())
        lost += dump.header.get("lost", {}).get("tensors over max_disk_gb", 0)
        assert (dump.directory / "not_saved.json").exists() == ("lost" in dump.header)
    assert lost > 0
    files = {p.stat().st_ino: p.stat().st_size for p in (tmp_path / "dump").rglob("*.pt")}
    assert sum(files.values()) <= 100_000


def test_a_second_run_into_the_same_directory(tmp_path: Path) -> None:
    """Tensor files of an earlier run are gone, those of the new one are all there."""
    train({"task": "tensor", "rank": [], "tensor": {"tensor_format": "packed"}}, tmp_path, steps=1)
    train({"task": "tensor", "tensor": {"list": ["relu"]}}, tmp_path, steps=1)
    assert check(tmp_path, 0) < 10
    assert not list((tmp_path / "dump").rglob("*.safetensors"))


def test_probe(tmp_path: Path) -> None:
    """The dump section of TorchProbe saves tensors in the same way."""
    dump = DumpSettings(task="tensor", level="L0", step=(1,), tensor_format="packed", dump_path=str(tmp_path / "dump"))
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), dump=dump, incident=IncidentSettings(enabled=False), strict=True))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    probe.attach(model)
    for step in range(3):
        probe.begin_step(step)
        model(torch.rand(2, 4)).sum().backward()
        probe.end_step()
    probe.close()
    assert check(tmp_path, 1) > 8
    assert open_dump(tmp_path / "dump").steps == [1]


KILLED = """
    import os, sys, torch
    from torch import nn
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
    debugger = PrecisionDebugger(sys.argv[1])
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    debugger.start(model)
    while True:
        model(torch.rand(64, 256)).sum().backward()
"""


@pytest.mark.framework
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.fast_cells("packed")
def test_killed_in_the_middle_of_a_step(tmp_path: Path, form: str) -> None:
    """SIGKILL leaves an unfinished step whose saved tensors can be read by name."""
    config = tmp_path / "config.json"
    options = {"tensor_format": form, "memory_budget_mb": 16}
    config.write_text(json.dumps({"task": "tensor", "level": "L0", "dump_path": str(tmp_path / "dump"), "tensor": options}))
    with warm.started(textwrap.dedent(KILLED), config):
        folder = None
        until = time.monotonic() + 60
        while time.monotonic() < until and (folder is None or len(TensorFiles(folder).names()) < 20):
            time.sleep(0.05)
            folder = next((tmp_path / "dump").glob("step0/*"), None)
    dump = open_dump(tmp_path / "dump").load(0)
    assert not dump.complete
    names, backend = dump.files.names(), TorchBackend()
    assert len(names) >= 20
    for name in names:
        assert dump.files.load(name, backend).numel() in (64 * 256, 256 * 256, 256)
    assert any(".parameters." in name for name in names)


@pytest.mark.framework
@pytest.mark.parametrize("form", FORMATS)
def test_a_forked_child_saves_nothing(tmp_path: Path, form: str) -> None:
    """A child of a dumping process runs the same code without saving and without hanging, and the parent goes on."""

    def fork(step: int) -> None:
        if step == 0:
            debugger = PrecisionDebugger._instance
            assert debugger is not None
            child = os.fork()
            if child == 0:
                try:
                    debugger.start(nn.Linear(2, 2))
                    torch.ones(3) + 1
                    debugger.stop()
                    debugger.step()
                finally:
                    os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    train({"task": "tensor", "tensor": {"tensor_format": form}}, tmp_path, 3, fork)
    assert check(tmp_path, 1) == check(tmp_path, 2)


@pytest.mark.parametrize("form", FORMATS)
def test_no_growth(tmp_path: Path, form: str) -> None:
    """120 dumped steps: neither memory, nor open files, nor threads grow."""
    seen: list[tuple[int, int]] = []

    def look(step: int) -> None:
        if step in (40, 119):
            assert PrecisionDebugger._instance is not None
            PrecisionDebugger._instance.writer.flush()  # steps that wait to be written hold their directories open
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            seen.append((resident, len(os.listdir("/proc/self/fd"))))

    train({"task": "tensor", "level": "L0", "tensor": {"tensor_format": form, "memory_budget_mb": 8}}, tmp_path, 120, look)
    assert seen[1][0] - seen[0][0] < 12 << 20
    assert seen[1][1] <= seen[0][1] + 2


@pytest.mark.parametrize("form", FORMATS)
def test_a_directory_that_goes_away(tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """When nothing can be written any more the training goes on with the same bits, and every lost tensor is counted."""
    wanted = train({"task": "statistics", "rank": [5]}, tmp_path, 4)
    counted: list[dict[str, int]] = []

    def look(step: int) -> None:
        debugger = PrecisionDebugger._instance
        assert debugger is not None
        if step == 1:
            debugger.writer.flush()
            (tmp_path / "dump").rename(tmp_path / "gone")  # in one act: the thread of the pack may be writing there
            (tmp_path / "dump").write_text("a file")
        elif step == 3:
            debugger.writer.flush()
            counted.append(dict(debugger.run.files.tally.lost))

    with caplog.at_level(logging.ERROR, "msprobe"):
        found = train({"task": "tensor", "tensor": {"tensor_format": form}}, tmp_path, 4, look)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert counted[0]["tensors of a step whose directory cannot be made"] > 100
    assert len([r for r in caplog.records if "is where a directory belongs" in r.getMessage()]) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk(small: Path, form: str) -> None:
    """A run that fills the disk ends with the same bits; what is named in a finished step is there."""
    wanted = train({"task": "statistics", "rank": [5]}, small, 12)
    found = train({"task": "tensor", "tensor": {"tensor_format": form, "memory_budget_mb": 1}}, small, 12)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    steps = [open_dump(small / "dump").load(step) for step in open_dump(small / "dump").steps]
    whole = [dump for dump in steps if dump.complete and not dump.recovered]
    assert 0 < len(whole) < 12
    for dump in whole:
        named = {t.data_name for e in dump.entries.values() for _, t in e.tensors() if t.data_name}
        assert named == set(dump.files.names())
        assert ("lost" in dump.header) == ((dump.directory / "not_saved.json").exists() or len(named) < 50)


# Saved tensors of two ranks: collectives before and after, local shards, each rank in its own directory.


def work(rank: int, port: int, config: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    debugger = PrecisionDebugger(config)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        debugger.start(model)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        gathered = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank)), async_op=True).wait()
        whole = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        torch.relu(whole)
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    dist.destroy_process_group()


@pytest.mark.framework
@pytest.mark.parametrize("form", FORMATS)
def test_two_ranks(tmp_path: Path, form: str) -> None:
    """What a collective read is the value before it, what it wrote the value after it was waited for; a DTensor is its local shard."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"task": "tensor", "level": "mix", "dump_path": str(tmp_path / "dump"), "tensor": {"tensor_format": form}})
    )
    mp.start_processes(work, (port, str(config)), nprocs=2, start_method="fork")
    dump, backend = open_dump(tmp_path / "dump"), TorchBackend()
    assert dump.steps == [0, 1]
    for rank in range(2):
        step = dump.load(1, rank)
        assert step.complete
        found = {name: step.files.load(name, backend) for name in step.files.names()}
        assert {t.data_name for e in step.entries.values() for _, t in e.tensors() if t.data_name} == set(found)
        assert found["Distributed.all_reduce.0.forward.input.0.pt"].tolist() == [rank + 1.0] * 3
        assert found["Distributed.all_reduce.0.forward.output.0.pt"].tolist() == [3.0] * 3
        gathered = [found[f"Distributed.all_gather.0.forward.output.0.{i}.pt"].tolist() for i in range(2)]
        assert gathered == [[0.0, 0.0], [1.0, 1.0]]
        assert found["Torch.relu.0.forward.input.0.pt"].tolist() == torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2].tolist()
        assert found["Functional.linear.0.forward.input.0.pt"].tolist() == [[rank + 1.0] * 4] * 2


# A process that is killed while tensor files of finished steps are still being written.

RUN = """
    import sys
    import torch
    from torch import nn
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger
    torch.set_num_threads(1)
    debugger = PrecisionDebugger(sys.argv[1])
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    while True:
        debugger.start(model)
        model(torch.rand(64, 256)).sum().backward()
        debugger.stop()
        debugger.step()
"""


@pytest.mark.framework
@pytest.mark.parametrize("form", FORMATS)
def test_a_step_that_says_it_is_complete_has_all_its_tensors(tmp_path: Path, form: str) -> None:
    """After SIGKILL in the middle of a quick loop every step that is complete, recovered from its log or not, has a file that can be read
    for every tensor its records name; the last step is not taken for complete unless it is."""
    config, root = tmp_path / "config.json", tmp_path / "dump"
    config.write_text(json.dumps({"task": "tensor", "level": "mix", "dump_path": str(root), "tensor": {"tensor_format": form}}))
    with warm.started(textwrap.dedent(RUN), config):
        until = time.monotonic() + 60
        while time.monotonic() < until and not (len(list(root.glob("step*"))) >= 6 and list(root.glob("step*/*/dump.json"))):
            time.sleep(0.01)
    dump, backend = open_dump(root), TorchBackend()
    loaded = 0
    for step in dump.steps:
        one = dump.load(step)
        wanted = {tensor.data_name for entry in one.entries.values() for _, tensor in entry.tensors() if tensor.data_name}
        there = set(one.files.names())
        if one.complete:
            assert wanted
            for name in wanted:
                assert one.files.load(name, backend) is not None
                loaded += 1
        elif one.entries:
            killed_before_the_mark_went = (one.directory / layout.MARKER).exists() and (one.directory / layout.DUMP).exists()
            assert killed_before_the_mark_went or not wanted <= there, "nothing is missing, yet the step is called incomplete"
    assert loaded


def test_a_recovered_step_without_its_files_is_incomplete(tmp_path: Path) -> None:
    """What the log names and the disk does not have makes a step incomplete, and the message of a missing tensor says how that can be."""
    config, root = tmp_path / "config.json", tmp_path / "dump"
    config.write_text(json.dumps({"task": "tensor", "level": "L0", "dump_path": str(root), "tensor": {}}))
    code = textwrap.dedent(RUN).replace("while True:", "for _ in range(1):")
    # the log stays when the last file cannot get its name: the step's dump.json is a directory
    code = code.replace(
        "debugger.start(model)", "debugger.start(model); import os, glob; os.mkdir(glob.glob(sys.argv[2] + '/step0/*')[0] + '/dump.json')"
    )
    done = warm.run(code, config, root)
    assert done.returncode == 0, done.stderr
    folder = next(root.glob("step0/*"))
    (folder / "dump.json").rmdir()
    whole = open_dump(root).load(0)
    assert (whole.recovered, whole.complete) == (True, True)
    victim = next(iter((folder / "dump_tensor_data").glob("*.pt")))
    victim.unlink()
    assert not open_dump(root).load(0).complete
    with pytest.raises(Exception, match="the process was killed before it was written"):
        whole.files.load(victim.name, TorchBackend())
