"""What a Megatron model is made of on this rank: chunks, parameters, bucket shards, places in the parallel layout.

Attribute names hold for megatron-core 0.8 to 0.19. Where one that tells a gradient's place has gone, reduced gradients are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from msprobe_integrations.common.monitor.targets import matches
from msprobe_integrations.common.parameters.gradients import Piece, layer_numbers, layer_of
from msprobe_integrations.requirements import MissingNameError, make_missing_error, need, optional
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_engine.core.settings.schema import MonitorSettings
    from msprobe_integrations.common.parameters.gradients import Exchange
    from msprobe_integrations.common.ranks.exchanges import Exchanges

REDUCED = "reduced gradients of Megatron, and which ranks hold the same"
_NO_WRAPPER = "models without a wrapper are whole"
_OLDER = "older versions have it not, and do not need it"
_MARK_OF_SOME = "only some parameters are marked; `marks_are_known` asks whether the mark is still called so"


def as_list(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]


def unwrap_model(chunk: Any) -> torch.nn.Module:
    """The model inside of DDP and mixed-precision wrappers."""
    while isinstance(optional(chunk, "module", because="the innermost has none"), torch.nn.Module):
        chunk = chunk.module
    inner: torch.nn.Module = chunk
    return inner


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
    """All bucket groups of a DDP chunk, dense ones first. In 0.8 each bucket is reduced by itself and stands for its group.

    Raises:
        MissingNameError: Megatron's DDP has neither.
    """
    if hasattr(chunk, "bucket_groups"):
        return [*chunk.bucket_groups, *need(chunk, "expert_parallel_bucket_groups", for_=REDUCED)]
    kinds = [optional(chunk, kind, because=_NO_WRAPPER) for kind in ("buffers", "expert_parallel_buffers")]
    buffers = [buffer for kind in kinds if isinstance(kind, list) for buffer in kind]  # of other modules `buffers` is a method
    buckets = [bucket for buffer in buffers for bucket in need(buffer, "buckets", for_=REDUCED)]
    reduced_by_themselves = buckets and all(hasattr(bucket, "start_grad_sync") for bucket in buckets)
    if not reduced_by_themselves and hasattr(chunk, "ddp_config") and not shards_itself(chunk):
        raise make_missing_error(f"{type(chunk).__name__}.bucket_groups", REDUCED)
    return buckets


def buckets_of(group: Any) -> list[Any]:
    """The buckets of a group that are reduced together.

    Raises:
        MissingNameError: it has none, and is none itself, as it was in 0.8.
    """
    return [group] if not hasattr(group, "buckets") and hasattr(group, "grad_data") else list(need(group, "buckets", for_=REDUCED))


def shards_itself(chunk: Any) -> bool:
    """Megatron-FSDP and torch's FSDP2 have no buckets of ours to look into."""
    return any("FullyShard" in kind.__name__ for kind in type(chunk).__mro__)


def is_distributed(owner: Any, chunk: Any) -> bool:
    """Does the distributed optimizer shard what is reduced here?

    Raises:
        MissingNameError: nothing says so.
    """
    config = need(owner if hasattr(owner, "ddp_config") else chunk, "ddp_config", for_=REDUCED)
    return bool(need(config, "use_distributed_optimizer", for_=REDUCED))


def places(chunk: Any) -> Iterator[tuple[torch.Tensor, Place]]:
    """Every parameter of the chunk's buckets with its place.

    Under the distributed optimizer the collective is a reduce-scatter into a view of the bucket: rank r of n holds the reduced
    gradient of elements [r * size / n, (r + 1) * size / n), the rest still holds local numbers. The parameter's own range is read
    from its view of the buffer: `bucket.param_to_index` ignores order and padding before 0.17, and from 0.17 on parameters with
    separate main gradients keep the communicated view in `main_grad_copy_in_grad_buffer`.

    Raises:
        MissingNameError: something that tells a place is not there. No place of the chunk is known then.
    """
    for group in bucket_groups(chunk):
        sharded = is_distributed(group, chunk)
        n, rank, members = (
            _find_sharing_ranks(group) if sharded else (1, 0, need(group, "data_parallel_group", *_INSTANCE_GROUP, for_=REDUCED))
        )
        several = optional(group, "inter_distributed_optimizer_instance_group", because=_OLDER) is not None
        everyone = None if several else optional(group, "data_parallel_group", because="another name for the same, or none") or members
        for bucket in buckets_of(group):
            data = need(bucket, "grad_data", for_=REDUCED)
            if data is None:
                continue
            size = data.numel() // n
            for parameter in need(bucket, "params", for_=REDUCED):
                view = optional(parameter, "main_grad_copy_in_grad_buffer", because="of separate main gradients; its memory is checked")
                if view is None and not shards_itself(chunk):
                    view = need(parameter, "main_grad", for_=REDUCED)
                if view is None:  # Megatron-FSDP: its buffers have gradients for as long as they are reduced
                    continue
                if view.untyped_storage().data_ptr() != data.untyped_storage().data_ptr():
                    raise make_missing_error(f"{type(parameter).__name__}.main_grad in {type(bucket).__name__}.grad_data", REDUCED)
                start = view.storage_offset() - data.storage_offset()
                lo = min(max(rank * size - start, 0), parameter.numel())
                hi = min(max((rank + 1) * size - start, 0), parameter.numel())
                yield parameter, Place(bucket, start, lo, hi, sharded and n > 1, members, everyone)


