"""Rows that a device makes by operators. There is none here: the same operators run on the CPU, and what they give is compared with the
kernel's rows."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint

from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.statistics import rows
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.statistics import device_rows

TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool_")
EXACT = [0, 1, 2, 3, 4, 5, 10, 11, 12, 15]
REAL = [6, 7, 8, 9, 13, 14]


@pytest.fixture(autouse=True)
def _as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device whose memory the host does not read, and large tensors are those over 1000 elements."""
    monkeypatch.setattr(device_rows, "HOSTS", frozenset())
    monkeypatch.setattr(device_rows, "PIECE", 1000)
    monkeypatch.setattr(device_rows, "_trusted", {})


def _both(tensor: Any, monkeypatch: pytest.MonkeyPatch, **wants: Any) -> tuple[np.ndarray, np.ndarray]:
    """The row by operators, and that by the kernel."""
    found = []
    for hosts in ((), ("cpu",)):
        monkeypatch.setattr(device_rows, "HOSTS", frozenset(hosts))
        backend = MindSporeBackend()
        for name, value in wants.items():
            setattr(backend, name, value)
        ref = backend.reduce(tensor)
        assert bool(backend._step.devices) is (not hosts and tensor.size > 0)
        pending = backend.finish_step()
        assert pending.ready()
        found.append(np.array(pending.rows()[ref.row]))
    return found[0], found[1]


SHAPES = [(), (3, 5), (2500,), (0, 3)]
"""Each type in the fast tier with one of them in turn."""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=[pytest.mark.slow] if (i + j) % len(SHAPES) else [])
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(TYPES)
    ],
)
def test_operators_give_the_rows_of_the_kernel(monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...]) -> None:
    """Every word, in one pass and in several, with NaN and Inf, moments and a limit; sums to rounding."""
    values = np.random.default_rng(1).standard_normal(shape) * 50
    if "float" in dtype and values.size > 3:
        values.reshape(-1)[:4] = [np.nan, np.inf, -np.inf, 0.0]
    tensor = Tensor(values.astype(np.float32), getattr(mindspore, dtype))
    got, want = _both(tensor, monkeypatch, want_moments=True, below=0.5)
    assert got.view(np.int64)[EXACT].tolist() == want.view(np.int64)[EXACT].tolist()
    np.testing.assert_allclose(got[REAL], want[REAL], rtol=1e-12)


def test_limits_of_large_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 2**53 a float64 would round."""
    got, want = _both(Tensor(np.array([2**62 + 3, -(2**62) - 7, 5]), mindspore.int64), monkeypatch)
    limits = [rows.IMIN, rows.IMAX]
    assert got.view(np.int64)[limits].tolist() == want.view(np.int64)[limits].tolist() == [-(2**62) - 7, 2**62 + 3]


def test_views_are_reduced_as_what_they_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transposed part of a tensor has the row of its own elements."""
    whole = Tensor(np.arange(60, dtype=np.float32).reshape(6, 10))
    got, want = _both(mint.transpose(mint.narrow(whole, 1, 2, 3), 0, 1), monkeypatch)
    np.testing.assert_array_equal(got, want)


def test_rows_of_device_and_host_keep_their_places() -> None:
    """What needs its bytes goes to the host, in the same step; `so_far` shows both before the end of it and takes nothing away."""
    backend = MindSporeBackend()
    first = backend.reduce(Tensor([1.0, 2.0]))
    second = backend.reduce(Tensor([3.0, 4.0], mindspore.complex64))
    backend.want_digest = True
    third = backend.reduce(Tensor([5.0, 6.0]))
    assert len(backend._step.devices._made) == 1
    refs = (first, second, third)
    assert [backend.so_far()[ref.row][rows.SUM] for ref in refs] == [3.0, 7.0, 11.0]
    table = backend.finish_step().rows()
    assert [table[ref.row][rows.SUM] for ref in refs] == [3.0, 7.0, 11.0]


def test_later_changes_do_not_reach_the_row() -> None:
    """A row is that of the moment of the hook, although nobody waited for it."""
    backend = MindSporeBackend()
    parameter = mindspore.Parameter(Tensor(np.ones(500, np.float32)), name="p")
    ref = backend.reduce(parameter)
    mindspore.ops.assign(parameter, Tensor(np.zeros(500, np.float32)))
    again = backend.reduce(parameter)
    table = backend.finish_step().rows()
    assert (table[ref.row][rows.SUM], table[again.row][rows.SUM]) == (500.0, 0.0)


def test_a_device_that_computes_otherwise_is_not_trusted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """An operator that is missing, or gives something else, is noticed at the first tensor of a type: it is said once, and rows are
    made on the host."""

    def none(_: Any, __: Any) -> Any:
        raise RuntimeError("Unsupported op [ReduceSum] on XPU")

    monkeypatch.setattr(device_rows, "_sum", none)
    backend = MindSporeBackend()
    ref = backend.reduce(Tensor(np.array([1, 2], np.int16)))
    assert backend.so_far()[ref.row][rows.SUM] == 3.0
    assert not backend._step.devices
    monkeypatch.setattr(device_rows, "_sum", lambda *_: Tensor(1.0, mindspore.float64))
    backend.reduce(Tensor(np.array([1, 2], np.int32)))
    assert not backend._step.devices
    said = capfd.readouterr().err
    assert "statistics of Int16 tensors on 'cpu' are taken on the host" in said
    assert "Unsupported op [ReduceSum] on XPU" in said


def test_a_failure_of_the_training_is_not_one_of_the_device() -> None:
    """An operator of the training that failed before is reported as it is, and the device stays trusted."""
    sound = Tensor(np.ones(4, np.float32)) + 1
    sound.asnumpy()
    backend = MindSporeBackend()
    _ = mint.cumsum(sound, 0)
    with pytest.raises(RuntimeError, match="Cumsum") as caught:
        backend.reduce(sound)
    assert is_of_training(caught.value)
    ref = backend.reduce(sound)
    assert backend._step.devices
    assert backend.so_far()[ref.row][rows.SUM] == 8.0


def test_nothing_of_it_is_recorded() -> None:
    """Gradients have the same bits when tensors are reduced by operators in the midst of a forward pass."""
    backend = MindSporeBackend()
    weight = mindspore.Parameter(Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)), name="w")
    data = Tensor(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))

    def forward(look: bool) -> Any:
        def run(x: Any) -> Any:
            hidden = mint.matmul(x, weight)
            if look:
                backend.reduce(hidden)
                backend.reduce(weight)
            return (hidden * hidden).sum()

        loss, grads = mindspore.value_and_grad(run, None, [weight])(data)
        return loss.asnumpy().tobytes(), grads[0].asnumpy().tobytes()

    assert forward(look=True) == forward(look=False)
    assert len(backend.finish_step().rows()) == 2
