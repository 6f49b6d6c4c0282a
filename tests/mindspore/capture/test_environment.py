"""Which environments MindSpore works in, what the integration relies on, names of operators, ranks, random streams and seeds."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from msprobe_engine.cli.launch import frameworks
from msprobe_engine.core.errors import MissingExtraError, UsageError
from msprobe_integrations import framework_report, requirements
from msprobe_integrations.mindspore import environment, reliance
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.environment import MindSporeError
from msprobe_integrations.mindspore.randomness.seeds import seed_all, undo_seed_all
from msprobe_integrations.mindspore.ranks.job import is_initialized


def _packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(environment, "_read_version", versions.get)


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
    with pytest.raises(MissingExtraError, match=r"needs the package 'mindspore': pip install 'msprobe-integrations\[mindspore\]'"):
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
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


def test_versions_live_together() -> None:
    """MindSpore's compiled part is built for NumPy 1; arithmetic with Python and NumPy numbers works here."""
    import mindspore

    assert np.__version__.startswith("1.")
    tensor = mindspore.Tensor(np.ones(2, np.float32))
    assert ((tensor * 2.0) * np.float32(2)).asnumpy().tolist() == [4.0, 4.0]


def test_every_test_has_its_own_directory(tmp_path: Path) -> None:
    """What MindSpore drops into the working directory stays out of the work tree."""
    assert Path.cwd() == tmp_path


def test_everything_is_there() -> None:
    """The MindSpore of these tests has all names of the table, and `msprobe frameworks` says so."""
    assert requirements.find_missing(reliance.TABLE) == []
    found = frameworks.check("mindspore", "msprobe_integrations.mindspore.reliance")
    assert {row["state"] for row in found["rows"]} == {"there", "in training"}
    assert f"all {len(reliance.TABLE)} names are there; " in frameworks.lines([found])[0]


def test_a_numpy_that_it_was_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numpy with which MindSpore cannot work is said in place of names."""
    assert reliance.trouble() == ""
    monkeypatch.setattr("msprobe_integrations.mindspore.reliance.importlib.import_module", lambda _: environment.check())
    monkeypatch.setattr(environment, "_read_version", {"mindspore": "2.10.0", "numpy": "2.4.6"}.get)
    assert "pip install 'numpy<2'" in framework_report.report(reliance)["error"]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("msprobe.mindspore", "PrecisionDebugger TrainerMon save save_grad step seed_all MsprobeStep MsprobeInitStep"),
        ("msprobe.mindspore.common.utils", "MsprobeStep MsprobeInitStep seed_all"),
        ("msprobe.mindspore.compare.ms_compare", "ms_compare"),
        ("msprobe.mindspore.compare.distributed_compare", "ms_compare_distributed"),
    ],
)
def test_names(module: str, names: str) -> None:
    """Both versions' names, and none of them needs torch."""
    found = importlib.import_module(module)
    assert all(callable(getattr(found, name)) for name in names.split())
    assert set(getattr(found, "__all__", ())) <= vars(found).keys()
    assert "torch" not in sys.modules


def test_signatures() -> None:
    """Arguments have the order that the existing tool has; those of our own come behind."""
    from msprobe.mindspore import PrecisionDebugger, save, save_grad, seed_all

    def first(function: object, count: int) -> list[str]:
        return list(inspect.signature(function).parameters)[:count]  # type: ignore[arg-type]

    assert first(PrecisionDebugger.__init__, 6) == ["self", "config_path", "task", "dump_path", "level", "step"]
    assert first(PrecisionDebugger.start, 2) == ["model", "token_range"]
    assert first(PrecisionDebugger.save, 3) == ["variable", "name", "save_backward"]
    assert first(PrecisionDebugger.register_custom_api, 3) == ["module", "api", "api_prefix"]
    assert first(seed_all, 3) == ["seed", "mode", "rm_dropout"]
    assert first(save, 3) == first(save_grad, 3) == ["save_dir", "name", "data"]