_INSTANCE_GROUP = ("intra_distributed_optimizer_instance_group",)


def _find_sharing_ranks(group: Any) -> tuple[int, int, Any]:
    """How many ranks share out what the group reduces, which of them this is, and their process group.

    Raises:
        MissingNameError: it does not say, or says two things.
    """
    n = int(need(group, "intra_distributed_optimizer_instance_size", "data_parallel_world_size", for_=REDUCED))
    members = need(group, *_INSTANCE_GROUP, "data_parallel_group", for_=REDUCED)
    if members is None or dist.get_world_size(members) != n:
        raise make_missing_error(f"{type(group).__name__}.{_INSTANCE_GROUP[0]} of {n} ranks", REDUCED)
    return n, dist.get_rank(members), members


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
        self._unknown: set[torch.Tensor] = set()
        for chunk in self.chunks:
            try:
                self.places.update(dict(places(chunk)))
                unknown = hasattr(chunk, "ddp_config") and not shards_itself(chunk) and is_distributed(chunk, chunk)
            except MissingNameError:  # said
                unknown = True
            self._unknown |= set(chunk.parameters()) - self.places.keys() if unknown else set()
        sharing = {_ranks(place) for place in self.places.values() if place.sharded}
        kept = [_fsdp_shards(chunk) for chunk in self.chunks]
        for chunk, held in zip(self.chunks, kept):  # FSDP, torch's and Megatron's, keeps parameters as DTensors, in no bucket of ours
            every = [held.get(id(p), p) for p in unwrap_model(chunk).parameters()]
            sharing |= {dtensors.sharers(p) for p in every if dtensors.is_dtensor(p)} - {()}
        made = {ranks: exchanges.of(ranks) for ranks in sorted(sharing)}
        for vpp_stage, chunk in enumerate(self.chunks):
            model = unwrap_model(chunk)
            numbers = layer_numbers(list(model.named_modules()))
            for name, now in model.named_parameters():
                parameter = kept[vpp_stage].get(id(now), now)
                if parameter.requires_grad and matches(name, monitor.targets, vpp_stage):
                    piece = self._piece(name, parameter, vpp_stage, numbers, made)
                    if dtensors.is_dtensor(parameter):
                        piece = _locate_piece(dtensors.make_piece(name, parameter, vpp_stage, piece.facts, exchanges))
                    self.pieces.append(piece)

    def read_reduced(self, piece: Piece) -> torch.Tensor | None:
        """The reduced gradient that this rank holds: the whole tensor, or its part under the distributed optimizer; None when it is not
        known which part that is."""
        place = self.places.get(piece.parameter)
        if place is None and piece.parameter in self._unknown:
            return None
        if place is None:
            gradient = self.local(piece)
            return (
                make_empty_part(piece.parameter)
                if gradient is None and is_empty_shard(piece)
                else dtensors.local_of(gradient, piece.parameter)
            )
        data: torch.Tensor = place.bucket.grad_data
        if piece.sharded:
            return data[place.start + piece.lo : place.start + piece.hi]
        return data[place.start : place.start + piece.parameter.numel()].view(piece.parameter.shape)

    def is_unknown(self, piece: Piece) -> bool:
        """Does nothing tell which part of the reduced gradient, and of the parameter's update, this rank has?"""
        return piece.parameter in self._unknown

    def local(self, piece: Piece) -> torch.Tensor | None:
        """The whole accumulation buffer of this rank; unreduced numbers before the reduction."""
        found = optional(piece.parameter, "main_grad", because="without it gradients are where torch has them")
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
        marks = optional(parameter, "orig_param", parameter, because="Megatron-FSDP copies some marks only; others have no copies")
        if optional(parameter, "tensor_model_parallel", False, because=_MARK_OF_SOME):
            facts["tensor_parallel"] = "shard"
            facts["partition_dim"] = int(need(parameter, "partition_dim", for_="the dimension that tensor parallelism cuts"))
        layer = layer_of(name, numbers)
        if layer is not None:
            facts["layer"] = layer
        if optional(marks, "allreduce", True, because="a mark of experts") is False:
            facts["expert"] = True
        if optional(parameter, "shared", False, because="a mark of tied embeddings"):
            facts["shared"] = True
        place = self.places.get(parameter)
        if place is None or not place.sharded:
            return Piece(name, parameter, vpp_stage, 0, parameter.numel(), facts)
        facts["of"] = parameter.numel()
        return Piece(name, parameter, vpp_stage, place.lo, place.hi, facts, exchanges.get(_ranks(place)))


