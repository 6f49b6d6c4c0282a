"""Memory without values, and memory that kernels write to without an operator of torch."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from capturing import capture, entries, stat

from msprobe_engine.core.records import Frame, TensorRef
from msprobe_integrations.torch.backend import TorchBackend

# Kernels that Python does not see write through a pointer: no operator of torch runs and no version counter moves. What they have
# written has numbers wherever it is met, those of its present values.


def scale(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
    """A kernel that is handed pointers: ``target = factor * source``, float32."""
    n = source.numel()
    read = (ctypes.c_float * n).from_address(source.data_ptr())
    write = (ctypes.c_float * n).from_address(target.data_ptr())
    for i in range(n):
        write[i] = read[i] * factor


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        scale(x, made, 2.0)
        return made

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(grads[0])
        scale(grads[0].contiguous(), made, 2.0)
        return made


class DoubledModule(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        scale(x, made, 2.0)
        return made


_library = torch.library.Library("msprobe_test", "DEF")
_library.define("double_into(Tensor(a!) out, Tensor x) -> ()")
_library.impl("double_into", lambda out, x: scale(x, out, 2.0), "CPU")


def _plain(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    scale(x, made, 2.0)
    return torch.exp(made)


def _returned(x: torch.Tensor) -> torch.Tensor:
    def made_by_a_function() -> torch.Tensor:
        made = torch.empty_like(x)
        scale(x, made, 2.0)
        return made

    return torch.exp(made_by_a_function().view(-1))


def _added(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    scale(x, made, 2.0)
    return torch.exp(made.add_(0.0))


def _declared(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    torch.ops.msprobe_test.double_into(made, x)
    return torch.exp(made)


def _function(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Doubled.apply(x)
    return torch.exp(result)


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in the same function": _plain,
    "returned by a function": _returned,
    "changed in place": _added,
    "a declared operator": _declared,
    "an autograd function": _function,
    "a module": lambda x: torch.exp(DoubledModule()(x)),
}


def references(node: Any) -> Iterator[TensorRef]:
    if isinstance(node, TensorRef):
        yield node
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from references(child)
    elif isinstance(node, dict):
        yield from references(list(node.values()))


def blank(frame: Frame) -> list[str]:
    """Records with a tensor of floats without numbers, but for results of ``torch.empty_like`` itself."""
    return [
        f"{name} {section}"
        for name, entry in entries(frame).items()
        for section, structure in entry.sections.items()
        if "empty_like" not in name
        for ref in references(structure)
        if ref.row < 0 and "float" in ref.description.dtype
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_a_kernel_has_written_has_numbers(case: str) -> None:
    """Whoever uses the result of such a kernel has its values as input, NaN as well; nothing that may have been written stays blank."""
    x = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])
    frame = capture(None, lambda: CASES[case](x), "L1")[0]
    seen = stat(frame, next(references(entries(frame)["Torch.exp.0.forward"].sections["input_args"])))
    assert (seen.finite_max, seen.nans) == (6.0, 1)
    # before the call the target of a declared operator may be anything; a view reads nothing, so it does not tell that there are values
    allowed = {"a declared operator": 1, "returned by a function": 2}.get(case, 0)
    assert len(blank(frame)) == allowed, blank(frame)


def test_an_operator_without_a_result_gives_what_it_writes() -> None:
    """An operator that writes into an argument and returns nothing has that argument as output, as it leaves it."""
    x, made = torch.tensor([1.0, float("nan")]), torch.zeros(2)
    frame = capture(None, lambda: torch.ops.msprobe_test.double_into(made, x), "L1")[0]
    (record,) = (entry for name, entry in entries(frame).items() if "double_into" in name)
    before, after = (stat(frame, next(references(record.sections[section]))) for section in ("input_args", "output"))
    assert (before.max, before.nans) == (0.0, 0)
    assert (after.finite_max, after.nans) == (2.0, 1)


def test_gradients_of_such_a_function_have_numbers() -> None:
    """The backward pass of an autograd function whose kernels are not seen."""
    x = torch.ones(2, 2, requires_grad=True)
    frame = capture(None, lambda: Doubled.apply(x).sum().backward(), "L1")[0]
    gradient = next(references(entries(frame)["Autograd.Doubled.0.backward"].sections["output"]))
    assert stat(frame, gradient).max == 2.0


def test_a_kernel_in_place_gives_a_new_row() -> None:
    """The same tensor in the same version has the same row while its memory is as it was, and a new one when a kernel has written to it."""
    types = torch.float32, torch.bfloat16, torch.float64
    for n, dtype, strided in itertools.product([1, 3, 32, 1000, 100_000], types, [False, True]):
        backend = TorchBackend()
        whole = torch.ones(n, 2, dtype=dtype)
        tensor = whole[:, 0] if strided else whole.reshape(-1)
        first = backend.reduce(tensor)
        assert backend.reduce(tensor).row == first.row, (n, dtype, strided)
        ctypes.memset(whole.data_ptr(), 0, whole.numel() * whole.element_size())
        second = backend.reduce(tensor)
        rows = backend.finish_step().rows()
        assert second.row != first.row, (n, dtype, strided)
        assert (rows[first.row][7], rows[second.row][7]) == (1.0, 0.0), (n, dtype, strided)


def test_a_record_has_the_values_of_its_moment() -> None:
    """Between two recorded calls a kernel multiplies a tensor: the second call has the new values as input."""

    def work() -> None:
        made = torch.relu(torch.ones(4, 8))
        scale(made, made, 1000.0)
        torch.neg(made)

    frame = capture(None, work, "L1")[0]
    assert stat(frame, next(references(entries(frame)["Torch.relu.0.forward"].sections["output"]))).max == 1.0
    assert stat(frame, next(references(entries(frame)["Torch.neg.0.forward"].sections["input_args"]))).max == 1000.0


def test_shapes_and_targets_of_raw_memory_stay_without_numbers() -> None:
    """Operations that look at a shape, or overwrite, read nothing: chance values are no statistic there."""

    def work() -> None:
        made = torch.empty(4)
        torch.zeros_like(made)
        made.view(2, 2)
        made.copy_(torch.ones(4))

    frame = capture(None, work, "L1")[0]
    for name in ("Torch.zeros_like.0.forward", "Tensor.view.0.forward", "Tensor.copy_.0.forward"):
        assert next(references(entries(frame)[name].sections["input_args"])).row == -1
    assert next(references(entries(frame)["Tensor.copy_.0.forward"].sections["output"])).row >= 0


@pytest.mark.parametrize("name", ["kaiming_uniform_", "uniform_", "normal_", "constant_"])
def test_initialisation_reads_nothing(name: str) -> None:
    """A weight that is initialised had no values before: chance values are no input, and the result has numbers."""
    frame = capture(None, lambda: getattr(torch.nn.init, name)(torch.empty(3, 4), 1.0), "L1")[0]
    entry = entries(frame)[f"Torch.{name}.0.forward"]
    assert [ref.row for ref in references(entry.sections["input_args"])] == [-1]
    assert next(references(entry.sections["output"])).row >= 0


TRITON = """
import sys; sys.path[:0] = [{tests!r}]
import torch, triton, triton.language as tl
from capturing import capture, entries, stat
from msprobe_engine.core.records import TensorRef

