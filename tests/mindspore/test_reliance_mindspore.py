"""What the integration relies on in MindSpore."""

from __future__ import annotations

import pytest

from msprobe_engine.cli import frameworks
from msprobe_integrations import reliance as reliances
from msprobe_integrations.mindspore import environment, reliance


def test_everything_is_there() -> None:
    """The MindSpore of these tests has all names of the table, and `msprobe frameworks` says so."""
    assert reliances.missing(reliance.TABLE) == []
    found = frameworks.check("mindspore", "msprobe_integrations.mindspore.reliance")
    assert {row["state"] for row in found["rows"]} == {"there"}
    assert frameworks.lines([found])[0].endswith(f"all {len(reliance.TABLE)} names are there")


def test_a_numpy_that_it_was_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A numpy with which MindSpore cannot work is said in place of names."""
    assert reliance.trouble() == ""
    monkeypatch.setattr("msprobe_integrations.mindspore.reliance.importlib.import_module", lambda _: environment.check())
    monkeypatch.setattr(environment, "_installed", {"mindspore": "2.10.0", "numpy": "2.4.6"}.get)
    assert "pip install 'numpy<2'" in reliances.report(reliance)["error"]
