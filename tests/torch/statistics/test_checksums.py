"""CRC-32 and XOR of tensors through the backend: raw bytes as they are at the call, on the host and on devices."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics import checksums
from msprobe_integrations.torch.statistics.checksums import Staging
from msprobe_integrations.torch.statistics.rows import CODES
from msprobe_integrations.torch.testing import EarlyRead, ProbeDevice, reads_forbidden


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in C order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.as_strided(flat.shape, (1,)).view(torch.uint8).tolist())  # one element may have any stride


def xor_of(data: bytes) -> int:
    """XOR of words of eight bytes, the last one filled up with zeros."""
    total = 0
    for at in range(0, len(data), 8):
        total ^= int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")
    return total


def backend_for(mode: str) -> TorchBackend:
    """A backend that takes this checksum."""
    backend = TorchBackend()
    backend.want_checksum = mode
    return backend


def checksum(mode: str, row: Any) -> int | None:
    """The checksum of a row."""
    s = rows.read_row(row)
    assert (s.crc32 is None) or (s.xor is None)
    return s.crc32 if mode == "crc32" else s.xor


def expected(mode: str, tensor: torch.Tensor) -> int:
    """What it has to be."""
    return zlib.crc32(raw(tensor)) if mode == "crc32" else xor_of(raw(tensor))


def samples() -> list[torch.Tensor]:
    """Tensors of every type the backend reduces, and of many layouts."""
    torch.manual_seed(0)
    made = [(torch.randn(13, 5) * 10).to(dtype) for dtype in CODES if not dtype.is_complex]
    made += [torch.randn(6, 5, dtype=d) for d in (torch.complex64, torch.complex128)]
    made += [torch.randn(7, 5).t(), torch.randn(3, 1).expand(3, 4), torch.tensor(3.5), torch.tensor(7), torch.empty(0, 3)]
    made += [torch.randn(40, 41)[3::2, 1:], torch.randn(2, 3, 4).permute(2, 0, 1), torch.arange(5, dtype=torch.uint8)[1:]]
    made += [torch.randn(3, dtype=torch.complex64).conj(), torch._neg_view(torch.randn(4)), torch.nn.Parameter(torch.randn(3))]
    return made


@pytest.mark.parametrize("mode", ["crc32", "xor"])
@pytest.mark.parametrize("kernel", [True, False])
def test_host_tensors(monkeypatch: pytest.MonkeyPatch, mode: str, kernel: bool) -> None:
    """Every type and layout has the checksum of its raw bytes, the first time and on the fast path, with and without the C kernel."""
    if not kernel:
        monkeypatch.setattr(host_kernel, "available", False)
        monkeypatch.setattr(host_kernel, "_kernel", None)
    backend, tensors = backend_for(mode), samples()
    for _ in range(2):
        refs = [backend.reduce(t) for t in tensors]
        data = backend.finish_step().rows()
        assert [checksum(mode, data[r.row]) for r in refs] == [expected(mode, t) for t in tensors]
    assert backend.unsupported == {}


@pytest.mark.parametrize("mode", ["crc32", "xor"])
def test_the_value_at_the_call(mode: str) -> None:
    """In-place changes after the call do not matter, also of large tensors and in a loop (26.2.0 is wrong in about half of the runs)."""
    backend = backend_for(mode)
    tensor = torch.randn(300_000)
    refs, wanted = [], []
    for _ in range(20):
        wanted.append(expected(mode, tensor[:100]))
        refs.append((backend.reduce(tensor), backend.reduce(tensor[:100])))
        tensor.mul_(1.5)
    data = backend.finish_step().rows()
    assert [checksum(mode, data[part.row]) for _, part in refs] == wanted
    assert len({whole.row for whole, _ in refs}) == 20


def test_what_is_wanted_can_change() -> None:
    """A row made before a checksum was wanted is not taken for one with it; the digest is a wish of its own."""
    backend, tensor = TorchBackend(digest=True), torch.ones(4)
    first = backend.reduce(tensor)
    backend.want_checksum = "crc32"
    second = backend.reduce(tensor)
    backend.want_checksum, backend.want_digest = "xor", False
    third = backend.reduce(tensor)
    data = backend.finish_step().rows()
    found = [rows.read_row(data[ref.row]) for ref in (first, second, third)]
    assert [s.digest is not None for s in found] == [True, True, False]
    assert [s.crc32 for s in found] == [None, zlib.crc32(raw(tensor)), None]
    assert [s.xor for s in found] == [None, None, 0]
    with pytest.raises(UsageError, match=r"'md5'; allowed: '', 'crc32', 'xor'"):
        backend.want_checksum = "md5"
    assert backend.want_checksum == "xor"


@pytest.mark.parametrize("mode", ["crc32", "xor"])
def test_tensors_that_are_not_plain(mode: str) -> None:
    """Nested, sparse and quantized tensors: the bytes of what the statistics are of. No data: no row."""
    backend = backend_for(mode)
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    sparse = torch.diag(torch.tensor([1.0, 2.0])).to_sparse()
    quantized = torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.5, 0, torch.quint8)
    cases = [
        (torch.nested.nested_tensor(parts, layout=torch.jagged), torch.cat(parts)),
        (sparse, sparse._values()),
        (quantized, quantized.dequantize()),
    ]
    refs = [backend.reduce(tensor) for tensor, _ in cases]
    assert backend.reduce(torch.ones(3, device="meta")).row == -1
    data = backend.finish_step().rows()
    assert [checksum(mode, data[r.row]) for r in refs] == [expected(mode, inner) for _, inner in cases]


@pytest.mark.parametrize("mode", ["crc32", "xor"])
def test_device_tensors(mode: str) -> None:
    """On a device nothing is read before the end of the step, and what is changed in place after the call does not matter."""
    backend, tensors = backend_for(mode), samples()
    wanted = [expected(mode, t) for t in tensors]
    before = ProbeDevice.copies
    with reads_forbidden():
        shown = [ProbeDevice.wrap(t.detach().resolve_conj().resolve_neg()) for t in tensors]
        refs = [backend.reduce(t) for t in shown]
        host = backend.reduce(torch.ones(3))
        changed = torch.randn(9)
        wanted_then = expected(mode, changed)
        changing = ProbeDevice.wrap(changed)
        then = backend.reduce(changing)
        changing.add_(1.0)
        pending = backend.finish_step()
        ready = pending.ready()
    assert ready
    data = pending.rows()
    assert [checksum(mode, data[r.row]) for r in refs] == wanted
    assert checksum(mode, data[then.row]) == wanted_then
    assert checksum(mode, data[host.row]) == expected(mode, torch.ones(3))
    assert rows.read_row(data[refs[0].row]).count == 65
    assert ProbeDevice.copies - before == (2 if mode == "crc32" else 1)
    assert backend.unsupported == {}


def test_tensors_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that fill a block, that do not fit behind another and that are longer than a block all have their CRC; when every
    block is under way the hook has to wait, which a device without streams can only do by reading."""
    monkeypatch.setattr(checksums, "BLOCK", 256)
    tensors = [torch.randn(n) for n in (3, 60, 1, 64, 65, 200, 0, 2)] + [torch.randn(30, 20).t()]
    staging = Staging(ProbeDevice.wrap(torch.ones(1)))
    for row, tensor in enumerate(tensors):
        if tensor.numel():
            staging.stage_bytes(ProbeDevice.wrap(tensor), row)
    assert staging.results() == {row: zlib.crc32(raw(t)) for row, t in enumerate(tensors) if t.numel()}
    assert staging.waited > 0
    late = Staging(ProbeDevice.wrap(torch.ones(1)))
    with reads_forbidden(), pytest.raises(EarlyRead):
        late.stage_bytes(ProbeDevice.wrap(torch.ones(64 * (checksums.MOST_BLOCKS + 2))), 0)


