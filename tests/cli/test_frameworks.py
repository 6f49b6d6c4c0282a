"""``msprobe frameworks`` and the tables it checks."""

from __future__ import annotations

import importlib
import json
import operator
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.cli.launch import frameworks
from msprobe_engine.cli.main import main
from msprobe_integrations import framework_report, requirements
from msprobe_integrations.requirements import Requirement
from msprobe_integrations.source_names import defines, find_needed_names

FRAMEWORK = "class Engine:\n    step = 1\n    class Inner:\n        deep = 2\nCONSTANT = None\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A framework ``fakefw`` with a module ``engine``, one that raises, and one that ends the process, on the path of all processes."""
    for name, text in (
        ("fakefw", FRAMEWORK),
        ("fakebroken", "raise OSError('libfake.so is missing')\n"),
        ("fakefatal", "import os; os._exit(5)\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("" if name == "fakefw" else text)
        (tmp_path / name / "engine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0].startswith("fake")]:
        del sys.modules[name]


def table(directory: Path, name: str, rows: str, extra: str = "") -> str:
    """A module with a table; returns its name."""
    (directory / f"{name}_table.py").write_text(
        f"from msprobe_integrations.requirements import Requirement as R\n"
        f"NAME = {name.title()!r}\nPACKAGE = {name!r}\nTABLE = ({rows})\n{extra}\n"
    )
    return f"{name}_table"


def states(report: dict[str, Any]) -> list[str]:
    return [row["state"] for row in report["rows"]]


def test_states(place: Path) -> None:
    """There, lost, about a training, of an optional part; one of several ways is enough."""
    rows = (
        "R('fakefw.engine:Engine.Inner.deep', 'a'), R('fakefw.engine:Engine.gone | fakefw.engine:CONSTANT', 'b'), "
        "R('fakefw.engine:Engine.gone', 'c', '1.0'), R('fakefw.gone:x', 'd'), R('engine.step', 'e'), "
        "R('engine.step | fakefw.engine:Engine', 'f'), R('fakefw.extra.loop:train', 'g'), R('fakefw.extraordinary:x', 'h')"
    )
    found = frameworks.check("fakefw", table(place, "fakefw", rows, "PARTS = ('fakefw.extra',)"))
    assert found["installed"]
    assert states(found) == ["there", "there", "lost", "lost", "in training", "there", "not installed", "lost"]
    assert frameworks.is_degraded(found)
    text = "\n".join(frameworks.lines([found]))
    assert "3 of 6 names are missing; 1 more of objects that only a training has: checked when one begins" in text
    assert "has no fakefw.engine:Engine.gone: without it: no c (known in: 1.0)" in text


@pytest.mark.parametrize(
    ("name", "error"),
    [("fakebroken", "OSError: libfake.so is missing"), ("fakefatal", "ended with exit code 5")],
)
def test_a_broken_framework_spoils_nothing(place: Path, name: str, error: str) -> None:
    """One that raises, and one that ends its process, are said by name; the others are checked."""
    broken = frameworks.check(name, table(place, name, f"R('{name}.engine:x', 'a'),"))
    good = frameworks.check("fakefw", table(place, "fakefw", "R('fakefw.engine:Engine', 'a'),"))
    assert error in broken["error"]
    assert frameworks.is_degraded(broken)
    assert not frameworks.is_degraded(good)
    text = frameworks.lines([broken, good])
    assert "does not work here" in text[0]
    assert text[1].endswith("all 1 names are there")


def test_rows_that_only_a_training_can_answer(place: Path) -> None:
    """Nothing is claimed of them."""
    found = frameworks.check("fakefw", table(place, "fakefw", "R('fakefw.engine:Engine', 'a'), R('engine.step', 'b')"))
    found["rows"] = [row for row in found["rows"] if row["state"] == "in training"]
    assert frameworks.lines([found])[0].endswith(" 1 of objects that only a training has: checked when one begins")
    assert not frameworks.is_degraded(found)


def test_nothing_is_imported_that_the_source_answers(place: Path) -> None:
    """A framework whose names are in its source is not imported; asked to, it is, and what raises then is said."""
    (place / "fakebroken" / "engine.py").write_text("class Engine:\n    step = 1\n")
    module = table(place, "fakebroken", "R('fakebroken.engine:Engine.step', 'a'),")
    assert not frameworks.is_degraded(frameworks.check("fakebroken", module))
    assert "libfake.so is missing" in frameworks.check("fakebroken", module, imports=True)["error"]


SOURCE = """\
from . import inner, other as aliased
from .inner import *
from .inner import Base as Parent
import fakesource.inner as module
class Engine(Parent):
    step = 1
    class Inner:
        deep = 2
    def method(self): self.instance = 1
    declared: int
class Dotted(inner.Base[int]): pass
a, (b, *c) = 1, (2, 3)
annotated: int = 1
gone = 1
del gone
if a:
    maybe = 1
"""
HERE = [
    *("Engine.step", "Engine.Inner.deep", "Engine.method", "Engine.parent", "Dotted.parent", "star", "Parent.parent", "module.star"),
    *("inner.star", "a", "b", "c", "annotated", "aliased.value"),
]
NOT_SAID = [
    *("Engine.instance", "Engine.declared", "Engine.Inner.parent", "gone", "maybe", "a.real", "nothing", "inner.nothing"),
    "Engine.method.x",
]
INNER = "class Base:\n    parent = 1\n    __class_getitem__ = classmethod(lambda c, _: c)\nstar = 1\n"


def test_names_from_source(place: Path) -> None:
    """What the source says beyond doubt is there when the module is imported; what stands under conditions is not claimed."""
    (place / "fakesource").mkdir()
    (place / "fakesource" / "__init__.py").write_text(SOURCE)
    (place / "fakesource" / "inner.py").write_text(INNER)
    (place / "fakesource" / "other.py").write_text("value = 1\n")
    assert [name for name in HERE if not defines("fakesource", name.split("."))] == []
    assert [name for name in NOT_SAID if defines("fakesource", name.split("."))] == []
    assert "fakesource" not in sys.modules
    whole = importlib.import_module("fakesource")
    assert [name for name in HERE if operator.attrgetter(name)(whole) is None] == []
    assert not defines("fakesource.absent", ["x"])
    assert not defines("fakeabsent", ["x"])


ASKS = """\
PART = "a part"
def look(engine, other):
    part = "another part"
    need(engine, "step", "old_step", for_=PART)
    need(need(engine, "inner", for_="a third one"), "deep", for_=part)
    need(other.self if other else engine, "name", for_=f"made of {other}")
    need(engine, *other, for_=PART)
    needs(engine, "step")
"""


def test_what_sources_ask_for_is_a_table(tmp_path: Path) -> None:
    """With each name what does not work without it; what is made while running is left out."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "asks.py").write_text(ASKS)
    (tmp_path / "asks_not.py").write_text("step = 1\n")
    assert {row.on: row.needed_for for row in find_needed_names(tmp_path)} == {
        "engine.step | engine.old_step": "a part",
        "engine.inner": "a third one",
        "engine.inner.deep": "another part",
        "other.self.name": "",
    }


def test_lightning_has_no_row_that_nothing_reads() -> None:
    """Its private names are those that its sources ask for."""
    rows = {row["on"] for row in frameworks.check("lightning", "msprobe_integrations.lightning.reliance")["rows"]}
    assert {"trainer.fit_loop._should_accumulate", "trainer._results"} <= rows


@given(text=st.text(max_size=30), path=st.text(max_size=10))
def test_any_name_is_answered(text: str, path: str) -> None:
    """Whatever is asked for, nothing raises, and nothing is there."""
    assert not defines(text, path.split("."))


def test_what_is_not_installed_is_no_fault(place: Path) -> None:
    """A framework that is not here is listed, and degrades nothing."""
    found = frameworks.check("fakeabsent", table(place, "fakeabsent", "R('fakeabsent.engine:x', 'a'),"))
    assert not found["installed"]
    assert not frameworks.is_degraded(found)
    assert frameworks.lines([found])[-1] == "not installed: Fakeabsent"


def test_what_does_not_go_together(place: Path) -> None:
    """A table may know why its framework cannot work in this environment: that is said, and its names are not looked for."""
    module = table(place, "fakefw", "R('fakefw.engine:gone', 'a'),", "def trouble():\n    return 'fakefw needs another number library'")
    found = frameworks.check("fakefw", module)
    assert frameworks.is_degraded(found)
    assert [line.strip() for line in frameworks.lines([found])[-1:]] == ["fakefw needs another number library"]


def test_a_package_that_refuses_to_be_imported(place: Path) -> None:
    """The table in it is read all the same: it may be the framework that is missing."""
    package = place / "fakepackage"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('no framework here')\n")
    name = table(package, "fakefw", "R('fakefw.engine:Engine', 'a'),")
    assert states(frameworks.check("fakefw", f"fakepackage.{name}")) == ["there"]


def test_an_integration_without_a_table(place: Path) -> None:
    """A module that cannot be imported is said like a broken framework."""
    (place / "fakeempty_table.py").write_text("NAME = 'x'\n")
    found = frameworks.check("fakeempty", "fakeempty_table")
    assert "TABLE" in found["error"]
    assert frameworks.is_degraded(found)


def test_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """The command with the torch that is installed: everything is there, exit code 0; as text and as JSON."""
    assert main(["frameworks", "torch"]) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("PyTorch")
    assert "names are there" in line
    assert main(["frameworks", "TORCH", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["name"] == "PyTorch"
    assert all({"on", "needed_for", "versions", "state"} == set(row) for row in report["rows"])


def test_a_degraded_framework_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Something is missing: exit code 1, and the text says what."""
    module = table(place, "fakefw", "R('fakefw.engine:Engine.gone', 'steps'),")
    monkeypatch.setattr(frameworks, "_modules", lambda _names: {"fakefw": module})
    assert main(["frameworks"]) == 1
    assert "without it: no steps" in capsys.readouterr().out


def test_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the names that there are."""
    assert main(["frameworks", "tensorflow"]) == 2
    assert "unknown framework 'tensorflow'; allowed: accelerate, " in capsys.readouterr().err


def test_every_table_is_well_formed() -> None:
    """Each integration's table can be read without any framework: no row twice, every row says what it is needed for."""
    modules = frameworks._modules([])
    assert len(modules) >= 8
    code = (
        "import sys\nfrom msprobe_integrations.framework_report import module_of\n"
        f"for module in {list(modules.values())!r}: module_of(module)\n"
        f"print(sorted(set({list(modules)!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for module in modules.values():
        found = framework_report.module_of(module)
        assert found.NAME
        assert found.PACKAGE
        assert len({(row.on, row.needed_for) for row in found.TABLE}) == len(found.TABLE)
        for row in found.TABLE:
            assert row.needed_for
            assert all("." in way or ":" in way for way in row.on.split("|"))


NAMES = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)


@given(path=st.lists(NAMES, min_size=1, max_size=4), cut=st.integers(0, 4))
def test_rows_about_objects(path: list[str], cut: int) -> None:
    """A row holds exactly when every attribute of its path is there; one about an object that was not given does not count."""
    whole: Any = types.SimpleNamespace()
    at = whole
    for name in path[:cut]:
        inner = types.SimpleNamespace()
        setattr(at, name, inner)
        at = inner
    row = Requirement("thing." + ".".join(path), "x")
    assert requirements.find_missing([row], {"thing": whole}) == ([] if cut >= len(path) else [row])
    assert requirements.find_missing([row]) == []
    assert requirements.find_missing([Requirement(f"{row.on} | thing", "x")], {"thing": whole}) == []


@given(text=st.text(max_size=30))
def test_any_row_is_answered(text: str) -> None:
    """Whatever stands in a row, checking it raises nothing."""
    assert requirements.find_missing([Requirement(text, "x")], {"thing": 1}) in ([], [Requirement(text, "x")])


class Hostile:
    """An attribute of a framework may do anything when it is read."""

    @property
    def engine(self) -> None:
        raise RuntimeError("not now")


def test_checking_says_each_loss_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, version, what is missing and what that takes away, once per process; what raises is missing."""
    monkeypatch.setattr(requirements, "MISSING", {})
    table = [Requirement("thing.engine", "steps"), Requirement("thing.__class__", "names")]
    for _ in range(2):
        assert requirements.check("Fake", "no-such-package", table, {"thing": Hostile()}) == table[:1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Fake (version unknown) has no thing.engine: without it: no steps")
