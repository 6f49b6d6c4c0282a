"""Passes of pipeline stages that are no training: before its first step a stage of ``torch.distributed.pipelining`` runs its module once
on memory without values, to learn the shapes that it will receive. They count as no micro batch, and what is in them is no NaN of the
training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.patching import FunctionPatch, shared_patch

_STAGES = "torch.distributed.pipelining.stage"
_METHODS = ("_prepare_forward_infra", "_prepare_backward_infra")
"""The methods of stages in which it happens, torch 2.4 to 2.13; the functions that they call have other names in each version."""


class StagePreparation:
    """Pauses a probe while a stage prepares itself."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._patches: list[FunctionPatch] = []

    def install(self) -> None:
        """Look at all classes of stages, when anybody has imported them; again is fine."""
        stages = sys.modules.get(_STAGES)
        if stages is None or self._patches:
            return
        for cls in {value for value in vars(stages).values() if isinstance(value, type) and value.__module__ == _STAGES}:
            for name in _METHODS:
                if name in vars(cls):
                    patch = shared_patch(cls, name)
                    patch.add(self._prepare)
                    self._patches.append(patch)

    def remove(self) -> None:
        """The methods are torch's own again."""
        for patch in self._patches:
            patch.discard(self._prepare)
        self._patches.clear()

    def _prepare(self, following: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._probe.guard("pause"):
            self._probe.pause()
        try:
            return following(*args, **kwargs)
        finally:
            with self._probe.guard("pause"):
                self._probe.resume()
