"""Parameters of plain torch: any `torch.optim.Optimizer`, on its own, under DDP, and with DTensor parameters (FSDP2, tensor parallel)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import EVALUATION_MODE, UPDATES_LOST, UPDATES_MADE, WEIGHTS_GROWN
from msprobe_engine.probe.rules.builtin.parameters.growing_weights import GrowingWeightsRule
from msprobe_engine.probe.rules.builtin.parameters.lost_updates import LostUpdatesRule
from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.monitor.targets import matches, plain
from msprobe_integrations.common.parameters.algorithms import algorithm_of
from msprobe_integrations.common.parameters.gradients import ACCUMULATED, LOCAL, Piece, layer_numbers, layer_of
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.common.parameters.parameter_sampler import MICRO, UNREDUCED
from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.common.parameters.updates import IN_NO_OPTIMIZER
from msprobe_integrations.requirements import MissingNameError, need
from msprobe_integrations.torch.capture.closures import after_closure
from msprobe_integrations.torch.hooks.methods import MethodHooks
from msprobe_integrations.torch.monitor.targets import unwrap_model
from msprobe_integrations.torch.parameters.fsdp import UnshardedGradients
from msprobe_integrations.torch.parameters.lost_updates import LostUpdates
from msprobe_integrations.torch.parameters.optimizer_states import numbers_of, updates_done
from msprobe_integrations.torch.parameters.scaler import UpdatePatches, inner_optimizer
from msprobe_integrations.torch.parameters.weight_growth import WeightGrowth
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler

_log = get_logger()
_PART, _SAMPLES = "parameter monitor", "samples of parameters"


class PlainSource:
    """Implements `ParameterSource`.

    Args:
        probe: owner; its monitor settings say what is watched. What its other optimizers update is left to them.
        models: model chunks; names come from their `named_parameters`, without wrappers.
        optimizer: what updates them, or a wrapper with the optimizer as ``optimizer``.

    Building it is a collective call where parameters are DTensors.
    """

    def __init__(self, probe: Probe, models: Sequence[nn.Module], optimizer: Any) -> None:
        monitor = probe.monitor
        assert monitor is not None
        self._probe = probe
        self._monitor = monitor
        self._optimizer = inner_optimizer(optimizer)
        others = probe.parameters.optimizers
        self._is_first = not others or inner_optimizer(others[0]) is self._optimizer
        self._is_new = False
        if self._is_first:
            counted = [weakref.ref(p) for group in self._optimizer.param_groups for p in group["params"]]
            before, probe.parameters.counted = probe.parameters.counted, counted
            self._is_new = len(before) != len(counted) or any(a() is not b() for a, b in zip(before, counted))
        self._roots = [weakref.ref(unwrap_model(model)) for model in models]
        self._evaluation_mode = False
        self._places: dict[torch.Tensor, tuple[int, int]] = {}
        self._watch: ParameterSampler | None = None
        self._patches: UpdatePatches | None = None
        self._lasting = MethodHooks(probe.faults, _PART)
        self._handles: list[Any] = []
        self._touched: set[Piece] = set()
        self._sync_is_last = True
        self._said = False
        self.pieces: list[Piece] = []
        chosen = [entry for chunk, model in enumerate(models) for entry in self._choose_parameters(chunk, model)]
        exchanges = probe.parameters.exchanges
        for ranks in sorted({dtensors.sharers(p) for _, p, _, _ in chosen if dtensors.is_dtensor(p)} - {()}):
            exchanges.of(ranks)
        for name, parameter, chunk, facts in chosen:
            if dtensors.is_dtensor(parameter):
                self.pieces.append(dtensors.make_piece(name, parameter, chunk, facts, exchanges))
            else:
                self.pieces.append(Piece(name, parameter, chunk, 0, parameter.numel(), facts))
        of = {piece.parameter: piece for piece in self.pieces}
        self._ddp: dict[torch.Tensor, DistributedDataParallel] = {}
        for module in (m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)):
            with suppress(MissingNameError):
                left_out = need(module, "parameters_to_ignore", for_="ranks of DistributedDataParallel that hold the same parameter")
                self._ddp.update((parameter, module) for name, parameter in module.module.named_parameters() if name not in left_out)
        self._unsharded = UnshardedGradients(models, of)
        rules = {rule.name for rule in probe.pipeline.rules}
        self._lost = LostUpdates(self._optimizer, self.pieces if LostUpdatesRule.name in rules else ())
        self._growth = WeightGrowth(self.pieces if GrowingWeightsRule.name in rules else ())

    def _choose_parameters(self, chunk: int, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, dict[str, Any]]]:
        own = {p for group in self._optimizer.param_groups for p in group["params"]}
        others = [inner_optimizer(other) for other in self._probe.parameters.optimizers]
        taken = {p for other in others for group in getattr(other, "param_groups", ()) for p in group["params"]} - own
        root = unwrap_model(model)
        numbers = layer_numbers(list(root.named_modules()))
        for path, parameter in root.named_parameters():
            name = plain(path)
            if not parameter.requires_grad or not matches(name, self._monitor.targets, chunk):
                continue
            if parameter in own or (self._is_first and parameter not in taken):  # nobody's is the first optimizer's
                layer = layer_of(name, numbers)
                yield name, parameter, chunk, {} if layer is None else {"layer": layer}

    # what a piece holds

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """``parameter.grad``."""
        gradient = piece.parameter.grad
        if type(gradient) is torch.Tensor:
            return gradient
        local = dtensors.local_of(gradient, piece.parameter)
        if local is None and gradient is not None and not self._said:
            self._said = True
            layouts = [str(tuple(getattr(one, "placements", ()))) for one in (gradient, piece.parameter)]
            said = "the gradient of %s is laid out as %s, the parameter as %s; expected the same: without rows of such gradients"
            _log.warning("parameter monitor: " + said, piece.name, *layouts)
        return local

    def value(self, piece: Piece) -> torch.Tensor | None:
        return dtensors.local_of(piece.parameter, piece.parameter)

    main = value

    def states(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """State tensors; numbers that are kept in tensors (``step``) are none."""
        shape = piece.parameter.shape
        found: dict[str, torch.Tensor] = {}
        for name, tensor in numbers_of(self._optimizer, piece.parameter).items():
            if tensor.shape != shape and (piece.sharded or not tensor.dim()):
                continue
            local = dtensors.local_of(tensor, piece.parameter)
            if local is not None:
                found[name] = local
        return found

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """The parameter's own group, ``algorithm``, ``optimizer`` (name of the class) and ``step``."""
        group = self._group(piece.parameter)
        state = self._optimizer.state.get(piece.parameter) or {}
        found = {key: value for key, value in group.items() if key != "params"}
        found["algorithm"] = algorithm_of(self._optimizer, group)
        found["optimizer"] = type(self._optimizer).__name__
        if piece.parameter not in self._places and not group:
            found[IN_NO_OPTIMIZER] = True
        found["step"] = state.get("step", group.get("step", 0))
        return found

    def owned(self) -> set[Piece]:
        """Those that are in a group of the optimizer now, themselves or as a float32 copy."""
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        copies = {p.shape for p in held - {piece.parameter for piece in self.pieces} if p.dtype == torch.float32}
        found = {piece for piece in self.pieces if piece.parameter in held}
        return found | {piece for piece in self.pieces if piece.parameter.element_size() == 2 and piece.parameter.shape in copies}

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """Ranks of DDP, and of mesh dimensions along which the parameter is whole."""
        if dtensors.is_dtensor(piece.parameter):
            return [Replicas(name, group, True) for name, group in dtensors.replicating_groups(piece.parameter)]
        module = self._ddp.get(piece.parameter)
        if module is None or dist.get_world_size(module.process_group) < 2:
            return []
        return [Replicas("dp", module.process_group)]

    def _group(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        groups = self._optimizer.param_groups
        place = self._places.get(parameter)
        if place is not None and place[0] < len(groups):
            params = groups[place[0]]["params"]
            if place[1] < len(params) and params[place[1]] is parameter:
                found: Mapping[str, Any] = groups[place[0]]
                return found
        self._places = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        return groups[self._places[parameter][0]] if parameter in self._places else {}

    # moments

    def connect(self, watch: ParameterSampler) -> None:
        """Follow the updates of the optimizer object, and what comes before them."""
        self._watch = watch
        watch.on_begin = self._begin_step
        watch.in_place = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        optimizer = self._optimizer
        self._patches = UpdatePatches(watch, optimizer, [piece.parameter for piece in self.pieces], self._report_skipped)
        if hasattr(optimizer, "register_step_pre_hook"):
            self._lasting.on_undo(optimizer.register_step_pre_hook(self._before).remove)
            self._lasting.on_undo(optimizer.register_step_post_hook(self._after).remove)
        else:
            self._lasting.after(optimizer, "step", lambda _: self._after(optimizer))
            self._lasting.before(optimizer, "step", lambda *args, **kwargs: self._before(optimizer, (optimizer, *args), kwargs))

    def open(self) -> None:
        """Hooks for gradients before the reduction."""
        self._touched.clear()
        watch, monitor = self._watch, self._monitor
        if watch is None or not (monitor.unreduced_gradients or monitor.micro_batch_gradients):
            return
        self._unsharded.open(watch, unreduced=monitor.unreduced_gradients, micro=monitor.micro_batch_gradients)
        if self._handles:
            return
        for piece in self.pieces:
            parameter = piece.parameter
            if parameter in self._unsharded.covered or not parameter.requires_grad:
                continue
            if monitor.micro_batch_gradients:
                self._handles.append(parameter.register_hook(self._build_local_hook(watch, piece)))
            if monitor.unreduced_gradients:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._build_accumulated_hook(watch, piece)))

    def shut(self) -> None:
        self._unsharded.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def close(self) -> None:
        self.shut()
        self._lasting.undo()
        if self._patches is not None:
            self._patches.close()
        self._watch = None

    def _build_local_hook(self, watch: ParameterSampler, piece: Piece) -> Callable[[torch.Tensor], None]:
        faults = self._probe.faults

        def hook(gradient: torch.Tensor) -> None:
            try:
                local = gradient if type(gradient) is torch.Tensor else dtensors.local_of(gradient, piece.parameter)
                if local is not None:
                    watch.micro_gradient(piece, local, LOCAL, -1, piece.sharded)
            except Exception as error:
                raise_of_training(error)
                faults.fail(MICRO, error)

        return hook

    def _build_accumulated_hook(self, watch: ParameterSampler, piece: Piece) -> Callable[[torch.Tensor], None]:
        module = self._ddp.get(piece.parameter)
        faults = self._probe.faults

        def hook(_: torch.Tensor) -> None:
            try:
                if module is not None:
                    if self._sync_is_last and not module.require_backward_grad_sync:
                        if watch.active:
                            self._touched.add(piece)  # more is to come
                        return
                    self._touched.discard(piece)
                gradient = self.gradient(piece)
                if gradient is not None:
                    watch.sample_unreduced(piece, gradient, ACCUMULATED, -1, piece.sharded)
            except Exception as error:
                raise_of_training(error)
                faults.fail(UNREDUCED, error)

        return hook

    def _begin_step(self) -> None:
        """An evaluation may stand between the backward pass and the update: the mode in which the step begins counts, too."""
        self._evaluation_mode = self._is_evaluation_mode()

    def _is_evaluation_mode(self) -> bool:
        roots = [root for ref in self._roots if (root := ref()) is not None]
        return bool(roots) and not any(root.training for root in roots)

    def _before(self, _optimizer: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        watch = self._watch
        if watch is None:
            return None
        with watch.guard(_PART):
            for name, value in update_numbers(self._optimizer.param_groups).items():
                watch.scalar(name, value)
            if self._is_first and not torch.compiler.is_compiling():
                with torch._C.DisableTorchFunction():
                    if self._evaluation_mode and self._is_evaluation_mode():
                        watch.scalar(EVALUATION_MODE, 1.0)
                    updates = updates_done([self._optimizer])
                    if updates or self._is_new:  # no update of parameters that no optimizer had before: nothing is lost
                        watch.scalar(UPDATES_MADE, float(updates))
                    self._is_new = False
        try:
            return self._at_update(watch, args, kwargs)
        except Exception as error:
            raise_of_training(error)
            self._probe.faults.fail(_PART, error)
        return None

    def _at_update(self, watch: ParameterSampler, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if not watch.awake:
            return None
        if self._touched:  # no backward pass of DDP was the last one: the training reduces by itself
            self._sync_is_last = False
            self._probe.pipeline.lose("unreduced gradients under no_sync", len(self._touched))
            self._touched.clear()
        changed = after_closure(args, kwargs, self._enter)
        if changed is None:
            self._enter()
        return changed

    def _enter(self) -> None:
        watch = self._watch
        if watch is None:
            return
        with watch.guard(_PART):
            watch.before_step()
            watch.ready()
            if watch.active and self._probe.faults.is_enabled(_SAMPLES):
                with watch.guard(_SAMPLES), self._probe.shield():
                    self._lost.before(self)
                    watch.scalar(WEIGHTS_GROWN, self._growth.measure(self, self._probe.step))

    def _after(self, optimizer: Any, *_: Any) -> None:
        if self._patches is not None:
            self._patches.stepped = True
        if (watch := self._watch) is not None:
            with watch.guard(_PART):
                found = getattr(optimizer, "found_inf", None)  # a fused update skips on the device
                if watch.active and found is None:
                    with watch.guard(_SAMPLES), self._probe.shield():
                        watch.scalar(UPDATES_LOST, self._lost.after(self))
                watch.after_step(found if isinstance(found, torch.Tensor) else False)

    def _report_skipped(self) -> None:
        self._enter()
        if self._watch is not None:
            with self._watch.guard(_PART):
                self._watch.after_step(True)
