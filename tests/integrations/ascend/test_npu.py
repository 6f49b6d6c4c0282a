"""Code paths of an Ascend NPU, on torch's own third-party device key under the name ``npu`` (no NPU is needed or used)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

pytestmark = pytest.mark.framework


def job(*arguments: str) -> dict[str, Any]:
    """What the parts of the job print."""
    done = warm.run(warm.script(Path(__file__).with_name("npu_job.py")), *arguments, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    """Of trainings that name the device ``npu``."""
    return job()


def test_monitor(ran: dict[str, Any]) -> None:
    """Every family has on the NPU the numbers it has on the processor; the training has the same bits with the probe and without; copies
    go over a stream of their own; the overflow flag is read and never cleared."""
    got = ran["monitor"]
    assert [len(frame) for frame in got["npu"]] == [len(frame) for frame in got["cpu"]]
    for want, have in zip(got["cpu"], got["npu"]):
        assert want.keys() == have.keys()
        for name, (norm, count) in want.items():
            assert have[name][1] == count
            assert have[name][0] == pytest.approx(norm, rel=1e-6), name
    assert got["npu lost"] == [{}, {}, {}]
    assert [got["cpu same"], got["npu same"]] == [True, True]
    assert [s["npu_overflow"] for s in got["npu scalars"]] == [0.0, 1.0, 1.0]
    assert "event" in got["events"]
    assert "clear" not in got["events"]


def test_operators(ran: dict[str, Any]) -> None:
    """Operators of torch_npu are ``NPU.{operator}`` however they are called, forward and backward, with statistics and their device."""
    found = {name: (mean, device) for name, mean, device in ran["dump"]}
    names = [name for name in found if name.startswith("NPU.")]
    assert names == [
        "NPU.npu_rms_norm.0.forward",
        *(f"NPU.npu_swiglu.{n}.forward" for n in range(4)),
        "NPU.npu_fusion_attention.0.forward",
        "NPU.npu_swiglu.0.backward",
        "NPU.npu_rms_norm.0.backward",
        "NPU.npu_fusion_attention.0.backward",
    ]
    assert all(found[name][1] == "npu:0" for name in names)
    assert found["NPU.npu_rms_norm.0.forward"][0] == pytest.approx(1.0, rel=1e-5)
    assert found["NPU.npu_fusion_attention.0.forward"][0] == 1.0
    assert all(found[name][0] is not None for name in names)


def test_random_state(ran: dict[str, Any]) -> None:
    """The device's random state is saved and put back; `seed_all` seeds it and asks HCCL for determinism until it is taken back."""
    got = ran["randomness"]
    assert "npu" in got["kinds"]
    assert got["again"] is True
    assert (got["seeded"], got["hccl"].lower(), got["after"]) == (5, "true", None)


def test_tensor_files(ran: dict[str, Any]) -> None:
    """Task tensor copies tensors of the device to files that load on the processor; the file of a copy to the host that comes late has
    what comes."""
    got = ran["tensors"]
    assert got["devices"] == ["cpu"]
    assert got["files"] > 10
    assert got["first"] == got["late"] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert "nan" in got["early"]


def test_without_float64(ran: dict[str, Any]) -> None:
    """The device makes float32 of ``.to(torch.float64)``; its rows have the digits of the processor's all the same, also where the square
    of a value does not fit float32."""
    got = ran["extremes"]
    cpu, npu = got.pop("histogram")
    assert cpu == npu
    cpu, npu = got.pop("update")
    assert npu == pytest.approx(cpu, rel=1e-7)
    for name, (cpu, npu) in got.items():
        assert npu[:4] == cpu[:4], name
        assert npu[4:] == pytest.approx(cpu[4:], rel=1e-7, nan_ok=True), name
        assert npu[5] == pytest.approx(cpu[5], rel=1e-9), name


