"""Known numbers through the device's kernels before the first tensor of a type: what gives another row than numpy is not used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.statistics import histograms, host_kernel, pairs
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics.device import histogram as device_histogram
from msprobe_integrations.torch.statistics.device import launch as _launch
from msprobe_integrations.torch.statistics.device import pair_launch as device_pair_launch
from msprobe_integrations.torch.statistics.device.kernel import KINDS, WORDS_WANTED
from msprobe_integrations.torch.statistics.pair_kernels import PairKey

ELEMENTS = 20_000
"""Enough for several programs."""
_INDEX0 = 5
_STEPS, _BETAS, _EPS = 3, (0.9, 0.999), 1e-3


def check(device: torch.device, dtype: torch.dtype, want: int) -> str:
    """Run the kernel on known numbers and compare with the numpy reference, once per type before it is trusted on a device. The direct
    call of the compiled kernel has to give the same bits as Triton's own; if it does not only that call is given up.

    Waits for these launches only: they run on a stream of their own, which depends on nothing that the training has queued.

    Returns:
        what is wrong, "" when nothing is.
    """
    raw = _known_bits(dtype)
    expected = host_kernel.row_of(raw, host_kernel.CODES[KINDS[dtype]], want & (WORDS_WANTED | ~0xFF), _INDEX0)
    with _aside(device):
        tensor = torch.from_numpy(raw).to(device).view(dtype)
        got = _run(tensor, want)
        if not (wrong := compare(got, expected)):
            _check_direct(tensor, want, got)
        return wrong


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a stream of its own: to wait for it is to wait for nothing that the training has queued."""
    if device.type == "cpu":
        yield
        return
    module = getattr(torch, device.type)
    with module.device(device), module.stream(module.Stream(device=device)):
        yield


def _check_direct(tensor: torch.Tensor, want: int, expected: Any) -> None:
    made = _launch.launcher(tensor.device, tensor.dtype, want)
    direct, stream = made.find(_launch.alignment(tensor.data_ptr()), tensor.numel()), made.stream()
    if direct is None or stream < 0:
        return
    try:
        row = torch.zeros(_rows.WORDS, dtype=torch.float64, device=tensor.device)
        made.start(direct, (tensor.data_ptr(),), tensor.numel(), row.data_ptr(), (_INDEX0, made.limit), stream)
        if not np.array_equal(row.cpu().numpy().view(np.int64), expected.view(np.int64)):
            _launch.distrust(tensor.device.type, "it gives another row for known numbers")
    except Exception as error:
        raise_of_training(error)
        _launch.distrust(tensor.device.type, f"{type(error).__name__}: {str(error)[:200]}")


def check_pair(key: PairKey) -> str:
    """`check` of the kernel for pairs of a kind."""
    launcher = device_pair_launch.launcher(key)
    raw = [_known_bits(dtype, seed) for seed, dtype in enumerate(launcher.dtypes, 1)]
    a, b = (host_kernel.decode(bits, host_kernel.CODES[KINDS[dtype]]) for bits, dtype in zip(raw, launcher.dtypes))
    made = pairs.values(launcher.op, a, b, (1 / (1 - _BETAS[0] ** _STEPS), (1 - _BETAS[1] ** _STEPS) ** -0.5, _EPS))
    words = launcher.want & ~host_kernel.WANT_DIGEST
    expected = host_kernel.row_of(made.view(np.uint8), host_kernel.CODES[made.dtype.name], words, 0)
    with _aside(launcher.device):
        row = torch.zeros(_rows.WORDS, dtype=torch.float64, device=launcher.device)
        data, numbers, _kept = known_data(launcher)
        launcher.launch(data, row, (launcher.limit, *numbers))
        return compare(row.cpu().numpy(), expected)


def known_data(launcher: _launch.Launcher) -> tuple[list[torch.Tensor], tuple[int, ...], Any]:
    """Bits of known numbers for each of a launcher's tensors, factors for the pairs of one, and what has to be kept for these."""
    data = [torch.from_numpy(_known_bits(dtype, seed)).to(launcher.device) for seed, dtype in enumerate(launcher.dtypes, 1)]
    bits = [one.view(_launch.BITS[dtype.itemsize]) for one, dtype in zip(data, launcher.dtypes)]
    if not isinstance(launcher, device_pair_launch.PairLauncher):
        return bits, (), None
    if launcher.step is not None:
        step = torch.full((), _STEPS, dtype=launcher.step, device=launcher.device)
        first, second = pairkernels.Correction(step, _BETAS[0], -1.0), pairkernels.Correction(step, _BETAS[1], -0.5)
        made = pairkernels.factors((first, second, _EPS), launcher.device)
        assert made is not None
        return bits, made, step
    made = pairkernels.factors((1 / (1 - _BETAS[0] ** _STEPS), (1 - _BETAS[1] ** _STEPS) ** -0.5, _EPS), launcher.device)
    assert made is not None
    return bits, made, None


