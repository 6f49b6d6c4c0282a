"""Every parallel layout of Megatron that runs on CPUs: what the probe says of it, against float64 and against what other ranks saw.

The fast tier has some layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from layout_checks import check_gradients, check_outputs, check_parameters, check_sums
from layout_job import seen_by
from megatron_harness import capturing, probe_settings, run_with_fault, train_gpt

from msprobe_engine.core.settings.schema import MonitorSettings, ReplicaCheckSettings
from msprobe_engine.find.nonfinite.nan_analyze import nan_analyze
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.layout import unwrap_model
from msprobe_integrations.megatron.observer import TrainingObserver
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework
EXPERTS = "--experts 4"
LAYOUTS = {
    "DP 2": (2, ""),
    "DP 2, distributed optimizer": (2, "--distopt"),
    "DP 2, distributed optimizer, overlapped": (2, "--distopt --overlap --overlap-param --bf16"),
    "DP 2, recompute full": (2, "--recompute"),
    "DP 2, recompute selective": (2, "--recompute-core"),
    "TP 2, fp16 with loss scale": (2, "--tp 2 --fp16"),
    "TP 2, sequence parallel": (2, "--tp 2 --sp"),
    "PP 2, tied embeddings": (2, "--pp 2"),
    "PP 2, interleaved": (2, "--pp 2 --vpp 2 --layers 4 --untie"),
    "EP 2, all-gather": (2, f"--ep 2 {EXPERTS} --allgather --distopt"),
    "TP 2, expert TP 2": (2, f"--tp 2 --sp --etp 2 {EXPERTS} --allgather"),
    "TP 2 x PP 2": (4, "--tp 2 --pp 2"),
    "DP 2 x TP 2, sequence parallel, distributed optimizer": (4, "--tp 2 --sp --distopt --overlap"),
    "EP 2 x TP 2, sequence parallel, distributed optimizer": (4, f"--tp 2 --sp --ep 2 {EXPERTS} --distopt"),
}
LEVELS = {"DP 2, distributed optimizer": ("L0", "L1", "mix")}
"""For the others mix, which has both."""
HEALTHY = (
    "monitor: activations",
    "monitor: gradients",
    "monitor: parameters",
    "monitor: optimizer",
    "collectives",
)


@pytest.mark.fast_cells("TP 2 x PP 2")  # data parallel: test_layouts_of_the_evidence_page; experts: launch/test_own_loop
@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_is_seen_as_it_is(layout: str) -> None:
    """Layer norms of modules and operators in the order of their calls, activations, reduced gradients, parameters
    and sums over groups equal those of hooks of the test's own and of gathered data in float64; levels agree on moments and losses."""
    runs = {level: seen_by(*LAYOUTS[layout], level) for level in LEVELS.get(layout, ("mix",))}
    for level, run in runs.items():
        assert [rank["losses"] for rank in run] == [rank["losses"] for rank in runs["mix"]]
        for rank in run:
            assert len(rank["seen"]) == 2
            for step, seen in enumerate(rank["seen"]):
                check_outputs(rank["norms"][step], seen, level, "recompute" in layout)
                check_gradients(rank["reference"][step], seen["samples"], bf16="--bf16" in LAYOUTS[layout][1])
                if "overlap-param" not in LAYOUTS[layout][1]:  # else the forward pass gathers them
                    check_parameters(rank["parameters"][step], seen["samples"])
                assert seen["scalars"]["skipped"] == 0
        if level != "L0":
            check_sums([rank["seen"][1]["sums"] for rank in run], run)


PLAIN = {"DP 2": "DP 2, distributed optimizer"}
FOUR = [layout for layout, (ranks, _) in LAYOUTS.items() if ranks == 4]


