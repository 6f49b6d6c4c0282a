"""The files of ``save`` and ``save_grad``: names, steps, and the places that compiled code refers to by number."""
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import io
import itertools
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mindspore import ops

from msprobe_engine.core import log, names
from msprobe_engine.core.errors import ProbeError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_integrations.mindspore.ranks.job import Job

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
        found = _numbers.get(made)
        if found is None:
            found = _numbers[made] = len(_targets)
            _targets.append(made)
        return found


def arrived(value: Any, number: int) -> None:
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
