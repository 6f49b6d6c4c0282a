"""The Triton kernel: its rows against the numpy reference, in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core import log
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device import trust as device_trust
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.rows import CODES, host_flags

KINDS = [dtype for dtype in CODES if not dtype.is_complex]
INTEGER_WORDS = [rows.NANS, rows.POS_INF, rows.NEG_INF, rows.ZEROS, rows.DIGEST, rows.IMIN, rows.IMAX]

triton_here = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def serve() -> None:
    """Answer requests on stdin: a line of JSON and the bytes of a tensor; the 128 bytes of its row come back. Runs in a process whose
    environment makes Triton interpret its kernels."""
    from msprobe_integrations.torch.statistics.device import kernel as device_kernel
    from msprobe_integrations.torch.statistics.device import launch as device_launch

    while line := sys.stdin.buffer.readline():
        ask = json.loads(line)
        raw = bytearray(sys.stdin.buffer.read(ask["bytes"]))
        dtype = getattr(torch, ask["dtype"])
        base = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
        tensor = base.as_strided(ask["shape"], ask["strides"]) if ask["shape"] is not None else base
        device_kernel.MAX_PROGRAMS = ask["programs"]
        row = torch.full((rows.WORDS,), -7.0, dtype=torch.float64)
        want = ask["want"] | (host_kernel.want_below(ask["limit"]) if ask["limit"] else 0)
        device_launch.reduce(tensor, row, want, ask["index0"])
        sys.stdout.buffer.write(row.numpy().tobytes())
        sys.stdout.buffer.flush()


class Interpreter:
    """The other process."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::RuntimeWarning", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def row(self, tensor: torch.Tensor, want: int, index0: int = 0, programs: int = 1024, limit: float = 0.0) -> np.ndarray:
        """The row the kernel writes for `tensor`, a view of memory that starts where the tensor starts; `limit`: of BELOW."""
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        raw = whole.view(torch.uint8).numpy().tobytes()
        plain = tensor.is_contiguous() and tensor.numel() == whole.numel()
        ask = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": len(raw),
            "want": int(want),
            "limit": limit,
            "index0": index0,
            "programs": programs,
            "shape": None if plain else list(tensor.shape),
            "strides": list(tensor.stride()),
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(ask).encode() + b"\n" + raw)
        self.process.stdin.flush()
        answer = self.process.stdout.read(8 * rows.WORDS)
        assert len(answer) == 8 * rows.WORDS, "the interpreting process ended; its messages are above"
        return np.frombuffer(answer, np.float64)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """One process for all tests of this file."""
    made = Interpreter()
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    assert made.process.wait(60) == 0


def reference(tensor: torch.Tensor, want: int, index0: int = 0) -> np.ndarray:
    """The numpy row."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return host_kernel.row_of(raw, CODES[tensor.dtype], want, index0)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal rows but for COUNT and FLAGS, which the host puts in; sums to rounding."""
    assert got.view(np.int64)[INTEGER_WORDS].tolist() == want.view(np.int64)[INTEGER_WORDS].tolist()
    assert got[6:8].tolist() == want[6:8].tolist()
    np.testing.assert_allclose(got[9], want[9], rtol=1e-12)
    np.testing.assert_allclose(got[8], want[8], rtol=1e-12, atol=1e-12 * np.sqrt(min(want[9], 1e300) * max(1, want.view(np.int64)[0])))
    overflow = want.view(np.int64)[rows.FLAGS] & rows.HAS_INTEGERS == 0 and want[7] >= 2.0**63 and want.view(np.int64)[0] > 0
    assert got.view(np.int64)[rows.FLAGS] in ((0, rows.HAS_INTEGERS) if overflow else (0,))
    assert got[[0, 13, 14, 15]].tolist() == [-7.0] * 4, "words that belong to the host were written"


def bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Random bits: NaN, Inf and subnormals come with them. float64: normal numbers of every size whose squares are finite."""
    random = np.random.default_rng(seed)
    if dtype == torch.float64:
        return torch.from_numpy(random.standard_normal(n) * np.exp2(random.integers(-400, 400, n)))
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, n).astype(bool))
    return torch.from_numpy(random.integers(0, 256, n * dtype.itemsize, np.uint8)).view(dtype)


@triton_here
@given(
    dtype=st.sampled_from(KINDS),
    n=st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 1023, 1024, 1025]), st.integers(1, 9000)),
    seed=st.integers(0, 2**31),
    index0=st.sampled_from([0, 1, 1023, 2047, 2**40 + 3]),
    digest=st.booleans(),
    programs=st.sampled_from([1, 3, 1024]),
)
def test_kernel_gives_the_numpy_row(
    interpreter: Interpreter, dtype: torch.dtype, n: int, seed: int, index0: int, digest: bool, programs: int
) -> None:
    """For every type the kernel gives the counts, extremes, exact integers and digest of the reference, with any number of programs."""
    tensor = bits(dtype, n, seed)
    same(interpreter.row(tensor, digest, index0, programs), reference(tensor, digest, index0))


@triton_here
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.uint64, torch.float8_e4m3fn])
def test_large_tensors_are_merged_from_many_programs(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """20 001 elements, a partial tile at the end, three programs or five and the second launch: the same row."""
    tensor = bits(dtype, 20_001, 3)
    same(interpreter.row(tensor, True, 5), reference(tensor, True, 5))


@triton_here
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_special_numbers(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """NaN, both infinities, both zeros, subnormals and the largest numbers each are counted as what they are."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    special = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, least, -least, info.tiny, info.max, info.min]
    for n in (1, 3, 10):
        for tensor in (torch.tensor(special[:n], dtype=torch.float64).to(dtype), torch.tensor(special[-n:], dtype=torch.float64).to(dtype)):
            same(interpreter.row(tensor, True), reference(tensor, True))
    tiny = torch.full((2000,), least, dtype=torch.float64).to(dtype)
    row = interpreter.row(tiny, False)
    assert row.view(np.int64)[rows.ZEROS] == 0
    assert row[rows.SUM] == pytest.approx(2000 * least, rel=1e-12)


@triton_here
@pytest.mark.parametrize("dtype", [d for d in KINDS if d.itemsize == 1 and d.is_floating_point])
def test_every_byte(interpreter: Interpreter, dtype: torch.dtype) -> None:
    """Each of the 256 bytes of an 8-bit float has the value of the format's definition. A number of a group is there once, the next twice
    and so on: because their values rise or fall with the byte, the sum is another one when two of them are exchanged."""
    finite = torch.arange(256).to(torch.uint8).view(dtype).double().isfinite().tolist()
    groups = [[byte for byte in range(low, low + 16) if finite[byte]] for low in range(0, 256, 16)]
    groups += [[byte] for byte in range(256) if not finite[byte]]
    assert sorted(byte for group in groups for byte in group) == list(range(256))
    for group in groups:
        tensor = torch.tensor([byte for i, byte in enumerate(group) for _ in range(i + 1)], dtype=torch.uint8).view(dtype)
        same(interpreter.row(tensor, False), reference(tensor, False))


@triton_here
def test_extreme_integers(interpreter: Interpreter) -> None:
    """Integers above 2**53 stay exact; uint64 above 2**63 - 1 has no IMIN and IMAX, and says so, from any program."""
    for values in ([2**63 - 1, -(2**63), 0], [2**53 + 1], [-5]):
        tensor = torch.tensor(values, dtype=torch.int64)
        same(interpreter.row(tensor, True), reference(tensor, True))
    for values in ([2**64 - 1, 3], [2**63], [2**63 - 1]):
        tensor = torch.from_numpy(np.array(values, np.uint64))
        same(interpreter.row(tensor, True), reference(tensor, True))
    long = torch.from_numpy(np.r_[np.arange(6000, dtype=np.uint64), np.uint64(2**63)])
    row = interpreter.row(long, True)
    same(row, reference(long, True))
    assert row.view(np.int64)[rows.FLAGS] == rows.HAS_INTEGERS


