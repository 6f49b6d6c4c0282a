"""Tools of Ascend devices: dumps of single kernels (level L2) and of torchair's graphs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe.pytorch import AclGraphDumper, acl_save, set_fx_dump_config, set_ge_dump_config
from msprobe_engine.core.errors import SinkError, UsageError
from msprobe_engine.core.guard import Faults
from msprobe_integrations.torch.ascend.graph_modes import fill_fx, fill_ge
from msprobe_integrations.torch.ascend.kernel_dump import KernelDump, npu_tool

# Level L2: the device's tool is driven around one API call. The tool here notes what it is told and what runs meanwhile.


class Tool:
    """Notes its calls, and the operators that run between `set_dump` and `finalize_dump`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ran: list[str] = []
        self.fails = ""
        self._watch = _Watch(self.ran)

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name.startswith(self.fails or "-"):
            raise RuntimeError(f"{name} failed")

    def synchronize(self) -> None:
        self._note("synchronize")

    def init_dump(self) -> None:
        self._note("init_dump")

    def set_dump(self, config_path: str) -> None:
        self._note(f"set_dump {config_path}")
        self._watch.__enter__()

    def finalize_dump(self) -> None:
        if "set_dump" in "".join(self.calls[-4:]) and not self.fails:
            self._watch.__exit__(None, None, None)
        self._note("finalize_dump")


class _Watch(TorchDispatchMode):
    def __init__(self, ran: list[str]) -> None:
        super().__init__()
        self._ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ran.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(functional.dropout(torch.relu(self.a(x)), 0.5)).sum()


def train(session: KernelDump | None, work: Any = None, step: int = 0, rank: int | None = 0) -> list[torch.Tensor]:
    """One step of a small model under the dump; returns its gradients."""
    torch.manual_seed(0)
    net = Net()
    if session is not None:
        session.begin(step, rank)
    (work or (lambda n: n(torch.ones(2, 3)).backward()))(net)
    if session is not None:
        session.pause()
        session.end_step()
    return [p.grad for p in net.parameters() if p.grad is not None]


def drive(name: str, tmp_path: Path, **faults: bool) -> tuple[KernelDump, Tool]:
    """A dump and its tool."""
    tool = Tool()
    return KernelDump(name, tmp_path, Faults(**faults), tool), tool


def test_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool is on exactly during the named call, configured by a file of its own; nothing stays behind."""
    session, tool = drive("Functional.linear.1.forward", tmp_path, strict=True)
    apply = torch.autograd.function._SingleLevelFunction.__dict__.get("apply")
    train(session)
    config = tmp_path / "step0/kernel_config_0.json"
    assert tool.calls == ["synchronize", "init_dump", f"set_dump {config}", "synchronize", "synchronize", "finalize_dump", "synchronize"]
    assert [name for name in tool.ran if name not in ("t", "view", "_unsafe_view")] == ["addmm"]
    assert json.loads(config.read_text()) == {
        "dump": {"dump_list": [], "dump_path": str(tmp_path / "step0"), "dump_mode": "all", "dump_op_switch": "on"}
    }
    assert config.stat().st_mode & 0o777 == 0o640 & ~os.umask(os.umask(0o022))
    assert "The kernel data of Functional.linear.1.forward is dumped successfully." in capsys.readouterr().err
    assert torch._C._len_torch_function_stack() == 0
    assert torch.autograd.function._SingleLevelFunction.__dict__.get("apply") is apply


@pytest.mark.parametrize("name", ["Functional.linear.0.backward", "Functional.dropout.0.backward", "Torch.relu.0.backward"])
def test_backward(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient of the named call goes through a copy of it, on which alone the tool is on; the training's own gradients and random
    numbers are those of a training without."""
    expected = train(None)
    session, tool = drive(name, tmp_path, strict=True)
    gradients = train(session)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert [c.partition(" ")[0] for c in tool.calls].count("set_dump") == 1
    own = {"Functional.linear": "mm", "Functional.dropout": "mul", "Torch.relu": "threshold_backward"}[name.rpartition(".0.")[0]]
    assert own in tool.ran
    assert not {"threshold_backward", "mm"} - {own} & set(tool.ran)
    assert f"The kernel data of {name} is dumped successfully." in capsys.readouterr().err


