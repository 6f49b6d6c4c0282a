"""What a Megatron model is made of on this rank: chunks, parameters, bucket shards, places in the parallel layout.

Attribute names hold for megatron-core 0.8 to 0.19; what is missing in a version reads as "not sharded".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from msprobe_integrations.common.monitor.targets import matches
from msprobe_integrations.common.parameters.gradients import Piece, layer_numbers, layer_of
from msprobe_integrations.megatron import fsdp
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_engine.core.settings.schema import MonitorSettings
    from msprobe_integrations.common.parameters.gradients import Exchange
    from msprobe_integrations.common.ranks.exchanges import Exchanges


def as_list(model: Any) -> list[Any]:
    """Model chunks as a list."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def unwrapped(chunk: Any) -> torch.nn.Module:
    """The model inside of DDP and mixed-precision wrappers."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module
    inner: torch.nn.Module = chunk
    return inner


def model_config(chunk: Any) -> Any:
    """The model's TransformerConfig, None when it has none."""
    return getattr(chunk, "config", None) or getattr(unwrapped(chunk), "config", None)


class Place(NamedTuple):
    """Where a parameter's gradient lies: its bucket, the group that shares the bucket's reduction, and this rank's part of it.
    `everyone` is the group that holds the same parameter as far as the bucket knows it."""

    bucket: Any
    start: int
    lo: int
    hi: int
    sharded: bool
    group: Any
    everyone: Any


def bucket_groups(chunk: Any) -> list[Any]:
    """All bucket groups of a DDP chunk, dense ones first. In 0.8 each bucket is reduced by itself and stands for its group."""
    if not hasattr(chunk, "bucket_groups"):
        kinds = [getattr(chunk, kind, None) for kind in ("buffers", "expert_parallel_buffers")]  # of other modules `buffers` is a method
        buffers = [buffer for kind in kinds if isinstance(kind, list) for buffer in kind]
        return [bucket for buffer in buffers for bucket in getattr(buffer, "buckets", ())]
    return [*chunk.bucket_groups, *getattr(chunk, "expert_parallel_bucket_groups", ())]


def buckets_of(group: Any) -> list[Any]:
    """The buckets of a group that are reduced together."""
    return list(getattr(group, "buckets", (group,)))


def places(chunk: Any) -> Iterator[tuple[torch.Tensor, Place]]:
    """Every parameter of the chunk's buckets with its place.

    Under the distributed optimizer the collective is a reduce-scatter into a view of the bucket: rank r of n holds the reduced
    gradient of elements [r * size / n, (r + 1) * size / n), the rest still holds local numbers. The parameter's own range is read
    from its view of the buffer: `bucket.param_to_index` ignores order and padding before 0.17, and from 0.17 on parameters with
    separate main gradients keep the communicated view in `main_grad_copy_in_grad_buffer`. What a version does not tell is left out.
    """
    for group in bucket_groups(chunk):
        config = getattr(group, "ddp_config", None) or getattr(chunk, "ddp_config", None)
        sharded = bool(getattr(config, "use_distributed_optimizer", False))
        n = int(getattr(group, "intra_distributed_optimizer_instance_size", 0) or getattr(group, "data_parallel_world_size", 0))
        if sharded and not n:
            continue
        n = n if sharded else 1
        rank = int(getattr(group, "intra_distributed_optimizer_instance_rank", 0) or 0) if sharded else 0
        members = getattr(group, "intra_distributed_optimizer_instance_group", None) or getattr(group, "data_parallel_group", None)
        several = getattr(group, "inter_distributed_optimizer_instance_group", None) is not None
        everyone = None if several else getattr(group, "data_parallel_group", None) or members
        if sharded and not hasattr(group, "intra_distributed_optimizer_instance_rank") and members is not None:
            rank = dist.get_rank(members)
        for bucket in buckets_of(group):
            data = getattr(bucket, "grad_data", None)
            if data is None:
                continue
            size = data.numel() // n
            for parameter in getattr(bucket, "params", ()):
                view = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
                view = getattr(parameter, "main_grad", None) if view is None else view
                if view is None:  # Megatron-FSDP: its buffers have gradients for as long as they are reduced
                    continue
                start = view.storage_offset() - data.storage_offset()
                lo = min(max(rank * size - start, 0), parameter.numel())
                hi = min(max((rank + 1) * size - start, 0), parameter.numel())
                yield parameter, Place(bucket, start, lo, hi, sharded and n > 1, members, everyone)