@triton.heuristics({{"N": lambda arguments: 8}})
@triton.jit
def rope(x, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 1000.0, mask=at < n)

def work():
    made = torch.empty(8)
    rope[(1,)](torch.ones(8), out=made, n=8)
    made.view(2, 4)  # of memory that was handed to a launch
    same = torch.relu(torch.ones(8))
    rope[(1,)](same, same, 8)
    torch.neg(same)

frame = capture(None, work, "L1")[0]
for name in ("Tensor.view.0.forward", "Torch.neg.0.forward"):
    print(stat(frame, entries(frame)[name].sections["input_args"][0]).max)
for name, entry in entries(frame).items():
    if name.startswith("Triton"):
        found = entry.sections
        kept = [found["input_args"][0], found["input_kwargs"].get("out"), *found["output"]]
        print(name, [stat(frame, ref).max if ref.row >= 0 else ref.description.extra for ref in kept if isinstance(ref, TensorRef)])
print(triton.runtime.interpreter.InterpretedFunction.run.__module__, triton.runtime.autotuner.Heuristics.run.__module__)
"""


def test_a_triton_launch_is_a_record(tmp_path: Path) -> None:
    """A launch (in Triton's interpreter) is one record, also behind a heuristic, with the arguments before it and as it leaves them. It
    ends that a buffer counts as without values, also for a view of it, and that an old row stands for a tensor; outside the window Triton
    is as it was."""
    pytest.importorskip("triton")
    program = tmp_path / "launch.py"  # Triton reads the source of a kernel from its file
    program.write_text(TRITON.format(tests=str(Path(__file__).parents[1])))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == [
        "1000.0",
        "1000.0",
        "Triton.rope.0.forward [1.0, (('uninitialised', True),), 1.0, 1000.0]",
        "Triton.rope.1.forward [1.0, 1000.0, 1000.0]",
        "triton.runtime.interpreter triton.runtime.autotuner",
    ], done.stderr[-2000:]


# Memory without values: what it holds by chance is no statistic and no reason for an alert.


def first(frame: Frame, name: str, section: str = "input_args") -> TensorRef:
    found: Any = entries(frame)[name].sections[section]
    ref = found[0] if isinstance(found, list) else found["out"]
    assert isinstance(ref, TensorRef)
    return ref


def test_empty_tensors_of_inference_mode_do_not_raise() -> None:
    """`torch.empty` under inference_mode, and of layouts without storage, runs as without the probe."""

    def work() -> None:
        with torch.inference_mode():
            torch.empty(3).fill_(1).exp()
        torch.empty(2, 2, layout=torch.sparse_coo)
        torch.empty(2, device="meta")
        torch.vmap(lambda x: torch.empty_like(x).fill_(0) + x)(torch.ones(2))

    assert "Tensor.exp.0.forward" in entries(capture(None, work, "L1")[0])


def test_writes_that_leave_the_version_end_rawness() -> None:
    """Memory filled through ``.data`` has values afterwards; before, it has none through the alias either."""

    def work() -> None:
        made = torch.empty(4)
        made.data.fill_(2.0)
        made.exp()

    frame = capture(None, work, "L1")[0]
    assert first(frame, "Tensor.fill_.0.forward").row == -1
    assert stat(frame, first(frame, "Tensor.exp.0.forward")).max == 2.0


def test_out_buffers_are_not_read_before_the_call() -> None:
    """What ``out=`` holds before the call is ignored; the result is recorded."""
    target = torch.full((3,), float("nan"))
    frame = capture(None, lambda: torch.add(torch.ones(3), 1, out=target), "L1")[0]
    assert first(frame, "Torch.add.0.forward", "input_kwargs").row == -1
    assert stat(frame, first(frame, "Torch.add.0.forward", "output")).max == 2.0


def test_memory_of_another_tensor_at_the_same_place_is_not_taken_for_raw() -> None:
    """A raw tensor that was given other memory says nothing about what comes to lie where it was."""

    def work() -> None:
        made = torch.empty(1000)
        made.data = torch.ones(1000)
        for _ in range(20):
            torch.ones(1000).exp()
        made.exp()

    frame = capture(None, work, "L1")[0]
    rows = [e.sections["input_args"][0].row for n, e in entries(frame).items() if n.startswith("Tensor.exp.")]
    assert len(rows) == 21
    assert min(rows) >= 0


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_collectives_fill_raw_memory() -> None:
    """A buffer that a collective is to fill has no values before, and has them afterwards."""

    def work() -> None:
        made = torch.empty(4)
        dist.broadcast(made, 0)
        made.exp()

    frame = capture(None, work, "L1")[0]
    assert first(frame, "Distributed.broadcast.0.forward").row == -1
    assert first(frame, "Distributed.broadcast.0.forward", "output").row >= 0
    assert first(frame, "Tensor.exp.0.forward").row >= 0
