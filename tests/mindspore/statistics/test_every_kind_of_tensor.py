"""Statistics of MindSpore tensors: every type, every layout, as they are at the moment, and failures of the training that come to light
meanwhile."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

from msprobe_engine.core.backend import Backend, load_backend
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.guard import Faults, is_of_training
from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.tensors import memory, npy
from msprobe_integrations.mindspore.tensors.memory import KERNEL

SIZES = {name: host_kernel.ITEMSIZE[code] for name, code in KERNEL.items()}


def row_of(backend: MindSporeBackend, ref: TensorRef) -> np.ndarray:
    """The row of the step in progress."""
    return np.array(backend.so_far()[ref.row])


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal rows; sums to rounding."""
    exact = [0, 1, 2, 3, 4, 5, 10, 11, 12]
    assert got.view(np.int64)[exact].tolist() == want.view(np.int64)[exact].tolist()
    np.testing.assert_allclose(got[6:8], want[6:8], rtol=1e-15)
    np.testing.assert_allclose(got[9], want[9], rtol=1e-11)
    np.testing.assert_allclose(got[8], want[8], rtol=1e-11, atol=1e-11 * np.sqrt(min(want[9], 1e300)))


def words_of(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bits, so NaN, Inf and subnormal numbers come with them; [*shape, bytes] uint8."""
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, SIZES[dtype]), dtype=np.uint8)
    if dtype == "Bool":
        raw %= 2
    if dtype in ("Float64", "Complex128"):  # squares of random bits leave float64
        raw[..., 6::8] = np.where(raw[..., 6::8] < 64, 64, raw[..., 6::8])
        raw[..., 7::8] &= 0xBF
    return raw


@pytest.mark.parametrize("dtype", list(KERNEL))
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.tuples(st.integers(500, 3000)),
    seed=st.integers(0, 2**31),
    view=st.sampled_from(["whole", "transposed", "part", "stepped"]),
)
def test_rows_are_those_of_the_bits(dtype: str, shape: tuple[int, ...], seed: int, view: str) -> None:
    """Every element type, empty and 0-d tensors, and views that share memory have the row of the bits of their elements in C order."""
    raw = words_of(dtype, shape, seed)
    tensor = npy.from_bytes(raw.tobytes(), dtype, shape)
    if view == "transposed" and len(shape) > 1 and 0 not in shape:
        tensor, raw = mint.transpose(tensor, 0, 1), np.swapaxes(raw, 0, 1)
    elif view == "part" and shape and shape[0] > 2:
        tensor, raw = mint.narrow(tensor, 0, 1, shape[0] - 2), raw[1:-1]
    elif view == "stepped" and shape and shape[-1] > 1:
        half = shape[-1] // 2
        tensor, raw = mint.narrow(tensor, -1, half, shape[-1] - half), raw[..., half:, :]
    backend = MindSporeBackend(digest=True)
    ref = backend.reduce(tensor)
    assert ref.description.dtype == dtype == str(tensor.dtype)
    assert ref.description.shape == tuple(tensor.shape)
    same(row_of(backend, ref), host_kernel.row_of(np.ascontiguousarray(raw).reshape(-1), KERNEL[dtype], host_kernel.WANT_DIGEST, 0))
    assert npy.bytes_of(tensor).tobytes() == raw.tobytes()
    assert backend.unsupported == {}


def test_it_is_found_by_name_and_keeps_the_protocol() -> None:
    """The entry point `mindspore` gives this backend, which is one of the engine's protocol."""
    backend = load_backend("mindspore")
    assert isinstance(backend, MindSporeBackend)
    assert isinstance(backend, Backend)
    assert (backend.name, backend.framework) == ("mindspore", "mindspore")
    assert backend.is_tensor(Parameter(Tensor([1.0]), name="p"))
    assert not backend.is_tensor(np.ones(2))


def test_descriptions_are_those_of_dump_files_and_one_object() -> None:
    """Type and dtype are written as in existing dumps; parameters are tensors; equal descriptions are the same object."""
    backend = MindSporeBackend()
    first = backend.describe(Tensor(np.ones((2, 3)), mindspore.bfloat16))
    assert first == ("mindspore.Tensor", "BFloat16", (2, 3), None, "cpu", ())
    assert backend.describe(Parameter(Tensor(np.ones((2, 3)), mindspore.bfloat16), name="w")) is first
    assert backend.reduce(Tensor(np.ones((2, 3)), mindspore.bfloat16)).description is first


def test_the_same_values_in_the_same_memory_have_one_row() -> None:
    """A tensor that comes again unchanged has the row that it had, as a view of the same layout has."""
    backend = MindSporeBackend()
    tensor = Tensor(np.arange(6, dtype=np.float32))
    assert backend.reduce(tensor) is backend.reduce(tensor)
    assert backend.reduce(tensor.view(6)) is backend.reduce(tensor)
    assert backend.reduce(tensor.view(2, 3)) is not backend.reduce(tensor)
    before = backend.reduce(tensor)
    backend.finish_step()
    assert backend.reduce(tensor) is not before


def _adam(kind: Any) -> Any:
    def change(parameter: Any) -> None:
        kind([parameter], 0.1)((Tensor([1.0, 2.0, 3.0]),))

    return change


CHANGES: dict[str, Any] = {
    "setitem": lambda x: x.__setitem__(0, 9.0),
    "slice": lambda x: x.__setitem__(slice(0, 2), Tensor([7.0, 8.0])),
    "assign": lambda x: ops.assign(x, Tensor([5.0, 6.0, 7.0])),
    "assign_value": lambda x: x.assign_value(Tensor([5.0, 6.0, 7.0])),
    "set_data": lambda x: x.set_data(Tensor([5.0, 6.0, 7.0])),
    "copy_": lambda x: x.copy_(Tensor([5.0, 6.0, 7.0])),
    "assign_add": lambda x: ops.assign_add(x, Tensor([5.0, 6.0, 7.0])),
    "numpy": lambda x: x.asnumpy().__setitem__(0, 4.0),
    "sgd": _adam(nn.SGD),
    "adam": _adam(nn.Adam),
    "adamw": _adam(optim.AdamW),
}


@pytest.mark.parametrize("how", list(CHANGES))
def test_every_change_is_seen_whatever_the_version_says(how: str) -> None:
    """MindSpore counts a version for `copy_` alone: each look reads the tensor, a view of it too."""
    backend = MindSporeBackend()
    parameter = Parameter(Tensor([1.0, 2.0, -3.0]), name="p")
    backend.reduce(parameter)
    CHANGES[how](parameter)
    row = row_of(backend, backend.reduce(parameter))
    assert row[rows.SUM] == pytest.approx(float(parameter.asnumpy().sum()))
    assert row[rows.SUM] != 0.0


def test_what_is_still_computed_is_waited_for() -> None:
    """Operators run in threads of their own; a row is that of the finished tensor, of an assignment that is under way too."""
    big = Tensor(np.full((900, 900), 0.5, np.float32))
    parameter = Parameter(Tensor(np.zeros((900, 900), np.float32)), name="p")
    backend = MindSporeBackend()
    made = ops.matmul(big, big)
    ops.assign(parameter, made)
    row = row_of(backend, backend.reduce(parameter))
    assert (row[rows.MIN], row[rows.MAX]) == (225.0, 225.0)


def test_a_failure_of_the_training_is_given_on() -> None:
    """An operator without a kernel fails at the next wait, whoever waits: the probe hands the error on, through its guards, and the
    tensors that are sound have their rows afterwards."""
    backend, faults = MindSporeBackend(), Faults()
    sound = Tensor(np.ones(4, np.float32)) + 1
    sound.asnumpy()
    _ = mint.cumsum(sound, 0)
    with pytest.raises(RuntimeError, match="Cumsum") as caught, faults.guard("dump"):
        backend.reduce(sound)
    assert is_of_training(caught.value)
    assert faults.disabled == faults.counts == {}
    with pytest.raises(RuntimeError):
        faults.fail("dump", caught.value)
    assert row_of(backend, backend.reduce(sound))[rows.SUM] == 8.0


def test_a_tensor_that_failed_raises_what_the_framework_raises() -> None:
    """The result of an operator that failed has no values; the error is the framework's own."""
    broken = mint.cumsum(Tensor(np.ones(4, np.float32)), 0)
    with pytest.raises(RuntimeError, match="Cumsum") as caught:
        MindSporeBackend().reduce(broken)
    assert is_of_training(caught.value)


@pytest.mark.parametrize(
    ("kind", "fail"),
    [
        (RuntimeError, lambda: ops.cholesky(Tensor(-np.eye(3, dtype=np.float32)))),
        (ValueError, lambda: ops.tensor_scatter_update(Tensor(np.ones(3, np.float32)), Tensor([[7]], mindspore.int32), Tensor([1.0]))),
    ],
)
@pytest.mark.parametrize("look", [lambda b, t: b.reduce(t), lambda b, t: b.describe(t), lambda _, t: npy.bytes_of(t)])
def test_a_failure_in_the_midst_of_an_operator_is_not_lost(kind: type[Exception], fail: Any, look: Any) -> None:
    """What an operator says while it runs is told once; its result has a shape and memory that nothing was written to. Whatever type the
    error has, and whatever the probe asks first, it is raised."""
    result = fail()

    def goes_on() -> None:
        try:
            look(MindSporeBackend(), result)
        except kind as error:
            assert is_of_training(error)  # noqa: PT017 - the framework's own, unmarked, may come later
            raise
        result.asnumpy()  # a description need not wait

    with pytest.raises(kind):
        goes_on()


def test_memory_that_cannot_be_reached_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor with a shape whose memory is out of reach at every try is no failure of the training."""

    def gone(_tensor: Any) -> Any:
        raise RuntimeError("Current Tensor has no device!")

    monkeypatch.setattr(memory, "_on_host", gone)
    backend = MindSporeBackend()
    assert backend.reduce(Tensor([1.0])).row == -1
    assert backend.unsupported == {"not readable: RuntimeError: Current Tensor has no device!": 1}


def test_what_has_no_values_has_no_row_and_is_counted() -> None:
    """A tensor that is not initialised, of a shape that is not known, or of a type that no kernel reads has row -1 and a reason."""
    backend = MindSporeBackend()
    lazy = Tensor(shape=(2, 2), dtype=mindspore.float32, init=mindspore.common.initializer.One())
    open_shape = Tensor(shape=(None, 2), dtype=mindspore.float32)
    assert [backend.reduce(x).row for x in (lazy, open_shape, Tensor([1.0, 2.0], mindspore.hifloat8))] == [-1, -1, -1]
    assert backend.unsupported == {"not initialised": 1, "shape is not known": 1, "no kernel: HiFloat8": 1}
    assert backend.reduce("no tensor").row == -1
    assert backend.reduce(None) == (-1, ("NoneType", "", (), None, "", ()))


def test_checksums_are_those_of_the_bytes() -> None:
    """CRC-32 and XOR of the bytes of the elements in C order, of a view too."""
    backend = MindSporeBackend()
    tensor = mint.transpose(Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)), 0, 1)
    raw = np.ascontiguousarray(np.arange(12, dtype=np.float32).reshape(3, 4).T).tobytes()
    backend.want_checksum = "crc32"
    assert rows.as_int64(row_of(backend, backend.reduce(tensor)))[rows.CRC] == zlib.crc32(raw)
    backend.want_checksum = "xor"
    assert row_of(backend, backend.reduce(tensor)).view(np.uint64)[rows.XOR] == host_kernel.xor64(np.frombuffer(raw, np.uint8))


def test_gradients_have_the_same_bits_when_everything_is_reduced() -> None:
    """Reading tensors inside a forward pass that is recorded changes nothing of it."""
    backend = MindSporeBackend()
    net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 4))
    data = Tensor(np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32))

    def run(look: bool) -> list[bytes]:
        def forward(x: Any) -> Any:
            for cell in net:
                x = cell(x)
                if look:
                    backend.reduce(x)
                    backend.reduce(x.T)
            return x.sum()

        loss, grads = mindspore.value_and_grad(forward, None, net.trainable_params())(data)
        return [one.asnumpy().tobytes() for one in (loss, *grads)]

    assert run(look=True) == run(look=False)
    assert backend.unsupported == {}


def test_threads_may_reduce_at_once() -> None:
    """Every call of every thread has a row of its own tensor; rows are handed over at the end of the step."""
    backend = MindSporeBackend()
    tensors = [Tensor(np.full(50, i, np.float32)) for i in range(200)]
    found: list[list[TensorRef]] = [[] for _ in range(4)]

    def work(place: int) -> None:
        found[place] = [backend.reduce(t) for t in tensors]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    pending = backend.finish_step()
    assert pending.ready()
    table = pending.rows()
    for refs in found:
        assert [table[ref.row][rows.MAX] for ref in refs] == [float(i) for i in range(200)]


def test_steps_that_are_put_aside_come_back() -> None:
    """`exchange` takes the rows of a step away and brings them back as they were."""
    backend = MindSporeBackend()
    ref = backend.reduce(Tensor([1.0, 2.0]))
    kept = backend.exchange()
    backend.reduce(Tensor([5.0]))
    backend.exchange(kept)
    assert backend.finish_step().rows()[ref.row][rows.SUM] == 3.0


@pytest.mark.parametrize("dtype", [*KERNEL, "HiFloat8"])
def test_bytes_make_the_same_tensor(dtype: str) -> None:
    """A tensor of any type comes back from its bytes, bit for bit, and with its type."""
    size = SIZES.get(dtype, 1)
    raw = bytes(range(1, 6 * size + 1)) if dtype != "Bool" else bytes([0, 1, 1, 0, 1, 0])
    tensor = MindSporeBackend().from_bytes(raw, dtype, (2, 3))
    assert (str(tensor.dtype), tuple(tensor.shape)) == (dtype, (2, 3))
    assert npy.bytes_of(tensor).tobytes() == raw


def test_files_come_back_as_numpy_has_them(tmp_path: Any) -> None:
    """`save` writes .npy that only owner and group may read; bfloat16 becomes float32; nothing is executed on loading."""
    backend = MindSporeBackend()
    path = tmp_path / "x.npy"
    backend.save(Tensor([1.5, -2.0], mindspore.bfloat16), path)
    assert np.load(path).tolist() == [1.5, -2.0]
    assert path.stat().st_mode & 0o777 == 0o640
    assert str(backend.load(path).dtype) == "Float32"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DumpFormatError, match="is no numpy file or is damaged"):
        backend.load(path)


def test_bytes_that_are_no_such_tensor_are_refused() -> None:
    """A type that is not known, and bytes that do not fit the shape, say so."""
    backend = MindSporeBackend()
    with pytest.raises(DumpFormatError, match="'Float5' is unknown to mindspore"):
        backend.from_bytes(b"", "Float5", (0,))
    with pytest.raises(DumpFormatError, match=r"3 bytes are no tensor of Float32 and shape \[1\]"):
        backend.from_bytes(b"abc", "Float32", (1,))