def _locate_piece(piece: Piece) -> Piece:
    """With the range that Megatron-FSDP gives this rank, which is not that of torch's DTensors."""
    place = _range_of(piece.parameter) if piece.sharded and _is_fsdp_shard(piece.parameter) else None
    return piece if place is None else replace(piece, lo=place[0], hi=place[1], positions=True)


def is_empty_shard(piece: Piece) -> bool:
    """Has Megatron-FSDP given nothing of the parameter to this rank? Then it has neither gradient nor states, as no part of one that
    others have."""
    return piece.sharded and piece.lo == piece.hi and _is_fsdp_shard(piece.parameter)


def make_empty_part(tensor: torch.Tensor) -> torch.Tensor:
    """No element of it, on its device and with its dtype."""
    return dtensors.local(tensor).detach().reshape(-1)[:0]


def _ranks(place: Place) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(place.group))


def marks_are_known() -> bool:
    """Does Megatron mark pieces of tensor parallelism by the name that is looked for? No parameter of a model may have the mark, so
    Megatron's own table of marks is asked."""
    from megatron.core.tensor_parallel import layers

    purpose = "replica check over tensor-parallel ranks"
    try:
        table = need(layers, "_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS", for_=purpose)
    except MissingNameError:  # said
        return False
    if "tensor_model_parallel" not in table:
        make_missing_error(f"{layers.__name__}._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS['tensor_model_parallel']", purpose)
    return "tensor_model_parallel" in table


def rank_info() -> dict[str, int]:
    """This rank's place: ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` where Megatron's parallel state knows them."""
    from megatron.core import parallel_state as state

    places: dict[str, int] = {}
    try:
        if not need(state, "model_parallel_is_initialized", for_="place of the rank in the parallel layout")():
            return places
    except MissingNameError:  # said
        return places
    for key, name in (
        ("dp", "get_data_parallel_rank"),
        ("tp", "get_tensor_model_parallel_rank"),
        ("pp", "get_pipeline_model_parallel_rank"),
        ("cp", "get_context_parallel_rank"),
        ("ep", "get_expert_model_parallel_rank"),
    ):
        try:
            places[key] = int(need(state, name, for_=f"place {key} of the rank in the parallel layout")())
        except (MissingNameError, AssertionError, RuntimeError):  # said; or the group was not made
            continue
    return places


def _fsdp_shards(chunk: Any) -> dict[int, torch.Tensor]:
    """Under Megatron-FSDP (0.14 to 0.19) what the optimizer updates of each parameter, by the `id` of whatever the module has at present.
    Empty for other models.

    Args:
        chunk: a model chunk as the loop has it.
    """
    shards: dict[int, torch.Tensor] = {}
    buffer = optional(chunk, "param_and_grad_buffer", because="only Megatron-FSDP has one, which `FSDP_ROWS` asks for")
    for _, shard in optional(buffer, "optimizer_named_parameters", (), because="a module of this name that is not Megatron's has none"):
        if _is_fsdp_shard(shard):
            shards[id(shard)] = shards[id(shard.orig_param)] = shard
    return shards


def _is_fsdp_shard(parameter: Any) -> bool:
    """Is it what the optimizer updates of a parameter under Megatron-FSDP? A module has a parameter as a whole tensor while it computes and
    as a DTensor otherwise. The DTensors that the optimizer has stay the same objects: each is a flat range of the whole (in mixed precision
    of its fp32 copy), which may be empty, and has a gradient from `finish_grad_sync` on, unless it is empty."""
    return hasattr(parameter, "orig_param") and dtensors.is_dtensor(parameter)


def _range_of(shard: Any) -> tuple[int, int] | None:
    """First element of the whole that this rank has, and the one after the last; None when this version does not say."""
    size = dtensors.local(shard).numel()
    place = optional(shard, "megatron_fsdp_slice", because="without it no range is claimed")
    if not size:
        return 0, 0
    return (place.start, place.stop) if isinstance(place, slice) and place.stop - place.start == size else None
