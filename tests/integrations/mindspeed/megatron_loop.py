"""Megatron's real training loop with MindSpeed's stand-in or without, one training after the other, each in two ranks of tensor parallelism
that are forked from one import.

python megatron_loop.py KIND FOLDER [SETTINGS FILE ...]

megatron: without MindSpeed; one training without a probe, then one with each of the files, asked for by Megatron's own argument.
mindspeed: the stand-in's adaptor is imported first; one training with what the launch has asked for, then one with each of the files.
faults: a weight that drifts, a module that fails, a replica check with nothing to say, and a probe that comes and goes; prints one line of
JSON with what the ranks have seen.
"""

from __future__ import annotations

import functools
import json
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions

if not hasattr(typing, "override"):  # Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS.parent / "examples" / "megatron"), *(str(TESTS / name) for name in ("frameworks", "training", "deepspeed"))]
ARGUMENTS = ["--tensor-model-parallel-size", "2"]
OWN = [*ARGUMENTS, "--own-step"]
DRIFTING = "decoder.layers.1.input_layernorm.weight"
FAILING = "decoder.layers.1.mlp.linear_fc2"
MORE = 2
"""Iterations that a training goes on for after it was over."""


def train_once(kind: str, file: str) -> None:
    """In a rank."""
    import pretrain_loop

    from msprobe_integrations.autoload import request

    if kind == "megatron":
        pretrain_loop.main([*ARGUMENTS, *(["--msprobe-config", file] if file else [])])
        return
    if file:
        request.forget()
        request.request_probe(file)
    pretrain_loop.main(OWN)


def train_with_fault(file: str, fault: Any, *more: str) -> list[Any]:
    """In a rank: a training with a `Fault` of the harness or None. Returns what Megatron's `train` was called with."""
    import megatron.training.training as training
    import pretrain_loop
    from harness.case import Training, TrainingCase
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from msprobe_integrations.autoload import request
    from msprobe_integrations.megatron.layout import unwrap_model

    if file:
        request.request_probe(file)
        come()
    told = Training(TrainingCase("megatron", parallelism={"tp": 2}, fault=fault), Path())
    if fault is not None and fault.name.startswith("drift"):
        told.step = -1  # Megatron's parameters are compared after the update: that of the step itself spoils them
    original = training.train
    given: list[Any] = []

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        given.extend((args, kwargs))
        told.model(unwrap_model(args[1][0]))
        return original(*args, **kwargs)

    training.train = called
    handle = register_optimizer_step_post_hook(lambda *_: told.updated())
    pretrain_loop.main([*OWN, *more])
    handle.remove()
    training.train = original
    return given


def come() -> None:
    """MindSpeed has been imported without the probe: it comes as one more feature, and MindSpeed asks its features."""
    from mindspeed.features_manager import MindSpeedFeaturesManager
    from mindspeed.megatron_adaptor import ARGS

    from msprobe_integrations.mindspeed import autoload

    autoload.arm()
    (ours,) = [one for one in MindSpeedFeaturesManager.FEATURES_LIST if one.feature_name.startswith("msprobe")]
    assert ours.is_need_apply(ARGS)
    ours.pre_register_patches(None, ARGS)


def replicas(file: str, name: str) -> list[Any]:
    """What the replica check of a training says in which `name` drifts; "": nothing does."""
    from harness.faults import drift
    from harness.run import alerts_in, close

    train_with_fault(file, drift(name) if name else None)
    steps = [frame.step for frame in close()]
    return [steps, alerts_in(Path(file).parent / "probe")]


def incident(file: str) -> None:
    """A training in which a module of the last rank fails; Megatron would end it."""
    from harness.faults import nan_output
    from harness.run import close

    train_with_fault(file, nan_output(FAILING), "--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled")
    close()


def detach(file: str) -> dict[str, Any]:
    """A training without the probe goes on with one that knows everything, which leaves again. What differs then, and whether MindSpeed
    takes its own patch off as ever."""
    import megatron.training.training as training
    import mindspeed.megatron_adaptor  # noqa: F401
    import torch
    from harness.restored import snapshot
    from harness.run import close
    from mindspeed.patch_utils import MindSpeedPatchesManager

    from msprobe_integrations.autoload import request
    from msprobe_integrations.megatron import patches
    from msprobe_integrations.mindspeed import autoload

    args, kwargs = train_with_fault("", None)
    theirs = training.get_args()

    def go_on() -> None:
        training.get_timers()("interval-time").stop()  # goes on running at the end of a loop
        theirs.iteration, theirs.train_iters = theirs.train_iters, theirs.train_iters + MORE
        training.train(*args, **kwargs)

    go_on()  # what a second call sets up by itself
    before = snapshot(*args[1], args[2])
    own = training.train_step
    request.request_probe(file)
    come()
    observer: Any = patches.current()
    observer.setup(args[1], args[2])  # they were built before it came
    over = training.train_step
    state = torch.get_rng_state()
    go_on()
    frames = close()
    request.forget()
    autoload.disarm()
    torch.set_rng_state(state)  # dropout of the training has drawn
    left = before.changed()
    patched = training.train_step
    MindSpeedPatchesManager.remove_patches()
    return {
        "followed": [frame.step for frame in frames],
        "wrapped": over is not own,
        "left": left,
        "patched": patched is own and own.__qualname__.startswith("OwnStep."),
        "bare": (training.train_step.__module__, training.train_step.__qualname__),
    }


def report_faults(folder: Path) -> dict[str, Any]:
    """Everything, each in ranks of its own."""
    from forkpool import run_ranks
    from harness.run import write_settings

    alone: Any = {"monitor": {"gradients": False, "replica_check": {"interval": 1}}, "log_level": "silent"}
    alone["sinks"] = {"memory": True, "csv": {"enabled": True}}
    ring = {"level": "mix", "ring_steps": 3}
    fault = write_settings(folder / "fault", monitor={"gradients": True}, incident=ring, log_level="silent")
    everything = write_settings(folder / "mix", dump={"step": [4, 5], "level": "mix"}, grad_probe={"grad_level": "L1"})
    return {
        "alike": run_ranks(2, replicas, str(write_settings(folder / "alike", **alone)), "", timeout=240),
        "drift": run_ranks(2, replicas, str(write_settings(folder / "drift", **alone)), DRIFTING, timeout=240),
        "fault": run_ranks(2, incident, str(fault), timeout=240),
        "detach": run_ranks(2, detach, str(everything), timeout=240),
    }


def main(kind: str, folder: Path, files: list[str]) -> None:
    """All trainings; what they log comes after the number of the training."""
    import cpu_shim

    sys.argv[1:] = ["--msprobe-config", *files[:1]] if kind == "megatron" else OWN  # else Megatron's parser gets none of our arguments
    cpu_shim.install()
    if kind == "megatron":
        from msprobe_integrations import autoload

        autoload.install()
    else:
        import mindspeed.megatron_adaptor  # type: ignore[import-not-found]  # noqa: F401  # the line that MindSpeed's users have
    import forkpool
    import pretrain_loop  # noqa: F401  # once for all ranks

    if kind == "faults":
        print(f"found {json.dumps(report_faults(folder))}", flush=True)
        return
    for number, file in enumerate(["", *files]):
        print(f"training {number}", flush=True)
        forkpool.run_ranks(2, train_once, kind, file, timeout=150)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
