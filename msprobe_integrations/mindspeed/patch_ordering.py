"""MindSpeed's patches and our wrappers, whichever come first.

MindSpeed replaces functions of Megatron when its adaptor is imported, and again with `repatch`: it remembers what it found, sets what it
made of that, and sweeps it into every module that has the old one. A wrapper of ours that it finds would be remembered as Megatron's
function, lost where a patch replaces it, and one on top of a patch would keep that patch from being removed. So ours are taken off
while it works and put on again, on top, when it is done: it never sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_integrations.autoload.imports import after_import, forget
from msprobe_integrations.megatron import patches
from msprobe_integrations.patching import Patches

_log = get_logger()
_depth = 0
_said: set[str] = set()
_patches = Patches()
_SCHEDULES = "megatron.core.pipeline_parallel.schedules."
_NUMBERS = "the number of the micro batch: records of a step have no micro_step"
DEGRADED = {
    _SCHEDULES + "forward_backward_pipelining_without_interleaving": _NUMBERS,
    _SCHEDULES + "forward_backward_pipelining_with_interleaving": _NUMBERS,
    _SCHEDULES + "forward_step": _NUMBERS,
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": "optimizer states (their tensors are on the host between steps)",
    "megatron.core.optimizer.optimizer.MixedPrecisionOptimizer.prepare_grads": "the optimizer's fp32 copies (it keeps none: they share "
    "memory with the parameters)",
    "mindspeed.core.optimizer.adamw.AdamW.step": "optimizer states (they may be on the host, or packed)",
}
"""Functions that a feature of MindSpeed may put its own in place of, and what may then be missing or wrong in what the probe shows."""


def watch(module: ModuleType) -> None:
    """`mindspeed.patch_utils` has been imported: be out of the way whenever its manager puts patches on or takes them off."""
    manager: Any = getattr(module, "MindSpeedPatchesManager", None)
    for name in ("apply_patches", "remove_patches"):
        stay_away(manager, name, lambda: say_degraded(getattr(manager, "patches_info", {})))


def watch_features(manager: Any) -> None:
    """And while features register their patches: a function that they keep then, to call it in theirs, is Megatron's."""
    for name in ("apply_features_pre_patches", "apply_features_patches"):
        stay_away(manager, name)


def stay_away(manager: Any, name: str, then: Callable[[], None] | None = None) -> None:
    """Let the class or static method `name` of `manager` run with `ours_off`, and call `then` after it."""

    def with_ours_off(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with ours_off():
            result = original(*args, **kwargs)
        if then is not None:
            _safely(then)
        return result

    _patches.around(manager, name, with_ours_off)


def put_back() -> None:
    """Every method that `stay_away` has replaced is MindSpeed's own again."""
    _patches.undo()


@contextmanager
def ours_off() -> Iterator[None]:
    """Megatron's functions are as without the probe inside; nested blocks count as one."""
    global _depth
    _depth += 1
    try:
        if _depth == 1:
            _safely(_off)
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            _safely(_on)


def _off() -> None:
    """Also what MindSpeed imports meanwhile stays as Megatron has it."""
    for name, hook in patches.hooks():
        forget(name, hook)
    patches.unwrap()


def _on() -> None:
    """Wrap what is there now, and wait for the rest."""
    for name, hook in patches.hooks():
        after_import(name, hook)


def say_degraded(registered: Mapping[str, Any]) -> None:
    """Name what suffers from functions that MindSpeed has replaced (not only decorated), once each.

    Args:
        registered: name of a function to MindSpeed's `Patch` of it.
    """
    for path, patch in registered.items():
        function = getattr(patch, "patch_func", None)
        if path in DEGRADED and function is not None and path not in _said:
            _said.add(path)
            where = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
            _log.warning("MindSpeed puts %s in place of %s; what may suffer: %s", where, path, DEGRADED[path])


def _safely(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        raise_of_training(error)
        if "" not in _said:
            _said.add("")
            _log.error("the probe may miss events of the training, which goes on: %s: %s", type(error).__name__, error)
