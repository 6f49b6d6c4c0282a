"""The short way to the kernels of a device: in Triton's interpreter with launches by address, and what decides that a kernel is used."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core import log
from msprobe_integrations.torch.statistics.device import trust as device_trust

triton_here = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(*cases: str) -> dict[str, Any]:
    """What these cases of `interpreted_device` found, in one process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    program = str(Path(__file__).with_name("interpreted_device.py"))
    command = [sys.executable, "-W", "ignore", program, *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return {name: case for line in ran.stdout.splitlines() for name, case in json.loads(line).items()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Batches and pairs."""
    return run_interpreted("batched", "paired")


@pytest.mark.slow
@triton_here
def test_launches_by_address_give_the_same_bits() -> None:
    """The second tensor of a kind is reduced without Triton's own call, one launch for a small tensor and two for a large one, for every
    type; its row is the same, bit for bit, wherever the memory begins."""
    got = run_interpreted("direct")["direct"]
    assert got["unequal"] == []
    assert got["unsupported"] == {}
    launches = {name: {tuple(one) for one in each} for name, each in got["kernels"].items()}
    for name in ("aligned", "odd"):
        assert launches[f"1 {name}"] == launches[f"700 {name}"] == {("row",)}
        assert launches[f"9001 {name}"] == {("row", "merge")}


@triton_here
@pytest.mark.slow
def test_what_no_kernel_reads_where_it_lies() -> None:
    """Tensors of five dimensions that are not dense, and pairs of tensors in other orders, are copied and read piece by piece: rows and
    histograms are those of the C kernel, and no new memory is larger than a few pieces."""
    got = run_interpreted("of_any_strides")["of_any_strides"]
    assert got["wrong"] == []
    assert got["trusted"] >= 4
    assert got["largest"] <= got["limit"]


@triton_here
@pytest.mark.slow
def test_histograms_by_the_kernel() -> None:
    """For every type of real numbers, of one program and of several, the kernel counts tensors of any strides as numpy does, and writes the
    rows that the C kernel's counts have on the host."""
    got = run_interpreted("counted")["counted"]
    assert got["wrong"] == []
    assert got["without kernel"] == []
    assert got["kernels"] >= 30
    assert got["unsupported"] == {}


@triton_here
@pytest.mark.slow
def test_a_batch_gives_the_rows_of_single_launches(found: dict[str, Any]) -> None:
    """Tensors of several types, of 0 to 9,000 elements, at odd addresses too, in more rows than a chunk has: one launch for a type at one
    alignment and one for what has to be merged, at the end of the block, and the bits are those of a launch each. A few alone are not worth
    a table."""
    got = found["batched"]
    assert got["unequal"] == []
    assert got["unsupported"] == {}
    assert got["early"] == []
    assert got["rows"] > 40
    assert len(got["kernels"]) < got["rows"] // 2
    assert got["kernels"].count("many") >= 4


@triton_here
@pytest.mark.slow
def test_pairs_are_reduced_by_one_kernel(found: dict[str, Any]) -> None:
    """Updates, ratios, agreements and signs have numpy's rows: counts, extremes and counts below a limit exactly, sums to 1e-9; in one
    launch, two for large ones, and in a batch for all of a kind together. A number of steps on the device is used there."""
    got = found["paired"]
    assert got["wrong"] == []
    assert got["unsupported"] == {}
    assert {tuple(one) for one in got["alone"][1::2]} == {("pair", "pair"), ("pair", "merge") * 2}
    assert {tuple(one) for one in got["batched"]} == {("many", "many"), ("many", "merge") * 2}


@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=0, max_size=5),
    order=st.permutations(range(5)),
    cut=st.booleans(),
    expanded=st.integers(0, 4),
    in_order=st.booleans(),
)
def test_fewer_dimensions_hold_the_same_elements(shape: list[int], order: list[int], cut: bool, expanded: int, in_order: bool) -> None:
    """Collapsed sizes and strides walk over the places of the tensor's elements, in its order where that is asked for."""
    pytest.importorskip("triton")
    from msprobe_integrations.torch.statistics.device import launch as device_launch

    base = torch.arange(int(np.prod([n + 1 for n in shape])) if shape else 1).view([n + 1 for n in shape] if shape else [])
    tensor = base[tuple(slice(0, n) if cut else slice(1, n + 1) for n in shape)].permute([i for i in order if i < len(shape)])
    if expanded < tensor.dim():
        tensor = tensor.narrow(expanded, 0, 1).expand(*(4 if i == expanded else -1 for i in range(tensor.dim())))
    places = device_launch.collapse(tensor.shape, tensor.stride(), in_order=in_order)
    assert len(places) <= max(1, tensor.dim())
    walked = torch.as_strided(base, [n for n, _ in places], [step for _, step in places], tensor.storage_offset()).flatten().tolist()
    whole = tensor.flatten().tolist()
    assert walked == whole if in_order else sorted(walked) == sorted(whole)


