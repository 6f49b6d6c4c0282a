"""Trainings for the cells of docs/integrations.md that compare what a followed engine shows with the same training without a probe."""

from __future__ import annotations

import csv
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from restored import snapshot
from torch import nn

from msprobe_engine import log
from msprobe_engine.settings.schema import GradProbeSettings, MonitorSettings, ReplicaCheckSettings

SIZE = 12
STEPS = 2
LEVELS = ("L0", "L1", "mix")
FULL = MonitorSettings(
    activations=True,
    activation_gradients=True,
    gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    collectives=True,
    replica_check=ReplicaCheckSettings(interval=1, gradients=True),
)
Norms = dict[tuple[str, str], list[float]]
"""(module or operator, forward or backward) -> norms of the outputs of linear layers, or of their gradients."""


class Experts(nn.Module):
    """A linear layer before two experts, one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(SIZE, SIZE)
        self.moe = MoE(SIZE, nn.Linear(SIZE, SIZE), num_experts=2, ep_size=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, auxiliary, _ = self.moe(self.i(x))
        loss: torch.Tensor = (y - x).pow(2).mean() + 0.01 * auxiliary
        return loss


def experts() -> Any:
    """An engine over `Experts`, ZeRO 1 in bfloat16."""
    if not harness.deepspeed.comm.is_initialized():
        harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = Experts()
    groups = split([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}])
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=groups, config=harness.config(1, "bf16"))
    return engine


def loop(engine: Any, spied: Callable[[], None] = lambda: None) -> list[float]:
    """`STEPS` updates; `spied` is called before each of them."""
    generator = torch.Generator().manual_seed(harness.deepspeed.comm.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randn(8, SIZE, generator=generator).bfloat16())
        engine.backward(loss)
        spied()
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def norm(tensor: torch.Tensor) -> float:
    """In double precision."""
    return float(tensor.detach().double().norm())


def truth() -> tuple[Any, list[Norms], list[dict[str, float]]]:
    """Bits of a training without a probe, and what hooks have seen in each step: linear layers and calls of ``linear``, and DeepSpeed's
    own gathered gradients."""
    engine = experts()
    steps: list[Norms] = [{}]
    gradients: list[dict[str, float]] = []
    linear = nn.functional.linear

    def keep(kind: str, output: torch.Tensor) -> None:
        now = steps[-1]
        now.setdefault((kind, "forward"), []).append(norm(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: now.setdefault((kind, "backward"), []).append(norm(gradient)))

    @functools.wraps(linear)
    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = linear(*args, **kwargs)
        keep("operator", output)
        return output

    def spied() -> None:
        whole = {name: harness.deepspeed.utils.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        gradients.append({name: norm(gradient) for name, gradient in whole.items() if gradient is not None})
        steps.append({})

    for module in engine.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, output: keep("module", output))
    nn.functional.linear = called
    try:
        losses = loop(engine, spied)
    finally:
        nn.functional.linear = linear
    return (losses, jobs.weights_of(engine)), steps[:-1], gradients


def watched() -> dict[str, Any]:
    """The truth, and for each level of the dump: bits, norms of each step, gradients of the gradient probe."""
    bits, norms, gradients = truth()
    found: dict[str, Any] = {"bits": bits, "norms": norms, "gradients": gradients}
    rank = harness.deepspeed.comm.get_rank()
    for level in LEVELS:
        with tempfile.TemporaryDirectory() as directory:
            engine = experts()
            sections = {"monitor": FULL, "dump": jobs.dump_of(level, tuple(range(STEPS))), "grad_probe": GradProbeSettings()}
            callback = jobs.follow(engine, jobs.settings(directory, **sections))
            losses = loop(engine)
            assert callback is not None
            callback.close()
            dumps = jobs.dumps_in(directory)
            seen = [norms_of(dumps[f"step{step}/rank{rank}"]) for step in range(STEPS)]
            found[level] = ((losses, jobs.weights_of(engine)), seen, probed(directory, rank))
    return found


def norms_of(dump: dict[str, Any]) -> Norms:
    """Linear layers and calls of ``linear`` in a dump."""
    found: Norms = {}
    for name, entry in dump.items():
        kind = "module" if name.startswith("Module.") and ".Linear." in name else "operator"
        if kind == "module" or name.startswith("Functional.linear."):
            for way, place in (("forward", "output"), ("backward", "input")):
                if f".{way}" in name:
                    found.setdefault((kind, way), []).append(entry[place][0]["Norm"])
    return found


def probed(directory: str, rank: int) -> list[dict[str, tuple[float, str]]]:
    """Norm and range of every gradient, by step and parameter."""
    steps = []
    for number in range(STEPS):
        (file,) = Path(directory).glob(f"grad_probe/rank{rank}/grad_summary_{number}.csv")
        rows = csv.DictReader(file.read_text("utf-8-sig").splitlines())
        steps.append({row["param_name"]: (float(row["norm"]), row.get("shard") or "") for row in rows})
    return steps


def left_behind() -> list[str]:
    """What differs after a probe has come to an engine and has left again."""
    engine = experts()
    loop(engine)
    before = snapshot(engine, engine.module, engine.optimizer, engine.monitor)
    callback = jobs.follow(engine, jobs.settings(monitor=FULL))
    loop(engine)
    assert callback is not None
    callback.close()
    return before.changed("process.random state of torch".__eq__)  # the gate draws


def drifting(layout: str) -> list[str]:
    """Messages of a training in whose second update a parameter changes on rank 1 alone, when the shards have been gathered."""
    lines: list[str] = []
    logger = log.get_logger()
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    rank, count, update = harness.deepspeed.comm.get_rank, [0], DeepSpeedZeroOptimizer.step
    engines: list[Any] = []

    @functools.wraps(update)
    def step(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        count[0] += 1
        if count[0] == 2 and rank() == 1:
            net = engines[0].module
            with torch.no_grad():
                (net.i if isinstance(net, Experts) else net.b).weight.view(-1)[0] += 1
        return result

    DeepSpeedZeroOptimizer.step = step
    moe = layout.startswith("EP 2")
    stage = 1 if moe else int(layout.split()[1].rstrip(","))
    engines.append(experts() if moe else harness.engine_of(harness.config(stage, "bf16")))
    sections = {"monitor": MonitorSettings(gradients=False, replica_check=ReplicaCheckSettings(interval=1))}
    callback = jobs.follow(engines[0], jobs.settings(**sections))
    if moe:
        loop(engines[0])
        loop(engines[0])
    else:
        jobs.loop(engines[0], harness.batches("bf16", 4))
    assert callback is not None
    callback.close()
    return lines
