"""Runs a script of a Megatron-LM checkout, unmodified, on a machine without an accelerator: ``pretrain_runner.py SCRIPT ARGUMENTS``.

It knows nothing of the probe. With LOSSES=FILE every loss that Megatron logs is written there bit by bit, and a hash of all weights after
every step; ``%r`` in the name is the rank.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import typing_extensions

warnings.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]


def main() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0:1] = [str(Path(script).resolve().parent), str(ROOT / "examples" / "megatron")]
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import cpu_shim

    cpu_shim.install()
    import megatron.training.initialize as initialize
    import megatron.training.training as training
    import torch

    torch.set_num_threads(1)
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    initialize._compile_dependencies = lambda: None
    for module in (training, initialize):
        if hasattr(module, "set_jit_fusion_options"):
            module.set_jit_fusion_options = lambda *_, **__: None
    _helpers()
    _record(training)
    runpy.run_path(script, run_name="__main__")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _helpers() -> None:
    """A checkout has its C++ helpers of data sets as sources; the installed megatron-core has them built."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return
    files = importlib.metadata.files("megatron-core") or ()
    built = next(str(file.locate()) for file in files if file.name.startswith("helpers_cpp") and file.suffix == ".so")
    spec = importlib.util.spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _record(training: Any) -> None:
    rank = os.environ.get("RANK", "0")
    file = os.environ.get("LOSSES", "").replace("%r", rank)
    if not file:
        return
    log, step = training.training_log, training.train_step

    @functools.wraps(log)
    def logged(losses: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(file).open("a") as stream:
            stream.write(" ".join(f"{name}={value.detach().double().view(-1)[0].item().hex()}" for name, value in losses.items()) + "\n")
        return log(losses, *args, **kwargs)

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        bits = hashlib.sha256()
        for chunk in args[2]:
            for parameter in chunk.parameters():
                bits.update(parameter.detach().float().contiguous().numpy(force=True).tobytes())  # exact for all dtypes of weights
        with Path(file).open("a") as stream:
            stream.write(f"weights {bits.hexdigest()}\n")
        return result

    training.training_log, training.train_step = logged, stepped


if __name__ == "__main__":
    main()
