"""Megatron's real training loop, some trainings after each other, each in two ranks of tensor parallelism that are forked from one import.

python stand_in_loop.py KIND [SETTINGS FILE ...]

megatron: without MindSpeed; one training without a probe, then one with each of the files, asked for by Megatron's own argument.
mindspeed: the stand-in's adaptor is imported first; one training with what the launch has asked for, then one with each of the files.
"""

from __future__ import annotations

import sys
import typing
from pathlib import Path

import typing_extensions

if not hasattr(typing, "override"):  # Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "examples" / "megatron"), str(ROOT / "tests" / "frameworks")]
ARGUMENTS = ["--tensor-model-parallel-size", "2"]
OWN = [*ARGUMENTS, "--own-step"]


def train(kind: str, file: str) -> None:
    """In a rank."""
    import pretrain_loop

    from msprobe_integrations.autoload import request

    if kind == "megatron":
        pretrain_loop.main([*ARGUMENTS, *(["--msprobe-config", file] if file else [])])
        return
    if file:
        request.forget()
        request.ask(file)
    pretrain_loop.main(OWN)


def main(kind: str, files: list[str]) -> None:
    """All trainings; what they log comes after the number of the training."""
    import cpu_shim

    sys.argv[1:] = OWN if kind == "mindspeed" else ["--msprobe-config", *files[:1]]  # else Megatron's parser gets none of our arguments
    cpu_shim.install()
    if kind == "mindspeed":
        import mindspeed.megatron_adaptor  # type: ignore[import-not-found]  # noqa: F401  # the line that MindSpeed's users have
    else:
        from msprobe_integrations import autoload

        autoload.install()
    import forkpool
    import pretrain_loop  # noqa: F401  # once for all ranks

    for number, file in enumerate(["", *files]):
        print(f"training {number}", flush=True)
        forkpool.run_ranks(2, train, kind, file, timeout=150)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