def test_every_wanted_step(tmp_path: Path) -> None:
    """Each step has its own configuration file and its own numbering; without a rank the file has the process id."""
    session, tool = drive("Functional.linear.0.forward", tmp_path, strict=True)
    for step in (0, 4):
        train(session, step=step, rank=None)
    session.close()
    assert [c for c in tool.calls if c.startswith("set_dump")] == [
        f"set_dump {tmp_path}/step{step}/kernel_config_{os.getpid()}.json" for step in (0, 4)
    ]


def test_a_call_that_raises(tmp_path: Path) -> None:
    """The tool is switched off when the named call raises, and the program gets its own error."""
    session, tool = drive("Functional.linear.0.forward", tmp_path, strict=True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(session, lambda net: net(torch.ones(2, 5)))
    session.close()
    assert tool.calls[-2:] == ["finalize_dump", "synchronize"]


@pytest.mark.parametrize(
    ("name", "work", "said"),
    [
        ("Functional.linear.9.forward", None, "Functional.linear.9.forward was not called in step 0"),
        ("Functional.linear.0.backward", lambda net: net(torch.ones(2, 3)), "does not support the Functional.linear.0.backward API"),
        ("Torch.ones.0.backward", None, "does not support the Torch.ones.0.backward API"),
        ("Tensor.detach.0.backward", lambda net: net(torch.ones(2, 3)).detach(), "does not support the Tensor.detach.0.backward API"),
    ],
)
def test_what_cannot_be_dumped_is_said(tmp_path: Path, name: str, work: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A call that never came, a gradient that never came and a call without gradients each give one line; the tool stays off."""
    session, tool = drive(name, tmp_path, strict=True)
    train(session, work)
    assert capsys.readouterr().err.count(said) == 1
    assert tool.calls == []


def test_in_place_call(tmp_path: Path) -> None:
    """A call that writes into its argument is repeated on a copy: the argument changes once."""
    session, tool = drive("Tensor.add_.0.backward", tmp_path, strict=True)
    seen = []

    def work(net: Net) -> None:
        y = net.a(torch.zeros(2, 3)) * 1
        before = y.detach().clone()
        y.add_(1)
        seen.append(torch.equal(y, before + 1))
        y.sum().backward()

    train(session, work)
    assert seen == [True]
    assert "finalize_dump" in tool.calls


@pytest.mark.parametrize("fails", ["init_dump", "set_dump", "finalize_dump"])
def test_a_tool_that_fails(tmp_path: Path, fails: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the tool ends the kernel dump with one message; the training goes on as without."""
    session, tool = drive("Functional.linear.0.forward", tmp_path)
    tool._watch.__enter__ = lambda: None  # type: ignore[method-assign]
    tool.fails = fails
    expected = train(None)
    for step in range(2):
        assert all(torch.equal(a, b) for a, b in zip(train(session, step=step), expected, strict=True))
    assert capsys.readouterr().err.count("kernel dump is switched off") == 1
    assert len([c for c in tool.calls if c == "init_dump"]) == 1


def test_without_an_npu() -> None:
    """Where torch_npu is not installed, one error says what level L2 needs."""
    with pytest.raises(UsageError, match=r"level L2 .* needs the package torch_npu"):
        npu_tool()


def test_a_name_that_is_no_api(tmp_path: Path) -> None:
    """A module has no kernels of its own."""
    with pytest.raises(UsageError, match="is no full API name"):
        drive("Module.fc.Linear.forward.0", tmp_path)


# Configuration of the dumps that torchair makes, and what needs an NPU.


def empty(**graph_dump: Any) -> Any:
    """An object with the attributes that torchair's configuration has."""
    debug = SimpleNamespace(graph_dump=SimpleNamespace(**graph_dump), data_dump=SimpleNamespace(path=None))
    return SimpleNamespace(debug=debug, fusion_config=SimpleNamespace(), dump_config=SimpleNamespace())


@pytest.mark.parametrize("attribute", ["_path", "path"])
def test_ge(tmp_path: Path, attribute: str) -> None:
    """The dump is switched on with path, mode, steps and layers in the words of torchair; older versions name the path otherwise."""
    switches = tmp_path / "fusion.json"
    switches.write_text("{}")
    config = fill_ge(empty(**{attribute: None}), str(tmp_path), "output", str(switches), [1, 3], ["layer.0", "layer.1"])
    directory = str(tmp_path.resolve() / "msprobe_ge_dump")
    assert vars(config.debug.graph_dump) == {"type": "txt", attribute: directory}
    assert vars(config.fusion_config) == {"fusion_switch_file": str(switches)}
    assert vars(config.dump_config) == {
        "enable_dump": True,
        "dump_mode": "output",
        "dump_path": directory,
        "dump_step": "1|3",
        "dump_layer": "layer.0 layer.1",
    }
    assert Path(directory).is_dir()


def test_ge_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments everything is dumped below the working directory; what is not asked for is not set. Old files are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msprobe_ge_dump").mkdir()
    (tmp_path / "msprobe_ge_dump/old").write_text("x")
    config = fill_ge(empty(), "")
    assert config.dump_config.dump_path == str(tmp_path.resolve() / "msprobe_ge_dump")
    assert set(vars(config.dump_config)) == {"enable_dump", "dump_mode", "dump_path"}
    assert vars(config.fusion_config) == {}
    assert "holds files already" in capsys.readouterr().err


def test_fx(tmp_path: Path) -> None:
    """Operators are kept by part of their name, whatever its case."""
    config = fill_fx(empty(), str(tmp_path), ["MatMul"])
    assert config.debug.data_dump.type == "npy"
    assert config.debug.data_dump.path == str(tmp_path.resolve() / "msprobe_fx_dump")
    op = SimpleNamespace(name="aten_matmul_3")
    assert config.debug.data_dump.filter(op) is op
    assert config.debug.data_dump.filter(SimpleNamespace(name="add")) is None
    assert not hasattr(fill_fx(empty(), str(tmp_path)).debug.data_dump, "filter")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dump_mode": "none"}, "dump_mode is 'none'"),
        ({"dump_token": [-1]}, "dump_token"),
        ({"dump_token": 3}, "dump_token is 3"),
        ({"dump_layer": "layer"}, "dump_layer is 'layer'"),
        ({"fusion_switch_file": "/no/such"}, "is no file"),
    ],
)
def test_ge_arguments(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    """A wrong argument is named, and nothing is created."""
    with pytest.raises(UsageError, match=said):
        fill_ge(empty(), str(tmp_path), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_places(tmp_path: Path) -> None:
    """Operator names are a list, the path a text that can be a directory."""
    with pytest.raises(UsageError, match="op_list is 'add'"):
        fill_fx(empty(), str(tmp_path), "add")
    with pytest.raises(UsageError, match="dump_path is 3"):
        fill_fx(empty(), 3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="file"):
        fill_fx(empty(), str(tmp_path / "file"))


def test_what_is_missing_is_named() -> None:
    """Where there is no NPU software, each function says in one line what it needs."""
    for call in (set_ge_dump_config, set_fx_dump_config):
        with pytest.raises(UsageError, match="torch_npu and torchair"):
            call()


def test_programs_that_use_acl_graphs_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    """The calls that vllm-ascend makes in its graph mode do nothing; that nothing is saved is said once for each name."""
    model, x = torch.nn.Linear(2, 2), torch.ones(2)
    for _ in range(2):
        dumper = AclGraphDumper("config.json")
        dumper.start(model)
        dumper.step(dump=False)
        dumper.step()
        dumper.stop()
        assert acl_save(x, "x") is x
    said = capfd.readouterr().err
    assert said.count("AclGraphDumper saves nothing") == 1
    assert said.count("acl_save saves nothing") == 1
