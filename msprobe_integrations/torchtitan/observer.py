"""Follows torchtitan's Trainer: it has no callbacks, so its own methods are looked through while it trains."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.patching import replace
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver, exclude_methods, number, quietly
from msprobe_integrations.torchtitan.reliance import NAME, PACKAGE, TABLE

_METRICS = ("global_avg_loss", "global_max_loss", "grad_norm")
"""What `MetricsProcessor.log` is given after the step's number."""
_PASSES = "loss and numbers of micro batches"


class TitanObserver(TrainerObserver):
    """A `LoopObserver` for torchtitan. Steps are the Trainer's minus one: updates before.

    Scalars: ``loss``, this rank's mean over the tokens of the step if data-parallel ranks have as many (there on the last stage of a
    pipeline), ``grad_norm``, numbers of the update; in steps that torchtitan logs also ``global_avg_loss`` and ``global_max_loss``.
    """

    _trainer: Any = None
    _update: Mapping[str, Any] = {}
    _pipeline = True
    """Also where that is not known: a schedule has micro batches of its own."""
    _has_loss = False
    """Only a pipeline's last stage has one."""

    def follow_trainer(self, trainer: Any) -> None:
        """`trainer` is about to make a step."""
        if trainer is self._trainer and trainer.model_parts == self.models:
            return
        self._trainer = trainer
        self.relies, self.objects = (NAME, PACKAGE, TABLE), {"trainer": trainer}
        self.setup(list(trainer.model_parts), list(trainer.optimizers.optimizers))
        self.training_begins(trainer.step - 1)

    def attach(self, probe: TorchProbe) -> None:
        """Names the model parts and the optimizers, and looks through the Trainer's methods."""
        trainer = self._trainer
        probe.pipeline.rank_info.update(_places(trainer.parallel_dims))
        super().attach(probe)
        with suppress(MissingNameError):
            self._pipeline = bool(need(trainer.parallel_dims, "pp_enabled", for_=_PASSES))
            self._has_loss = not self._pipeline or bool(need(trainer, "pp_has_last_stage", for_=_PASSES))
        utils = sys.modules.get("torchtitan.distributed.utils")
        undo = [
            replace(trainer, "forward_backward_step", self._pass),
            replace(trainer.metrics_processor, "log", self._log),
            replace(utils, "clip_grad_norm_", self._clip),
            *exclude_methods(self, optional(trainer, "checkpointer", because="reliance has said it"), "save", "load"),
            *exclude_methods(self, optional(trainer, "validator", because="not every job validates"), "validate"),
        ]
        for each in undo:
            self.undo(each)

    def numbers(self) -> dict[str, Any]:
        """Loss of this rank, and the learning rate and the like that `train_step` is going to use."""
        found = dict(self._update)
        if self.loss is not None:
            with suppress(MissingNameError):
                found["loss"] = self.loss * _count_sharing_ranks(self._trainer.parallel_dims)
        return {name: value for name, value in found.items() if value is not None}

    def begin(self, step: int | None = None) -> None:
        super().begin(step)
        with self.safely("learning rate"):
            groups = [group for optimizer in self._trainer.optimizers.optimizers for group in optimizer.param_groups]
            self._update = {name: number(value) for name, value in update_numbers(groups).items()}

    def record_clipping(self, norm: Any) -> None:
        """Gradients have been clipped; `norm` as torchtitan has it, not read here."""
        if (value := number(norm)) is not None:
            self.add_scalars({"grad_norm": value})

    def _pass(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._pipeline:
            quietly(self, "micro batches", "pass_begins")
        loss = original(*args, **kwargs)
        if self._has_loss:
            quietly(self, "the loss", "pass_ends", loss)
        return loss

    def _clip(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        norm = original(*args, **kwargs)
        quietly(self, "the gradient norm", "record_clipping", norm)
        return norm

    def _log(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = _METRICS if self._has_loss else _METRICS[2:]  # other stages log -1
        told = {name: value for name, value in {**dict(zip(_METRICS, args[1:])), **kwargs}.items() if name in known}
        quietly(self, "logged metrics", "add_scalars", told)
        return original(*args, **kwargs)


# What torchtitan's `ParallelDims` say of this rank.
_MESHES = {"dp": "batch", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
"""Our name of a kind of parallelism, and torchtitan's of its mesh."""


def _count_sharing_ranks(dims: Any) -> int:
    """Ranks that share the batch.

    Raises:
        MissingNameError: this version does not say.
    """
    return math.prod(int(need(dims, name, for_="the loss of this rank")) for name in ("dp_replicate", "dp_shard", "cp"))


def _places(dims: Any) -> dict[str, int]:
    """This rank's place: ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` where there is more than one rank."""
    get = optional(dims, "get_optional_mesh", because="ranks of older versions are told by their groups alone")
    meshes = {} if get is None else {axis: get(mesh_axis) for axis, mesh_axis in _MESHES.items()}
    return {name: int(mesh.get_local_rank()) for name, mesh in meshes.items() if mesh is not None and mesh.size() > 1}
