"""Which MindSpore this is, and whether it can work here at all. Imports nothing of it before `check`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from types import ModuleType
from typing import Any

from msprobe_engine.core import log
from msprobe_engine.core.errors import MissingExtraError, ProbeError
from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.requirements import make_missing_error

_LAST_FOR_NUMPY_1 = (2, 10)
"""Newest version known to be compiled for numpy 1, whatever its package says."""


class MindSporeError(ProbeError):
    """MindSpore is there, but cannot work in this environment."""


def check() -> None:
    """Can MindSpore be imported and used here? Cheap; called before the first import of it.

    Raises:
        MissingExtraError: it is not installed.
        MindSporeError: it was compiled for numpy 1 and numpy 2 is installed: its first operation with a Python number would end in a
            ``SystemError``, and numpy scalars would never be taken.
    """
    installed = _read_version("mindspore")
    if installed is None and importlib.util.find_spec("mindspore") is None:
        raise MissingExtraError("mindspore", "mindspore", "msprobe.mindspore")
    numpy = _read_version("numpy")
    if installed is None or numpy is None:
        return
    if _numbers(installed)[:2] <= _LAST_FOR_NUMPY_1 and _numbers(numpy)[:1] >= (2,):
        raise MindSporeError(
            f"mindspore {installed} was compiled for numpy 1 and does not work with the installed numpy {numpy}: pip install 'numpy<2'"
        )


@lru_cache(maxsize=1)
def version() -> tuple[int, ...]:
    """``(2, 10, 0)`` for 2.10.0 and 2.10.0rc1."""
    import mindspore

    return _numbers(str(mindspore.__version__))


@lru_cache(maxsize=1)
def api_module() -> ModuleType:
    """The module that holds ``_pynative_executor``, ``jit`` and ``_no_grad``: ``mindspore.graph.api`` (2.9 and later), else
    ``mindspore.common.api``. What is assigned to the latter in 2.9 changes nothing, it is only an alias."""
    try:
        return importlib.import_module("mindspore.graph.api")
    except ModuleNotFoundError:
        return importlib.import_module("mindspore.common.api")


def no_grad() -> AbstractContextManager[Any]:
    """What runs inside is not recorded for gradients."""
    context: AbstractContextManager[Any] = api_module()._no_grad()
    return context


def warn_of_sink_mode(callback: str, parameters: Mapping[str, Any]) -> None:
    """Say once that with ``dataset_sink_mode`` the loop runs beneath Python, and all steps of an epoch look like one to `callback`.

    Args:
        parameters: ``run_context.original_args()``; as an attribute, what it lacks would be a KeyError in the training.
    """
    for name in ("dataset_sink_mode", "batch_num"):
        if name not in parameters:
            make_missing_error(f"original_args().{name}", f"{callback} says when dataset_sink_mode makes one step of an epoch")
            return
    if parameters["dataset_sink_mode"] and parameters["batch_num"] > 1:
        log.warn_once(
            f"{callback} sink mode",
            f"{callback}: with dataset_sink_mode=True all steps of an epoch are one step; use False to tell them apart",
        )


def adapter() -> bool:
    """Is what the program calls torch really MindSpore (MSAdapter, MindSpeed-Core-MS)? Told by its tensors; torch is never imported to
    find out, so the answer holds for what is imported by now."""
    torch, mindspore = sys.modules.get("torch"), sys.modules.get("mindspore")
    if torch is None or mindspore is None:
        return False
    kind = getattr(torch, "Tensor", None)
    if isinstance(kind, type) and issubclass(kind, mindspore.Tensor):
        return True
    # PyTorch's own class rests on its C part; nothing is made with it, which could start a device
    own = isinstance(kind, type) and any(base.__module__ == "torch._C" for base in kind.__mro__)
    return not own and _made_by_mindspore(torch, mindspore)


def _made_by_mindspore(torch: Any, mindspore: Any) -> bool:
    try:
        return isinstance(torch.tensor(0.0), mindspore.Tensor)
    except Exception as error:  # whatever calls itself torch
        raise_of_training(error)
        return False


def _read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


__all__ = ["MindSporeError", "adapter", "api_module", "check", "no_grad", "version"]
