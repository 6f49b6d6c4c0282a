"""What the ranks of one parallel layout do for its row of docs/evidence/integrations.md: train without the probe, and with every
feature."""

from __future__ import annotations

import csv
import functools
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsdp_layout
import torch
import torch.distributed as dist
from harness.restored import snapshot
from layout_job import ALL, _sums, norm, spy
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.tensor_parallel import layers
from megatron_harness import capturing, probe_settings, run_gpt, run_with_fault, train_gpt

from msprobe_engine.core.settings.schema import DumpSettings, GradProbeSettings, MonitorSettings, ProbeSettings, ReplicaCheckSettings
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.layout import unwrap_model
from msprobe_integrations.megatron.observer import TrainingObserver
from msprobe_integrations.torch.monitor.probe import TorchProbe

STEPS = 2
LEVELS = ("L0", "L1", "mix")
BITS = ("losses", "weights", "random")
_PREFIX = re.compile(r"^(module\.)+")
_CHUNK = re.compile(r"^chunk(\d+)\.")
_SHARD = re.compile(r"\[(\d+), (\d+)\) of (\d+)")


def prepared(argv: str) -> str:
    """The script's arguments. ``--fused``, which it has not, is gradient accumulation in the matrix products: the extension needs CUDA, a
    function that computes the same stands in for it. So is Megatron-FSDP, in place of its DistributedDataParallel. One layer is
    enough where layers are not dealt out."""
    logging.getLogger("msprobe").setLevel(logging.ERROR)
    if "--fused" in argv:

        def added(inputs: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
            buffer.add_(gradient.t() @ inputs)

        class Fused(train_gpt.TransformerConfig):  # type: ignore[name-defined,misc]
            def __post_init__(self) -> None:
                self.gradient_accumulation_fusion = True
                super().__post_init__()

        layers._grad_accum_fusion_available = True
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=added)
        train_gpt.TransformerConfig = Fused  # type: ignore[misc]
    if fsdp_layout.FLAG in argv:
        fsdp_layout.use_it()
    return argv.replace("--fused", "").replace(fsdp_layout.FLAG, "") + ("" if "--pp" in argv else " --layers 1")


def again() -> None:
    """Another training may begin in this process."""
    patches.observe(None)
    parallel_state.destroy_model_parallel()
    destroy_num_microbatches_calculator()


def watched(argv: str, output: str) -> dict[str, Any]:
    """The bits of a training without the probe; of one for each level of the dump, with everything watched; and what detaching left."""
    argv = f"--steps {STEPS} {prepared(argv)}"
    made: list[Any] = []
    plain, _ = run_gpt(argv, None, lambda _state, *what: made.extend(what))
    found: dict[str, Any] = {
        "rank": dist.get_rank(),
        "plain": {key: plain[key] for key in BITS},
        "left": left_behind(argv, *made, f"{output}/detach"),
    }
    for level in LEVELS:
        again()
        found[level] = with_all(argv, level, f"{output}/{level}")
    members = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    found["members"] = [dist.get_process_group_ranks(group) for group in (members, experts)]
    return found


def everything(level: str, output: str) -> ProbeSettings:
    """All families, a dump of all steps, and the gradient probe."""
    settings = probe_settings(ALL, output=output)
    return replace(settings, dump=DumpSettings(level=level, step=tuple(range(STEPS))), grad_probe=GradProbeSettings())


def left_behind(argv: str, chunks: list[Any], optimizer: Any, output: str) -> list[str]:
    """What differs after a probe has come to a training that is there, and has left again."""
    a = train_gpt.arguments(["--quiet", *argv.split()])
    patches.observe(None)
    before = snapshot(*chunks, optimizer)
    observer = TrainingObserver(everything("mix", output))
    patches.observe(lambda: observer)
    observer.setup(chunks, optimizer)
    train_gpt.train(a, chunks, optimizer)
    seen = observer.step
    observer.close()
    patches.observe(None)
    drawn = "process.random state of torch"  # by dropout of the training
    return before.changed(drawn.__eq__) if seen == STEPS else [f"{seen} steps were followed"]


def spied(state: dict[str, Any], chunks: list[Any], optimizer: Any) -> None:
    """`layout_job.spy`, and norms of the gradients of the layer norms' outputs."""
    state["gradients"] = [[]]

    def seen(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: state["gradients"][-1].append(norm(gradient)))

    for chunk in chunks:
        for _, module in unwrap_model(chunk).named_modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_hook(seen)
    spy(state, chunks, optimizer)
    step = optimizer.step

    @functools.wraps(step)
    def over() -> Any:
        result = step()
        state["gradients"].append([])
        return result

    optimizer.step = over


