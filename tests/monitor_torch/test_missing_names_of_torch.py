"""FSDP1, FSDP2 and DTensor with one of their names called otherwise, one at a time, in all of their code: what the probe then reports is
what it reports with all of them, or is left out and said; the training is the same."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import parameter_cases as cases
import pytest
import torch
from forkpool import run_ranks
from harness import renames
from log_lines import heard
from torch.distributed.fsdp import FullyShardedDataParallel

from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations import requirements
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
PACKAGE = "torch.distributed.fsdp"
NAMES = {
    "fsdp1": (
        *("_handle", "flat_param", "_shard_param_infos", "_fqns", "_shapes", "_numels", "uses_sharded_strategy", "sharded_grad"),
        *("intra_param_start_idx", "numel_in_shard", "in_shard", "offset_in_shard", "_inter_node_pg", "_reduce_grad"),
    ),
    "fsdp2": (
        *("_get_fsdp_state", "_fsdp_param_groups", "fsdp_params", "sharded_param", "_unsharded_param"),
        *("foreach_reduce", "post_backward", "_local_tensor"),
    ),
}
HIDDEN = {"_local_tensor"}
"""Names that torch's own C++ looks up, too: they stay, and the probe does not find them."""
CHANGES_NOTHING = {"_inter_node_pg", "_fsdp_param_groups"}
"""Only some trainings have the one, the other has its older name beside it: nothing is left out here."""


class Result(NamedTuple):
    same: bool
    wrong: list[Any]
    left_out: int
    said: list[str]


def train(kind: str, seen: bool) -> tuple[list[float], dict[Any, Any]]:
    model: Any = cases.net()
    model = (
        FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        if kind == "fsdp1"
        else cases.wrapped(kind, model)
    )
    optimizer = cases.optimizer("adam", [p for p in model.parameters() if p.requires_grad])
    probe = None
    if seen:
        monitor = MonitorSettings(**{**cases.EVERYTHING, "momentum_agreement": False, "micro_batch_gradients": kind == "fsdp2"})
        sinks = SinkSettings(memory=True)
        settings = ProbeSettings(
            output_dir=tempfile.mkdtemp(prefix="msprobe-test-"), monitor=monitor, sinks=sinks, incident=IncidentSettings(enabled=False)
        )
        probe = TorchProbe(settings)
        probe.attach(model, optimizer)
    losses = []
    for step in range(2):
        if probe is not None:
            probe.begin_step(step)
        loss = model(cases.data(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step()
        losses.append(float(loss.detach()))
    frames = []
    if probe is not None:
        (memory,) = (sink for sink in probe.session.writer.sinks if hasattr(sink, "frames"))
        probe.close()
        frames = list(memory.frames)
    found = {}
    for frame in frames:
        for one in frame.samples:
            key = (frame.step, one.family, one.name, one.phase, one.micro_step, str(one.extra.get("state")))
            row = None if one.ref.row < 0 else frame.rows[one.ref.row].tobytes()
            found[key] = (row, one.ref.description.shape, str(one.extra.get("shard")))
    return losses, found


@contextmanager
def without(name: str) -> Iterator[None]:
    """Another version of torch, which has not this name."""

    def look(thing: Any, wanted: str, *default: Any) -> Any:
        return getattr(thing, f"{name}_of_another_version" if wanted == name else wanted, *default)

    if name in HIDDEN:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(requirements, "getattr", look, raising=False)
            yield
        return
    renames.rename(name, f"{name}_of_another_version", PACKAGE)
    try:
        yield
    finally:
        renames.rename(f"{name}_of_another_version", name, PACKAGE)


def trials(kind: str) -> dict[str, Any]:
    lines = heard()
    plain, _ = train(kind, False)
    _, right = train(kind, True)
    results: dict[str, Any] = {"": len(right)}
    for name in NAMES[kind]:
        lines.clear()
        requirements.MISSING.clear()
        with without(name):
            losses, found = train(kind, True)
        found = {key: value for key, value in found.items() if value[0] is not None}
        wrong = [(key, value, right.get(key)) for key, value in found.items() if right.get(key) != value]
        said = [line for line in lines if name in line]
        results[name] = Result(losses == plain, wrong[:3], len(right.keys() - found.keys()), said[:2])
    return results


@pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions are as of Python 3.11")
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.slow
def test_no_number_is_another_one(kind: str) -> None:
    """Of every name; what is left out without it is said with the name, by a rank at least: others may miss what it has not sent."""
    renames.functions(PACKAGE)  # once, before children are forked
    ranks = run_ranks(2, trials, kind, timeout=250)
    assert all(found.pop("") > 20 and set(found) == set(NAMES[kind]) for found in ranks)
    for name in NAMES[kind]:
        said = [line for found in ranks for line in found[name].said]
        left_out = [found[name].left_out for found in ranks]
        assert all(found[name].same for found in ranks), name
        assert not any(found[name].wrong for found in ranks), (name, [found[name].wrong for found in ranks])
        assert bool(said) == any(left_out), (name, left_out, said)
        assert said or name in CHANGES_NOTHING, name
