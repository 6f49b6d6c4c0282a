"""Known numbers through the device's kernels before the first tensor of a type: what gives another row than numpy is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msprobe_engine import hostkernel
from msprobe_engine import rows as _rows
from msprobe_integrations.torch import device_launch as _launch
from msprobe_integrations.torch.device_kernel import KINDS, WORDS_WANTED

_INDEX0 = 5


def check(device: torch.device, dtype: torch.dtype, want: int) -> str:
    """Run the kernel on known numbers and compare with the numpy reference, once per type before it is trusted on a device. The direct
    call of the compiled kernel has to give the same bits as Triton's own; if it does not only that call is given up.

    Waits for these launches only: they run on a stream of their own, which depends on nothing that the training has queued.

    Returns:
        what is wrong, "" when nothing is.
    """
    raw = _known_bits(dtype)
    expected = hostkernel.row_of(raw, hostkernel.CODES[KINDS[dtype]], want & (WORDS_WANTED | ~0xFF), _INDEX0)
    module = getattr(torch, device.type)
    if device.type == "cpu":
        return compare(_run(torch.from_numpy(raw).view(dtype), want), expected)
    with module.device(device), module.stream(module.Stream(device=device)):
        tensor = torch.from_numpy(raw).to(device).view(dtype)
        got = _run(tensor, want)
        if not (wrong := compare(got, expected)):
            _check_direct(tensor, want, got)
        return wrong


def _check_direct(tensor: torch.Tensor, want: int, expected: Any) -> None:
    made = _launch.launcher(tensor.device, tensor.dtype, want)
    direct, stream = made.direct[tensor.data_ptr() % _launch.ALIGNMENT == 0], made.stream()
    if direct is None or stream < 0:
        return
    try:
        row = torch.zeros(_rows.WORDS, dtype=torch.float64, device=tensor.device)
        made.start(direct, tensor.data_ptr(), tensor.numel(), row.data_ptr(), stream, _INDEX0)
        if not np.array_equal(row.cpu().numpy().view(np.int64), expected.view(np.int64)):
            _launch.distrust(tensor.device.type, "it gives another row for known numbers")
    except Exception as error:
        _launch.distrust(tensor.device.type, f"{type(error).__name__}: {str(error)[:200]}")


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


def _known_bits(dtype: torch.dtype) -> Any:
    """Bytes of 20 000 elements, enough for several programs: integers of any bits; floats between 1 and 2, and special ones."""
    n, name = 20_000, KINDS[dtype]
    random = np.random.default_rng(1)
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
