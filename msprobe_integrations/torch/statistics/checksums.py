"""CRC-32 and XOR of tensors on an accelerator, without waiting for it.

XOR: torch operators on the device fold the words until one is left. CRC-32: the bytes are copied, in stream order, to a *block* of
device memory, so that later in-place changes do not matter; a full block goes to pinned host memory on a side stream, and a thread
takes the CRC of each tensor in it as soon as it has arrived. A device without streams has its blocks read when the rows are asked
for.

Memory: at most `MOST_BLOCKS` blocks of `BLOCK` bytes per step and device, on the device and again on the host. When all of them are
under way the hook waits for the oldest; `Staging.waited` says how long.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Any

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.statistics import host_kernel
from msprobe_integrations.torch.statistics.streams import side_stream, wait_for
from msprobe_integrations.torch.tensors.stretches import stretch

BLOCK = 1 << 25
MOST_BLOCKS = 8
_ALIGN = 16
_WORTH_SAYING = 0.1  # seconds
_XOR_PIECE = 1 << 23  # bytes per pass: bounds the temporary memory


def xor_into(tensor: torch.Tensor, out: torch.Tensor) -> None:
    """XOR of the 64-bit little-endian words of the bytes of `tensor` in C order, the last word filled up with zeros, written to `out`
    (0-dim int64 on the same device). Launches two operators per halving; reads nothing on the host."""
    n, size = tensor.numel(), _XOR_PIECE // tensor.element_size()
    if n == 0:
        return
    total = _words(_bytes_of(tensor, 0, _XOR_PIECE))
    if n > size:
        total = total.clone()
        for at in range(size, n, size):
            words = _words(_bytes_of(tensor, at, _XOR_PIECE))
            total[: words.shape[0]].bitwise_xor_(words)
    while (n := total.shape[0]) > 1:
        half = n // 2
        folded = torch.bitwise_xor(total[:half], total[half : 2 * half])
        if n % 2:
            folded[:1].bitwise_xor_(total[-1:])
        total = folded
    out.copy_(total[0])


def _bytes_of(tensor: torch.Tensor, first: int, size: int) -> torch.Tensor:
    """`size` bytes of the elements in C order from element `first` on, as far as there are, flat uint8; a view where memory allows."""
    part = stretch(tensor.detach(), first, min(first + size // tensor.element_size(), tensor.numel()))
    return part.as_strided(part.shape, (1,)).view(torch.uint8)  # one element may have any stride


def _words(raw: torch.Tensor) -> torch.Tensor:
    """`raw` (flat uint8) as int64, filled up with zeros."""
    n = raw.shape[0]
    if n % 8 or raw.storage_offset() % 8:
        padded = raw.new_zeros(-(-n // 8) * 8)
        padded[:n].copy_(raw)
        raw = padded
    return raw.view(torch.int64)


def _allocate_pinned(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Tensor:
    """The CRC of one tensor, as far as its bytes have arrived."""

    __slots__ = ("crc", "row")

    def __init__(self, row: int) -> None:
        self.row = row
        self.crc = 0


class _Block:
    """Bytes of several tensors on the device, then on the host."""

    def __init__(self, like: torch.Tensor, module: Any) -> None:
        self.device = like.device
        self.module = module
        with torch.inference_mode(False), torch.no_grad():
            self.memory: torch.Tensor | None = like.new_empty((BLOCK,), dtype=torch.uint8)
        self.parts: list[tuple[_Tensor, int, int]] = []
        """Tensor, first byte, number of bytes."""
        self.filled = 0
        self.done = threading.Event()
        self.error = ""
        self._host: torch.Tensor | None = None
        self._event: Any = None
        self._streams: set[Any] = set()
        if module is not None:
            first = module.current_stream(self.device)
            self._streams.add(first)
            self._made = module.Event()
            self._made.record(first)

    def copy_data(self, tensor: _Tensor, data: torch.Tensor) -> None:
        """Copy `data` (any strides, fits) behind what is there."""
        assert self.memory is not None
        if self.module is not None:
            stream = self.module.current_stream(self.device)
            if stream not in self._streams:  # the memory may still be in use by what was there before the block
                stream.wait_event(self._made)
                self._streams.add(stream)
        n = data.numel() * data.element_size()
        self.memory[self.filled : self.filled + n].view(data.dtype).view(data.shape).copy_(data)
        self.parts.append((tensor, self.filled, n))
        self.filled += -(-n // _ALIGN) * _ALIGN

    def room(self) -> int:
        return BLOCK - self.filled

    def send(self) -> bool:
        """Start the copy to the host; False for a device where only a wait would do."""
        memory, module = self.memory, self.module
        if module is None or memory is None:
            return False
        with module.device(self.device):
            side = side_stream(module, self.device)
            for stream in self._streams:
                side.wait_stream(stream)
            self._host = _allocate_pinned(self.filled)
            with module.stream(side):
                self._host.copy_(memory[: self.filled], non_blocking=True)
                self._event = module.Event()
                self._event.record(side)
            memory.record_stream(side)
        self.memory = None
        return True

    def finish(self) -> None:
        """Wait for the bytes and take the CRCs. Never raises."""
        try:
            if self._event is not None:
                wait_for(self._event)
            host = self._host
            if host is None and self.memory is not None:
                host = self.memory[: self.filled].cpu()
            if host is not None:
                for tensor, at, n in self.parts:
                    tensor.crc = host_kernel.crc32(host.data_ptr() + at, n, tensor.crc)
        except Exception as error:
            raise_of_training(error)
            self.error = f"{type(error).__name__}: {str(error)[:80]}"
        self.memory = self._host = self._event = None
        self.done.set()


class Staging:
    """The tensors of one step and device whose CRC is wanted.

    Attributes:
        waited: seconds that hooks waited for blocks to come free.
    """

    def __init__(self, like: torch.Tensor) -> None:
        module = getattr(torch, like.device.type, None)
        streams = like.device.type != "cpu" and hasattr(module, "Stream") and not getattr(type(like), "probe_device", False)
        self._module = module if streams else None
        self._lock = threading.Lock()
        self._block: _Block | None = None
        self._sent: deque[_Block] = deque()
        self._all: list[_Block] = []
        self._tensors: list[tuple[_Tensor, list[_Block]]] = []
        self.waited = 0.0

    def stage_bytes(self, data: torch.Tensor, row: int) -> None:
        """Copy the bytes of a strided tensor as they are now (in the order of its stream); its CRC belongs to `row` of the step."""
        tensor, blocks = _Tensor(row), []
        with self._lock:
            n = data.numel() * data.element_size()
            if n <= BLOCK:
                blocks.append(self._copy_to_block(tensor, data, n))
            else:
                for at in range(0, data.numel(), BLOCK // data.element_size()):
                    piece = _bytes_of(data, at, BLOCK)
                    blocks.append(self._copy_to_block(tensor, piece, piece.shape[0]))
            self._tensors.append((tensor, blocks))

    def _copy_to_block(self, tensor: _Tensor, data: torch.Tensor, n: int) -> _Block:
        if self._block is not None and self._block.room() < n:
            self._close()
        if self._block is None:
            if len(self._sent) >= MOST_BLOCKS:
                self._wait(self._sent.popleft())
            self._block = _Block(data, self._module)
        self._block.copy_data(tensor, data)
        return self._block

    def _close(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            self._sent.append(block)
            self._all.append(block)
            if block.send():
                _taker.give(block)

    def _wait(self, block: _Block) -> None:
        start = time.perf_counter()
        if self._module is None:
            block.finish()
        else:
            block.done.wait()
        self.waited += time.perf_counter() - start

    def close(self) -> None:
        """The step is over: send what is left."""
        with self._lock:
            self._close()
        if self.waited > _WORTH_SAYING:
            warn_once(
                "checksums wait",
                f"summary_mode md5: hooks waited {self.waited:.1f} s in one step for bytes to reach the host (at most "
                f"{MOST_BLOCKS * BLOCK >> 20} MiB are under way at once); summary_mode digest is taken on the device and never waits",
            )

    def ready(self) -> bool:
        """True when `results` will not wait, or when only it can start the copy."""
        return self._module is None or all(block.done.is_set() for block in self._all)

    def results(self) -> dict[int, int]:
        """Row to CRC-32. Tensors whose bytes did not arrive are missing. Waits."""
        self.close()
        for block in self._all:
            if not block.done.is_set():
                self._wait(block)
        return {tensor.row: tensor.crc for tensor, blocks in self._tensors if not any(block.error for block in blocks)}


class _Taker:
    """The thread that takes CRCs of blocks that have arrived; it runs from the first block on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._blocks: queue.SimpleQueue[_Block] = queue.SimpleQueue()

    def give(self, block: _Block) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # not in a forked child
                self._blocks = queue.SimpleQueue()
                self._thread = threading.Thread(target=self._run, args=(self._blocks,), name="msprobe-crc", daemon=True)
                self._thread.start()
            self._blocks.put(block)

    @staticmethod
    def _run(blocks: queue.SimpleQueue[_Block]) -> None:
        while True:
            blocks.get().finish()


_taker = _Taker()