class Layout:
    """Parameters of all chunks of this rank, in an order that is the same on all ranks of a data-parallel group.

    Args:
        chunks: model chunks (one per virtual pipeline stage), wrapped or not.
        monitor: its targets choose the parameters.
        exchanges: merge the rows of shards.

    Building it is a collective call when parameters are sharded (see `Exchanges`).
    """

    def __init__(self, chunks: Sequence[Any], monitor: MonitorSettings, exchanges: Exchanges) -> None:
        self.chunks = list(chunks)
        self.pieces: list[Piece] = []
        self.places: dict[torch.Tensor, Place] = {}
        for chunk in self.chunks:
            self.places.update(places(chunk))
        self._unknown = {p for chunk in self.chunks if _shares_out(chunk) for p in chunk.parameters()} - self.places.keys()
        sharing = {_ranks(place) for place in self.places.values() if place.sharded}
        kept = [fsdp.shards(chunk) for chunk in self.chunks]
        for chunk, held in zip(self.chunks, kept):  # FSDP, torch's and Megatron's, keeps parameters as DTensors, in no bucket of ours
            every = [held.get(id(p), p) for p in unwrapped(chunk).parameters()]
            sharing |= {dtensors.sharers(p) for p in every if dtensors.is_dtensor(p)} - {()}
        made = {ranks: exchanges.of(ranks) for ranks in sorted(sharing)}
        for vpp_stage, chunk in enumerate(self.chunks):
            model = unwrapped(chunk)
            numbers = layer_numbers(list(model.named_modules()))
            for name, now in model.named_parameters():
                parameter = kept[vpp_stage].get(id(now), now)
                if parameter.requires_grad and matches(name, monitor.targets, vpp_stage):
                    piece = self._piece(name, parameter, vpp_stage, numbers, made)
                    if dtensors.is_dtensor(parameter):
                        piece = _located(dtensors.make_piece(name, parameter, vpp_stage, piece.facts, exchanges))
                    self.pieces.append(piece)

    def reduced(self, piece: Piece) -> torch.Tensor | None:
        """The reduced gradient that this rank holds: the whole tensor, or its part under the distributed optimizer; None when it is not
        known which part that is."""
        place = self.places.get(piece.parameter)
        if place is None and piece.parameter in self._unknown:
            return None
        if place is None:
            found = self.local(piece)
            return nothing(piece.parameter) if found is None and is_empty_shard(piece) else dtensors.local_of(found, piece.parameter)
        data: torch.Tensor = place.bucket.grad_data
        if piece.sharded:
            return data[place.start + piece.lo : place.start + piece.hi]
        return data[place.start : place.start + piece.parameter.numel()].view(piece.parameter.shape)

    def local(self, piece: Piece) -> torch.Tensor | None:
        """The whole accumulation buffer of this rank; unreduced numbers before the reduction."""
        found = getattr(piece.parameter, "main_grad", None)
        gradient: torch.Tensor | None = piece.parameter.grad if found is None else found
        return gradient

    def members(self, piece: Piece) -> Any:
        """The group that reduces the piece's gradient; None when it is in no bucket, or the bucket's group is a part of it (several
        instances of the distributed optimizer)."""
        place = self.places.get(piece.parameter)
        return place.everyone if place is not None else None

    def _piece(
        self,
        name: str,
        parameter: torch.Tensor,
        vpp_stage: int,
        numbers: dict[str, int],
        exchanges: dict[tuple[int, ...], Exchange | None],
    ) -> Piece:
        facts: dict[str, Any] = {}
        marks = getattr(parameter, "orig_param", parameter)  # Megatron-FSDP copies some of them only
        if getattr(parameter, "tensor_model_parallel", False):
            facts["tensor_parallel"] = "shard"
            facts["partition_dim"] = int(getattr(parameter, "partition_dim", -1))
        layer = layer_of(name, numbers)
        if layer is not None:
            facts["layer"] = layer
        if getattr(marks, "allreduce", True) is False:
            facts["expert"] = True
        if getattr(parameter, "shared", False):
            facts["shared"] = True
        place = self.places.get(parameter)
        if place is None or not place.sharded:
            return Piece(name, parameter, vpp_stage, 0, parameter.numel(), facts)
        facts["of"] = parameter.numel()
        return Piece(name, parameter, vpp_stage, place.lo, place.hi, facts, exchanges.get(_ranks(place)))


def _located(piece: Piece) -> Piece:
    """With the range that Megatron-FSDP gives this rank, which is not that of torch's DTensors."""
    place = fsdp.range_of(piece.parameter) if piece.sharded and fsdp.is_shard(piece.parameter) else None
    return piece if place is None else replace(piece, lo=place[0], hi=place[1], positions=True)


def is_empty_shard(piece: Piece) -> bool:
    """Has Megatron-FSDP given nothing of the parameter to this rank? Then it has neither gradient nor states, as no part of one that
    others have."""
    return piece.sharded and piece.lo == piece.hi and fsdp.is_shard(piece.parameter)


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    """No element of it, on its device and with its dtype."""
    local: torch.Tensor = tensor._local_tensor if dtensors.is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local.detach().reshape(-1)[:0]


def _shares_out(chunk: Any) -> bool:
    """Is the reduced gradient of a parameter only a part, in buckets?"""
    return bool(getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False)) and bool(bucket_groups(chunk))


def _ranks(place: Place) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(place.group))


def rank_info() -> dict[str, int]:
    """This rank's place: ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` where Megatron's parallel state knows them."""
    from megatron.core import parallel_state as state

    found: dict[str, int] = {}
    initialized = getattr(state, "model_parallel_is_initialized", None)
    if initialized is not None and not initialized():
        return found
    for key, name in (
        ("dp", "get_data_parallel_rank"),
        ("tp", "get_tensor_model_parallel_rank"),
        ("pp", "get_pipeline_model_parallel_rank"),
        ("cp", "get_context_parallel_rank"),
        ("ep", "get_expert_model_parallel_rank"),
    ):
        ask = getattr(state, name, None)
        if ask is not None:
            try:
                found[key] = int(ask())
            except (AssertionError, RuntimeError):  # the group was not made
                continue
    return found