@pytest.mark.slow
def test_an_installed_torch_is_left_alone(tmp_path: Path) -> None:
    """Importing and dumping does not import a torch that lies beside."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    code = (
        "import mindspore, sys\n"
        "from msprobe.mindspore import PrecisionDebugger\n"
        "debugger = PrecisionDebugger(level='mix', dump_path='out')\n"
        "net = mindspore.nn.SequentialCell(mindspore.nn.Dense(2, 2))\n"
        "debugger.start(net)\n"
        "net(mindspore.ops.ones((2, 2)))\n"
        "debugger.stop()\n"
        "debugger.step()\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _draws() -> list[Any]:
    low, high = Tensor(0.0), Tensor(1.0)
    drawn = [ops.uniform((3,), low, high).asnumpy().tolist(), ops.uniform((3,), low, high, seed=7).asnumpy().tolist()]
    return [*drawn, random.random(), np.random.rand()]


@pytest.mark.parametrize("seed", [None, 0, 5])
def test_random_streams_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    """After `set_random_state` the same numbers come again: with a global seed, and without one for operators with a seed of their own."""
    import sys

    monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", None)
    if seed is not None:
        mindspore.set_seed(seed)
    backend = MindSporeBackend()
    _draws()
    state = backend.random_state()
    first = _draws()
    second = _draws()
    backend.set_random_state(state)
    again = _draws()
    assert mindspore.get_seed() == seed
    kept = slice(None) if seed is not None else slice(1, None)
    assert again[kept] == first[kept]
    assert first[1:] != second[1:]


def test_the_generator_comes_back() -> None:
    """The state of the generator, which `manual_seed` sets, is part of it."""
    backend = MindSporeBackend()
    mindspore.manual_seed(11)
    state = backend.random_state()
    mindspore.manual_seed(12)
    backend.set_random_state(state)
    assert mindspore.initial_seed() == 11


def test_taking_the_state_changes_no_stream() -> None:
    """Looking at the random state draws nothing."""
    backend = MindSporeBackend()
    state = backend.random_state()
    plain = _draws()
    backend.set_random_state(state)
    backend.random_state()
    assert _draws() == plain


def test_the_rank_is_the_assigned_one_the_communication_s_or_the_launcher_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assigned rank counts first, then the communication, then RANK_ID and RANK; nonsense in them is no rank."""
    for name in ("RANK_ID", "RANK", "RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM"):
        monkeypatch.delenv(name, raising=False)
    backend = MindSporeBackend()
    assert not is_initialized()
    assert (backend.rank(), backend.world_size()) == (None, 1)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    assert (backend.rank(), backend.world_size()) == (7, 8)
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("RANK_SIZE", "4")
    assert (backend.rank(), backend.world_size()) == (3, 4)
    monkeypatch.setenv("RANK_ID", "three")
    assert backend.rank() == 7
    monkeypatch.setattr(mindspore.communication.GlobalComm, "INITED", True)
    monkeypatch.setattr(mindspore.communication, "get_rank", lambda: 1)
    monkeypatch.setattr(mindspore.communication, "get_group_size", lambda: 2)
    assert (backend.rank(), backend.world_size()) == (1, 2)
    backend.assigned_rank = 5
    assert backend.rank() == 5


ONES = np.ones((8, 8), np.float32)


class Dropping(nn.Cell):  # type: ignore[misc]
    """A dropout Cell and a dropout function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(p=0.5)

    def construct(self, x: Any) -> Any:
        return self.drop(x) + ops.dropout(x, 0.5)


class Jitted(Dropping):
    """The same, compiled."""

    @mindspore.jit
    def construct(self, x: Any) -> Any:
        return self.drop(x) + ops.dropout(x, 0.5)


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), ops.rand(3).asnumpy().tolist(), nn.Dense(3, 3).weight.asnumpy().tolist()


def test_the_same_seed_draws_the_same() -> None:
    """Python, numpy, operators and initializers repeat with the seed and differ with another."""
    seed_all(7)
    first = drawn()
    seed_all(7)
    assert drawn() == first
    seed_all(8)
    assert drawn() != first


@pytest.mark.parametrize("kind", [Dropping, Jitted])
def test_dropout_passes_through(kind: type[Dropping]) -> None:
    """rm_dropout reaches Cells that exist already and functions, eager and compiled; undo_seed_all lets them drop again."""
    before = kind()
    before.set_train()
    seed_all(1, rm_dropout=True)
    after = kind()
    after.set_train()
    for net in (before, after):
        assert (net(Tensor(ONES)).asnumpy() == 2).all()
    undo_seed_all()
    anew = kind()
    anew.set_train()
    assert (anew(Tensor(ONES)).asnumpy() != 2).any()


def test_dropout_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that a module took by name before is replaced there too."""
    monkeypatch.setitem(globals(), "taken", ops.dropout)
    seed_all(1, rm_dropout=True)
    assert (globals()["taken"](Tensor(ONES), p=0.5).asnumpy() == 1).all()


def test_deterministic_kernels_and_the_environment_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """mode chooses deterministic kernels; what the context writes into the environment is gone after undo."""
    monkeypatch.delenv("HCCL_DETERMINISTIC", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    before = mindspore.get_context("deterministic")
    seed_all(3, mode=True)
    seed_all(3, mode=True)
    assert mindspore.get_context("deterministic") == "ON"
    assert os.environ["PYTHONHASHSEED"] == "3"
    undo_seed_all()
    assert mindspore.get_context("deterministic") == before
    assert not {"HCCL_DETERMINISTIC", "PYTHONHASHSEED"} & os.environ.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": -1}, "seed is -1; allowed: an int from 0 to 4294967295"),
        ({"seed": True}, "seed is True"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": "1"}, "seed is '1'"),
        ({"mode": 1}, "mode is 1; allowed: True or False"),
        ({"rm_dropout": None}, "rm_dropout is None; allowed: True or False"),
    ],
)
def test_wrong_values_change_nothing(arguments: dict[str, Any], said: str) -> None:
    """A wrong value is an error that names it, before anything is changed."""
    state = random.getstate()
    with pytest.raises(UsageError, match=said):
        seed_all(**arguments)
    assert random.getstate() == state
