"""Parameters of MindSpore: what an optimizer of `mindspore.nn`, `mindspore.experimental.optim` or `mindspore.mint.optim` updates.

Gradients are what the optimizer is called with: whatever the program has done to them before (reduction over ranks, unscaling, clipping)
is done. Before that they are seen by hooks on the Parameters, one backward pass at a time; adding up micro batches is the program's own.

Does the optimizer change the weights at all? Looked at in the first updates of every optimizer that is watched, whatever is monitored.

On the CPU operators that work in place give a new tensor and leave the old one as it is (mindspore 2.7 and 2.10), so the optimizers of
``mint.optim`` run, keep their moments, and never write a weight. The loss stays what it was, and nothing says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import warn_once
from msprobe_integrations.common.monitor.targets import matches
from msprobe_integrations.common.parameters.gradients import ACCUMULATED, LOCAL, Piece
from msprobe_integrations.common.parameters.parameter_sampler import MICRO, UNREDUCED
from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.mindspore.hooks import eager as hooks
from msprobe_integrations.mindspore.monitor.cell_names import parameter_names
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView
from msprobe_integrations.mindspore.tensors.memory import array_at, numel_of
from msprobe_integrations.requirements import MissingNameError, need

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler


_PART = "parameter monitor"
SAMPLES = 4
"""Weights that tell whether there was an update that no hook has seen: the smallest ones."""


class CellSource:
    """Implements `ParameterSource`.

    Args:
        probe: owner; its monitor settings say what is watched.
        models: model chunks, whose paths name the parameters.
        optimizer: a Cell with ``parameters``.
    """

    def __init__(self, probe: Probe, models: Sequence[Any], optimizer: Any) -> None:
        monitor = probe.monitor
        assert monitor is not None
        self._probe = probe
        self._monitor = monitor
        self._view = self.view_of(optimizer)
        self._watch: ParameterSampler | None = None
        self._lasting: list[Any] = []
        self._handles: list[Any] = []
        self._gradients: dict[int, Any] = {}
        self._passes: dict[int, int] = {}
        self._seen = False
        self._samples: list[tuple[Any, Any]] = []
        self._order = [id(parameter) for parameter in self._view.parameters]
        self.pieces: list[Piece] = list(self._select_pieces(models))
        self._moved = MovedCheck(probe, self._view, self.pieces)

    @staticmethod
    def view_of(optimizer: Any) -> OptimizerView:
        return OptimizerView(optimizer)

    def _select_pieces(self, models: Sequence[Any]) -> Iterator[Piece]:
        names = parameter_names(models)
        for parameter in self._view.parameters:
            chunk, name = names.get(id(parameter), (0, parameter.name))
            if matches(name, self._monitor.targets, chunk):
                yield Piece(name, parameter, chunk, 0, numel_of(parameter))

    # what a piece holds

    def gradient(self, piece: Piece) -> Any:
        """What the optimizer was called with; None outside of an update."""
        return self._gradients.get(id(piece.parameter))

    def value(self, piece: Piece) -> Any:
        return piece.parameter

    main = value

    def states(self, piece: Piece) -> Mapping[str, Any]:
        """States of the optimizer, by PyTorch's names where they are the same thing."""
        return self._view.states(piece.parameter)

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """See `OptimizerView.hyper`."""
        return self._view.hyper(piece.parameter)

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """In data-parallel training (no rank holds a slice of a parameter) all ranks hold all of them."""
        del piece
        return [Replicas("dp", "")] if self._probe.backend.world_size() > 1 and not _are_parameters_sliced() else []

    # moments

    def connect(self, watch: ParameterSampler) -> None:
        """Follow the calls of the optimizer."""
        self._watch = watch
        watch.in_place = False
        optimizer = self._view.optimizer
        self._lasting.append(hooks.before_call(optimizer, self._before))
        self._lasting.append(hooks.after_call(optimizer, self._after))

    def open(self) -> None:
        """Hooks on the Parameters, for gradients as the backward pass has them."""
        self._passes.clear()
        self._samples = [] if self._seen else [(p, array_at(p).copy()) for p in self._smallest()]
        monitor, watch = self._monitor, self._watch
        if self._handles or watch is None or not (monitor.unreduced_gradients or monitor.micro_batch_gradients):
            return
        for piece in self.pieces:
            if piece.parameter.requires_grad:
                self._handles.append(hooks.at_gradient(piece.parameter, self._make_gradient_hook(watch, piece)))

    def step_ends(self) -> None:
        """A monitored step is over. An update that is compiled (GRAPH_MODE, or jit around the training step) calls no hook; when weights
        have changed without one, parameters and states are taken as they are now."""
        watch, samples = self._watch, self._samples
        self._samples = []
        if watch is None or self._seen or not watch.active:
            return
        with watch.guard(_PART):
            if any(not np.array_equal(before, array_at(p), equal_nan=True) for p, before in samples):
                warn_once(
                    f"compiled update {self._view.name}",
                    f"monitor: the update of {self._view.name} is compiled: parameters and states are taken at the end of a step; "
                    "gradients are inside of the graph and not seen",
                )
                watch.scalar("learning_rate", self._view.learning_rate())
                watch.after_step()

    def _smallest(self) -> list[Any]:
        return sorted((p for p in self._view.parameters if p.requires_grad), key=numel_of)[:SAMPLES]

    def shut(self) -> None:
        """Take them off: a hook that is left would fire for ever."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        self.shut()
        for handle in self._lasting:
            handle.remove()
        self._lasting.clear()
        self._gradients.clear()
        self._watch = None

    def _make_gradient_hook(self, watch: ParameterSampler, piece: Piece) -> Callable[[Any], None]:
        faults, monitor, passes, key = self._probe.faults, self._monitor, self._passes, id(piece.parameter)

        def hook(gradient: Any) -> None:
            try:
                if monitor.micro_batch_gradients:
                    watch.micro_gradient(piece, gradient, LOCAL)
            except Exception as error:
                raise_of_training(error)
                faults.fail(MICRO, error)
            try:
                if monitor.unreduced_gradients and watch.active:
                    number = passes[key] = passes.get(key, -1) + 1
                    # the program adds up what several backward passes give; the last one is not their sum
                    watch.sample_unreduced(piece, gradient, LOCAL if number else ACCUMULATED, number or -1)
            except Exception as error:
                raise_of_training(error)
                faults.fail(UNREDUCED, error)

        return hook

    def read_gradients(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """The gradients of an update, by id of the parameter; `args`, `kwargs`: what the optimizer is called with."""
        given = args[0] if args else kwargs.get("gradients")
        gradients = given if isinstance(given, (tuple, list)) else ()
        return {key: g for key, g in zip(self._order, gradients) if isinstance(g, mindspore.Tensor)}

    def _before(self, _optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._seen = True
        watch = self._watch
        if watch is None:
            return
        with watch.guard(_PART):
            watch.scalar("learning_rate", self._view.learning_rate() if watch.active else None)
            self._gradients = self.read_gradients(args, kwargs)
            if not self._moved.over:
                self._moved.before(self._gradients)
            if watch.awake:
                watch.before_step()
                watch.ready()

    def _after(self, *_: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        with watch.guard(_PART):
            if not self._moved.over:
                self._moved.after()
            watch.after_step()
        self._gradients = {}


def _are_parameters_sliced() -> bool:
    """Does the framework cut parameters into slices over the ranks? True where this version does not say."""
    try:
        mode = str(need(mindspore, "get_auto_parallel_context", for_="the replica check over data-parallel ranks")("parallel_mode"))
    except MissingNameError:
        return True
    return mode in ("semi_auto_parallel", "auto_parallel")


RULE = "no_progress"
UPDATES = 2
"""Updates in a row without any change after which it is said; the first change ends the looking."""
WEIGHTS = 16
LARGEST = 1 << 20
"""Elements of the largest weight that is looked at."""
_EXACT = (mindspore.float32, mindspore.float64)  # in shorter types an update may be lost in rounding


class MovedCheck:
    """Looks at some weights of one optimizer before and after its updates.

    Args:
        probe: gets the alert.
    """

    def __init__(self, probe: Probe, view: OptimizerView, pieces: Sequence[Piece]) -> None:
        self._probe = probe
        self._view = view
        usable = [p for p in pieces if p.parameter.dtype in _EXACT and p.parameter.requires_grad and 0 < numel_of(p.parameter) <= LARGEST]
        self._chosen = sorted(usable, key=lambda p: numel_of(p.parameter))[:WEIGHTS]
        self._before: list[tuple[Piece, Any]] = []
        self._same = 0

    @property
    def over(self) -> bool:
        """Nothing is looked at any more."""
        return not self._chosen

    def before(self, gradients: dict[int, Any]) -> None:
        """An update begins. `gradients`: by id of the parameter."""
        rate = self._view.learning_rate()
        self._before = []
        if rate is None or bool(np.all(array_at(rate) == 0) if isinstance(rate, mindspore.Tensor) else rate == 0):
            return
        for piece in self._chosen:
            gradient = gradients.get(id(piece.parameter))
            if gradient is not None and gradient.dtype in _EXACT and _moves(gradient):
                self._before.append((piece, array_at(piece.parameter).copy()))

    def after(self) -> None:
        """The update is over."""
        before, self._before = self._before, []
        if not before:
            return
        if any(not np.array_equal(old, array_at(piece.parameter), equal_nan=True) for piece, old in before):
            self._chosen = []
            return
        self._same += 1
        if self._same >= UPDATES:
            self._chosen = []
            self._probe.pipeline.alert([self._alert([piece.name for piece, _ in before])])

    def _alert(self, names: list[str]) -> Alert:
        optimizer = type(self._view.optimizer)
        kind = f"{optimizer.__module__.rpartition('.')[0] or optimizer.__module__}.{optimizer.__name__}"
        why = "look at the learning rate, at frozen weights and at what the optimizer is called with"
        if optimizer.__module__.startswith("mindspore.mint.optim") and str(mindspore.get_context("device_target")) == "CPU":
            why = (
                "on the CPU the in-place operators that mint.optim writes weights with change nothing; use an optimizer of mindspore.nn or "
                "mindspore.experimental.optim there"
            )
        text = (
            f"{kind} has made {self._same} updates and no weight has moved ({len(names)} looked at, all with gradients, '{names[0]}' first)"
        )
        step, rank = self._probe.step, self._probe.backend.rank() or 0
        message = f"rank {rank}, step {step}: {text}: {why}"
        return Alert(RULE, "warning", "param", names[0], step, rank, float(self._same), "weights that change with the update", message)


def _moves(gradient: Any) -> bool:
    values = array_at(gradient)
    return bool(np.isfinite(values).all() and values.any())
