"""Rows of updates, ratios and agreements of real optimizers, histograms, and the words that a backend may add to its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import columns, histograms, host_kernel, rows
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics import derived, device_rows
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.testing import ProbeDevice, reads_forbidden

Move = Callable[[Any], Any]
HOMES: list[Any] = [pytest.param(lambda t: t, id="cpu"), pytest.param(ProbeDevice.wrap, id="device")]


def moved(states: dict[str, Any], move: Move) -> dict[str, Any]:
    """The states where the test wants them; a step on the CPU stays there, as torch's optimizers keep it."""
    return {name: move(value) if isinstance(value, torch.Tensor) and value.dim() else value for name, value in states.items()}


def trained(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], steps: int = 3) -> tuple[Any, ...]:
    """A parameter after some steps: parameter before the last step and after, gradient, states after, parameter group."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(70, 40))
    optimizer = make([p])
    for _ in range(steps):
        before = p.detach().clone()
        p.grad = torch.randn(70, 40) * 0.1 + p.detach() * 0.01
        p.grad[:3] = 0.0
        optimizer.step()
    assert p.grad is not None
    return before, p.detach(), p.grad, dict(optimizer.state[p]), dict(optimizer.param_groups[0])


def sameness(backend: TorchBackend, ref: TensorRef | None, expected: torch.Tensor, rel: float = 1e-5) -> None:
    """The row is that of `expected` to rounding, without NaN."""
    assert ref is not None
    assert ref.row >= 0, backend.unsupported
    row = rows.read_row(backend.finish_step().rows()[ref.row])
    wide = expected.to(torch.float64)
    assert (row.count, row.nans, row.infs) == (wide.numel(), 0, 0)
    assert ref.description.shape == tuple(expected.shape)
    assert row.norm == pytest.approx(wide.norm().item(), rel=rel)
    assert row.mean == pytest.approx(wide.mean().item(), rel=rel, abs=rel * wide.abs().mean().item())
    assert row.max == pytest.approx(wide.max().item(), rel=rel)
    assert row.min == pytest.approx(wide.min().item(), rel=rel)


LR = 0.5  # large, so that the difference of two parameters is a good measure of the step
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=LR),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=LR, amsgrad=True, betas=(0.8, 0.95), eps=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0, maximize=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True),
    "sgd maximize": lambda p: torch.optim.SGD(p, lr=LR, maximize=True),
    "sgd nesterov maximize": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True, maximize=True),
    "sgd decay": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.2),
    "sgd decay maximize": lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.2, maximize=True),
    "sgd momentum decay": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, dampening=0.1, weight_decay=0.2),
    "sgd nesterov decay": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=LR),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=LR),
}


@pytest.mark.parametrize("move", HOMES)
def test_the_update_is_what_the_optimizer_did(move: Move) -> None:
    """For every known optimizer of torch, u times the learning rate is the difference of the parameter over its step."""
    for name, make in OPTIMIZERS.items():
        before, after, grad, states, group = trained(make)
        backend = TorchBackend(digest=True)
        with reads_forbidden():
            ref = backend.reduce_update(name.split()[0], move(after), move(grad), moved(states, move), group)
        sameness(backend, ref, (before - after) / LR, rel=2e-5)


@pytest.mark.parametrize("move", HOMES)
def test_lion(move: Move) -> None:
    """Lion's update is the sign of the mix of the gradient and the momentum before the step, made from the one after."""
    torch.manual_seed(0)
    old, grad = torch.randn(500, 3), torch.randn(500, 3)
    after = old * 0.99 + grad * 0.01
    backend = TorchBackend()
    ref = backend.reduce_update("lion", None, move(grad), {"exp_avg": move(after)}, {"betas": (0.9, 0.99)})
    sameness(backend, ref, torch.sign(old * 0.9 + grad * 0.1))


@pytest.mark.parametrize("move", HOMES)
def test_the_ratio_has_no_nan_in_a_healthy_run(move: Move) -> None:
    """r is m_hat / sqrt(v_hat), and zero for elements that never had a gradient."""
    _, _, _, states, group = trained(lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9)))
    m, v, t = states["exp_avg"].double(), states["exp_avg_sq"].double(), 3
    expected = torch.nan_to_num((m / (1 - 0.8**t)) / (v / (1 - 0.9**t)).sqrt(), 0.0)
    assert (expected[:3] == 0).all()
    backend = TorchBackend()
    sameness(backend, backend.reduce_ratio("adamw", None, None, moved(states, move), group), expected)