def check_many(launcher: _launch.Launcher, aligned: int, at_once: Callable[[_launch.Launcher, int, list[_launch.Numbers]], None]) -> str:
    """Known numbers of several sizes by one launch (`at_once`) and by one each: the rows are the same, but for the rounding of sums."""
    with _aside(launcher.device):
        known, numbers, _kept = known_data(launcher)
        begins = (0, 16, 16) if aligned == launcher.whole else (0, 1, 3)
        parts = [[one[begin:end] for one in known] for begin, end in zip(begins, (len(known[0]), begins[1] + 1, 1000))]
        rows = torch.zeros((2, len(parts), _rows.WORDS), dtype=torch.float64, device=launcher.device)
        lines = []
        for part, row, other in zip(parts, *rows):
            launcher.launch(part, row, launcher.numbers((0, 0, 0, 0, *numbers)))
            data = [one.data_ptr() for one in part]
            lines.append((data[0], other.data_ptr(), len(part[0]), *data[1:], *numbers))
        at_once(launcher, aligned, lines)
        alone, together = rows.cpu().numpy()
    return next((wrong for row, other in zip(alone, together) if (wrong := compare(other, row))), "")


def check_histogram(device: torch.device, dtype: torch.dtype, kind: str) -> str | None:
    """`check` of the kernel for histograms; None when it does not read the type."""
    if dtype not in KINDS:
        return None
    raw = _known_bits(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:  # all bins, behind the special numbers
        random = np.random.default_rng(3)
        sizes = random.standard_normal(ELEMENTS - 64) * np.exp2(random.uniform(-45.0, 9.0, ELEMENTS - 64))
        raw[64 * dtype.itemsize :] = torch.from_numpy(sizes).to(dtype).view(torch.uint8).numpy()
    with np.errstate(invalid="ignore"):
        expected = histograms.count_values(host_kernel.real_values(raw, host_kernel.CODES[KINDS[dtype]]), kind)
    with _aside(device):
        found = torch.zeros((histograms.row_count(kind), _rows.WORDS), dtype=torch.float64, device=device)
        device_histogram.count(torch.from_numpy(raw).to(device).view(dtype), kind, list(found))
        got = histograms.counts(found.cpu().numpy(), 0, kind)
    return "" if np.array_equal(got, expected) else f"the {kind} histogram of known numbers is {got.tolist()}, not {expected.tolist()}"


def compare(got: Any, expected: Any) -> str:
    """What differs between the row of a device and numpy's, "" when nothing does; sums are equal to 1e-9."""
    words = [_rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS, _rows.DIGEST, _rows.IMIN, _rows.IMAX, _rows.BELOW]
    for word in words:
        if got.view(np.int64)[word] != expected.view(np.int64)[word]:
            return f"word {word} of the known row is {got.view(np.int64)[word]} instead of {expected.view(np.int64)[word]}"
    sums = [_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4]
    if (got[6:8] != expected[6:8]).any() or not np.allclose(got[sums], expected[sums], rtol=1e-9, atol=0.0):
        return f"the known row has {got[6:].tolist()} instead of {expected[6:].tolist()}"
    return ""


def _run(tensor: torch.Tensor, want: int) -> Any:
    row = torch.zeros(_rows.WORDS, dtype=torch.float64, device=tensor.device)
    _launch.reduce(tensor, row, want, _INDEX0)
    return row.cpu().numpy()


def _known_bits(dtype: torch.dtype, seed: int = 1) -> Any:
    """Bytes of `ELEMENTS`: integers of any bits; floats between 1 and 2, and special ones."""
    n, name = ELEMENTS, KINDS[dtype]
    random = np.random.default_rng(seed)
    if name == "bool":
        return random.integers(0, 2, n, np.uint8)
    if not name.startswith("float") and name != "bfloat16":
        return random.integers(0, 256, n * dtype.itemsize, np.uint8)
    values = torch.from_numpy(random.uniform(1.0, 2.0, n)).to(dtype)
    raw: Any = values.view(torch.uint8).numpy()
    raw[: 64 * dtype.itemsize] = random.integers(0, 256, 64 * dtype.itemsize, np.uint8) if dtype.itemsize == 1 else 0
    if dtype.itemsize > 1:
        special = torch.tensor(
            [float("nan"), float("inf"), float("-inf"), -0.0, torch.finfo(dtype).tiny / 2, -torch.finfo(dtype).tiny], dtype=torch.float64
        )
        raw[: 6 * dtype.itemsize] = special.to(dtype).view(torch.uint8).numpy()
    return raw