@pytest.mark.fast_cells("DP 2, distributed optimizer")
@pytest.mark.parametrize("layout", [*PLAIN.values(), *FOUR[1:]])
@pytest.mark.slow
def test_moments_of_sharded_optimizers_are_whole(layout: str) -> None:
    """Moments under the distributed optimizer are those of the same layout without it."""
    ranks, argv = LAYOUTS[layout]
    whole = seen_by(ranks, argv.replace("--distopt", "").replace("--overlap", "").strip(), "mix")
    for plain, sharded in zip(whole, seen_by(ranks, argv, "mix")):
        for key, (statistics, _) in plain["seen"][1]["samples"].items():
            if key[0] in ("exp_avg", "exp_avg_sq", "update"):
                assert sharded["seen"][1]["samples"][key][0].norm == pytest.approx(statistics.norm, rel=1e-4, abs=1e-9)


def faulty(argv: str, seed: int, output: str) -> dict[str, Any]:
    return run_with_fault(argv if "--pp" in argv else f"{argv} --layers 1", seed, capturing(output), steps=4)


INCIDENTS = [layout for layout in LAYOUTS if "EP" not in layout and "expert" not in layout]


@pytest.mark.fast_cells("TP 2 x PP 2")
@pytest.mark.parametrize("layout", INCIDENTS)
@pytest.mark.slow
def test_an_incident_names_the_fault(layout: str, tmp_path: Path) -> None:
    """Step, rank and module that `nan_analyze` gives for the incident are those of a planted fault."""
    ranks, argv = LAYOUTS[layout]
    answers = run_ranks(ranks, faulty, argv.replace("--fp16", ""), 3, str(tmp_path), timeout=240)
    (truth,) = [answer for answer in answers if answer]
    (incident, *_) = sorted((tmp_path / "incidents").glob("step*"))
    first = nan_analyze(incident).findings[0]
    assert (first["step"], first["rank"]) == (truth["step"], truth["rank"])
    assert first["module"].removeprefix("0.") == truth["module"]  # of several chunks the first is meant


def drifting(argv: str, guilty: int) -> list[tuple[int, str, tuple[int, ...]]]:
    monitor = MonitorSettings(gradients=False, replica_check=ReplicaCheckSettings(interval=1))
    ears = MemorySink()
    settings = probe_settings(monitor)
    observer = TrainingObserver(settings, lambda s: TorchProbe(s, extra_sinks=[ears]))
    patches.observe(lambda: observer)
    a = train_gpt.arguments(["--quiet", "--steps", "4", "--pace", "0.05", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)

    def flip(step: int) -> None:
        if step == 2 and dist.get_rank() == guilty:
            names = dict(unwrap_model(chunks[-1]).named_parameters())
            name = next(name for name in sorted(names) if "input_layernorm.weight" in name)
            with torch.no_grad():
                names[name].view(-1)[0] += 1

    train_gpt.train(a, chunks, optimizer, on_step=flip)
    observer.close()
    return [
        (alert.step, alert.name, tuple(alert.extra.get("ranks", ())))
        for alert in ears.alerts
        if alert.rule == "replica_mismatch" and not alert.extra.get("over")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DP 2", "TP 2, sequence parallel", *FOUR])
def test_replicas_that_drift_apart(layout: str) -> None:
    """A healthy training is silent; a weight that changes on one rank alone is named with its group, which has that rank in it."""
    ranks, argv = LAYOUTS[layout]
    argv = argv.replace("--distopt", "").replace("--overlap", "")  # the shard that is updated would heal it
    assert run_ranks(ranks, drifting, argv, -1, timeout=240) == [[]] * ranks
    said = [alert for rank in run_ranks(ranks, drifting, argv, ranks - 1, timeout=240) for alert in rank]
    first = min(step for step, _, _ in said)
    assert first in (2, 3)
    named = [(name, group) for step, name, group in said if step == first]
    # what that rank computes from now on differs, too, and so do gradients of those it sends them to
    assert any("input_layernorm.weight" in name and ranks - 1 in group for name, group in named), said
