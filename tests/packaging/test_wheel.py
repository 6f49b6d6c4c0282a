"""Building and installing the distribution."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from msprobe_engine import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compiled_wheel", "plain_wheel"])
def test_a_wheel_is_built_with_and_without_a_compiler(kind: str, request: pytest.FixtureRequest) -> None:
    """A machine without a C compiler gets a complete wheel; compiled helpers are only added where they can be built."""
    wheel: Path = request.getfixturevalue(kind)
    assert wheel.name.startswith(f"msprobe_integrations-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert {"msprobe/py.typed", "msprobe_engine/core/settings/load.py", "msprobe_integrations/torch/__init__.py"} <= set(names)
    assert {"msprobe_autoload.pth", "msprobe_integrations/autoload/bootstrap/sitecustomize.py"} <= set(names)
    assert {"msprobe_engine/cli/for-assistants.md", "msprobe_engine/core/settings/presets/watch.yaml"} <= set(names)
    web = (ROOT / "msprobe_engine/report/web").rglob("*.*")
    pages = {str(path.relative_to(ROOT)) for path in web if path.suffix in (".css", ".js", ".json")}
    assert {"msprobe_engine/report/web/kit.css", "msprobe_engine/report/web/kit_texts.json"} <= pages <= set(names)
    assert "msprobe = msprobe_engine.cli.main:main" in entry_points
    assert not any(n.startswith(("tests/", "benchmarks/", "examples/")) for n in names)
    sources = {path.stem for package in ("msprobe_engine", "msprobe_integrations") for path in (ROOT / package).rglob("_*.c")}
    built = {Path(n).name.partition(".")[0] for n in names if n.endswith(".so")}
    assert built == (sources if kind == "compiled_wheel" and shutil.which("cc") else set())
