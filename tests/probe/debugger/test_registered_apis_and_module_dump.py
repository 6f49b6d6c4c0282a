"""`register_custom_api`, `restore_custom_api`, `module_dump` and `module_dump_end`."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
from debug_model import Net, config, names, written, x
from torch import nn

from msprobe.pytorch import module_dump, module_dump_end
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def package(net: Net) -> types.ModuleType:
    """A module ``my.pkg`` with a function that calls a model and torch."""
    made: Any = types.ModuleType("my.pkg")

    def f(t: torch.Tensor, y: int = 1) -> torch.Tensor:
        """What f does."""
        return torch.matmul(net.a(t), t.t()) * y

    made.f = f
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("level", ["L1", "mix"])
def test_records(tmp_path: Path, level: str) -> None:
    """Calls are numbered, forward and backward; modules inside are records, functions inside are not, so that torch's own are
    numbered as if they were not there."""
    debugger = PrecisionDebugger(config(tmp_path, level))
    net = Net()
    pkg: Any = package(net)
    original = pkg.f
    debugger.register_custom_api(pkg, "f")
    debugger.register_custom_api(pkg, "f")
    assert (pkg.f.__name__, pkg.f.__doc__) == ("f", "What f does.")
    debugger.start(net)
    pkg.f(x())
    torch.matmul(x(), x().t())
    given = x().requires_grad_()
    pkg.f(given, y=2).sum().backward()
    debugger.restore_custom_api(pkg, "f")
    assert pkg.f is original
    torch.matmul(x(), x().t())
    debugger.stop()
    debugger.step()
    found = names(tmp_path)
    assert [n for n in found if n.startswith("my.pkg")] == ["my.pkg.f.0.forward", "my.pkg.f.1.forward", "my.pkg.f.1.backward"]
    assert [n for n in found if "matmul" in n] == ["Torch.matmul.0.forward", "Torch.matmul.1.forward"]
    assert ("Module.a.Linear.forward.0" in found) == (level == "mix")
    assert not [n for n in found if "mul." in n and "matmul" not in n]
    entries = written(tmp_path).entries
    assert entries["my.pkg.f.1.forward"].sections["input_kwargs"]["y"].json == {"type": "int", "value": 2}
    assert [t.description.shape for _, t in entries["my.pkg.f.1.backward"].tensors()] == [(2, 2), (2, 4)]
    assert Path(__file__).name in entries["my.pkg.f.0.forward"].stack[0]
    if level == "mix":
        assert entries["Module.a.Linear.forward.0"].parent == "my.pkg.f.0.forward"


def test_prefix(tmp_path: Path) -> None:
    """A prefix may hold dots and spaces; list picks the records by their name; at level L0 nothing is recorded."""
    debugger = PrecisionDebugger(config(tmp_path, "L1", section={"list": ["fast.ops"]}))
    pkg: Any = package(Net())
    debugger.register_custom_api(pkg, "f", "my fast.ops")
    debugger.start()
    pkg.f(x())
    torch.sin(x())
    debugger.stop()
    pkg.f(x())
    debugger.step()
    assert names(tmp_path) == ["my fast.ops.f.0.forward"]


class Tools:
    """Every kind of method."""

    factor = 3.0

    def plain(self, t: torch.Tensor) -> torch.Tensor:
        return t * self.factor

    @staticmethod
    def static(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    @classmethod
    def of_class(cls, t: torch.Tensor) -> torch.Tensor:
        return t * cls.factor


class Derived(Tools):
    factor = 5.0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def test_methods(tmp_path: Path) -> None:
    """Methods, static methods, class methods, inherited ones and those of an object go on as before and are restored to what was."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    tool = Tools()
    before = dict(vars(Tools))
    for owner, name in ((Tools, "plain"), (Tools, "static"), (Tools, "of_class"), (Derived, "static"), (tool, "plain"), (Square, "apply")):
        debugger.register_custom_api(owner, name, f"{getattr(owner, '__name__', 'tool')}")
    one = torch.ones(2, requires_grad=True)
    debugger.start()
    assert Tools().plain(one).tolist() == [3, 3]
    assert (Tools().static(one).tolist(), Tools.static(one).tolist()) == ([2, 2], [2, 2])
    assert Derived.of_class(one).tolist() == [5, 5]
    assert Derived().static(one).tolist() == [2, 2]
    assert tool.plain(one).tolist() == [3, 3]
    assert Square.apply(one).tolist() == [1, 1]  # type: ignore[no-untyped-call]
    debugger.stop()
    debugger.step()
    for owner, name in ((Tools, "plain"), (Tools, "static"), (Tools, "of_class"), (Derived, "static"), (tool, "plain"), (Square, "apply")):
        debugger.restore_custom_api(owner, name)
    assert dict(vars(Tools)) == before
    assert "static" not in vars(Derived)
    assert not vars(tool)
    assert "apply" not in vars(Square)
    assert names(tmp_path) == [
        "Tools.plain.0.forward",
        "Tools.static.0.forward",
        "Tools.static.1.forward",
        "Tools.of_class.0.forward",
        "Derived.static.0.forward",
        "tool.plain.0.forward",
        "Square.apply.0.forward",
    ]


