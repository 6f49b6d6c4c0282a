"""One training in one parallel layout with everything watched, and what the probe must have seen, by other means and in float64."""

from __future__ import annotations

import functools
import logging
import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from every_family import EVERY_FAMILY
from forkpool import run_ranks
from layout_checks import gathered
from megatron_harness import probe_settings, run_gpt

from msprobe_engine.core.records import leaves
from msprobe_engine.core.settings.schema import ReplicaCheckSettings
from msprobe_engine.core.statistics.rows import read_row
from msprobe_integrations.megatron.layout import unwrap_model

try:
    import fsdp_layout
except ImportError:  # before megatron-core 0.14
    fsdp_layout = None
ALL = replace(
    EVERY_FAMILY,
    momentum_agreement=False,
    micro_batch_gradients=True,
    collectives=True,
    digest=True,
    replica_check=ReplicaCheckSettings(interval=1, gradients=True),
)


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().norm())


def parameter_norms(chunks: list[Any]) -> dict[str, float]:
    """Of all parameters of this rank."""
    return {f"{i} {n}": norm(p) for i, c in enumerate(chunks) for n, p in unwrap_model(c).named_parameters()}


def spy(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    """Outputs of all layer norms in the order of their calls, reduced gradients, parameters after each update."""
    state["norms"], state["reference"], state["parameters"] = [[]], [], []

    def seen(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        state["norms"][-1].append(norm(output))

    for chunk in chunks:
        for _, module in unwrap_model(chunk).named_modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_hook(seen)
    step = optimizer.step
    sharded = fsdp_layout is not None and fsdp_layout.is_it(chunks)

    @functools.wraps(step)
    def looked() -> Any:
        state["reference"].append(fsdp_layout.gathered(chunks) if sharded else gathered(chunks))
        result = step()
        state["norms"].append([])
        state["parameters"].append(fsdp_layout.parameter_norms(chunks) if sharded else parameter_norms(chunks))
        return result

    optimizer.step = looked


def job(argv: str, level: str, output: str) -> dict[str, Any]:
    """What a rank has seen, and what it should have seen."""
    logging.getLogger("msprobe").setLevel(logging.ERROR)
    state, frames = run_gpt(argv, probe_settings(ALL, level=level, output=output), spy)
    seen = []
    for frame in frames:
        samples = {
            (r.source.family, r.source.phase, f"{r.source.vpp_stage} {r.name}", r.source.micro_step): (r.statistics, dict(r.source.extra))
            for r in frame.records()
            if hasattr(r.source, "family")
        }
        seen.append(
            {
                "samples": samples,
                "modules": _outputs(frame, "Module.", "LayerNorm.forward."),
                "operators": _outputs(frame, "Functional.layer_norm.", ""),
                "sums": _sums(frame),
                "scalars": frame.scalars,
            }
        )
    return {"seen": seen, "rank": dist.get_rank(), **{key: state[key] for key in ("norms", "reference", "parameters", "losses")}}


@functools.cache
def seen_by(ranks: int, argv: str, level: str) -> list[dict[str, Any]]:
    """`job` on each rank, for all tests that look at it: two steps, of one layer where layers are not dealt out."""
    small = "" if "--pp" in argv else " --layers 1"
    with tempfile.TemporaryDirectory() as place:
        return run_ranks(ranks, job, f"--steps 2 {argv}{small}", level, place, timeout=240)


def _outputs(frame: Any, start: str, middle: str) -> list[float]:
    return [
        read_row(frame.rows[ref.row]).norm
        for entry in frame.entries
        if entry.name.startswith(start) and middle in entry.name and ".forward" in entry.name
        for place, ref in leaves(entry)
        if place == "output.0"
    ]


def _sums(frame: Any) -> dict[tuple[int, ...], list[tuple[float, float, float]]]:
    """(mean of the input, mean and norm of the output) of every all-reduce that adds up, by the ranks of its group, in order."""
    found: dict[tuple[int, ...], list[tuple[float, float, float]]] = {}
    for entry in frame.entries:
        if (
            not entry.name.startswith("Distributed.all_reduce.")
            or entry.tags.get("reduce") != "sum"
            or entry.sections.get("output") is None
        ):
            continue
        places = {place: read_row(frame.rows[ref.row]) for place, ref in leaves(entry)}
        if "input.0" in places and "output.0" in places:
            before, after = places["input.0"], places["output.0"]
            found.setdefault(tuple(entry.tags["group_ranks"]), []).append((before.mean, after.mean, after.norm))
    return found
