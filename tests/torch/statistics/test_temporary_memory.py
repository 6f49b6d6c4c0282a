"""No reduction makes a temporary tensor above 64 MiB, whatever it reads. Here everything is 128 times smaller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.core.statistics import histograms, host_kernel, pairs, rows
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.gradient_probe import step as grad_signs
from msprobe_integrations.torch.monitor import feature_math
from msprobe_integrations.torch.statistics import checksums, derived
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.rows import host_flags, reduce_cpu, reduce_device
from msprobe_integrations.torch.tensors import devices

SMALLER = 128
LIMIT = (64 << 20) // SMALLER
EVERY = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.want_below(0.25)


class Memory(TorchDispatchMode):
    """Refuses new memory above the limit."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        given = {one.untyped_storage().data_ptr() for one in tensors}
        for made in _pytree.tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                assert made.untyped_storage().nbytes() <= LIMIT, (func, tuple(made.shape), made.dtype)
        return out


@pytest.fixture(autouse=True, params=["float64", "float32"])
def smaller(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Pieces are smaller, and operators have float64 or not."""
    monkeypatch.setattr(statistics, "PIECE", statistics.PIECE // SMALLER)
    monkeypatch.setattr(checksums, "_XOR_PIECE", checksums._XOR_PIECE // SMALLER)
    monkeypatch.setattr(checksums, "BLOCK", checksums.BLOCK // SMALLER)
    monkeypatch.setattr(feature_math, "_PIECE", feature_math._PIECE // SMALLER)
    monkeypatch.setattr(feature_math, "PIECE", {"cpu": feature_math._PIECE})
    monkeypatch.setattr(grad_signs, "_PIECE", grad_signs._PIECE // SMALLER)
    monkeypatch.setattr(devices, "FLOAT64", {"cpu": request.param == "float64"})


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values[:144_000],
    "one value": lambda values: values[:1].expand(400, 360),
    "expanded": lambda values: values[:1000].view(1, 1000, 1).expand(12, 1000, 12),
    "transposed": lambda values: values[:144_000].view(360, 400).t(),
    "columns": lambda values: values[:144_000].view(360, 400)[:, 3:],
    "five dimensions": lambda values: values.view(5, 10, 10, 6, 60)[:, :9, 1:, :, 1:].transpose(0, 3),
}
"""Of more bytes than the limit, from 180 000 numbers."""
ANY = pytest.mark.parametrize("layout", list(LAYOUTS))


def by_turns(values: list[Any]) -> list[Any]:
    """Every layout with every value; in the fast tier each layout with one of them."""
    return [
        pytest.param(layout, value, marks=[] if number % len(values) == turn else [pytest.mark.slow])
        for number, layout in enumerate(LAYOUTS)
        for turn, value in enumerate(values)
    ]


def tensor_of(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of a layout."""
    return LAYOUTS[layout](torch.from_numpy(np.random.default_rng(0).standard_normal(180_000).astype(np.float32)).to(dtype))


def rows_of(count: int, work: Callable[[list[Taker]], None], like: torch.Tensor, want: int = 0) -> np.ndarray:
    """What `work` writes, under the limit."""
    device, out = DeviceRows(like, 256), rows.empty(count)
    with Memory():
        work([Taker(device, like, place, host_flags(like.dtype, want)) for place in range(count)])
    device.scatter(device.join_rows().numpy(), out)
    return out


def same(got: np.ndarray, expected: np.ndarray, error: float = 1e-9) -> None:
    """Equal rows, sums to `error`."""
    sums = [rows.SUM, rows.SUMSQ, rows.SUM3, rows.SUM4]
    exact = [word for word in range(rows.WORDS) if word not in sums]
    assert got.view(np.int64)[exact].tolist() == expected.view(np.int64)[exact].tolist()
    np.testing.assert_allclose(got[[rows.SUMSQ, rows.SUM4]], expected[[rows.SUMSQ, rows.SUM4]], rtol=error)
    np.testing.assert_allclose(got[[rows.SUM, rows.SUM3]], expected[[rows.SUM, rows.SUM3]], rtol=error, atol=error * expected[rows.SUMSQ])


@pytest.mark.parametrize(("layout", "want"), by_turns([0, EVERY & ~host_kernel.WANT_DIGEST, EVERY]))
def test_statistics(layout: str, want: int) -> None:
    """Rows are those of the C kernel."""
    tensor, expected = tensor_of(layout), rows.empty(1)
    reduce_cpu(tensor, expected.ctypes.data, want)
    same(rows_of(1, lambda take: reduce_device(tensor, take[0], want), tensor, want)[0], expected[0])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.complex64,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.int64, torch.complex128, torch.uint8)),
    ],
)
def test_types(dtype: torch.dtype) -> None:
    """Types that are cast to wider ones, and wide ones."""
    for tensor in (tensor_of("transposed", dtype), tensor_of("columns", dtype)):
        with Memory():
            reduce_device(tensor, Taker(DeviceRows(tensor, 256), tensor, 0, host_flags(dtype, EVERY)), EVERY)


def test_a_digest_of_an_expanded_tensor_has_its_positions() -> None:
    """Elements that are in the tensor several times count once for each of their positions."""
    tensor = torch.tensor([1.0, 2.0]).view(2, 1).expand(2, 3)
    for want in (0, host_kernel.WANT_DIGEST):
        expected = rows.empty(1)
        reduce_cpu(tensor, expected.ctypes.data, want)
        same(rows_of(1, lambda take, want=want: reduce_device(tensor, take[0], want), tensor, want)[0], expected[0])


