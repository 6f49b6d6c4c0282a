"""Level L2: the device's tool is driven around one API call. The tool here notes what it is told and what runs meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.errors import UsageError
from msprobe_engine.guard import Faults
from msprobe_integrations.torch.kernel_dump import KernelDump, npu_tool


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