class Streams:
    """Streams and events of a device whose copies to the host arrive when `arrive` is set."""

    def __init__(self) -> None:
        self.arrive = threading.Event()
        self.order: list[str] = []
        streams = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                self.device = device

            def wait_stream(self, _: Any) -> None:
                streams.order.append("side waits")

            def wait_event(self, _: Any) -> None:
                streams.order.append("stream waits for the block")

        class Event:
            def record(self, stream: Any = None) -> None:
                self.stream = stream

            def synchronize(self) -> None:
                assert streams.arrive.wait(30)

        self.Stream, self.Event = Stream, Event
        self.main = Stream()

    def current_stream(self, _: Any = None) -> Any:
        return self.main

    @contextmanager
    def device(self, _: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, _: Any) -> Iterator[None]:
        yield


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Blocks of 256 bytes, at most four of them, on the test device as if it had streams."""
    made = Streams()
    monkeypatch.setattr(checksums, "BLOCK", 256)
    monkeypatch.setattr(checksums, "MOST_BLOCKS", 4)
    monkeypatch.setattr(checksums, "side_stream", lambda _module, device: made.Stream(device))
    monkeypatch.setattr(checksums, "_allocate_pinned", lambda n: torch.empty(n, dtype=torch.uint8))
    monkeypatch.setattr(ProbeDevice, "record_stream", lambda _self, _stream: None, raising=False)
    yield made
    made.arrive.set()


def test_blocks_on_a_side_stream(streams: Streams) -> None:
    """With streams a full block is sent at once and its CRCs are taken by a thread when it has arrived; the hook goes on meanwhile, on
    any stream, and waits only when too many blocks are under way, which is counted."""
    staging = Staging(ProbeDevice.wrap(torch.ones(1)))
    staging._module = streams
    tensors = [torch.randn(n) for n in (10, 60, 64, 5, 30)]
    with reads_forbidden():
        for row, tensor in enumerate(tensors[:4]):
            staging.stage_bytes(ProbeDevice.wrap(tensor), row)
        streams.main = streams.Stream()
        staging.stage_bytes(ProbeDevice.wrap(tensors[4]), 4)
        assert streams.order[-1] == "stream waits for the block"
        staging.close()
        assert staging.waited == 0
        assert not staging.ready()
        long = torch.randn(64 * 6)
        threading.Timer(0.2, streams.arrive.set).start()
        staging.stage_bytes(ProbeDevice.wrap(long), 5)
    assert staging.waited > 0
    assert staging.results() == {row: zlib.crc32(raw(t)) for row, t in enumerate([*tensors, long])}
    assert staging.ready()


def test_a_fault_costs_the_checksum_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the bytes of a device tensor cannot be taken, its statistics are there all the same and the fault is counted."""
    backend = backend_for("crc32")

    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(Staging, "stage_bytes", broken)
    ref = backend.reduce(ProbeDevice.wrap(torch.ones(4)))
    s = rows.read_row(backend.finish_step().rows()[ref.row])
    assert (s.crc32, s.count, s.max) == (None, 4, 1.0)
    assert backend.unsupported == {"checksum: MemoryError: no room": 1}
