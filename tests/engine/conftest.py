"""What all tests of the C kernel share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from msprobe_engine.core.statistics import host_kernel


@pytest.fixture(params=["avx512", "avx2", "portable", "numpy"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set this machine has, and numpy as where the kernel was not built."""
    kernel = host_kernel.kernel()
    if request.param == "numpy":
        monkeypatch.setattr(host_kernel, "_kernel", None)
    elif kernel is None or kernel.set_isa(request.param) != request.param:
        pytest.importorskip("msprobe_engine.native._rowstats").set_isa("avx512")
        pytest.skip(f"no {request.param} here")
    yield request.param
    if kernel is not None:
        kernel.set_isa("avx512")
