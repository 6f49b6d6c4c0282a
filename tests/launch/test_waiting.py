"""What is done before and after a framework's modules are imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from msprobe_integrations import autoload
from msprobe_integrations.autoload import imports, request


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``fakeframework`` with a module ``loop``; waiting and modules are as before afterwards."""
    root = tmp_path / "fakeframework"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "loop.py").write_text("def train(): return 'theirs'\n")
    (tmp_path / "fakescript.py").write_text("from fakeframework.loop import train\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    for table in ("_before", "_after"):
        monkeypatch.setattr(imports, table, {})
    yield root
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.partition(".")[0] in ("fakeframework", "fakescript")]:
        del sys.modules[name]


def wrap(module: ModuleType) -> None:
    original = module.train
    module.train = lambda: f"ours({original()})"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("package")
def test_who_imports_a_name_gets_the_wrapped_one() -> None:
    """Hooks run after the module's own code and before anybody can take a name from it, once, and leave the loader as it was."""
    seen: list[str] = []
    imports.before_import("fakeframework", lambda: seen.append("before"))
    imports.after_import("fakeframework.loop", wrap)
    imports.after_import("fakeframework.loop", wrap)
    script = importlib.import_module("fakescript")
    assert script.train() == "ours(theirs)"
    assert seen == ["before"]
    loop = sys.modules["fakeframework.loop"]
    assert "exec_module" not in vars(loop.__loader__)
    importlib.reload(loop)
    assert loop.train() == "theirs"


@pytest.mark.usefixtures("package")
def test_asking_whether_a_module_is_there_loses_nothing() -> None:
    """Libraries look for optional packages with `find_spec`, as often as they like."""
    imports.after_import("fakeframework.loop", wrap)
    for _ in range(3):
        assert importlib.util.find_spec("fakeframework.loop") is not None
    assert importlib.import_module("fakeframework.loop").train() == "ours(theirs)"


def test_a_module_that_fails_is_waited_for_again(package: Path) -> None:
    """An import that raises raises as without us; the one that works later is followed."""
    good = (package / "loop.py").read_text()
    (package / "loop.py").write_text("raise ImportError('not built yet')\n")
    imports.after_import("fakeframework.loop", wrap)
    with pytest.raises(ImportError, match="not built yet"):
        importlib.import_module("fakeframework.loop")
    (package / "loop.py").write_text(good + "#\n")
    importlib.invalidate_caches()
    assert importlib.import_module("fakeframework.loop").train() == "ours(theirs)"


@pytest.mark.usefixtures("package")
def test_a_module_that_is_missing() -> None:
    """A module that this version of the framework does not have: the error is Python's own."""
    imports.after_import("fakeframework.gone", wrap)
    with pytest.raises(ModuleNotFoundError, match=r"fakeframework\.gone"):
        importlib.import_module("fakeframework.gone")


@pytest.mark.usefixtures("package")
def test_a_fault_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a hook before nor one after makes the import of a framework fail; the other hooks still run."""

    def fault(*_: object) -> None:
        raise ValueError("ours")

    imports.before_import("fakeframework", fault)
    imports.after_import("fakeframework.loop", fault)
    imports.after_import("fakeframework.loop", wrap)
    assert importlib.import_module("fakeframework.loop").train() == "ours(theirs)"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("works without the probe: ValueError: ours" in line for line in lines)


@pytest.mark.usefixtures("package")
def test_modules_that_are_there_and_those_half_way() -> None:
    """What is imported already is told at once; what is being imported, at its end."""
    loop = importlib.import_module("fakeframework.loop")
    imports.after_import("fakeframework.loop", wrap)
    assert loop.train() == "ours(theirs)"
    seen: list[str] = []
    imports.before_import("fakeframework.loop", lambda: seen.append("at once"))
    assert seen == ["at once"]
    loop.__spec__._initializing = True  # type: ignore[union-attr]
    assert imports.being_imported(loop)


@pytest.mark.usefixtures("package")
def test_forgetting() -> None:
    """A hook that was taken back does not run."""
    imports.after_import("fakeframework.loop", wrap)
    imports.forget("fakeframework.loop", wrap)
    imports.forget("fakeframework.loop", wrap)
    assert importlib.import_module("fakeframework.loop").train() == "theirs"


@pytest.mark.usefixtures("package")
def test_modules_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip file has one loader for all its modules: only the one that is waited for is followed."""
    archive = tmp_path / "packed.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("fakeframework_zip_a.py", "import fakeframework_zip_b\ndef train(): return 'a'\n")
        file.writestr("fakeframework_zip_b.py", "def train(): return 'b'\n")
    monkeypatch.syspath_prepend(str(archive))
    imports.after_import("fakeframework_zip_a", wrap)
    module = importlib.import_module("fakeframework_zip_a")
    assert module.train() == "ours(a)"
    assert module.fakeframework_zip_b.train() == "b"