@ANY
def test_checksums(layout: str) -> None:
    """XOR and CRC-32 are those of the C kernel."""
    tensor, expected = tensor_of(layout), rows.empty(1)
    reduce_cpu(tensor, expected.ctypes.data, host_kernel.WANT_XOR | host_kernel.WANT_CRC)
    out = torch.zeros(1, dtype=torch.int64)
    staging = checksums.Staging(tensor)
    with Memory():
        checksums.xor_into(tensor, out[0])
        staging.stage_bytes(tensor, 7)
        crcs = staging.results()
    assert out.item() == expected.view(np.int64)[0, rows.XOR]
    assert crcs[7] == expected.view(np.int64)[0, rows.CRC]


@pytest.mark.parametrize(("layout", "kind"), by_turns(["linear", "log2"]))
def test_histograms(layout: str, kind: str) -> None:
    """Counts are those of the C kernel."""
    tensor = tensor_of(layout)
    out = rows_of(histograms.row_count(kind), lambda take: pairkernels.histogram_device(tensor, kind, take), tensor)
    assert histograms.counts(out, 0, kind).tolist() == pairkernels.histogram_cpu(tensor, kind).tolist()


@pytest.mark.parametrize(("layout", "op"), by_turns([pairs.AGREE, pairs.RATIO, pairs.LINEAR, pairs.SIGN]))
def test_pairs(layout: str, op: int) -> None:
    """Rows of two tensors of other strides, on a device and on the host."""
    a = tensor_of(layout)
    b = torch.linspace(0.1, 2.0, a.numel()).reshape(a.shape)
    c = (0.7, 1.3, 1e-8)
    expected, host = rows.empty(1), rows.empty(1)
    pairkernels.pair_cpu(op, a.contiguous(), b, c, expected.ctypes.data, 0)
    with Memory():
        pairkernels.pair_cpu(op, a, b, c, host.ctypes.data, 0)
    same(host[0], expected[0])
    got = rows_of(1, lambda take: pairkernels.pair_device(op, a, b, c, take[0], 0), a)[0]
    got.view(np.int64)[rows.FLAGS] = expected.view(np.int64)[0, rows.FLAGS]
    np.testing.assert_allclose(got[[rows.MIN, rows.MAX, rows.SUMSQ]], expected[0, [rows.MIN, rows.MAX, rows.SUMSQ]], rtol=1e-6)
    assert got.view(np.int64)[: rows.MIN].tolist() == expected.view(np.int64)[0, : rows.MIN].tolist()


@pytest.mark.parametrize("on_host", [True, False])
def test_histogram_of_an_update(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of the update exist a piece at a time."""
    monkeypatch.setattr(derived, "quiet", contextlib.nullcontext)
    monkeypatch.setattr(derived, "PIECE", statistics.PIECE)
    first = tensor_of("transposed")
    states, hyper = {"exp_avg": first, "exp_avg_sq": first.square()}, {"betas": (0.9, 0.999), "step": 3}
    whole = (first / (1 - 0.9**3)) / ((first.square() / (1 - 0.999**3)).sqrt() + 1e-8)
    if not on_host:
        monkeypatch.setattr(derived, "on_host", lambda _: False)
    backend = TorchBackend()
    with Memory():
        row = backend.histogram_of_update(states, hyper, 1e-8, "log2")
    found = histograms.counts(backend.finish_step().rows(), row, "log2")
    assert not backend.unsupported
    assert found.tolist() == pairkernels.histogram_cpu(whole, "log2").tolist()


def test_layer_features() -> None:
    """Matrices, logits and keys are cast in blocks; what comes out is as with one block."""
    weight = tensor_of("contiguous", torch.bfloat16).view(400, 360)
    logits = tensor_of("transposed", torch.bfloat16)
    q, k = weight[:400].reshape(2, 240, 6, 50), weight[:100].reshape(2, 120, 3, 50)
    start = feature_math.start_vector(360, weight.device)

    def found() -> list[torch.Tensor]:
        norm, _ = feature_math.spectral_norm(weight, start, 12)
        load = feature_math.expert_load(logits, 2)
        return [norm, feature_math.similarity(weight), feature_math.token_entropy(logits), *load, *feature_math.attention(q, k, "b,s,h,d")]

    with Memory():
        got = found()
    feature_math.PIECE["cpu"] = feature_math._PIECE = 1 << 30
    for one, expected in zip(got, found()):
        assert one.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-7)


@ANY
def test_signs_and_counts_of_gradients(layout: str) -> None:
    """Gradient probes read in pieces."""
    tensor = tensor_of(layout)
    packed, whole = (torch.zeros(-(-tensor.numel() // 4), dtype=torch.uint8) for _ in range(2))
    below = torch.zeros(1, dtype=torch.int64)
    with Memory():
        grad_signs.pack_signs(tensor, packed)
        grad_signs.count_below(tensor, [0.5], below)
    grad_signs.pack_signs(tensor.contiguous(), whole)
    assert torch.equal(packed, whole)
    assert below.item() == int((tensor <= 0.5).sum())
