"""What the MindSpore integration says about the environment it runs in."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import mindspore
import pytest

from msprobe_engine.errors import MissingExtraError
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.environment import MindSporeError


def _packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(environment, "_installed", versions.get)


def test_this_environment_works() -> None:
    """The environment of these tests passes, and its version is known as numbers."""
    environment.check()
    assert environment.version() == tuple(int(n) for n in mindspore.__version__.split(".")[:3])
    assert hasattr(environment.api_module(), "_pynative_executor")
    assert not environment.adapter()


@pytest.mark.parametrize(
    ("found", "numpy", "works"),
    [
        ("2.10.0", "1.26.4", True),
        ("2.10.0", "2.0.0", False),
        ("2.10.0rc1", "2.4.6", False),
        ("2.7.0", "2.1.0", False),
        ("2.11.0", "2.4.6", True),
        ("3.0", "2.4.6", True),
    ],
)
def test_numpy_2_is_refused_where_mindspore_is_built_for_numpy_1(
    monkeypatch: pytest.MonkeyPatch, found: str, numpy: str, works: bool
) -> None:
    """One line says which packages do not go together, and what to install."""
    _packages(monkeypatch, mindspore=found, numpy=numpy)
    if works:
        environment.check()
        return
    with pytest.raises(MindSporeError) as caught:
        environment.check()
    text = f"mindspore {found} was compiled for numpy 1 and does not work with the installed numpy {numpy}: pip install 'numpy<2'"
    assert str(caught.value) == text


def test_without_mindspore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where MindSpore is not installed the message is the command that installs it."""
    _packages(monkeypatch, numpy="2.4.6")
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"msprobe.mindspore needs the package 'mindspore': pip install 'msprobe\[mindspore\]'"):
        environment.check()


def test_a_build_without_a_package_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore built from source may have no package metadata; then nothing is known against it."""
    _packages(monkeypatch, numpy="2.4.6")
    environment.check()


def test_the_environment_speaks_before_mindspore_is_imported() -> None:
    """The package says what is wrong at its own import, before anything of MindSpore runs."""
    program = (
        "import importlib.metadata as m, sys\n"
        "real = m.version\n"
        "m.version = lambda name: '2.4.6' if name == 'numpy' else real(name)\n"
        "try:\n    import msprobe_integrations.mindspore.backend\n"
        "except Exception as error:\n    print(type(error).__name__, 'mindspore' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["MindSporeError", "False"], done.stderr


def _module(**names: Any) -> ModuleType:
    module = ModuleType("torch")
    module.__dict__.update(names)
    return module


def test_an_adapter_is_known_by_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called torch counts as MindSpore when its tensors are MindSpore's; PyTorch itself, and modules that are neither, do not;
    torch is not imported to find out."""
    assert "torch" not in sys.modules
    real = type("Tensor", (type("TensorBase", (), {"__module__": "torch._C"}),), {})

    def never(_: float) -> None:
        raise AssertionError("a tensor of PyTorch was made")

    def broken(_: float) -> None:
        raise RuntimeError("no device")

    modules = {
        "same class": (_module(Tensor=mindspore.Tensor), True),
        "subclass": (_module(Tensor=type("Tensor", (mindspore.Tensor,), {})), True),
        "made by a function": (_module(tensor=mindspore.Tensor), True),
        "PyTorch": (_module(Tensor=real, tensor=never), False),
        "neither": (_module(tensor=broken), False),
        "nothing": (_module(), False),
    }
    for name, (module, expected) in modules.items():
        monkeypatch.setitem(sys.modules, "torch", module)
        assert environment.adapter() is expected, name
