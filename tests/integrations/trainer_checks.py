"""What the tests of Trainers share: a job in forked ranks with a probe that is asked for as by the environment, what the probe has seen,
and the same training written by hand in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from forkpool import run_ranks

from msprobe_integrations.autoload import request
from msprobe_integrations.torch import owner

MONITOR = {"activations": True, "gradients": True, "parameters": True, "optimizer_states": True}
Key = tuple[str, int, str]


def config(folder: Path, **sections: Any) -> Path:
    """A settings file whose frames are kept in memory; `sections` as in probe.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {
        "output_dir": str(folder / "probe"),
        "strict": True,
        "log_level": "warning",
        "monitor": MONITOR,
        "sinks": {"memory": True, "csv": {"enabled": False}},
        "incident": {"enabled": False},
        **sections,
    }
    (folder / "probe.yaml").write_text(yaml.safe_dump({k: v for k, v in text.items() if v is not None}))
    return folder / "probe.yaml"


def everything(**more: Any) -> dict[str, Any]:
    """Sections that switch on what the table of integrations has, with files: a dump of step 1, collectives, replicas, gradient probe,
    an incident at step 0, which has the next step captured."""
    return {
        "monitor": {**MONITOR, "collectives": True, "replica_check": {"interval": 1}},
        "dump": {"step": [1], "level": "mix"},
        "grad_probe": {"grad_level": "L1"},
        "rules": [{"rule": "extreme_value", "severity": "critical", "args": {"threshold": 1e-30}}],
        "incident": {"level": "L0", "capture_level": "mix", "max_incidents": 1},
        **more,
    }


def asked(file: Path | None, *frameworks: str) -> None:
    """As if the environment had asked for the probe when these frameworks were imported."""
    if file is None:
        return
    request.ask(str(file))
    for name in frameworks:
        importlib.import_module(f"msprobe_integrations.{name}.autoload").arm()


def seen(observer: Any = None) -> dict[str, Any]:
    """What the observer that follows now has in memory; closes it."""
    observer = observer or owner.current()
    if observer is None or observer.probe is None:
        return {}
    probe = observer.probe
    observer.close()
    found: dict[str, Any] = {
        "steps": [f.step for f in probe.frames],
        "scalars": {},
        "norms": {},
        "micro": {},
        "entries": {},
        "complete": {},
    }
    for frame in probe.frames:
        found["scalars"][frame.step] = dict(frame.scalars)
        found["complete"][frame.step] = frame.complete
        found["entries"][frame.step] = [entry.name for entry in frame.entries]
        for record in frame.records():
            if hasattr(record.source, "family"):
                found["norms"].setdefault((record.source.family, frame.step, record.name), record.statistics.norm)
                found["micro"].setdefault((record.source.family, frame.step), set()).add(record.source.micro_step)
    found["faults"] = sorted(probe.faults.disabled) if hasattr(probe.faults, "disabled") else []
    return found


def digest(parameters: Iterable[torch.Tensor]) -> str:
    """Of all bits; of DTensors this rank's part."""
    parts = [(p.to_local() if hasattr(p, "to_local") else p).detach().contiguous().view(-1).view(torch.uint8) for p in parameters]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


def deepspeed_on_gloo() -> None:
    """DeepSpeed is imported before ranks are forked, and sums by gloo: its own sums in shared memory wait busily, which on few cores takes
    longer than the training."""
    with contextlib.suppress(ImportError):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fsdp_on_cpu() -> None:
    """Accelerate uses FSDP on accelerators only, and DDP in its place on a CPU, without a word. In its state FSDP is what was asked for."""
    from accelerate import state

    init = state.AcceleratorState.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, plugin

    state.AcceleratorState.__init__ = made  # type: ignore[method-assign]


def ranks(n: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """`job` in n forked processes: with a gloo group, or alone and without one."""
    gc.collect()
    gc.freeze()  # frameworks collect at the start of a training: not what the parent has imported
    if n > 1:
        return run_ranks(n, job, *args, timeout=240)
    context = get_context("fork")
    mine, theirs = context.Pipe(duplex=False)

    def child() -> None:
        mine.close()
        torch.set_num_threads(1)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        theirs.send(job(*args))

    process = context.Process(target=child, daemon=True)
    process.start()
    theirs.close()
    try:
        result = mine.recv() if mine.poll(240) else None
    except EOFError:
        result = None
    process.join(10)
    assert result is not None, f"the job failed, exit code {process.exitcode}; its traceback is above"
    return [result]


def by_hand(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor],
    steps: Sequence[Sequence[Any]],
    optimizer: Any,
    clip: float = 0,
) -> dict[Key, float]:
    """Train a float64 copy: per step the norms of the gradients before clipping, of the parameters before and after, of the moments.

    Args:
        loss: ``(model, batch)`` to the loss of one micro batch.
        steps: micro batches of each step.
        optimizer: ``(parameters)`` to an optimizer.
    """
    model = model.double().train()
    opt = optimizer(model.parameters())
    found: dict[Key, float] = {}
    for number, batches in enumerate(steps):
        for batch in batches:
            (loss(model, batch) / len(batches)).backward()
        named = dict(model.named_parameters())
        for name, p in named.items():
            found["grad_reduced", number, name] = float(p.grad.norm())
            found["param_origin", number, name] = float(p.detach().norm())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        for name, p in named.items():
            found["param_updated", number, name] = float(p.detach().norm())
            for state in ("exp_avg", "exp_avg_sq"):
                found[state, number, name] = float(opt.state[p][state].norm())
        opt.zero_grad()
    return found


def compare(norms: dict[Key, float], reference: dict[Key, float], tolerance: float = 2e-4, families: Sequence[str] = ()) -> int:
    """Every number of the reference was seen and agrees; returns how many were compared."""
    count = 0
    for key, expected in reference.items():
        if families and key[0] not in families:
            continue
        assert key in norms, f"{key} was not seen; seen of it: {sorted(k for k in norms if k[:2] == key[:2])[:5]}"
        assert abs(norms[key] - expected) <= tolerance * abs(expected) + 1e-9, (key, norms[key], expected)
        count += 1
    return count


def files(folder: Path) -> dict[str, bool]:
    """Which of the things that `everything` asks for were written."""
    out = folder / "probe"
    return {
        "dump": bool(list(out.glob("dump/step1/*/dump.json"))),
        "grad_probe": bool(list(out.glob("grad_probe/**/*.csv"))),
        "incident": bool(list(out.glob("incidents/*/**/dump.json"))),
    }


def installed(distribution: str) -> str:
    """Version that runs here, also where PYTHONPATH puts another one before the environment's."""
    return version(distribution)