@pytest.fixture
def table(package: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The table of frameworks has the fake one, whose ``arm`` notes that it was called; nothing is installed yet."""
    assert package.is_dir()
    armed: list[str] = []
    module = ModuleType("fakeframework_arming")
    module.arm = lambda: armed.append("armed")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fakeframework_arming", module)
    monkeypatch.setattr(autoload, "FRAMEWORKS", {"fakeframework": ("fakeframework_arming", True, 30)})
    monkeypatch.setattr(autoload, "_installed", False)
    monkeypatch.setattr(autoload, "_unfit", False)
    return armed


def test_frameworks_are_armed_when_the_environment_asks(table: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without MSPROBE_CONFIG nothing waits; with it ``arm`` is called before the import, once."""
    autoload.install()
    assert imports._before == {}
    monkeypatch.setattr(autoload, "_installed", False)
    monkeypatch.setenv(request.CONFIG, "probe.yaml")
    autoload.install()
    assert table == []
    importlib.import_module("fakeframework.loop")
    assert table == ["armed"]


@pytest.mark.usefixtures("table")
def test_a_relative_name_is_fixed_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that changes its directory, and its children, still find the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(request.CONFIG, "probe.yaml")
    autoload.install()
    monkeypatch.chdir("/")
    asked = request.current()
    assert asked is not None
    assert asked.config == str(tmp_path / "probe.yaml")


def test_an_interpreter_that_lacks_packages(table: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the interpreter and what it lacks; the framework is imported without the probe."""
    monkeypatch.setenv(request.CONFIG, "probe.yaml")
    monkeypatch.setattr(autoload, "NEEDS", ("json", "no_such_package"))
    autoload.install()
    importlib.import_module("fakeframework.loop")
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{sys.executable} lacks package no_such_package; install msprobe there" in line
    assert table == []


@pytest.mark.usefixtures("table")
def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """MSPROBE_AUTOLOAD=0: not even a finder."""
    monkeypatch.setenv(request.CONFIG, "probe.yaml")
    monkeypatch.setenv(request.SWITCH, "0")
    before = list(sys.meta_path)
    autoload.install()
    assert sys.meta_path == before
    assert request.current() is None


def test_the_launch_argument_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which file, and who asked for it, for messages; its changes are those that it is given."""
    monkeypatch.setenv(request.CONFIG, "environment.yaml")
    monkeypatch.setenv(request.CHANGES, "dump.step=[1]\n\nstrict=true")
    try:
        asked = request.request_probe("argument.yaml", request.environment_changes(), by="--msprobe-config")
        assert request.current() is asked
        assert Path(asked.config).name == "argument.yaml"
        assert asked.changes == ("dump.step=[1]", "strict=true")
        assert asked == request.Request(asked.config, asked.changes)
        assert hash(asked) == hash(request.Request(asked.config, asked.changes))
        assert request.request_probe("argument.yaml", ("strict=false",)).changes == ("strict=false",)
    finally:
        request.forget()
    current = request.current()
    assert current is not None
    assert Path(current.config).name == "environment.yaml"


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only arguments that begin like ours say that the framework's parser has to know them."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    assert not request.has_probe_argument()
    monkeypatch.setattr(sys, "argv", ["train.py", "--msprobe-config", "x"])
    assert request.has_probe_argument()