@triton_here
def test_strides(interpreter: Interpreter) -> None:
    """Transposed, cut and expanded tensors of up to four dimensions are read where they lie: in logical order
    for the digest, and completely without it."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((60, 50)).astype(np.float32))
    deep = x.view(3, 2, 5, 10, 10)[:, :, :4, :, ::3].transpose(0, 3)
    for tensor in (x.t(), x[:, ::7], x[:1].expand(40, 50), x.view(6, 10, 50).permute(2, 0, 1), x[0, 0].expand(70, 80), deep[0]):
        for digest in (False, True):
            same(interpreter.row(tensor, digest), reference(tensor, digest))


@triton_here
def test_shards_add_up(interpreter: Interpreter) -> None:
    """Rows of parts, taken with the position in the whole, merge to the row of the whole."""
    for dtype in (torch.bfloat16, torch.float64):
        whole = bits(dtype, 5000, 1)
        merged = rows.empty(1)
        for low, high in ((0, 1500), (1500, 1501), (1501, 5000)):
            part = interpreter.row(whole[low:high].clone(), True, low).copy()[None]
            rows.as_int64(part)[:, [rows.COUNT, rows.FLAGS]] = high - low, rows.WRITTEN | rows.HAS_DIGEST
            merged = rows.merge(merged, part)
        assert merged.view(np.uint64)[0, rows.DIGEST] == reference(whole, True).view(np.uint64)[rows.DIGEST]
        assert merged[0, rows.SUMSQ] == pytest.approx(reference(whole, True)[rows.SUMSQ], rel=1e-12, nan_ok=True)


@triton_here
def test_every_type_with_moments_and_counts_below_a_limit(interpreter: Interpreter) -> None:
    """SUM3, SUM4 and BELOW are those of the reference for every type, the other words as without them; and the row with a digest."""
    for number, dtype in enumerate(KINDS):
        for n, programs, limit in ((1, 1, 1.5), (2100, 3, 2e-38), (700, 1, 1.5)):
            tensor = bits(dtype, n, number)
            if dtype == torch.float64:
                tensor = tensor.clamp(-1e60, 1e60)  # the sum of fourth powers is finite
            row = interpreter.row(tensor, host_kernel.WANT_MOMENTS, 0, programs, limit)
            want = reference(tensor, host_kernel.WANT_MOMENTS | host_kernel.want_below(limit))
            same(np.r_[row[:13], [-7.0] * 3], want)
            assert row.view(np.int64)[rows.BELOW] == want.view(np.int64)[rows.BELOW], dtype
            np.testing.assert_allclose(row[rows.SUM4], want[rows.SUM4], rtol=1e-12)
            np.testing.assert_allclose(row[rows.SUM3], want[rows.SUM3], rtol=1e-12, atol=1e-12 * n**0.25 * want[rows.SUM4] ** 0.75)
        same(interpreter.row(tensor, True, 1023), reference(tensor, True, 1023))


COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from msprobe_integrations.torch.statistics.device import histogram as h
from msprobe_integrations.torch.statistics.device import kernel as k

pointers = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}

def compiled(kernel, signature, constants, pointed, **options):
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(pointed)}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=target, options=options).asm

def numbers(*names):
    return dict.fromkeys(names, "i64")

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
kernels = [(f32, 0), (bf16, 1), (torch.float8_e4m3fn, 1), (torch.uint64, 1), (f32, 48)]
pairs = [(f32, f32, 1, f32), (bf16, f32, 0, None), (f16, f64, 1, None)]
for target, suffix in ((GPUTarget("cuda", 80, 32), "ptx"), (GPUTarget("cuda", 90, 32), "ptx"), (GPUTarget("hip", "gfx942", 64), "amdgcn")):
    for dtype, want in kernels:
        constants, data = k.constants(dtype, want), {"data": pointers[dtype.itemsize], "out": "*i64"}
        made = compiled(k._row_kernel, data | numbers("n", "index0", "limit"), constants, 2)
        print(json.dumps([suffix, str(dtype), want, made[suffix]]))
        many = compiled(k._many_kernel, {"table": "*i64"} | numbers("limit"), constants | {"ALIGNED": True}, 1)
        print(json.dumps([suffix, str(dtype), want, many[suffix]]))
        layouts = [{line for line in one["ttgir"].splitlines() if line.startswith("#")} for one in (made, many)]
        assert {line for line in layouts[0] if "loc" not in line} == {line for line in layouts[1] if "loc" not in line}
    for a, b, op, step in pairs:
        constants = k.pair_constants(a, b, op, step, 48)
        data = {"first": pointers[a.itemsize], "second": pointers[b.itemsize], "out": "*i64"}
        data |= numbers("n", "limit", "c0", "c1", "c2", "step")
        made = compiled(k._pair_kernel, data, constants, 3, enable_fp_fusion=False)
        print(json.dumps([suffix, f"pair {a}", op, made[suffix]]))
        constants = constants | {"ALIGNED": True}
        compiled(k._many_pairs_kernel, {"table": "*i64"} | numbers("limit"), constants, 1, enable_fp_fusion=False)
    strides = numbers("n", "index0", "limit", "s1", "s2", "s3", "t0", "t1", "t2", "t3")
    for dims in (1, 2, 3, 4):
        constants = k.constants(torch.bfloat16, 1) | {"DIMS": dims, "WIDE": dims == 4}
        compiled(k._strided_kernel, {"data": "*i16", "out": "*i64"} | strides, constants, 0)
    for dtype, kind in ((bf16, "log2"), (f64, "linear"), (torch.uint64, "log2")):
        constants = h.constants(dtype, kind) | {"DIMS": 4, "WIDE": False}
        data = {"data": pointers[dtype.itemsize], "parts": "*i64"}
        compiled(h._count_kernel, data | numbers("n", "s1", "s2", "s3", "t0", "t1", "t2", "t3"), constants, 2)
    out = {f"o{i}": "*i64" for i in range(10)}
    compiled(h._sum_kernel, {"parts": "*i64", "programs": "i32"} | out, {"ROWS": 10}, 1)
    constants = k.more_words(48)
    compiled(k._merge_many_kernel, {"table": "*i64"}, constants, 1)
    made = compiled(k._merge_kernel, {"parts": "*i64", "out": "*i64", "programs": "i32"}, constants, 2)
    print(json.dumps([suffix, "merge", 48, made[suffix]]))
"""


