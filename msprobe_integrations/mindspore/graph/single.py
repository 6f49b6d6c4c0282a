"""``save`` and ``save_grad``: single tensors to files, in code that is compiled (``jit``, GRAPH_MODE) and in code that is not.

Files are ``{save_dir}/step{N}/rank{R}/{name}_{dtype}_{id}.npy``, those of gradients ``{name}_grad_{dtype}_{id}.npy``, as the existing tool
and ``ops.TensorDump`` name them: the id counts the files of the process, members of containers have ``.{index}`` or ``.{key}`` behind the
name, bfloat16 is written as float32. `step` counts N up.

Each function is two: Python runs the one, the compiler reads the other (it looks through ``__wrapped__``). In a graph the CPU has operators
that call Python. An Ascend has none: there ``TensorDump`` and ``DumpGradient`` write the files, and N is that of the compilation.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import io
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, ops
from mindspore.ops.operations import _inner_ops

from msprobe_engine.core import log, names
from msprobe_engine.core.errors import ProbeError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_integrations.mindspore.environment import no_grad
from msprobe_integrations.mindspore.graph import notes
from msprobe_integrations.mindspore.graph.probes import operator
from msprobe_integrations.mindspore.ranks.job import Job

__all__ = ["save", "save_grad", "step"]


def save(save_dir: str, name: str, data: Any) -> None:
    """Write a tensor, or the tensors of nested lists, tuples and dicts (in a graph up to three levels).

    Args:
        save_dir: made when it is not there.
        name: begin of the file names; a constant in compiled code.
        data: what is written. Inside a graph, empty tensors and those of a shape that is not known have no file.

    Raises:
        UsageError: outside of a graph: `name` cannot be a file name, or `data` has something else in it.
    """
    _check("save", save_dir, name)
    _save_members(save_dir, name, data)


def save_grad(save_dir: str, name: str, data: Any) -> Any:
    """Write the gradient of a tensor when the backward pass gets to it.

    Args:
        save_dir, name: see `save`; the name gets ``_grad``.
        data: a tensor.

    Returns:
        The tensor that must be used in place of `data`: the gradient is that of what is made of it.

    Raises:
        UsageError: outside of a graph: `name` cannot be a file name, or `data` is no tensor.
    """
    _check("save_grad", save_dir, name)
    if not isinstance(data, Tensor):
        raise UsageError(f"save_grad: {name} is a {type(data).__name__}; allowed: one tensor")

    def save_gradients(_: Any, gradients: Any) -> None:
        for gradient in gradients:
            if isinstance(gradient, Tensor):
                _save_members(save_dir, f"{name}_grad", gradient)

    hooks = OrderedDict({0: save_gradients})
    tap = _inner_ops.CellBackwardHook(name, _Owner(), hooks)
    tap.register_backward_pre_hook()
    _taps.append((tap, hooks))
    tapped = tap((data,))
    return tapped[0] if isinstance(tapped, tuple) else tapped


class _Owner:
    """Whose gradient it is; the operator wants an object."""


_taps: deque[Any] = deque(maxlen=10_000)
"""Operators hold their hooks weakly: they live until so many others have been made, which is long after the backward pass."""


def _check(function: str, save_dir: Any, name: Any) -> None:
    for argument, value in (("save_dir", save_dir), ("name", name)):
        if not isinstance(value, str) or not value:
            raise UsageError(f"{function}: {argument} is {value!r}; allowed: a text that is not empty")
    names.tensor_file(name, "", "")


def _save_members(save_dir: str, name: str, data: Any) -> None:
    if isinstance(data, Mapping):
        for key, value in data.items():
            _save_members(save_dir, f"{name}.{key}", value)
    elif isinstance(data, (list, tuple)):
        for i, value in enumerate(data):
            _save_members(save_dir, f"{name}.{i}", value)
    elif isinstance(data, Tensor):
        with no_grad():
            values = (data.astype(mindspore.float32) if data.dtype == mindspore.bfloat16 else data).asnumpy()
        write(save_dir, name, values)
    else:
        raise UsageError(f"save: {name} is a {type(data).__name__}; allowed: tensors, and lists, tuples and dicts of them")


# From here on: what the compiler reads.

_NOTHING = np.zeros((1,), np.int32)


def _write_graph_tensor(value: Any, number: int) -> Any:
    write_graph_tensor(value, int(number))
    return _NOTHING


def _same(value: Any, *_: Any) -> Any:
    return value


def _back(value, number, out, dout):  # noqa: ARG001
    _WRITE(dout, number)
    return dout, 0


_WRITE = operator(_write_graph_tensor)
_IDENTITY = ops.Custom(_same, _same, _same, "pyfunc", bprop=_back)
_DUMP = ops.TensorDump()
_DUMP_GRADIENT = ops.DumpGradient()


@ops.constexpr
def _calls_python() -> bool:
    """Can a graph on this device call Python?"""
    return str(mindspore.get_context("device_target")) == "CPU"


def _save_leaf(save_dir, name, data):
    if isinstance(data, Tensor):
        if not _calls_python():
            _DUMP(path(save_dir, name), ops.stop_gradient(data))
        else:
            how = notes.way(data.dtype, data.shape)
            if how == 1:
                _WRITE(ops.stop_gradient(data), target(save_dir, name, data.dtype, data.ndim == 0))
            elif how == 2:
                _WRITE(ops.cast(ops.stop_gradient(data), mindspore.float32), target(save_dir, name, data.dtype, data.ndim == 0))
    return 0


def _make_saving_level(inner):
    def level(save_dir, name, data):
        if isinstance(data, (tuple, list)):
            index = 0
            for value in data:
                inner(save_dir, member(name, index), value)
                index = index + 1
        elif isinstance(data, dict):
            for key in data:
                inner(save_dir, member(name, key), data[key])
        else:
            _save_leaf(save_dir, name, data)
        return 0

    return level


_save_3 = _make_saving_level(_make_saving_level(_make_saving_level(_save_leaf)))


def _save_in_graph(save_dir, name, data):
    _save_3(save_dir, name, data)


def _save_grad_in_graph(save_dir, name, data):
    if not _calls_python():
        return _DUMP_GRADIENT(path(save_dir, gradient_name(name)), data, "out")
    if notes.way(data.dtype, data.shape) == 0 or not notes.has_gradient(data.dtype):
        return data
    number = target(save_dir, gradient_name(name), data.dtype, data.ndim == 0)
    if data.dtype == mindspore.bfloat16:
        wide = ops.cast(data, mindspore.float32)
        if data.ndim == 0:
            return ops.cast(_IDENTITY(wide.reshape((1,)), number).reshape(()), mindspore.bfloat16)
        return ops.cast(_IDENTITY(wide, number), mindspore.bfloat16)
    if data.ndim == 0:
        return _IDENTITY(data.reshape((1,)), number).reshape(())
    return _IDENTITY(data, number)


save.__wrapped__ = _save_in_graph  # type: ignore[attr-defined]
save_grad.__wrapped__ = _save_grad_in_graph  # type: ignore[attr-defined]


_ids = itertools.count()
_lock = threading.Lock()
_job = Job()
_step = 0


def step() -> None:
    """The training step is over: further files go to the next ``step{N}``."""
    global _step
    _step += 1


def directory_of(save_dir: str) -> str:
    """Where the files of the present step go."""
    return os.path.join(os.path.abspath(save_dir), f"step{_step}", f"rank{_job.rank() or 0}")


def write(save_dir: str, name: str, values: npt.NDArray[Any]) -> None:
    """One file ``{name}_{dtype}_{id}.npy``; what goes wrong is said once for a directory and costs the training nothing."""
    try:
        place = directory_of(save_dir)
        content = io.BytesIO()
        np.save(content, values, allow_pickle=False)
        with _lock:
            file = names.tensor_file(f"{name}_{values.dtype.name}_{next(_ids)}", "", ".npy")
            make_directories(place)
            write_file(os.path.join(place, file), [content.getvalue()])
    except (OSError, ProbeError) as error:
        log.warn_once(f"save {save_dir}", f"save: {name} has no file, training goes on: {error}; said once for {save_dir}")


class Target(NamedTuple):
    """Where a tensor of a compiled graph goes; `dtype` as its tensors print it, `scalar`: it has no dimensions, and comes with one."""

    save_dir: str
    name: str
    dtype: str
    scalar: bool


_targets: list[Target] = []
_numbers: dict[Target, int] = {}


@ops.constexpr
def target(save_dir: Any, name: Any, dtype: Any, scalar: bool) -> int:
    """Number of a place; run by the compiler."""
    made = Target(str(save_dir), str(name), str(dtype), scalar)
    with _lock:
        number = _numbers.get(made)
        if number is None:
            number = _numbers[made] = len(_targets)
            _targets.append(made)
        return number


def write_graph_tensor(value: Any, number: int) -> None:
    """A tensor has come out of a graph: an array, or a number for one without dimensions; float32 for bfloat16."""
    to = _targets[number]
    array = np.asarray(value, np.float32 if to.dtype == "BFloat16" else to.dtype.lower())
    write(to.save_dir, to.name, array.reshape(()) if to.scalar else array)


@ops.constexpr
def member(name: Any, key: Any) -> str:
    """Name of a member of a container; run by the compiler."""
    return f"{name}.{key}"


@ops.constexpr
def gradient_name(name: Any) -> str:
    """Name of a gradient; run by the compiler."""
    return f"{name}_grad"


@ops.constexpr
def path(save_dir: Any, name: Any) -> str:
    """What ``TensorDump`` takes; run by the compiler."""
    place = directory_of(str(save_dir))
    make_directories(place)
    return os.path.join(place, str(name))