@triton_here
@pytest.mark.parametrize(
    ("version", "by_address", "constants"), [("3.2.0", True, 0), ("3.3.1", True, 2), ("3.9.0+git", True, 2), ("3.10.0", False, 2)]
)
def test_a_compiled_kernel_is_called_as_its_version_of_triton_calls_it(
    version: str, by_address: bool, constants: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grid, stream, function, metadata, no hooks, arguments; compile-time arguments from 3.3 on. A version not known is not called so."""
    from msprobe_integrations.torch.statistics.device import launch as device_launch

    seen: list[Any] = []
    monkeypatch.setattr(device_launch.triton, "__version__", version)
    compiled = SimpleNamespace(run=lambda *arguments: seen.append(arguments), function=7, packed_metadata=(4, 1, 0))
    call = device_launch.bind(compiled, {"KIND": "float32", "SIZE": 4})
    assert call is not None
    call(3, 99, 1 << 40, 5)
    assert seen == [(3, 1, 1, 99, 7, (4, 1, 0), None, None, None, 1 << 40, 5, *("float32", 4)[:constants])]
    assert device_launch._same_call(version) is by_address


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel has been tried."""
    monkeypatch.setattr(device_trust, "TRUSTED", {})
    monkeypatch.setattr(device_trust, "_failed", {})
    log.forget_warnings()
    yield
    log.forget_warnings()


CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("undecided")
def test_a_check_may_wait_where_the_user_forbids_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of a kernel runs with `set_sync_debug_mode` off, which is put back, also after an error."""
    mode = [2]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: mode.__setitem__(0, new))
    during: list[int] = []

    def check() -> str:
        during.append(mode[0])
        return ""

    assert device_trust.by_kernel(CUDA, ("a",), "rows", check, lambda: during.append(mode[0]))
    assert (during, mode) == ([0, 2], [2])
    assert not device_trust.by_kernel(CUDA, ("b",), "rows", lambda: 1 / 0, lambda: None)  # type: ignore[arg-type,return-value]
    assert mode == [2]


@pytest.mark.usefixtures("undecided")
def test_what_is_not_the_fault_of_a_kernel_does_not_count_against_it() -> None:
    """A check that fails because a wait is forbidden or a graph is recorded runs again at the next tensor; wrong numbers and errors of the
    compiler are final, as is a check that never comes to an end."""
    problems = iter(["called a synchronizing CUDA operation", "operation not permitted when stream is capturing"])
    started: list[int] = []

    def check() -> str:
        for text in problems:
            raise RuntimeError(text)
        return ""

    tries = [device_trust.by_kernel(CUDA, ("row",), "rows", check, lambda: started.append(1)) for _ in range(4)]
    assert tries == [False, False, True, True]
    assert started == [1, 1]
    for key, wrong in (("numbers", "synchronized sums are 3 instead of 4"), ("compiler", "")):
        calls: list[int] = []

        def failing(wrong: str = wrong, calls: list[int] = calls) -> str:
            calls.append(1)
            if not wrong:
                raise RuntimeError("failed to compile")
            return wrong

        assert [device_trust.by_kernel(CUDA, (key,), "rows", failing, lambda: None) for _ in range(3)] == [False] * 3
        assert calls == [1]
    endless: list[int] = []

    def never() -> str:
        endless.append(1)
        raise RuntimeError("stream is capturing")

    for _ in range(20):
        assert not device_trust.by_kernel(CUDA, ("never",), "rows", never, lambda: None)
    assert len(endless) < 10
