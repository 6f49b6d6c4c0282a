"""What layouts of Megatron have in common: numbers that were seen, beside those of whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from msprobe_engine.core.statistics.digest import digest_array
from msprobe_integrations.megatron.layout import bucket_groups, buckets_of, places, unwrap_model


def gathered(chunks: list[Any]) -> dict[str, tuple[float, ...]]:
    """norm, sum, min, max and digest of each whole reduced gradient, from gathered data in float64."""
    found: dict[str, tuple[float, ...]] = {}
    for stage, chunk in enumerate(chunks):
        names = {p: n for n, p in unwrap_model(chunk).named_parameters()}
        whole: dict[int, torch.Tensor] = {}
        for group in bucket_groups(chunk):
            for bucket in buckets_of(group):
                data = bucket.grad_data.clone()
                if group.ddp_config.use_distributed_optimizer:
                    members = getattr(group, "intra_distributed_optimizer_instance_group", None) or group.data_parallel_group
                    shards = list(data.chunk(dist.get_world_size(members)))
                    mine = shards[dist.get_rank(members)].clone()
                    parts = [torch.empty_like(mine) for _ in shards]
                    dist.all_gather(parts, mine, group=members)
                    data = torch.cat(parts)
                whole[id(bucket)] = data
        for parameter, place in places(chunk):
            data = whole[id(place.bucket)][place.start : place.start + parameter.numel()]
            wide = data.double().numpy()
            found[f"{stage} {names[parameter]}"] = (
                float(np.sqrt((wide**2).sum())),
                float(wide.sum()),
                float(wide.min()),
                float(wide.max()),
                digest_array(data.numpy()),
            )
    return found


def check_outputs(expected: list[float], seen: dict[str, Any], level: str, twice: bool) -> None:
    assert expected
    if level in ("L1", "mix"):
        assert seen["operators"] == pytest.approx(expected, rel=1e-6)
    if level in ("L0", "mix"):
        assert seen["modules"] == pytest.approx(expected, rel=1e-6)
    samples = seen["samples"]
    activations = sorted(v[0].norm for k, v in samples.items() if k[0] == "actv" and "layernorm.output" in k[2] and "k_lay" not in k[2])
    activations = [value for value in activations if any(value == pytest.approx(one, rel=1e-6) for one in expected)]
    assert len(activations) >= (len(expected) // 2 if twice else len(expected))


def check_gradients(reference: dict[str, tuple[float, ...]], samples: dict[Any, Any], bf16: bool) -> None:
    reduced = {key[2]: value for key, value in samples.items() if key[0] == "grad_reduced" and key[1] == "reduced"}
    assert set(reduced) == set(reference)
    for name, (whole, total, low, high, digest) in reference.items():
        statistics, extra = reduced[name]
        assert extra.get("scope") in (None, "whole")
        assert statistics.norm == pytest.approx(whole, rel=1e-6, abs=1e-30)
        assert statistics.mean * statistics.count == pytest.approx(total, rel=1e-6, abs=1e-6 * whole)
        assert (statistics.min, statistics.max, statistics.digest) == (low, high, digest)
    moments = {key[2] for key in samples if key[0] == "exp_avg"}
    assert moments == set(reference) or bf16


def check_parameters(expected: dict[str, float], samples: dict[Any, Any]) -> None:
    updated = {key[2]: value[0].norm for key, value in samples.items() if key[0] == "param_updated"}
    assert updated == pytest.approx(expected, rel=1e-6)


def check_sums(sums: list[dict[tuple[int, ...], list[tuple[float, ...]]]], run: list[dict[str, Any]]) -> None:
    """The k-th sum over a group has the same output on all its members, the sum of their inputs."""
    number = {rank["rank"]: at for at, rank in enumerate(run)}
    for ranks in {group for one in sums for group in one}:
        members = [sums[number[rank]][ranks] for rank in ranks]
        assert len({len(calls) for calls in members}) == 1
        for calls in zip(*members):
            assert len({call[2] for call in calls}) == 1
            scale = max(abs(call[0]) for call in calls) + max(call[2] for call in calls)
            assert calls[0][1] == pytest.approx(sum(call[0] for call in calls), rel=1e-3, abs=2e-2 * scale)