@pytest.mark.parametrize("move", HOMES)
def test_agreement(move: Move) -> None:
    """The mean of the row is the share of elements whose signs agree, in the types that optimizers mix."""
    torch.manual_seed(0)
    for type_g, type_m in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)):
        g, m = torch.randn(300, 7).to(type_g), torch.randn(300, 7).to(type_m)
        g[:10] = 0
        backend = TorchBackend()
        with reads_forbidden():
            ref = backend.reduce_agreement(move(g), move(m))
        sameness(backend, ref, (1 + torch.sign(g.double()) * torch.sign(m.double())) / 2)
        assert ref.description.dtype == ("torch.float64" if type_g is torch.float64 else "torch.float32")


@pytest.mark.parametrize("move", HOMES)
def test_agreement_with_nan(move: Move) -> None:
    """Where a gradient or a momentum is NaN there is no agreement and no disagreement, but NaN."""
    g, m = torch.tensor([1.0, float("nan"), -1.0, 2.0]), torch.tensor([1.0, 1.0, float("nan"), -3.0])
    backend = TorchBackend()
    ref = backend.reduce_agreement(move(g), move(m))
    row = backend.finish_step().rows()[ref.row]
    assert row.view(np.int64)[[rows.COUNT, rows.NANS, rows.ZEROS]].tolist() == [4, 2, 1]
    assert row[[rows.MIN, rows.MAX, rows.SUM]].tolist() == [0.0, 1.0, 1.0]


