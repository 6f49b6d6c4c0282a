"""Megatron's real training loop with MindSpeed's stand-in, in two ranks of tensor parallelism: a weight that drifts, a module that fails,
a replica check with nothing to say, and a probe that comes and goes. Prints one line of JSON with what the ranks have seen.

python loop_cells_job.py FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import stand_in_loop

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "integrations"), str(TESTS / "frameworks")]
DRIFTING = "decoder.layers.1.input_layernorm.weight"
FAILING = "decoder.layers.1.mlp.linear_fc2"
MORE = 2
"""Iterations that a training goes on for after it was over."""


def train(file: str, eye: Any, *more: str) -> list[Any]:
    """In a rank: a training with these arguments that `eye` is told of. Returns what Megatron's `train` was called with."""
    import megatron.training.training as training
    import pretrain_loop
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from msprobe_integrations.autoload import request
    from msprobe_integrations.megatron.layout import unwrapped

    if file:
        request.ask(file)
        come()
    original = training.train
    given: list[Any] = []

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        given.extend((args, kwargs))
        eye.begins(unwrapped(args[1][0]))
        return original(*args, **kwargs)

    training.train = called
    handle = register_optimizer_step_post_hook(lambda *_: eye.updated())
    pretrain_loop.main([*stand_in_loop.OWN, *more])
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
    from trainer_cells import alerts_in, close
    from trainer_eyes import Drift, Eye

    eye = Drift(name) if name else Eye()
    eye.step = -1  # Megatron's parameters are compared after the update: that of the step itself spoils them
    train(file, eye)
    steps = [frame.step for frame in close()]
    return [steps, alerts_in(Path(file).parent / "probe")]


def incident(file: str) -> None:
    """A training in which a module of the last rank fails; Megatron would end it."""
    from trainer_cells import close
    from trainer_eyes import Plant

    train(file, Plant(FAILING), "--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled")
    close()


def detach(file: str) -> dict[str, Any]:
    """A training without the probe goes on with one that knows everything, which leaves again. What differs then, and whether MindSpeed
    takes its own patch off as ever."""
    import megatron.training.training as training
    import mindspeed.megatron_adaptor  # noqa: F401
    import torch
    from mindspeed.patch_utils import MindSpeedPatchesManager
    from restored import snapshot
    from trainer_cells import close
    from trainer_eyes import Eye

    from msprobe_integrations.autoload import request
    from msprobe_integrations.megatron import patches
    from msprobe_integrations.mindspeed import autoload

    args, kwargs = train("", Eye())
    theirs = training.get_args()

    def go_on() -> None:
        training.get_timers()("interval-time").stop()  # goes on running at the end of a loop
        theirs.iteration, theirs.train_iters = theirs.train_iters, theirs.train_iters + MORE
        training.train(*args, **kwargs)

    go_on()  # what a second call sets up by itself
    before = snapshot(*args[1], args[2])
    own = training.train_step
    request.ask(file)
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


def main(folder: Path) -> None:
    """Everything, each in ranks of its own."""
    sys.argv[1:] = stand_in_loop.OWN
    import cpu_shim

    cpu_shim.install()
    import mindspeed.megatron_adaptor  # noqa: F401  # the line that MindSpeed's users have
    from forkpool import run_ranks
    from trainer_cells import files
    from trainer_checks import config

    given = files(folder)
    alone: Any = {"monitor": {"gradients": False, "replica_check": {"interval": 1}}, "log_level": "silent"}
    alone["sinks"] = {"memory": True, "csv": {"enabled": True}}
    found = {
        "alike": run_ranks(2, replicas, str(config(folder / "alike", **alone)), "", timeout=120),
        "drift": run_ranks(2, replicas, str(config(folder / "drift", **alone)), DRIFTING, timeout=120),
        "fault": run_ranks(2, incident, str(given["fault"]), timeout=120),
        "detach": run_ranks(2, detach, str(given["mix"]), timeout=120),
    }
    print(f"found {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
