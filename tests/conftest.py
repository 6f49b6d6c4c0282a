"""Shared by all tests: hypothesis without deadlines (machines differ), an environment free of this project's variables, file systems of
their own."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ending
import pytest
from hypothesis import HealthCheck, settings

from msprobe_engine.core.process.variables import VARIABLES

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job: programs that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

for profile, examples in (("full", 100), ("fast", 10)):
    settings.register_profile(profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("fast")


class _NeedsMindSpore(pytest.Dir):
    """A directory whose tests run in an environment with mindspore; in any other it is one skipped line."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        pytest.skip("mindspore is not installed in this environment; make test-mindspore has one with it")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """tests/mindspore is not even imported where there is no mindspore."""
    installed = importlib.util.find_spec("mindspore")  # a folder of that name on the path is none: it has no origin
    if path == Path(__file__).parent / "mindspore" and (installed is None or installed.origin is None):
        collector: pytest.Collector = _NeedsMindSpore.from_parent(parent, path=path)
        return collector
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a parametrized test with the marker `fast_cells` all other cells are slow. What a test runs in marks it: Chromium, MindSpore."""
    cells: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
            item.add_marker(pytest.mark.browser)
        if (Path(__file__).parent / "mindspore") in item.path.parents:
            item.add_marker(pytest.mark.mindspore)
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("fast_cells")) is not None:
            function, cell = item.nodeid.partition("[")[0], item.callspec.id
            cells.setdefault(function, set()).add(cell)
            named[function] = set(marker.args)
            if cell not in marker.args:
                item.add_marker(pytest.mark.slow)
    if not any("[" in argument for argument in config.args):  # else only some cells were collected
        for function, names in named.items():
            if unknown := sorted(names - cells[function]):
                raise pytest.UsageError(f"{function}: fast_cells names {unknown}; there are {sorted(cells[function])}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported stays to the end, so the garbage collector need not look through it again and again, here and in every process
    that is forked: a tenth of the time of all tests."""
    ending.freeze()


# A forked child that collects what its parent has left may wait for ever: a leaked DDP reducer joins threads that a fork does not have.
os.register_at_fork(after_in_child=gc.freeze)


# Extension modules complain at the end of objects that nobody has freed. Not before: pytest collects five times when it ends.
atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="session")
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Directories that tests and the code under test make by `tempfile` go with those of pytest."""
    multiprocessing.util.get_temp_dir()  # of the process, which takes it away when it ends, after pytest: it must not lie in pytest's
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("t"))
    yield
    tempfile.tempdir = before


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop("MSPROBE_OWNER", None)  # of a probe that a test has left open
    logging.getLogger("msprobe").setLevel(logging.INFO)  # settings loaded in a test may have made it silent


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with these options; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a tmpfs needs root")
        place = tmp_path / f"tmpfs{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not allowed here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small(tmpfs: Callable[[str], Path]) -> Path:
    """A file system of 1 MiB: a disk that is soon full."""
    return tmpfs("size=1m")


_PACKAGES = {"promtool": "prometheus", "amtool": "prometheus-alertmanager"}


@pytest.fixture(scope="session")
def binary() -> Callable[[str], str]:
    """Path of a program. Without it the test fails with the Debian package to install, or is skipped with MSPROBE_ALLOW_SKIP=1."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            text = f"{name} is not installed: apt-get install {_PACKAGES.get(name, name)}"
            if os.environ.get("MSPROBE_ALLOW_SKIP") == "1":
                pytest.skip(text)
            pytest.fail(text)
        return path

    return find