def test_pieces_and_a_step_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a piece give the same rows with torch operators, and histograms the same counts."""
    monkeypatch.setattr(statistics, "PIECE", 1000)
    _, after, _, states, group = trained(OPTIMIZERS["adamw"])
    found = []
    for move in (lambda t: t, ProbeDevice.wrap):
        backend = TorchBackend()
        backend.want_moments, backend.below = True, 0.5
        ref = backend.reduce_update("adamw", None, None, moved(states, move), group)
        first = backend.histogram(move(after), "log2")
        data = backend.finish_step().rows()
        assert ref is not None
        found.append((data[ref.row], histograms.counts(data, first, "log2")))
    (a, counts), (b, others) = found
    assert a.view(np.int64)[[0, 1, 2, 3, 4, 12, 15]].tolist() == b.view(np.int64)[[0, 1, 2, 3, 4, 12, 15]].tolist()
    np.testing.assert_allclose(a[[8, 9, 13, 14]], b[[8, 9, 13, 14]], rtol=1e-5)
    assert counts.tolist() == others.tolist()


def test_strided_and_unequal_tensors() -> None:
    """Transposed tensors, both or one of them, are paired by element; what cannot be paired has no row and a reason."""
    torch.manual_seed(0)
    g, m = torch.randn(30, 20), torch.randn(20, 30)
    backend = TorchBackend()
    for left, right in ((g.t(), m), (g, m.t()), (g.t(), m.t().t()), (g[::2], m.t()[::2])):
        sameness(backend, backend.reduce_agreement(left, right), (1 + torch.sign(left) * torch.sign(right)) / 2)
    for left, right, why in ((g, g[0], "pair of different sizes"), (g.int(), m, "no pair kernel: torch.int32"), (g, m.to("meta"), "meta")):
        assert backend.reduce_agreement(left, right).row == -1
        assert why in backend.unsupported


def test_empty_tensors() -> None:
    """The row of an empty pair is that of an empty tensor."""
    for move in (lambda t: t, ProbeDevice.wrap):
        backend = TorchBackend()
        ref = backend.reduce_agreement(move(torch.empty(0, 3)), move(torch.empty(0, 3)))
        first = backend.histogram(move(torch.empty(0)), "linear")
        data = backend.finish_step().rows()
        assert rows.read_row(data[ref.row]).count == 0
        assert histograms.counts(data, first, "linear").sum() == 0


def test_unknown_updates() -> None:
    """None where the algorithm is unknown or something is missing; nothing is counted as a fault."""
    m, v = torch.ones(3), torch.ones(3)
    state, group = {"exp_avg": m, "exp_avg_sq": v, "step": torch.tensor(1.0)}, {"betas": (0.9, 0.99), "eps": 1e-8}
    backend = TorchBackend()
    assert backend.reduce_update("adam", None, None, state, group) is not None
    for algorithm, states, hyper, grad in (
        ("muon", {"momentum_buffer": m}, {}, m),
        ("", {}, {}, m),
        ("adam", {}, group, m),
        ("adam", state, {"eps": 1e-8}, m),
        ("adam", {**state, "step": 0}, group, m),
        ("adam", state, {**group, "amsgrad": True}, m),
        ("sgd", {}, {"momentum": 0.9}, m),
        ("sgd", {}, {}, None),
        ("lion", {"exp_avg": m}, {"betas": (0.9, 0.99)}, None),
        ("sgd", {}, {"weight_decay": 0.1}, m),
        ("rmsprop", {"square_avg": v}, {"centered": True}, m),
        ("rmsprop", {"square_avg": v}, {"weight_decay": 0.1}, m),
    ):
        assert backend.reduce_update(algorithm, None, grad, states, hyper) is None
    assert backend.reduce_update("adam", torch.ones(4), None, state, group) is None
    assert backend.reduce_ratio("sgd", None, m, {}, {}) is None
    assert backend.unsupported == {}


def test_a_step_that_lies_on_the_device_is_used_there() -> None:
    """The bias correction of a step tensor on a device is a tensor there, made when an operator needs it, and equals that of the number."""
    from msprobe_integrations.torch.statistics.derived import PairRows

    step = PairRows.tensors.number(_Elsewhere(torch.tensor(3.0)))
    assert isinstance(step, torch.Tensor)
    for power in (1.0, -1.0, -0.5):
        made = (PairRows.tensors.correction(0.9, step) ** power).value()
        assert isinstance(made, torch.Tensor)
        assert made.dtype is torch.float64
        assert float(made) == pytest.approx((1.0 - 0.9**3) ** power)


class _Elsewhere(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Elsewhere:
        return inner.as_subclass(cls)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@settings(max_examples=15, deadline=None)
@given(x=st.lists(st.floats(width=32), max_size=50), cut=st.integers(0, 50))
def test_updates_of_shards_merge_to_that_of_the_whole(x: list[float], cut: int) -> None:
    """The rows of two shards of a parameter merge to the row of the whole, histograms too."""
    m = torch.tensor(x, dtype=torch.float32)
    v = m.abs() * 0.5
    backend = TorchBackend()
    backend.want_moments = True
    refs = []
    for part in (slice(None), slice(0, cut), slice(cut, None)):
        states = {"exp_avg": m[part], "exp_avg_sq": v[part], "step": 2}
        ref = backend.reduce_update("adam", None, None, states, {"betas": (0.9, 0.99), "eps": 1e-3})
        assert ref is not None
        refs.append((ref.row, backend.histogram(m[part], "log2")))
    data = backend.finish_step().rows()
    (whole, a), (left, b), (right, c) = ((data[row : row + 1], histograms.counts(data, first, "log2")) for row, first in refs)
    merged = rows.merge(left, right)
    assert rows.as_int64(merged)[0, :5].tolist() == rows.as_int64(whole)[0, :5].tolist()
    np.testing.assert_allclose(merged[0, [9, 14]], whole[0, [9, 14]], rtol=1e-9)
    assert (b + c).tolist() == a.tolist()


@pytest.mark.parametrize("move", HOMES)
def test_histograms_by_operators_and_by_the_kernel(move: Move) -> None:
    """For every type both ways count as the definition in numpy does."""
    for dtype, code in statistics.CODES.items():
        raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 3000 * dtype.itemsize, np.uint8))
        raw = raw % 2 if dtype == torch.bool else raw
        backend = TorchBackend()
        with reads_forbidden():
            firsts = {kind: backend.histogram(move(raw.view(dtype)), kind) for kind in histograms.BINS}
        data = backend.finish_step().rows()
        for kind, first in firsts.items():
            assert first >= 0, backend.unsupported
            with np.errstate(invalid="ignore"):
                expected = histograms.count_values(host_kernel.real_values(raw.numpy(), code), kind)
            assert histograms.counts(data, first, kind).tolist() == expected.tolist(), (dtype, kind)
            assert (rows.as_int64(data)[first : first + histograms.row_count(kind), rows.COUNT] == 3000).all(), (dtype, kind)


@pytest.mark.parametrize("move", HOMES)
@pytest.mark.parametrize("piece", [1 << 22, 700])
def test_histograms_of_updates(monkeypatch: pytest.MonkeyPatch, move: Move, piece: int) -> None:
    """Counts are those of m_hat / (sqrt(v_hat) + eps), 0 where v_hat is 0, however many pieces are made of it, and whatever the strides."""
    monkeypatch.setattr(derived, "PIECE", piece)
    m, v = torch.randn(40, 70).t(), torch.rand(40, 70).t()
    v[3:5] = 0.0
    hyper = {"betas": (0.9, 0.99), "step": 3}
    root = (v / (1 - 0.99**3)).sqrt()
    expected = torch.where(root == 0, 0.0, (m / (1 - 0.9**3)) / (root + 1e-3))
    backend = TorchBackend()
    with reads_forbidden():
        firsts = {
            kind: backend.histogram_of_update({"exp_avg": move(m), "exp_avg_sq": move(v)}, hyper, 1e-3, kind) for kind in histograms.BINS
        }
        empty = torch.ones(0)
        nothing = backend.histogram_of_update({"exp_avg": move(empty), "exp_avg_sq": move(empty)}, hyper, 1e-3, "log2")
    data = backend.finish_step().rows()
    assert backend.unsupported == {}
    for kind, first in firsts.items():
        assert histograms.counts(data, first, kind).tolist() == histograms.count_values(expected.numpy(), kind).tolist()
        assert (rows.as_int64(data)[first : first + histograms.row_count(kind), rows.COUNT] == 2800).all()
    assert histograms.counts(data, nothing, "log2").sum() == 0
    assert backend.histogram_of_update({"exp_avg": m}, hyper, 1e-3, "log2") == -1


def test_a_kernel_that_gives_up_loses_no_earlier_part() -> None:
    """What is taken back are the rows of one part of a tensor, those of the parts before stay."""
    memory = device_rows.DeviceRows(torch.ones(1), 8)
    device_rows.Taker(memory, torch.ones(1), 0, rows.WRITTEN)(5)
    second = device_rows.Taker(memory, torch.ones(1), 0, rows.WRITTEN)
    second(7)
    second.cancel()
    second(6)
    assert memory.counts == [5, 0, 6]


def test_histograms_while_other_threads_take_rows() -> None:
    """A histogram has consecutive rows although other threads reduce at the same time, in memory that grows."""
    backend = TorchBackend()
    x = torch.linspace(-1, 1, 31)
    stop = threading.Event()

    def others() -> None:
        y = torch.ones(2)
        while not stop.is_set():
            backend.forget()
            backend.reduce(y)

    thread = threading.Thread(target=others)
    thread.start()
    firsts = [backend.histogram(x, "linear") for _ in range(300)]
    stop.set()
    thread.join()
    data = backend.finish_step().rows()
    assert min(firsts) >= 0
    assert {tuple(histograms.counts(data, first, "linear")) for first in firsts} == {tuple(histograms.count_values(x.numpy(), "linear"))}


def test_wrong_kinds_have_no_row() -> None:
    """An unknown kind of histogram gives -1 and a reason; nothing raises in a training."""
    backend = TorchBackend()
    assert backend.histogram(torch.ones(3), "log3") == -1
    assert "log3" in next(iter(backend.unsupported))


@pytest.mark.parametrize("move", HOMES)
def test_words_are_switched_for_the_rows_that_follow(move: Move) -> None:
    """Rows have the words that were wanted when they were made, in the same step; a change makes known tensors new."""
    backend, x = TorchBackend(), move(torch.tensor([0.0, 1e-9, 1.0, -3.0]))
    refs = [backend.reduce(x)]
    backend.want_moments = True
    backend.eps = 1e-8
    assert (backend.eps, backend.below) == (1e-8, 0.0)
    refs += [backend.reduce(x), backend.reduce(x)]
    backend.eps = 0.0
    backend.below = 2.0
    assert (backend.eps, backend.below) == (0.0, 2.0)
    refs.append(backend.reduce(x))
    data = backend.finish_step().rows()
    plain, eps, same, below = (rows.read_row(data[ref.row]) for ref in refs)
    assert refs[1].row == refs[2].row
    assert same == eps
    assert (plain.kurtosis, plain.below) == (None, None)
    assert (eps.below, below.below) == (2, 3)
    assert eps.kurtosis == below.kurtosis == pytest.approx(columns.column(data, "kurtosis")[refs[1].row])
    assert columns.column(data, "zeros")[[refs[0].row, refs[1].row]].tolist() == [0.25, 0.5]
    assert columns.column(data, "underflow")[refs[3].row] == 0.5


def test_words_that_exclude_each_other() -> None:
    """Moments and checksums share their place, and there is one counter: both at once is an error."""
    backend = TorchBackend()
    backend.want_moments = True
    with pytest.raises(UsageError, match="want_moments"):
        backend.want_checksum = "crc32"
    backend.want_moments, backend.want_checksum = False, "xor"
    with pytest.raises(UsageError, match="want_checksum"):
        backend.want_moments = True
    backend.below = 1.0
    with pytest.raises(UsageError, match="below and eps"):
        backend.eps = 1e-8
    backend.eps = 0.0
    assert backend.below == 1.0
