"""What stands for an object of a pickle that was not made: its class by name, what it was called with, and its state.

Names are compared with a list and never imported. A name that is not on the list is refused although nothing of it would run: a
checkpoint that holds one was made by code of its own, or to do harm to those who load it with ``torch.load``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_NAMESPACES = frozenset({
    "accelerate", "apex", "argparse", "bitsandbytes", "collections", "copyreg", "dataclasses", "datasets", "datetime", "decimal",
    "deepspeed", "diffusers", "enum", "fractions", "hydra", "lightning", "lightning_fabric", "megatron", "mindformers",
    "mindspeed", "mindspeed_llm", "mindspeed_mm", "modellink", "modelscope", "msadapter", "nemo", "numpy", "omegaconf", "pathlib",
    "peft", "pytorch_lightning", "random", "safetensors", "tokenizers", "torch", "torch_npu", "torchao", "torchdata",
    "torchmetrics", "torchtitan", "torchvision", "transformer_engine", "transformers", "trl", "types", "uuid", "zoneinfo",
})  # fmt: skip
"""Packages whose objects checkpoints hold: arguments, enumerations, schedulers, optimizers, data types."""
_NAMES = frozenset(
    {
        "builtins.bool",
        "builtins.bytearray",
        "builtins.bytes",
        "builtins.complex",
        "builtins.dict",
        "builtins.float",
        "builtins.frozenset",
        "builtins.getattr",
        "builtins.int",
        "builtins.list",
        "builtins.object",
        "builtins.range",
        "builtins.set",
        "builtins.slice",
        "builtins.str",
        "builtins.tuple",
        "builtins.type",
        "builtins.NoneType",
        "builtins.Ellipsis",
        "_codecs.encode",
        "functools.partial",
        "signal.Signals",  # of Megatron's arguments
    }
)
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections", "UserList": "collections"}
"""Of Python 2, as `pickle` maps them."""


class Named(NamedTuple):
    """A class, function or constant that a pickle names: ``torch.bfloat16``, ``argparse.Namespace``."""

    name: str

    def __str__(self) -> str:
        return self.name


class _Nothing(dict[Any, Any]):
    """A mapping without items that all objects share which have none: a checkpoint has hundreds of thousands."""

    __hash__ = object.__hash__  # type: ignore[assignment]


_NOTHING: Mapping[Any, Any] = _Nothing()


@dataclass(eq=False, slots=True)
class Inert:
    """An object that was not made.

    Attributes:
        cls: its class, or the function that would make it: ``argparse.Namespace``.
        args, keywords: what that would be called with.
        state: what would be set on it then; mostly a dict of attributes, or a pair of two of them (the second: slots).
        items: of a mapping.
        elements: of a list.
    """

    cls: str
    args: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = _NOTHING
    state: Any = None
    items: Mapping[Any, Any] = _NOTHING
    elements: Sequence[Any] = ()

    def append_all(self, elements: list[Any]) -> None:
        """More elements of a list."""
        if isinstance(self.elements, list):
            self.elements.extend(elements)
        else:
            self.elements = elements

    def set_all(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """More items of a mapping."""
        if self.items is _NOTHING:
            self.items = {}
        self.items.update(pairs)  # type: ignore[attr-defined]

    def __repr__(self) -> str:  # its parts may be nested without end
        return f"<{self.cls}>"


def full_name(module: str, name: str) -> str:
    """``module.name`` with today's name of the module."""
    return f"{_OLD_MODULES.get(module, module)}.{name}"


def is_known(name: str, trust: Iterable[str] = ()) -> bool:
    """Whether checkpoints hold objects of this name (``module.Class``), or it is trusted by itself or with its module."""
    if name in _NAMES or (name.partition(".")[0] in _NAMESPACES and "." in name):
        return True
    return any(name == trusted or name.startswith(trusted + ".") for trusted in trust)


def attributes(value: Any) -> dict[str, Any]:
    """What an object holds by name: the items of a dict, the attributes (and items) of an `Inert`; nothing of anything else."""
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    if not isinstance(value, Inert):
        return {}
    found: dict[str, Any] = dict(value.keywords)
    for state in value.state if isinstance(value.state, tuple) else (value.state,):
        if isinstance(state, dict):
            found |= {str(key): item for key, item in state.items()}
    return found | {str(key): item for key, item in value.items.items()}
