"""Checkpoints that real frameworks write, once for all tests of a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from megatron_writer import FAST


@pytest.fixture(scope="session")
def megatron_checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one of each of `megatron_writer.CASES`, of its `FAST` ones where no slow test is run, written by megatron-core in
    processes of its own. Do not write into it."""
    target = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_writer.py")
    names = () if any(item.get_closest_marker("slow") for item in request.session.items) else FAST
    done = warm.run(warm.script(script), target, *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return target