@triton_here
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiles_for_gpus(tmp_path: Any) -> None:
    """NVIDIA's and AMD's compilers take the kernels; the loop over whole tiles loads 16
    bytes at a time, also for a table of tensors, whose elements lie in the same registers (so that the sums are the same). Updates have
    correctly rounded roots and quotients, and no product and sum rounded at once."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    script = tmp_path / "compile.py"  # Triton wants the source of a kernel in a file
    script.write_text(COMPILE)
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(made) >= 12
    assert {(suffix, name) for suffix, name, _, _ in made} >= {(s, n) for s in ("ptx", "amdgcn") for n in ("torch.uint64", "merge")}
    for suffix, name, _, text in made:
        if suffix == "ptx" and name == "pair torch.float32":
            assert "sqrt.rn.f32" in text
            assert "div.rn.f32" in text
            assert "fma.rn.f32" not in text
        if suffix == "ptx" and name in ("torch.float32", "torch.bfloat16", "torch.uint64"):
            assert "cp.async.cg.shared.global" in text or "v4.b32" in text or "v2.b64" in text, name


CHECK = """
import sys, torch
from msprobe_engine.core.statistics import host_kernel
from msprobe_integrations.torch.statistics.device import check as k

cpu = torch.device("cpu")
every = 1 | host_kernel.WANT_MOMENTS | host_kernel.want_below(1.25)
some = (torch.float32, torch.int8, torch.float8_e5m2)
kinds = k.KINDS if sys.argv[1] == "all" else some
wanted = [*((dtype, every) for dtype in kinds), *((dtype, 0) for dtype in kinds)]
print(len(wanted), *[k.check(cpu, dtype, want) or "right" for dtype, want in wanted])
right, row = host_kernel.row_of, k._run(torch.from_numpy(k._known_bits(torch.float32)).view(torch.float32), every)
k._run = lambda *_: row  # from here on the rows differ on the other side
for word in (1, 4, 5, 6, 9, 13, 14, 15):
    def wrong(*a, word=word):
        row = right(*a)
        row[word] += 1e-3 * abs(row[word]) + 1e-300
        return row
    host_kernel.row_of = wrong
    print("seen" if k.check(cpu, torch.float32, every) else "missed")
