"""Takes the gradients of one update and lets them come to the host without a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from msprobe_engine.formats.grad_probe.files import Gradient, StepFiles
from msprobe_integrations.common.gradient_probe import step
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.pending import quiet
from msprobe_integrations.torch.statistics.streams import side_stream, wait_for
from msprobe_integrations.torch.tensors import describe as _describe
from msprobe_integrations.torch.tensors.dtensors import is_dtensor
from msprobe_integrations.torch.tensors.stretches import stretch

SEND_BYTES = 32 << 20
"""Signs that are sent to the host together: bounds what they take on the device."""


class GradientStep(step.GradientStep[TorchBackend]):
    """See `msprobe_integrations.common.gradient_probe.step.GradientStep`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._waiting_bytes = 0
        self._events: list[Any] = []

    def add_gradient(self, name: str, gradient: torch.Tensor, shard: str = "") -> None:
        """Take one gradient as it is now (in the order of its stream).

        Raises:
            TimeoutError: the memory for signs is used up and nothing is written.
        """
        with quiet():
            if gradient.layout != torch.strided:
                gradient = gradient.to_dense()  # what is not stored is zero
            data, _, why = _describe.resolve(gradient)
            if data is None or why or not data.is_floating_point():
                self.left_out[name] = why or f"its type is {gradient.dtype}"
                return
            size = self._room_for(name, data.numel())
            checksum = self._backend.want_checksum
            ref = self._backend.reduce(data.float() if checksum and data.dtype != torch.float32 else data)
            if ref.row < 0:
                self.left_out[name] = "it has no data that can be read"
                return
            packed = below = None
            if self._signs:
                packed = torch.empty(size, dtype=torch.uint8, device=data.device)
                pack_signs(data, packed)
                packed = self._to_host(packed)
            if self._bounds:
                below = torch.zeros(len(self._bounds), dtype=torch.int64, device=data.device)
                count_below(data, self._bounds, below)
                below = self._to_host(below)
            self._taken.append((name, tuple(data.shape), ref.row, packed, below, shard or _format_placement(gradient)))

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where the values of `tensor` will be."""
        if tensor.device.type == "cpu":
            return tensor
        module = getattr(torch, tensor.device.type, None)
        if not hasattr(module, "Stream"):
            return tensor.cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._waiting.setdefault(tensor.device, []).append((host, tensor))
        self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes > SEND_BYTES:
            self._send()
        return host

    def _send(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        for device, pairs in waiting.items():
            module = getattr(torch, device.type)
            with module.device(device):
                side = side_stream(module, device)
                side.wait_stream(module.current_stream(device))
                with module.stream(side):
                    for host, tensor in pairs:
                        host.copy_(tensor, non_blocking=True)
                        tensor.record_stream(side)
                    event = module.Event()
                    event.record(side)
                self._events.append(event)

    def finish(self) -> Callable[[StepFiles, int], None]:
        """Everything is taken: what puts it into files, on another thread."""
        with quiet():
            self._send()
        pending, taken, events = self._backend.finish_step(), self._taken, self._events

        def write(files: StepFiles, number: int) -> None:
            for event in events:
                wait_for(event)
            gradients = [
                Gradient(
                    name,
                    shape,
                    row,
                    None if packed is None else packed.numpy().view(np.uint8),
                    None if below is None else below.numpy().view(np.int64),
                    shard,
                )
                for name, shape, row, packed, below, shard in taken
            ]
            files.write(number, gradients, pending.rows())

        return write


def _format_placement(gradient: torch.Tensor) -> str:
    """``[lo, hi) of n`` for the local part of a DTensor that is one flat range of the whole, its placements when it is not, ``""``
    for a gradient that is whole."""
    placements = gradient.placements if is_dtensor(gradient) else ()  # type: ignore[attr-defined]
    if all(p.is_replicate() for p in placements):
        return ""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # up to torch 2.4
        from torch.distributed._tensor._utils import compute_local_shape_and_global_offset  # type: ignore[import-not-found,no-redef]

    local, offset = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, placements)  # type: ignore[attr-defined]
    if all(p.is_replicate() or (p.is_shard() and p.dim == 0) for p in placements):
        row = int(np.prod(gradient.shape[1:], dtype=np.int64))
        return f"[{offset[0] * row}, {(offset[0] + local[0]) * row}) of {gradient.numel()}"
    return f"{list(local)} at {list(offset)} of {list(gradient.shape)}, {', '.join(map(str, placements))}"


_PIECE = 1 << 18  # elements; a multiple of 4
_COMPARABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def pack_signs(data: torch.Tensor, out: torch.Tensor) -> None:
    """Put the signs of `data` into `out` as `msprobe_engine.formats.grad_probe.signs` has them.

    Args:
        data: floating point, any shape and strides, n elements.
        out: [ceil(n / 4)] uint8, contiguous, on the same device.
    """
    for start, piece in _pieces(data):
        piece = piece if piece.dtype in _COMPARABLE else piece.float()
        codes = (piece > 0).view(torch.uint8)
        codes.add_((piece < 0).view(torch.uint8), alpha=2)
        codes.add_((piece != piece).view(torch.uint8), alpha=3)  # only NaN differs from itself
        if codes.numel() % 4:
            codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 4))
        four = codes.view(torch.int32)  # 000000dd 000000cc 000000bb 000000aa, and ddccbbaa in the last byte at the end
        pairs = four | (four >> 6)
        out[start // 4 : start // 4 + four.numel()].copy_((pairs | (pairs >> 12)) & 0xFF)


def count_below(data: torch.Tensor, bounds: Sequence[float], out: torch.Tensor) -> None:
    """Add to `out` ([len(bounds)] int64, same device) how many elements of `data` are <= each bound, both rounded to the type the
    comparison is made in: float64 for float64, else float32. NaN is below nothing."""
    for _, piece in _pieces(data):
        piece = piece if piece.dtype == torch.float64 else piece.float()
        for i, bound in enumerate(bounds):
            out[i].add_(torch.count_nonzero(piece <= float(bound)))


def _pieces(data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    data, n = data.detach(), data.numel()
    for at in range(0, n, _PIECE):
        yield at, stretch(data, at, min(at + _PIECE, n))
