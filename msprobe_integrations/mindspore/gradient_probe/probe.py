"""The gradient probe of MindSpore: all gradients that an optimizer is called with, just before its update.

As the optimizer uses them: reduced over ranks, unscaled and clipped by the program. Names are those of the Parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.grad_probe.files import Gradient, StepFiles
from msprobe_engine.formats.grad_probe.signs import Bytes, packed_size
from msprobe_integrations.common.gradient_probe import step
from msprobe_integrations.common.gradient_probe.updates import PART, GradientUpdates, bare
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView, is_optimizer
from msprobe_integrations.mindspore.tensors.npy import array_of

_log = get_logger()


class GradientStep(step.GradientStep[MindSporeBackend]):
    """See `msprobe_integrations.common.gradient_probe.step.GradientStep`."""

    def add_gradient(self, name: str, gradient: Any, shard: str = "") -> None:
        """Take one gradient as it is now.

        Raises:
            TimeoutError: the memory for signs is used up and nothing is written.
        """
        description = self._backend.describe(gradient)
        if description.dtype not in _FLOATS:
            self.left_out[name] = f"its type is {description.dtype}"
            return
        self._room_for(name, math.prod(description.shape))
        reduced = gradient
        if self._backend.want_checksum and description.dtype != "Float32":  # the checksum in the files is that of float32
            reduced = mindspore.Tensor(array_of(gradient).astype(np.float32))
        ref = self._backend.reduce(reduced)
        if ref.row < 0:
            self.left_out[name] = "it has no data that can be read"
            return
        packed = below = None
        if self._signs or self._bounds:
            flat = array_of(gradient).reshape(-1)
            packed = pack_signs(flat) if self._signs else None
            below = count_below(flat, self._bounds) if self._bounds else None
        self._taken.append((name, description.shape, ref.row, packed, below, shard))

    def finish(self) -> Callable[[StepFiles, int], None]:
        """Everything is taken: what puts it into files, on another thread."""
        pending, taken = self._backend.finish_step(), self._taken

        def write(files: StepFiles, number: int) -> None:
            files.write(number, [Gradient(*gradient) for gradient in taken], pending.rows())

        return write


class GradientProbe(GradientUpdates):
    """One per process. Where several optimizers are watched, a step is over when all of them have been called, or one a second time.

    Args:
        settings: with a section ``grad_probe``.
        at_once: hooks go with the last wanted update, from inside of its hooks; False: at the next `settle`.
    """

    backend: MindSporeBackend

    step_type = GradientStep

    def __init__(self, settings: ProbeSettings, *, at_once: bool = True) -> None:
        super().__init__(settings, MindSporeBackend(), at_once=at_once)
        self._views: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()
        self._ever = False

    def monitor(self, optimizer: Any) -> None:
        """Watch what an optimizer, or each of a list of them, is called with from its next update on.

        Raises:
            UsageError: it is no optimizer, two parameters of one name, or no parameter of ``param_list``.
        """
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for each in given:
            if not is_optimizer(each):
                raise UsageError(
                    f"monitor(): {type(each).__name__} is no optimizer; give the one that updates the network: of mindspore.nn, "
                    "mint.optim or experimental.optim"
                )
        for each in given:
            self._views[each] = tuple(str(p.name) for p in OptimizerView(each).parameters)
        names = [name for held in self._views.values() for name in held]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UsageError(f"monitor(): two parameters are called '{twice}'; give the networks other names, or watch one optimizer")
        self._check_names({bare(name) for name in names}, self.backend.world_size() > 1, "the Parameters")
        if not self._window.is_wanted(self.settings.step[0] if self.settings.step else 0, self.backend.rank()):
            _log.info("grad_probe: rank %s is not among the ranks of the settings, nothing is watched here", self.backend.rank())
            return
        if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
            _log.warning("grad_probe: in GRAPH_MODE the update is a part of the graph and its gradients are not seen; use PYNATIVE_MODE")
        self._off, self._ever = False, True
        for each in given:
            self._undo.append(hooks.before_call(each, self._before).remove)
            self._undo.append(hooks.after_call(each, self._after).remove)
        _log.info("grad_probe: gradients of %d parameters are watched, files go to %s", sum(map(self.is_listed, names)), self.root)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._off or not self.faults.is_enabled(PART):
            return
        with self.faults.guard(PART):
            self.begin_update(optimizer)
            given = args[0] if args else kwargs.get("gradients")
            for name, gradient in zip(self._views.get(optimizer, ()), given if isinstance(given, (tuple, list)) else ()):
                if self._open is None:
                    return
                if self.is_listed(name) and isinstance(gradient, mindspore.Tensor) and not self.add_gradient(name, gradient):
                    return

    def _after(self, *_: Any) -> None:
        if not self._off and all(optimizer_seen in self._stepped for optimizer_seen in self._views):
            with self.faults.guard(PART):
                self._finish()

    @property
    def _watching(self) -> bool:
        return self._ever

    def _why(self) -> str:
        if self._empty:
            return f"{self._empty} updates were seen, and the optimizer was not called with gradients of floating point"
        return (
            "no update of the optimizer was seen; call monitor(optimizer) before the training loop. An update that is compiled "
            "(GRAPH_MODE, or jit around the whole training step) cannot be seen"
        )


_PIECE = 1 << 18  # elements; a multiple of 4
_FLOATS = frozenset(("Float16", "Float32", "Float64", "BFloat16"))


def pack_signs(flat: npt.NDArray[Any]) -> Bytes:
    """The signs of [n] numbers as `msprobe_engine.formats.grad_probe.signs` has them, [ceil(n / 4)]."""
    out = np.zeros(packed_size(flat.size), np.uint8)
    for start in range(0, flat.size, _PIECE):
        piece = _comparable(flat[start : start + _PIECE])
        codes = np.zeros(-(-piece.size // 4) * 4, np.uint8)
        nan = piece != piece  # only NaN differs from itself
        codes[: piece.size] = (piece > 0) + 2 * (piece < 0).view(np.uint8) + 3 * nan.view(np.uint8)
        four = codes.reshape(-1, 4)
        out[start // 4 : start // 4 + len(four)] = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return out


def count_below(flat: npt.NDArray[Any], bounds: Sequence[float]) -> npt.NDArray[np.int64]:
    """How many of [n] numbers are <= each bound, [len(bounds)]; both rounded to the type the comparison is made in: float64 for float64,
    else float32. NaN is below nothing."""
    out = np.zeros(len(bounds), np.int64)
    for start in range(0, flat.size, _PIECE):
        piece = _comparable(flat[start : start + _PIECE])
        for i, bound in enumerate(bounds):
            out[i] += np.count_nonzero(piece <= piece.dtype.type(bound))
    return out


def _comparable(piece: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return piece if piece.dtype in (np.float32, np.float64) else piece.astype(np.float32)