def test_exceptions_are_the_functions_own(tmp_path: Path) -> None:
    """An exception passes through unchanged, the record says that the call raised, and the next call is whole."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    pkg: Any = package(Net())
    debugger.register_custom_api(pkg, "f")
    odd, right = torch.ones(3, 3), x()
    debugger.start()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        pkg.f(odd)
    pkg.f(right)
    debugger.stop()
    debugger.step()
    entries = written(tmp_path).entries
    assert list(entries) == ["my.pkg.f.0.forward", "my.pkg.f.1.forward"]
    assert entries["my.pkg.f.0.forward"].tags["raised"] is True


def compiled(path: Path) -> int:
    from torch._dynamo.testing import CompileCounter

    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # a framework that was imported before may have switched compilation off
    torch._dynamo.config.disable = False
    debugger = PrecisionDebugger(str(path))
    pkg: Any = types.ModuleType("pkg")
    pkg.f = lambda t: torch.sin(t) * 2
    debugger.register_custom_api(pkg, "f")
    counter = CompileCounter()
    run = torch.compile(lambda t: pkg.f(t) + 1, backend=counter, fullgraph=True)
    for _ in range(4):
        run(torch.ones(3))
        debugger.start()
        pkg.f(torch.ones(3))
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    return int(counter.frame_count)


def test_compiled_code(tmp_path: Path) -> None:
    """In compiled code a registered function is what it was, in one graph that is compiled once, whatever the window does."""
    done = pr.run(compiled, config(tmp_path, "L1", step=[1, 3]), directory=tmp_path)[0]
    assert done.value == 1
    assert [n for n in open_dump(tmp_path / "dump").load(3).entries if "pkg" in n] == ["pkg.f.0.forward"]


@pytest.mark.parametrize(("api", "prefix", "says"), [
    ("g", None, "my.pkg has no attribute 'g'"),
    (3, None, "api is 3; allowed: the name of a function"),
    ("number", None, "my.pkg.number is a int; allowed: functions and methods"),
    ("kind", None, "kind is a class; allowed: functions and methods"),
    ("f", 3, "api_prefix is 3; allowed: a text without /"),
    ("f", "", "api_prefix is ''"),
    ("f", "../up", "api_prefix is '../up'"),
])  # fmt: skip
def test_wrong_registration(tmp_path: Path, api: Any, prefix: Any, says: str) -> None:
    """What cannot be registered is named with what is allowed, and nothing is replaced."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    pkg: Any = package(Net())
    pkg.number, pkg.kind = 1, Tools
    before = dict(vars(pkg))
    with pytest.raises(UsageError, match=says.replace("(", r"\(").replace(".", r"\.")):
        debugger.register_custom_api(pkg, api, prefix)
    assert dict(vars(pkg)) == before


def test_builtin_and_unregistered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A type that takes no attributes is refused; restoring what was not registered is a warning, what does not exist an error; what
    somebody else has put in the place meanwhile stays."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    with pytest.raises(UsageError, match="cannot be replaced"):
        debugger.register_custom_api(str, "upper")
    pkg: Any = package(Net())
    debugger.restore_custom_api(pkg, "f")
    assert "f was not registered" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"restore_custom_api: my\.pkg has no attribute 'g'"):
        debugger.restore_custom_api(pkg, "g")
    debugger.register_custom_api(pkg, "f")
    theirs = pkg.f = lambda t: t
    debugger.restore_custom_api(pkg, "f")
    assert pkg.f is theirs
    assert "replaced by something else meanwhile" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_only_the_chosen_module(tmp_path: Path, level: str) -> None:
    """Between module_dump and its end one module is recorded under the given name, without its children and without functions;
    before and after what the level says; gradients come with the backward pass."""
    debugger = PrecisionDebugger(config(tmp_path, level))
    net = Net()
    debugger.start(net)
    net(x())
    module_dump(net.b, "my.block")
    first = net(x())
    torch.sin(x())
    second = net(x())
    module_dump_end()
    net(x())
    (first + second).sum().backward()
    debugger.stop()
    debugger.step()
    found = names(tmp_path)
    assert [n for n in found if n.startswith("Module.my.block")] == [
        "Module.my.block.Sequential.forward.0",
        "Module.my.block.Sequential.forward.1",
        "Module.my.block.Sequential.backward.1",
        "Module.my.block.Sequential.backward.0",
    ]
    assert not [n for n in found if "sin" in n]
    assert sum("Module.a.Linear.forward" in n for n in found) == (0 if level == "L1" else 2)
    assert sum(n.startswith("Torch.tanh") and n.endswith("forward") for n in found) == (0 if level == "L0" else 2)


def test_parameter_gradients_and_windows(tmp_path: Path) -> None:
    """The chosen module's parameter gradients come after module_dump_end; a module chosen before start and over several steps is
    recorded in each; several can be chosen; the end takes every hook off."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    net = Net()
    module_dump(net.a, "first")
    module_dump(net.b[0], "second")
    for step in range(2):
        debugger.start()
        y = net(x())
        debugger.stop()
        if step:
            module_dump_end()
        y.sum().backward()
        debugger.step()
    for step in range(2):
        assert sorted(names(tmp_path, step)) == [
            "Module.first.Linear.backward.0",
            "Module.first.Linear.forward.0",
            "Module.first.Linear.parameters_grad.0",
            "Module.second.Linear.backward.0",
            "Module.second.Linear.forward.0",
            "Module.second.Linear.parameters_grad.0",
        ]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [("net", "n", "module is a str"), (nn.Identity(), 3, "dump_name is 3"), (nn.Identity(), "", "dump_name is ''")],
)
def test_wrong_choice(tmp_path: Path, module: Any, name: Any, says: str) -> None:
    """What is no module and what is no name is refused, and without a debugger the message says what to do."""
    with pytest.raises(UsageError, match="construct it first"):
        module_dump(nn.Identity(), "n")
    with pytest.raises(UsageError, match="construct it first"):
        module_dump_end()
    PrecisionDebugger(config(tmp_path, "L1"))
    with pytest.raises(UsageError, match=says):
        module_dump(module, name)