"""


@triton_here
@pytest.mark.slow
@pytest.mark.parametrize("types", ["some", "all"])
def test_the_check_before_first_use(types: str) -> None:
    """The check passes for each type when the kernel is right, and names a difference in any word when the rows differ."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", CHECK, types], env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    number, *said = ran.stdout.split()
    assert int(number) == 2 * (len(KINDS) if types == "all" else 3)
    assert said == ["right"] * int(number) + ["seen"] * 8


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it lies on a GPU: only the choice of the way is tested with it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision made, no warning given."""
    monkeypatch.setattr(device_trust, "TRUSTED", {})
    log.forget_warnings()


class Lines(logging.Handler):
    """Messages written."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.mark.usefixtures("fresh")
def test_a_kernel_that_cannot_run_is_replaced_with_one_warning() -> None:
    """Without a usable Triton or GPU the operators write the row, one warning says why, nothing raises and nothing is tried again."""
    lines = Lines()
    log.get_logger().addHandler(lines)
    try:
        x = torch.arange(5.0)
        for tensor in (x, x, x.to(torch.int32), x.to(torch.complex64)):
            device = DeviceRows(tensor, 1)
            take = Taker(device, tensor, 0, host_flags(tensor.dtype, False))
            with torch._C.DisableTorchFunction():
                statistics.reduce_device(tensor.as_subclass(Elsewhere), take, False)
            out = rows.empty(1)
            device.scatter(device.join_rows().numpy(), out)
            assert rows.read_row(out[0]).max == 4.0
    finally:
        log.get_logger().removeHandler(lines)
    assert len(lines.seen) == 1, lines.seen
    assert "take torch operators" in lines.seen[0]
    assert set(device_trust.TRUSTED.values()) == {False}


def test_nothing_is_recorded_into_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a device graph is captured tensors get no row: each replay would write to memory that has gone to others."""
    backend = TorchBackend()
    with torch._C.DisableTorchFunction():
        tensor = torch.ones(3).as_subclass(Elsewhere)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert backend._unfit(tensor) == ""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert backend._unfit(tensor) == "graph capture"
        assert backend._unfit(torch.ones(3)) == ""


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@on_gpu
def test_replays_of_a_real_graph() -> None:
    """A CUDA graph captured while the probe looks has none of the probe's work in it."""
    backend, x = TorchBackend(), torch.ones(1000, device="cuda")
    backend.reduce(x)
    backend.finish_step().rows()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        assert backend.reduce(y).row == -1
    graph.replay()
    assert backend.unsupported == {"graph capture": 1}
    ref = backend.reduce(y)
    assert rows.read_row(backend.finish_step().rows()[ref.row]).max == 2.0


@on_gpu
def test_streams_of_a_gpu() -> None:
    """Rows written on several streams all arrive, in one copy, also those of the first tensors after the memory was made."""
    backend = TorchBackend(digest=True)
    refs = []
    for i in range(3000):
        with torch.cuda.stream(torch.cuda.Stream()) if i % 3 == 0 else torch.cuda.stream(torch.cuda.default_stream()):
            refs.append((backend.reduce(torch.full((100,), float(i), device="cuda")), i))
    data = backend.finish_step().rows()
    assert [data[ref.row, rows.MAX] for ref, _ in refs] == [float(i) for _, i in refs]


@on_gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dtype", KINDS)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """On a CUDA device the kernel is chosen, and gives the numpy row."""
    for n in (1, 1000, 70_001, 3_000_000):
        tensor = bits(dtype, n, n)
        device, out = DeviceRows(tensor.cuda(), 1), rows.empty(1)
        statistics.reduce_device(tensor.cuda(), Taker(device, tensor.cuda(), 0, host_flags(dtype, 1)), 1, 3)
        device.scatter(device.join_rows().cpu().numpy(), out)
        same(out[0], reference(tensor, True, 3))
    assert list(device_trust.TRUSTED.items()) == [(("cuda", "row", dtype, True), True)]


if __name__ == "__main__":
    serve()
