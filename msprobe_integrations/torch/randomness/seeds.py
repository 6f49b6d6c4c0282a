"""`seed_all`: the same random numbers and deterministic kernels in every run. `random_save`: where random numbers are drawn."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_integrations.torch.hooks.functions import Rebinding, compiled_as
from msprobe_integrations.torch.randomness.calls import RECURRENT, RandomLog, watch

_log = get_logger()
_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_NPU = {"HCCL_DETERMINISTIC": "True", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1", "ATB_LLM_LCOC_ENABLE": "0"}
_undo: list[Callable[[], None]] = []


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False, is_enhanced: bool = False) -> None:
    """Seed Python, numpy and torch (all devices) and choose deterministic algorithms. Call it before the model is made.

    Variables of the environment that go with it: ``PYTHONHASHSEED``; with a CUDA GPU ``CUBLAS_WORKSPACE_CONFIG``; with an NPU
    ``HCCL_DETERMINISTIC``, ``LCCL_DETERMINISTIC``, ``CLOSE_MATMUL_K_SHIFT``, ``ATB_LLM_LCOC_ENABLE``. With a CUDA GPU cuDNN is
    told to be deterministic and not to try algorithms.

    Args:
        seed: 0 .. 2**32 - 1.
        mode: use deterministic algorithms (``torch.use_deterministic_algorithms``).
        rm_dropout: dropout functions and modules pass their input through.
        is_enhanced: every call of a random function starts from the state that `seed` makes, so that its numbers do not depend on
            how many were drawn before. Seeds set later by the program have no effect on these calls. Calls with a generator of
            their own are left alone.

    `undo_seed_all` takes all of it back but the states of the generators.

    Raises:
        UsageError: a value is of the wrong type or out of range; nothing has been changed then.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise UsageError(f"seed_all: seed is {seed!r}; allowed: an int from 0 to 4294967295")
    for name, value in (("mode", mode), ("rm_dropout", rm_dropout), ("is_enhanced", is_enhanced)):
        if not isinstance(value, bool):
            raise UsageError(f"seed_all: {name} is {value!r}; allowed: True or False")
    npu = _npu()
    if not _undo:
        _remember()
    random.seed(seed)
    np.random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)  # for processes that are started from here; this one has its hashes
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(mode)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        os.environ.update(_CUDA)
    if npu is not None:
        npu.manual_seed_all(seed)
        os.environ.update(_NPU)
    if is_enhanced:
        watch.fix(seed)
        _log.info("seed_all: every call of a random function starts from the state of seed %d", seed)
    if rm_dropout:
        watch.beneath(remove)
        _log.info("seed_all: dropout passes its input through")


def undo_seed_all() -> None:
    """Take back what `seed_all` changed: dropout drops again, random functions go on from call to call, and the choice of
    algorithms and the environment are as before the first call. Nothing happens when there was none."""
    watch.beneath(restore)
    watch.fix(None)
    while _undo:
        _undo.pop()()


def random_save(output_path: str | Path = "./output") -> None:
    """Write every call of a random function from now on, with its call stack, to
    ``{output_path}/random_{rank|proc}{id}_{yyyymmddHHMMSS}.csv``: two runs that should draw the same numbers must have the same list.

    `random_save_end` ends it; a second call begins a new file.

    Raises:
        UsageError: `output_path` is no path.
        SinkError: the file cannot be created.
    """
    if not isinstance(output_path, (str, Path)):
        raise UsageError(f"random_save: output_path is {output_path!r}; allowed: a string or a Path")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    log = RandomLog(Path(output_path), torch.distributed.get_rank() if distributed else None)
    watch.list_calls(log)
    _log.info("random_save: calls of random functions are listed in %s", log.path)


def random_save_end() -> None:
    """End `random_save`; nothing happens when it is not on."""
    watch.list_calls(None)


def _npu() -> Any:
    """``torch.npu`` where there is an NPU, else None. Torch imports an installed torch_npu by itself; nobody does it here."""
    npu = getattr(torch, "npu", None)
    return npu if npu is not None and npu.is_available() else None


def _remember() -> None:
    environment = {name: os.environ.get(name) for name in ("PYTHONHASHSEED", *_CUDA, *_NPU)}
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def restore() -> None:
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])

    _undo.append(restore)


_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_patches = Rebinding()


def remove() -> None:
    """Dropout passes its input through: ``F.dropout`` and its relatives (``nn.Dropout`` and the other modules call them), the
    attention dropout of ``F.scaled_dot_product_attention``, and the dropout between the layers of recurrent modules."""
    if _patches:
        return
    for name in _FUNCTIONS:
        _patches.wrap(functional, name, _disable_dropout)
    _patches.wrap(functional, "scaled_dot_product_attention", _attention)
    for name in RECURRENT:
        _patches.wrap(torch._VF, name, _recurrent)
    _patches.early_imports()


def restore() -> None:
    """Dropout drops again."""
    _patches.undo()


def _disable_dropout(original: Any) -> Any:
    @functools.wraps(original)
    def call_without_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if p < 0.0 or p > 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        return original(input, p=0.0, training=training, inplace=inplace)

    return compiled_as(call_without_dropout, _return_input)


def _return_input(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    """What a compiled dropout becomes."""
    return input


def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return original(query, key, value, attn_mask, min(dropout_p, 0.0), *args, **kwargs)  # a negative one is an error as before

    return attention


def _recurrent(original: Any) -> Any:
    @functools.wraps(original)
    def recurrent(*args: Any, **kwargs: Any) -> Any:
        # the dropout between layers is the only float among the arguments; its place differs for packed sequences
        return original(
            *(0.0 if isinstance(argument, float) else argument for argument in args),
            **{**kwargs, **({"dropout": 0.0} if "dropout" in kwargs else {})},
        )

    return recurrent
