"""From the name of a record back to the torch function: ``Functional.linear.0.forward`` -> ``torch.nn.functional.linear``.

A dump is not trusted. Only functions that torch itself lists as operations on tensors (`torch.overrides.get_overridable_functions`)
are found: none that reads a file, unpickles, compiles or loads anything.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import get_overridable_functions

_NOT = frozenset(
    (
        "from_file",
        "load",
        "save",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "backward",
        "share_memory_",
        "requires_grad_",
        "numpy",
    )
)
"""Listed there, and no computation (or one that touches files)."""
_OPERATORS = frozenset(dir(operator)) | {f"__{prefix}{name.strip('_')}__" for name in dir(operator) for prefix in ("", "r", "i")}
_SPACES: dict[str, Any] = {"Functional": torch.nn.functional, "Torch": torch, "Tensor": torch.Tensor, "VF": torch._VF}


@lru_cache(maxsize=1)
def _known() -> frozenset[int]:
    """Identities of all functions that are operations; they live as long as torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return frozenset(id(function) for functions in get_overridable_functions().values() for function in functions)


def find(record: str) -> Callable[..., Any] | None:
    """The function of a forward record of an API; None when it is not known or no operation on tensors."""
    parts = record.split(".")
    space = _SPACES.get(parts[0])
    if space is None or len(parts) != 4 or not parts[1].isidentifier() or parts[1] in _NOT:
        return None
    name = parts[1]
    if name.startswith("__") and name not in _OPERATORS:
        return None
    function = getattr(space, name, None)
    if parts[0] == "VF":  # the functions behind torch's own
        function = getattr(torch, name, None)
    if not callable(function) or isinstance(function, type):
        return None
    return function if id(function) in _known() or (parts[0] == "Tensor" and _is_operator(name)) else None


def _is_operator(name: str) -> bool:
    """Operators of tensors are methods that are made anew for each look; all of them are operations."""
    return name in _OPERATORS and name.startswith("__")


def is_api(record: str) -> bool:
    """Is this a forward call of an API: ``{type}.{name}.{number}.forward``, neither a module nor communication?"""
    parts = record.split(".")
    return len(parts) == 4 and parts[3] == "forward" and parts[0] not in ("Module", "Cell", "Distributed", "MintDistributed")
