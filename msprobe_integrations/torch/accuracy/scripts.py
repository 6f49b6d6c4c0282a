"""How operator scripts are written for torch: names of functions, types and values, and data files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from msprobe_engine import names
from msprobe_engine.accuracy.scripts.literals import CannotWrite
from msprobe_integrations.torch.api_lookup import find

_SPACES: tuple[tuple[str, Any], ...] = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch._VF", torch._VF),
    ("torch._C._nn", torch._C._nn),
)
"""Where scripts find functions, in the order in which they are looked for."""
_FORMATS = ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")
_LAYOUTS = ("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.jagged")


class Call(NamedTuple):
    """See `msprobe_engine.accuracy.scripts.source.Function`."""

    expression: str
    method: str = ""
    imports: tuple[str, ...] = ()


class TorchDialect:
    """See `msprobe_engine.accuracy.scripts.source.Dialect`."""

    framework = "torch"
    suffix = ".pt"

    def function(self, name: names.ApiName) -> Call:
        """The function of a record; only what `find` knows as an operation on tensors, so a script calls nothing else.

        Raises:
            CannotWrite: it is none, or has no name that a script without this package could use.
        """
        function = find(str(name))
        if function is None:
            raise CannotWrite(f"{name.prefix}.{name.api} is no function of torch {torch.__version__}, or none that calculates with tensors")
        if name.prefix == "Tensor":
            return Call(f"torch.Tensor.{name.api}", name.api)
        first = {"Functional": 0, "Torch": 1}.get(name.prefix, len(_SPACES))
        for expression, space in (*_SPACES[first : first + 1], *_SPACES):
            if getattr(space, name.api, None) is function:
                return Call(f"{expression}.{name.api}")
        for expression, space in (("torch.ops.aten", torch.ops.aten),):
            if getattr(space, name.api, None) == function:
                return Call(f"{expression}.{name.api}")
        raise CannotWrite(
            f"{name.prefix}.{name.api} is a function that is registered here and has no name in torch; write its call by hand"
        )

    def dtype(self, name: str) -> str | None:
        """``torch.float32`` of ``torch.float32`` and of a numpy array's ``Float32``."""
        plain = name.removeprefix("torch.").lower()
        return f"torch.{plain}" if isinstance(getattr(torch, plain, None), torch.dtype) else None

    def raises(self, name: str) -> bool:
        """Floating point and complex types."""
        return self.differentiable(name)

    def differentiable(self, name: str) -> bool:
        """Floating point and complex types."""
        kind = getattr(torch, name.removeprefix("torch.").lower(), None)
        return isinstance(kind, torch.dtype) and (kind.is_floating_point or kind.is_complex)

    def special(self, kind: str, item: Mapping[str, Any]) -> str | None:
        """Types, sizes, memory formats, layouts and devices."""
        value = item.get("value")
        if kind == "torch.dtype" and isinstance(value, str):
            found = self.dtype(value)
            return f"dtype({found})" if found and self.raises(value) else found
        if kind == "torch.Size" and isinstance(value, list) and all(type(n) is int for n in value):
            return f"torch.Size({value!r})"
        if kind == "torch.memory_format" and item.get("format") in _FORMATS:
            return f"torch.{item['format']}"
        if kind == "torch.layout" and value in _LAYOUTS:
            return str(value)
        return "device" if kind == "torch.device" else None

    def support(self) -> str:
        """Text of the support module."""
        return files("msprobe_integrations.torch.accuracy").joinpath("script_support.py").read_text("utf-8")

    def data(self, tensor: Any) -> bytes:
        """A tensor as a ``.pt`` file of its own storage."""
        buffer = io.BytesIO()
        torch.save(tensor.detach().clone(), buffer)
        return buffer.getvalue()