def with_all(argv: str, level: str, output: str) -> dict[str, Any]:
    """One training: its bits, what was seen in each step, and what should have been."""
    state, frames = run_gpt(argv, everything(level, output), spied)
    seen = []
    for frame in frames:
        samples = {
            (r.source.family, r.source.phase, f"{r.source.vpp_stage} {r.name}", r.source.micro_step): (r.statistics, dict(r.source.extra))
            for r in frame.records()
            if hasattr(r.source, "family")
        }
        dump = json.loads((Path(output) / "dump" / f"step{frame.step}" / f"rank{dist.get_rank()}" / "dump.json").read_text())["data"]
        seen.append({"samples": samples, "dump": norms_of(dump), "sums": _sums(frame), "scalars": frame.scalars})
    return {
        "bits": {key: state[key] for key in BITS},
        "seen": seen,
        "probed": probed(output),
        **{key: state[key] for key in ("norms", "gradients", "reference", "parameters")},
    }


def norms_of(dump: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """Norms of the layer norms in the order of the file: (module or operator, forward or backward) -> outputs, or their gradients."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, entry in dump.items():
        kind = "module" if name.startswith("Module.") and ".LayerNorm." in name else "operator"
        if kind == "module" or name.startswith("Functional.layer_norm."):
            for way, place in (("forward", "output"), ("backward", "input")):
                if f".{way}" in name:  # modules have parameters_grad, too
                    found.setdefault((kind, way), []).append(entry[place][0]["Norm"])
    return found


def probed(output: str) -> list[dict[str, tuple[float, int, int, int]]]:
    """Of every step of the gradient probe: chunk and parameter -> norm, and the range that this rank updates, of how many elements."""
    steps = []
    for number in range(STEPS):
        (file,) = Path(output).glob(f"grad_probe/rank{dist.get_rank()}/grad_summary_{number}.csv")
        rows = {}
        for row in csv.DictReader(file.read_text("utf-8-sig").splitlines()):
            size = 1
            for length in re.findall(r"\d+", row["shape"]):
                size *= int(length)
            lo, hi, whole = map(int, _SHARD.fullmatch(row["shard"]).groups()) if row.get("shard") else (0, size, size)  # type: ignore[union-attr]
            chunk = _CHUNK.match(row["param_name"])
            name = _PREFIX.sub("", _CHUNK.sub("", row["param_name"]))
            rows[f"{chunk[1] if chunk else 0} {name}"] = (float(row["norm"]), lo, hi, whole)
        steps.append(rows)
    return steps


def drifting(argv: str, guilty: int, name: str) -> list[tuple[int, str, tuple[int, ...]]]:
    """In step 2 one element of a parameter changes on one rank alone: at the end of the update, when shards have been gathered; where the
    next forward pass gathers them, after it. Returns what was said: step, name, ranks of the group."""
    argv = prepared(argv)
    monitor = MonitorSettings(gradients=False, replica_check=ReplicaCheckSettings(interval=1))
    ears, now, depth, chunks = MemorySink(), [0], [0], []

    def drift() -> None:
        if now[0] == 2 and dist.get_rank() == guilty:
            names = dict(unwrap_model(chunks[-1]).named_parameters())
            with torch.no_grad():
                next(names[one] for one in sorted(names) if name in one).view(-1)[0] += 1

    def wrapped(update: Any) -> Any:
        @functools.wraps(update)
        def outermost(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            result = update(*args, **kwargs)
            depth[0] -= 1
            if not depth[0]:
                drift()
            return result

        return outermost

    late = "--overlap-param" in argv
    kinds = {one for thing in vars(optimizers).values() if isinstance(thing, type) for one in thing.__mro__}
    for kind in [] if late else kinds:
        if "step_with_ready_grads" in vars(kind):
            kind.step_with_ready_grads = wrapped(kind.step_with_ready_grads)  # type: ignore[attr-defined]
    observer = TrainingObserver(probe_settings(monitor), lambda s: TorchProbe(s, extra_sinks=[ears]))
    patches.observe(lambda: observer)
    a = train_gpt.arguments(["--quiet", "--steps", "5", "--pace", "0.1", *argv.split()])
    config, chunks, optimizer = train_gpt.build(a)
    if late:
        finalize = config.finalize_model_grads_func

        def finalized(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            drift()

        config.finalize_model_grads_func = finalized
    train_gpt.train(a, chunks, optimizer, on_step=lambda step: now.__setitem__(0, step))
    observer.close()
    return [
        (alert.step, alert.name, tuple(alert.extra.get("ranks", ())))
        for alert in ears.alerts
        if alert.rule == "replica_mismatch" and not alert.extra.get("over")
    ]


def alone(argv: str) -> list[str]:
    """What the replica check of a training says where no rank holds what another holds."""
    said: list[str] = []
    argv = prepared(argv)
    logger = logging.getLogger("msprobe")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: said.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    run_gpt(f"--steps 2 {argv}", probe_settings(MonitorSettings(replica_check=ReplicaCheckSettings(interval=1))))
    return [line for line in said if "replica" in line]


def faulty(argv: str, seed: int, output: str) -> dict[str, Any]:
    """NaN or Inf in one module of one rank (experts may have no tokens that could be spoiled); returns the truth on that rank."""
    return run_with_fault(prepared(argv), seed, capturing(output), steps=4, spared="experts")
