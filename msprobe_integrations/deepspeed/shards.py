"""Where a parameter lies in the buffers of DeepSpeed's optimizers: which elements are this rank's, and where its master copy is.

Every number comes from the optimizer's own tables:

================================  ==================================================================================================
optimizer                         tables
================================  ==================================================================================================
torch optimizer (stage 0, fp32)   the parameter itself
FP16_UnfusedOptimizer             `fp16_groups` and `fp32_groups`, one master copy per parameter
FP16_Optimizer                    `fp16_groups` in the order of `fp32_groups_flat`
BF16_Optimizer                    `bf16_groups` in the order of `bf16_groups_flat`, cut into equal partitions
DeepSpeedZeroOptimizer            `grad_start_offset` and `grad_partition_insertion_offset` (they know the round-robin order and padding)
DeepSpeedZeroOptimizer_Stage3     `grad_position`, and the rank in the parameter's partition group
================================  ==================================================================================================

Names hold for DeepSpeed 0.15 to 0.19. An optimizer is told by its tables, so subclasses are found as well. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.parameters.optimizer_states import numbers_of

WHOLE = -1
"""`Fragment.at` of a master copy that has the parameter's shape."""


class Fragment(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        lo, hi: flat range of the parameter's elements that this rank updates.
        group: number of the optimizer's buffer.
        at: where the range begins in that buffer; `WHOLE` when the buffer is the parameter's own.
        order: the parameter's place in the list of gradients of that buffer.
    """

    lo: int
    hi: int
    group: int
    at: int
    order: int


class Shards:
    """The optimizer's view of the model's parameters; the base class is a torch optimizer that updates the parameters themselves.

    Args:
        optimizer: what DeepSpeed calls `engine.optimizer`.

    Attributes:
        kind: name of its table in `reliance`; empty for a torch optimizer.
    """

    kind = ""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.fragments: dict[torch.Tensor, Fragment] = dict(self._find())

    @property
    def inner(self) -> Any:
        """The torch optimizer that does the update."""
        return self.optimizer

    def inners(self) -> list[Any]:
        """All torch optimizers that do updates: one, or two when a part of them is offloaded."""
        second = optional(self.optimizer, "backup_optimizer", because="only where a part of the states is offloaded")
        return [self.inner] if second is None else [self.inner, second]

    def members(self, parameter: torch.Tensor) -> Any:  # noqa: ARG002
        """The process group that shares the parameter's elements; None when every rank has all of them."""
        return None

    def numel(self, parameter: torch.Tensor) -> int:
        """Elements of the whole parameter."""
        return parameter.numel()

    def value(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's range of the model's parameter, in the model's dtype."""
        fragment = self.fragments.get(parameter)
        if fragment is None or fragment.at == WHOLE:
            return parameter
        return parameter.detach().view(-1)[fragment.lo : fragment.hi]

    def read_reduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient after data-parallel reduction and before unscaling and clipping, or None when there is none: this rank's range,
        or the whole tensor when nothing is sharded."""
        return parameter.grad

    def read_unreduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What this rank has added up so far and not reduced, whole."""
        return parameter.grad

    def main(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """This rank's range of what the optimizer updates: the master copy."""
        return self._slice_fragment(self.buffer(parameter), parameter)

    def read_stepping(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the master copy, there only while the inner optimizer steps: unscaled and clipped."""
        buffer = self.buffer(parameter)
        return self._slice_fragment(buffer.grad if buffer is not None else None, parameter)

    def states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's range of the optimizer's states that have an element per element of the parameter."""
        buffer = self.buffer(parameter)
        if buffer is None:
            return {}
        states = next((numbers_of(optimizer, buffer) for optimizer in self.inners() if buffer in optimizer.state), {})
        cut = {key: self._slice_fragment(v, parameter) for key, v in states.items() if v.shape == buffer.shape}
        return {key: v for key, v in cut.items() if v is not None}

    def hyper(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The parameter group's settings without its parameters, and ``step`` as the optimizer counts it."""
        fragment = self.fragments.get(parameter)
        buffer = self.buffer(parameter)
        group = self._settings(fragment, buffer) if fragment is not None and buffer is not None else None
        if buffer is None or group is None:
            return {}
        hyper = {key: value for key, value in group.items() if key != "params"}
        step = self._state(buffer).get("step")
        if step is not None:
            hyper["step"] = step
        return hyper

    def _settings(self, fragment: Fragment, buffer: torch.Tensor) -> Mapping[str, Any] | None:
        """The parameter group. While ZeRO 1 or 2 updates one group it is the only one that the inner optimizer has, whatever its number."""
        groups: Sequence[Mapping[str, Any]] = self.inner.param_groups
        for group in groups:
            if group["params"] and group["params"][0] is buffer:
                return group
        number = self._param_group(fragment.group)
        return groups[number] if 0 <= number < len(groups) else None

    # what the kinds differ in

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                yield parameter, Fragment(0, parameter.numel(), i, WHOLE, j)

    def buffer(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter if parameter in self.fragments else None

    def _param_group(self, group: int) -> int:
        return group

    # helpers

    def _state(self, buffer: torch.Tensor) -> Mapping[str, Any]:
        for optimizer in self.inners():
            if buffer in optimizer.state:
                states: Mapping[str, Any] = optimizer.state[buffer]
                return states
        return {}

    def _slice_fragment(self, buffer: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
        """The fragment's range of a tensor that is laid out as the buffer; None when there is none or it was moved away (NVMe)."""
        fragment = self.fragments.get(parameter)
        if buffer is None or fragment is None:
            return None
        if fragment.at == WHOLE:
            return buffer
        size = fragment.hi - fragment.lo
        return buffer.detach().view(-1)[fragment.at : fragment.at + size] if buffer.numel() >= fragment.at + size else None


class _Wrapped(Shards):
    """A DeepSpeed optimizer around a torch optimizer."""

    masters: ClassVar[str]
    """The optimizer's table of master copies, by which it is told what kind it is."""

    @property
    def inner(self) -> Any:
        return self.optimizer.optimizer

    def buffer(self, parameter: torch.Tensor) -> torch.Tensor | None:
        fragment = self.fragments.get(parameter)
        return None if fragment is None else self._master(fragment)

    def _master(self, fragment: Fragment) -> torch.Tensor:
        master: torch.Tensor = getattr(self.optimizer, self.masters)[fragment.group]
        return master


class UnfusedShards(_Wrapped):
    """fp16 or bf16 without ZeRO, one fp32 copy per parameter."""

    kind = "unfused"
    masters = "fp32_groups"

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        for i, group in enumerate(self.optimizer.fp16_groups):
            for j, parameter in enumerate(group):
                yield parameter, Fragment(0, parameter.numel(), i, WHOLE, j)

    def _master(self, fragment: Fragment) -> torch.Tensor:
        return super()._master(fragment)[fragment.order]  # a list of them, one per parameter


class FusedShards(_Wrapped):
    """fp16 or bf16 without ZeRO, one flat fp32 copy per parameter group."""

    kind = "fused"
    masters = "fp32_groups_flat"

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        for i, group in enumerate(self.optimizer.fp16_groups):
            start = 0
            for j, parameter in enumerate(group):
                yield parameter, Fragment(0, parameter.numel(), i, start, j)
                start += parameter.numel()


class _Partitioned(_Wrapped):
    """Flat buffers cut into one partition per rank."""

    def members(self, parameter: torch.Tensor) -> Any:
        return self._groups().get(self._group_of(parameter))

    def _groups(self) -> Mapping[int, Any]:
        return dict(enumerate(self.optimizer.real_dp_process_group))

    def _group_of(self, parameter: torch.Tensor) -> int:
        fragment = self.fragments.get(parameter)
        return fragment.group if fragment is not None else -1

    def _rank(self, group: int) -> int:
        return int(dist.get_rank(self._groups()[group]))


class Bf16Shards(_Partitioned):
    """BF16_Optimizer: gradients are added up in fp32 and all-reduced whole, masters and states are partitioned."""

    kind = "bf16"
    masters = "fp32_groups_flat_partition"

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        for i, group in enumerate(self.optimizer.bf16_groups):
            size = self.optimizer.fp32_groups_flat_partition[i].numel()
            begin = self._rank(i) * size
            start = 0
            for j, parameter in enumerate(group):
                lo, hi = max(begin - start, 0), min(begin + size - start, parameter.numel())
                yield parameter, Fragment(lo, hi, i, start + lo - begin, j) if lo < hi else Fragment(0, 0, i, 0, j)
                start += parameter.numel()

    def read_unreduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        fragment = self.fragments.get(parameter)
        if fragment is None or not self.optimizer.fp32_groups_has_gradients[fragment.group][fragment.order]:
            return None
        gradient: torch.Tensor = self.optimizer.fp32_groups_gradients[fragment.group][fragment.order]
        return gradient.view(parameter.shape)

    def read_reduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        whole, fragment = self.read_unreduced(parameter), self.fragments.get(parameter)
        return whole.view(-1)[fragment.lo : fragment.hi] if whole is not None and fragment is not None else None


class ZeroShards(_Partitioned):
    """ZeRO 1 and 2: the gradients of this rank's partition are kept as a list of fragments, or flat. A rank that has nothing of a
    parameter gives empty tensors."""

    kind = "zero12"
    masters = "single_partition_of_fp32_groups"

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        optimizer = self.optimizer
        for i, group in enumerate(optimizer.bit16_groups):
            rank = self._rank(i)
            starts, places = optimizer.grad_start_offset[i][rank], optimizer.grad_partition_insertion_offset[i][rank]
            order = {id(p): j for j, p in enumerate(optimizer.params_in_partition[i])}
            for parameter in group:
                number = optimizer.get_param_id(parameter)
                if number not in starts:
                    yield parameter, Fragment(0, 0, i, 0, -1)
                    continue
                lo, place = int(starts[number]), int(places[number])
                hi = lo + min(parameter.numel() - lo, int(optimizer.partition_size[i]) - place)
                yield parameter, Fragment(lo, hi, i, place, order[id(parameter)])

    def read_unreduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        ask = optional(self.optimizer, "get_gradient_for_reduction", because="reliance has said what is left out")
        gradient: torch.Tensor | None = None if ask is None else ask(parameter)
        return gradient

    def read_reduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        fragment = self.fragments.get(parameter)
        if fragment is None:
            return None
        if optional(self.optimizer, "cpu_offload", because="an offloaded optimizer has no averaged gradients either"):
            return self.read_stepping(parameter)
        kept = optional(self.optimizer, "averaged_gradients", {}, because="reliance has said what is left out").get(fragment.group)
        if not kept:
            return None
        if fragment.lo == fragment.hi:
            nothing: torch.Tensor = kept[0].detach().view(-1)[:0]
            return nothing
        flat = optional(kept, "flat_partition", because="older versions keep a list")
        if flat is not None:
            return self._slice_fragment(flat, parameter)
        parts = [part for part in kept if not optional(part, "_zero_padding", because="it marks padding, which comes last")]
        gradient = parts[fragment.order].detach() if fragment.order < len(parts) else None
        return gradient.view(-1) if gradient is not None and gradient.numel() == fragment.hi - fragment.lo else None

    def states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        states = super().states(parameter)
        if "momentum_buffer" in states and "muon" in type(self.inner).__name__.lower() and _of_muon(parameter):
            states.pop("momentum_buffer", None)  # kept in an order of its own, which is not the partition's
        return states


class Zero3Shards(_Partitioned):
    """ZeRO 3: the parameter itself is empty between its uses; `ds_tensor` is this rank's partition of it, padded to equal sizes."""

    kind = "zero3"
    masters = "fp32_partitioned_groups_flat"

    def members(self, parameter: torch.Tensor) -> Any:
        return parameter.ds_process_group  # type: ignore[attr-defined]

    def numel(self, parameter: torch.Tensor) -> int:
        return int(parameter.ds_numel)  # type: ignore[attr-defined]

    def value(self, parameter: torch.Tensor) -> torch.Tensor | None:
        fragment, kept = self.fragments.get(parameter), parameter.ds_tensor  # type: ignore[attr-defined]
        if fragment is None or kept is None or kept.numel() < fragment.hi - fragment.lo:
            return None
        value: torch.Tensor = kept.detach().view(-1)[: fragment.hi - fragment.lo]
        return value

    def read_unreduced(self, parameter: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        return None  # every micro batch is reduced at once

    def read_reduced(self, parameter: torch.Tensor) -> torch.Tensor | None:
        fragment = self.fragments.get(parameter)
        if fragment is None:
            return None
        if optional(self.optimizer, "offload_optimizer", because="an offloaded optimizer has no averaged gradients either"):
            return self.read_stepping(parameter)
        kept = optional(self.optimizer, "averaged_gradients", {}, because="reliance has said what is left out").get(fragment.group)
        return kept[fragment.order].detach().view(-1)[: fragment.hi - fragment.lo] if kept is not None else None

    def _find(self) -> Iterator[tuple[torch.Tensor, Fragment]]:
        optimizer = self.optimizer
        for i, group in enumerate(optimizer.fp16_groups):
            for j, parameter in enumerate(group):
                number, place, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                rank = int(dist.get_rank(self.members(parameter)))
                lo = min(rank * size, parameter.ds_numel)
                yield parameter, Fragment(lo, min(lo + size, parameter.ds_numel), number if number == i else i, place, j)

    def _param_group(self, group: int) -> int:
        table = optional(self.optimizer, "sub_group_to_group_id", because="reliance has said what is left out")
        return -1 if table is None else int(table[group])


def _of_muon(parameter: torch.Tensor) -> bool:
    """Is the parameter updated by Muon? Where that cannot be told its momentum is left out, too."""
    try:
        return bool(need(parameter, "use_muon", for_="momentum of Muon"))
    except MissingNameError:
        return True


_KINDS: tuple[type[_Wrapped], ...] = (Zero3Shards, ZeroShards, Bf16Shards, FusedShards, UnfusedShards)


def kind_of(optimizer: Any) -> type[Shards]:
    """The kind of an optimizer, by the tables it has; `Shards` itself for one that is not DeepSpeed's."""
    return next((kind for kind in _KINDS if hasattr(optimizer, kind.masters)), Shards)