def test_private_formats(ran: dict[str, Any]) -> None:
    """What is read of a tensor in format FRACTAL_NZ is a copy in format ND: rows, pairs and files are those of its
    values, and the tensor itself stays as it is. Where torch_npu refuses the cast there is no row, and a message says why."""
    got = ran["formats"]
    assert got["rows"][0] == got["rows"][1] == got["rows"][2] == got["rows"][3]
    assert got["pairs"][0] == got["pairs"][1]
    assert got["same"] == [True, True]
    assert got["saved"] == [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]]
    assert got["still"] == [29, [777.0]]
    row, (why,) = got["refused"]
    assert row == -1
    assert why.startswith("private format: 29, RuntimeError: can not cast format")


def test_copies_to_the_host_that_come_late(ran: dict[str, Any]) -> None:
    """The result of a copy that is not waited for has the numbers of what is copied, whenever it comes; other names of its memory have
    theirs as soon as it has come, and none, said so, when it has been written to before or does not come within the step. Nobody waits."""
    got = ran["arrivals"]
    late = [None, "torch.float32", "cpu", {"pending": True}]
    assert got["waits"] == [0]
    assert {name: what for name, what in got["found"].items() if ".full." not in name} == {
        "Tensor.to.0.forward": [3.0, "torch.float32", "npu:0", {}],
        "Tensor.to.1.forward": [5.0, "torch.float32", "npu:0", {}],
        "Tensor.to.2.forward": [3.0, "torch.float32", "cpu", {}],
        "Tensor.view.0.forward": [3.0, "torch.float32", "cpu", {}],
        "Module.0.Offload.forward.0": [3.0, "torch.float32", "cpu", {}],
        "Torch.relu.0.forward": [3.0, "torch.float32", "npu:0", {}],
        "Tensor.to.3.forward": [3.0, "torch.float32", "cpu", {}],
        "Tensor.copy_.0.forward": [3.0, "torch.float32", "cpu", {}],
        "Tensor.view.1.forward": late,
        "Tensor.copy_.1.forward": [5.0, "torch.float32", "cpu", {}],
        "Tensor.copy_.2.forward": [3.0, "torch.float16", "cpu", {}],
        "Torch.add.0.forward": [6.0, "torch.float32", "cpu", {}],
        "Tensor.copy_.3.forward": [None, "torch.float16", "cpu", {"pending": True}],
    }


@pytest.mark.slow
def test_transfer_to_npu(ran: dict[str, Any]) -> None:
    """Of trainings that name the device ``cuda``, after ``transfer_to_npu``, everything is as of those that name it ``npu``: rows, records,
    files, stacks (without the functions that stand in place of torch's), and the NPU is listed, and its random state saved, once.

    MSPROBE_TORCH_NPU: the directory of an unpacked wheel of torch_npu, whose own module is then used, not the tests'.
    """
    found = job("cuda")
    assert found["devices"] == ran["devices"]
    assert found["devices"]["devices"] == {"npu": {"count": 1, "name": "stand-in"}}
    assert found["devices"]["states"] == ["npu:0", "numpy", "python", "torch"]
    assert ["torch.npu.manual_seed", 1] in found["devices"]["calls"]
    assert found["tensors"]["stacks"] == []
    assert found["randomness"] == ran["randomness"]
    for part in ("dump", "tensors", "formats", "arrivals"):
        assert found[part] == ran[part], part
    for part in ("npu", "npu lost", "npu same"):
        assert found["monitor"][part] == ran["monitor"][part], part


def test_overflow_flag_of_newer_devices(ran: dict[str, Any]) -> None:
    """Where Inf is Inf the flag is read only when torch_npu itself goes by it, which depends on more than a variable."""
    assert ran["overflow"] == [{}, {}, {"npu_overflow": 1.0}]


@pytest.mark.slow
def test_nothing_imports_torch_npu() -> None:
    """No module of this project imports torch_npu by itself, nor looks for more than its name."""
    text = (
        "import sys, pkgutil, importlib, msprobe_integrations.torch as t\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.partition('.')[0] != 'torch_npu', 'somebody imports torch_npu'\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "for m in pkgutil.walk_packages(t.__path__, t.__name__ + '.'):\n"
        "    if '.statistics.device.' not in m.name:\n"
        "        importlib.import_module(m.name)\n"
        "assert 'torch_npu' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
