"""Tests inside MindSpore's own environment: each in a directory of its own (MindSpore litters), seeded, in PyNative mode, on the CPU.

Without mindspore the directory is skipped as a whole (`tests/conftest.py`), so nothing here imports it before a test runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GLOG_v", "3")  # errors only; read once, when mindspore is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
for place in (HERE.parent / "frameworks", HERE):  # programs and helpers that several tests share
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))


@pytest.fixture(scope="session", autouse=True)
def _litter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What fixtures of a module or of the session run leaves its files here."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("litter"))
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what `programs_of_ranks` has seen."""
    from ms_ranks import run_ranks

    root = tmp_path_factory.mktemp("ranks")
    run_ranks(HERE / "programs_of_ranks.py", root)
    return root


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Own directory, seed 1234, PyNative mode before and after."""
    import mindspore

    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.set_seed(1234)
    yield
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


@pytest.fixture
def own_debugger() -> Iterator[None]:
    """A process without a debugger, and no trace of the test's own behind it."""
    from msprobe_engine import log
    from msprobe_integrations.common import at_exit
    from msprobe_integrations.mindspore.debugger import PrecisionDebugger

    PrecisionDebugger._instance = None
    log.forget_warnings()
    yield
    made = PrecisionDebugger._instance
    if made is not None and made._built:
        if made._run is not None:
            made._run.at_exit()
        at_exit.unregister(made._at_exit)
    PrecisionDebugger._instance = None
    log.set_rank(None)
