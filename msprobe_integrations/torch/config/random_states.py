"""Random calls and random states of a torch process, for a pack of the config check."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from msprobe_engine.config.collect.random_calls import RandomCalls
from msprobe_integrations.autoload.imports import after_import, before_import
from msprobe_integrations.torch.hooks.frames import PLUMBING, kind_of
from msprobe_integrations.torch.hooks.functions import Rebinding
from msprobe_integrations.torch.randomness.calls import TENSOR, TORCH
from msprobe_integrations.torch.tensors.devices import in_use, is_capturing, kinds

_SEEDING = ("manual_seed", "seed", "set_rng_state")
_DEVICE_SEEDING = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
_DROPS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_ALWAYS_FUNCTIONAL = ("gumbel_softmax",)
_COMPILER = "torch._dynamo"
_TRACKERS = ("megatron.core.tensor_parallel.random",)
"""Modules with ``get_cuda_rng_tracker``; looked up among those that are loaded, never imported."""


def _drops(input: Any, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return bool(training) and p > 0


def _drops_in_torch(input: Any, p: float = 0.0, train: bool = False, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return bool(train) and p > 0


def _attends(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:  # noqa: ARG001
    return dropout_p > 0


class TorchRandomCalls:
    """The record of this process, and the wrappers that make it."""

    def __init__(self) -> None:
        self.record = RandomCalls(lambda code: kind_of(code) == PLUMBING, torch.compiler.is_compiling)
        self._patches = Rebinding()

    def start(self) -> None:
        """Replace the functions, also where they were imported by name; nothing happens when they are replaced already."""
        self.record.on = True
        if self._patches:
            return
        before_import(_COMPILER, self._patches.undo)
        after_import(_COMPILER, self._beside_compiler)
        if _COMPILER not in sys.modules:
            self._replace()

    def _beside_compiler(self, module: Any) -> None:
        """The compiler knows functions of torch by identity, and makes its tables of the names it finds: they are made of the originals."""
        rules = getattr(sys.modules.get(f"{module.__name__}.trace_rules"), "get_torch_obj_rule_map", None)
        if rules is not None:
            rules()
        if self.record.on and not self._patches:
            self._replace()

    def _replace(self) -> None:
        replace, record = self._patches.wrap, self.record
        record.replace_all(replace)

        def each(owner: Any, prefix: str, names: tuple[str, ...], draws: Callable[..., bool] | None = None) -> None:
            for name in names:
                replace(owner, name, functools.partial(record.wrapped, f"{prefix}.{name}", draws=draws))

        each(torch, "torch", TORCH)
        each(torch, "torch", _SEEDING)
        each(torch, "torch", ("dropout", "alpha_dropout", "feature_dropout", "native_dropout"), _drops_in_torch)
        each(torch.Tensor, "torch.Tensor", TENSOR)
        each(functional, "torch.nn.functional", _DROPS, _drops)
        each(functional, "torch.nn.functional", _ALWAYS_FUNCTIONAL)
        each(functional, "torch.nn.functional", ("scaled_dot_product_attention",), _attends)
        for kind in kinds():
            if (module := getattr(torch, kind, None)) is not None:
                each(module, f"torch.{kind}", _DEVICE_SEEDING)
        self._patches.early_imports()

    def stop(self) -> None:
        """Put the functions back; what was recorded stays."""
        self.record.stop()
        self._patches.undo()


def states() -> dict[str, str]:
    """Digests of the states of all random streams of this process: ``python``, ``numpy``, ``torch``, of every device that is in use
    ``cuda:0`` and so on, and the streams of Megatron's tracker by name. Equal states have equal digests."""
    found = {
        "python": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(_text(np.random.get_state(legacy=False)).encode()),
    }
    with torch._C.DisableTorchFunction():
        found["torch"] = _of_tensor(torch.get_rng_state())
        for kind, module in in_use():
            if is_capturing(kind):
                continue
            for number, state in enumerate(module.get_rng_state_all()):
                found[f"{kind}:{number}"] = _of_tensor(state)
        for name in _TRACKERS:
            tracker = getattr(sys.modules.get(name), "get_cuda_rng_tracker", None)
            streams = tracker().get_states() if tracker is not None else {}
            found.update({f"tracker:{stream}": _of_tensor(state) for stream, state in streams.items() if isinstance(state, torch.Tensor)})
    return found


def _text(state: Any) -> str:
    if isinstance(state, dict):
        return " ".join(f"{name} {_text(value)}" for name, value in sorted(state.items()))
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def _of_tensor(state: torch.Tensor) -> str:
    return _digest(state.cpu().numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
