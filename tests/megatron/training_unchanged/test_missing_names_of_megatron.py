"""Megatron with one of its names called otherwise, one at a time, on its real objects: what the probe then reports is what it reports
with all of them, or is left out and said; never another range of a gradient, nor other ranks that hold the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from every_family import PARAMETER_FAMILIES
from forkpool import run_ranks
from megatron_harness import run_gpt

from msprobe_engine.core.guard import Faults
from msprobe_integrations import requirements
from msprobe_integrations.megatron.layout import bucket_groups, buckets_of, rank_info, unwrap_model
from msprobe_integrations.megatron.source import MegatronSource

pytestmark = pytest.mark.framework
NAMES = {
    "chunk": ("bucket_groups", "expert_parallel_bucket_groups", "ddp_config"),
    "group": (
        *("buckets", "ddp_config", "start_grad_sync", "data_parallel_group"),
        *(f"intra_distributed_optimizer_instance_{what}" for what in ("size", "rank", "group")),
    ),
    "bucket": ("grad_data", "params"),
    "config": ("use_distributed_optimizer", "overlap_param_gather"),
    "parameter": ("main_grad", "tensor_model_parallel"),
    "state": (
        *("model_parallel_is_initialized", "get_data_parallel_rank", "get_tensor_model_parallel_rank", "get_pipeline_model_parallel_rank"),
        *("get_context_parallel_rank", "get_expert_model_parallel_rank", "get_tensor_model_parallel_group"),
        *("get_embedding_group", "get_data_parallel_group"),
    ),
}
MUST_BE_SAID = {
    *("bucket_groups", "buckets", "grad_data", "params", "use_distributed_optimizer", "overlap_param_gather", "main_grad"),
    *("tensor_model_parallel", "model_parallel_is_initialized"),
}
"""Without these something is left out in any layout."""


@contextmanager
def called_otherwise(objects: list[Any], name: str) -> Iterator[int]:
    """`name` is another one in all objects and in their classes, as after a change of the framework; how often it was found."""
    moved: list[tuple[Any, Any]] = []
    places: dict[int, Any] = {}
    for one in objects:
        for place in (one, *(() if isinstance(one, (torch.nn.Parameter, dict)) else type(one).__mro__)):
            found = place if isinstance(place, dict) else vars(place)
            if name in found:
                places[id(place)] = place
    for place in places.values():
        if isinstance(place, dict):
            moved.append((place, place.pop(name)))
        else:
            moved.append((place, vars(place)[name]))
            delattr(place, name)
    try:
        yield len(moved)
    finally:
        for place, value in moved:
            if isinstance(place, dict):
                place[name] = value
            else:
                setattr(place, name, value)


def reported(chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    """What the parameter side takes: reduced gradients with their range, ranks that hold the same, the place of the rank. Following the
    updates, and gradients before the reduction, raises nothing, else all of the monitor would be off."""
    probe: Any = SimpleNamespace(
        monitor=PARAMETER_FAMILIES, faults=Faults(), parameters=SimpleNamespace(exchanges=SimpleNamespace(of=lambda _: None))
    )
    source = MegatronSource(probe, chunks, optimizer)
    found: dict[str, Any] = {f"place {key}": value for key, value in rank_info().items()}
    for piece in source.pieces:
        gradient = source.gradient(piece)
        if gradient is not None:
            found[f"reduced {piece.name}"] = (piece.lo, piece.hi, tuple(gradient.detach().flatten().tolist()))
        for one in source.find_replicas(piece):
            found[f"{one.label} {piece.name}"] = (tuple(dist.get_process_group_ranks(one.group)), one.late)
    source.connect(Mock())
    source.open()
    source.close()
    return found


def trials(results: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    from megatron import core
    from megatron.core.tensor_parallel import layers

    for_the_probe = ModuleType(core.parallel_state.__name__)  # Megatron's own functions go on finding each other
    vars(for_the_probe).update(vars(core.parallel_state))
    core.parallel_state = for_the_probe
    groups = [group for chunk in chunks for group in bucket_groups(chunk)]
    parameters = [p for chunk in chunks for p in unwrap_model(chunk).parameters()]
    objects = {
        "chunk": chunks,
        "group": groups,
        "bucket": [bucket for group in groups for bucket in buckets_of(group)],
        "config": [chunks[0].ddp_config],
        "parameter": [*parameters, layers._MODEL_PARALLEL_ATTRIBUTE_DEFAULTS],
        "state": [vars(for_the_probe)],
    }
    right = reported(chunks, optimizer)
    assert not requirements.MISSING
    results["reported"] = len(right)
    for kind, names in NAMES.items():
        for name in names:
            requirements.MISSING.clear()
            with called_otherwise(objects[kind], name) as places:
                found = reported(chunks, optimizer)
            wrong = {key for key, value in found.items() if right.get(key) != value}
            results[f"{kind} {name}"] = (places, sorted(wrong)[:3], len(right.keys() - found.keys()), dict(requirements.MISSING))
    requirements.MISSING.clear()
    assert reported(chunks, optimizer) == right


def job(argv: str) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def spy(_: Any, chunks: list[Any], optimizer: Any) -> None:
        step: Callable[[], Any] = optimizer.step

        @functools.wraps(step)
        def looked() -> Any:
            trials(results, chunks, optimizer)
            return step()

        optimizer.step = looked

    run_gpt(f"--steps 1 --layers 1 {argv}", None, spy)
    return results


@pytest.mark.parametrize("argv", ["--distopt", pytest.param("--tp 2", marks=pytest.mark.slow), pytest.param("", marks=pytest.mark.slow)])
def test_a_name_that_went_takes_a_part_away_and_is_said(argv: str) -> None:
    """Of each name: nothing that is reported is another number, and what is reported no longer is said."""
    for results in run_ranks(2, job, argv, timeout=240):
        assert results.pop("reported") > 20
        for name, (places, wrong, left_out, said) in results.items():
            assert not wrong, (name, wrong)
            assert said or not left_out, f"{left_out} left out without {name}, and nothing is said"
            assert said or not places or name.split()[1] not in MUST_BE_SAID, f"nothing is said of {name}"
