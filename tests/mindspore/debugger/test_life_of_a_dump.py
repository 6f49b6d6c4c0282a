"""The life of a dump with MindSpore: exceptions, NaN, the end of the process in every way, forks, full disks, Model.train, hot switch."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import mindspore
import ms_programs
import numpy as np
import pytest
from mindspore import nn
from small_cells import Job, config, names, steps, train, written, x

from msprobe.mindspore import MsprobeInitStep, MsprobeStep, PrecisionDebugger
from msprobe_engine.formats.dump.reader import open_dump


def program(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    script = directory / "script.py"
    script.write_text(f"import os, signal, sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom small_cells import *\n{body}")
    return ms_programs.run(script, cwd=directory)


@pytest.mark.slow
def test_an_exception_in_the_step(tmp_path: Path) -> None:
    """A Cell that raises ends its call in the tree; the training that goes on is recorded as before. In a process of its own: MindSpore
    itself runs every forward pass of ``Model.train`` twice from then on."""
    done = program(
        tmp_path,
        f"""
debugger = PrecisionDebugger({str(config(tmp_path, "mix"))!r})
job = Job()
whole = job.net.pair.construct
def broken(*_):
    raise ValueError("the training's own")
for step in range(3):
    object.__setattr__(job.net.pair, "construct", broken if step == 1 else whole)
    debugger.start(job.net)
    try:
        job.forward_backward()
    except ValueError as error:
        assert (step, str(error)) == (1, "the training's own")
    debugger.stop()
    debugger.step()
assert not debugger.faults.disabled
""",
    )
    assert done.returncode == 0, done.stderr
    first, broken, last = (list(open_dump(tmp_path / "dump").load(step).entries) for step in range(3))
    assert first == last
    assert "Cell.a.Dense.forward.0" in broken


def test_an_exception_of_a_kernel(tmp_path: Path) -> None:
    """An operator that MindSpore fails later still raises in the training, with a dump on as without."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    job = Job()
    debugger.start(job.net)
    job.forward_backward()
    with pytest.raises(RuntimeError):
        mindspore.mint.norm(x()).asnumpy()
    debugger.stop()
    debugger.step()
    assert names(tmp_path)


def test_nan_and_inf(tmp_path: Path) -> None:
    """NaN and Inf are counted, and dump.json says where they are."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    data = x()
    data[0, 0] = float("nan")
    data[1, 1] = float("inf")
    job = Job()
    debugger.start(job.net)
    job.forward_backward(data)
    debugger.stop()
    debugger.step()
    given = dict(written(tmp_path).entries["Cell.a.Dense.forward.0"].tensors())["input.0"]
    assert (given.nan_count, given.inf_count) == (1, 1)


@pytest.mark.slow
def test_kill_9(tmp_path: Path) -> None:
    """Finished steps of a killed process are whole; the one it died in says that it is not."""
    done = program(
        tmp_path,
        f"""
debugger = PrecisionDebugger({str(config(tmp_path, "L0"))!r})
job = Job()
for step in range(3):
    debugger.start(job.net)
    job.forward_backward()
    if step == 2:
        debugger.run.files.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    debugger.stop()
    debugger.step()
""",
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    dump = open_dump(tmp_path / "dump")
    assert [dump.load(step).complete for step in (0, 1)] == [True, True]
    assert "Cell.a.Dense.backward.0" in dump.load(1).entries
    assert not dump.load(2).complete


@pytest.mark.parametrize(
    ("end", "complete", "code"), [("raise ValueError('mine')", False, 1), ("", False, 0), ("debugger.stop()", True, 0)]
)
def test_the_end_without_step(tmp_path: Path, end: str, complete: bool, code: int) -> None:
    """What was seen when the program ends is written; it is complete when it was stopped."""
    begin = f"debugger = PrecisionDebugger({str(config(tmp_path, 'L0'))!r})\njob = Job()\ndebugger.start(job.net)\n"
    done = program(tmp_path, f"{begin}job.forward_backward()\n{end}\n")
    assert done.returncode == code, done.stderr
    step = open_dump(tmp_path / "dump").load(0)
    assert step.complete == complete
    assert "Cell.a.Dense.forward.0" in step.entries


def test_a_forked_child_is_not_the_training(tmp_path: Path) -> None:
    """A child of fork (a worker of a data loader) dumps nothing and leaves the parent's files alone."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    job = Job()
    debugger.start(job.net)
    job.forward_backward()
    child = os.fork()
    if child == 0:
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    debugger.stop()
    debugger.step()
    assert steps(tmp_path) == [0]
    assert written(tmp_path).complete


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training ends with the same bits and is told what is lost."""
    plain = train(None, 12)
    debugger = PrecisionDebugger(config(tmp_path, "mix", "tensor", dump_path=str(small / "dump")))
    (small / "ballast").write_bytes(b"x" * (900 << 10))
    assert train(debugger, 12) == plain
    debugger.run.at_exit()
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "not everything is there" in said


def test_model_train(tmp_path: Path) -> None:
    """MsprobeStep dumps each step of Model.train, MsprobeInitStep lets the numbers go on; losses and weights keep their bits."""

    class Loss(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Job().net

        def construct(self, data: Any, label: Any) -> Any:
            return self.inner(data) + label.sum()

    def run(callbacks: list[Any], start: Any) -> list[bytes]:
        net = Loss()
        start(net)
        rows = [(np.full((2, 4), i, np.float32), np.zeros(1, np.float32)) for i in range(3)]
        data = mindspore.dataset.GeneratorDataset(rows, ["data", "label"], shuffle=False)
        model = mindspore.train.Model(net, optimizer=nn.SGD(net.trainable_params(), 0.01))
        model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
        return [p.asnumpy().tobytes() for p in net.trainable_params()]

    plain = run([], lambda _: None)
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    assert run([MsprobeStep(debugger), MsprobeInitStep()], debugger.start) == plain
    assert steps(tmp_path) == [0, 1, 2]
    assert "Cell.inner.a.Dense.backward.0" in names(tmp_path, 2), "\n".join(names(tmp_path, 2))


def test_hot_switch(tmp_path: Path) -> None:
    """dump_enable is read again while the training runs: off, on, and with another level."""
    path = config(tmp_path, "L0", dump_enable=False)
    debugger = PrecisionDebugger(path)
    job = Job()

    def step() -> None:
        debugger.start(job.net)
        job.forward_backward()
        debugger.stop()
        debugger.step()

    step()
    assert steps(tmp_path) == []
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "dump_enable": True, "level": "mix"}))
    os.utime(path, (time.time() + 5, time.time() + 5))
    deadline = time.monotonic() + 20
    while not debugger.run.on and time.monotonic() < deadline:
        time.sleep(0.2)
        debugger.stop()
    first = debugger.run.step_number
    step()
    assert steps(tmp_path) == [first]
    assert any(n.startswith("Mint.add") for n in names(tmp_path, first))


def test_init_step_and_several_windows(tmp_path: Path) -> None:
    """set_init_step counts from there; two windows of one step are one dump, with call numbers that go on."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    debugger.set_init_step(5)
    job = Job()
    for _ in range(2):
        debugger.start(job.net)
        job.net(x())
        debugger.stop()
        job.net(x())
    debugger.step()
    assert steps(tmp_path) == [5]
    assert [n for n in names(tmp_path, 5) if n.startswith("Cell.pair")] == ["Cell.pair.Pair.forward.0", "Cell.pair.Pair.forward.1"]


def test_a_fault_of_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error inside the probe switches the dump off with one message; the training keeps its bits."""
    plain = train(None, 3)
    debugger = PrecisionDebugger(config(tmp_path, "L0"))

    def broken(*_: Any) -> Any:
        raise OSError("of the probe")

    monkeypatch.setattr(debugger.run.pipeline, "end_step", broken)
    assert train(debugger, 3) == plain
    assert capsys.readouterr().err.count("of the probe") == 1


def test_gradients_after_stop(tmp_path: Path) -> None:
    """A backward pass between stop and step still has its records."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    job = Job()

    class Windowed(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = job.net

        def construct(self, data: Any) -> Any:
            debugger.start(self.inner)
            loss = self.inner(data)
            debugger.stop()
            return loss

    mindspore.value_and_grad(Windowed(), None, job.optimizer.parameters)(x())
    debugger.step()
    assert {"Cell.a.Dense.backward.0", "Cell.a.Dense.parameters_grad.0"} <= set(names(tmp_path))


def test_the_scheduler_of_msrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """msrun starts the program in its scheduler too, which is no rank: it writes nothing and complains of nothing."""
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    train(debugger, 1)
    debugger.run.at_exit()
    assert not (tmp_path / "dump").exists()
    assert "empty" not in capsys.readouterr().err


def test_the_functions_of_graph_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Level L1 in GRAPH_MODE says that the network makes no calls there, and what to use."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    debugger.start()
    debugger.stop()
    assert "in GRAPH_MODE the network makes none; use level L0 for its Cells" in capsys.readouterr().err


@functools.cache
def compiled() -> list[bytes]:
    """Bits of a training in GRAPH_MODE."""
    return train(None)


@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.slow
def test_graph_mode(tmp_path: Path, level: str) -> None:
    """A training in GRAPH_MODE has the records of its Cells and the bits it has without a dump."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    plain = compiled()
    assert train(PrecisionDebugger(config(tmp_path, level))) == plain
    assert {"Cell.a.Dense.forward.1", "Cell.pair.Pair.backward.0", "Cell.b.0.Linear.parameters_grad.0"} <= set(names(tmp_path))
    assert names(tmp_path, 0) == names(tmp_path, 1)
