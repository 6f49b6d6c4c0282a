"""How operator scripts are written for torch: names of functions, types and values, and data files."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from msprobe_engine.accuracy.scripts.literals import CannotWrite
from msprobe_engine.accuracy.scripts.source import MARK
from msprobe_engine.core import names
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy.resolve import resolve

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
_MAIN = 'if __name__ == "__main__":'
_FORMATS = ("preserve_format", "contiguous_format", "channels_last", "channels_last_3d")
_LAYOUTS = ("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "torch.jagged")


class Call(NamedTuple):
    """See `msprobe_engine.accuracy.scripts.source.Function`."""

    expression: str
    method: str = ""
    imports: tuple[str, ...] = ()


def _build_imported_call(base: str, function: Any) -> Call:
    """A registered function by the module that has it."""
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    plain = all(part.isidentifier() for part in (*module.split("."), name))
    if not plain or getattr(sys.modules.get(module), name, None) is not function or module == "__main__":
        raise CannotWrite(f"{base} is a function that no module has under its name; write its call by hand")
    return Call(f"{module}.{name}", "", (module,))


class TorchDialect:
    """See `msprobe_engine.accuracy.scripts.source.Dialect`."""

    framework = "torch"
    suffix = ".pt"
    says_gradients = True
    tuples = False

    def function(self, name: names.ApiName) -> Call:
        """The function of a record: only what the pre-check would run, so a script calls nothing else.

        Raises:
            CannotWrite: it would not, and why; or it has no name that a script without this package could use.
        """
        base = f"{name.prefix}.{name.api}"
        try:
            functions = resolve(base).functions
        except CannotRun as error:
            raise CannotWrite(str(error)) from None
        if not functions:
            raise CannotWrite(f"{base} has a formula for the bench here, and no function")
        kind, _, api = base.partition(".")
        if kind == "Tensor":
            return Call(f"torch.Tensor.{api}", api)
        if kind == "NPU":
            return Call(f"torch_npu.{api}", "", ("torch_npu",))
        if kind == "Aten":
            return Call(f"torch.ops.aten.{api}")
        plain = api.rpartition(".")[2]
        first = {"Functional": 0, "Torch": 1}.get(kind, len(_SPACES))
        for expression, space in (*_SPACES[first : first + 1], *_SPACES):
            if getattr(space, plain, None) is functions[0]:
                return Call(f"{expression}.{plain}")
        return _build_imported_call(base, functions[0])

    def explain_refusal(self, name: names.ApiName, record: Mapping[str, Any]) -> str | None:
        """Dropout that drops something."""
        args, kwargs = record.get("input_args"), record.get("input_kwargs")
        named = dict(kwargs) if isinstance(kwargs, Mapping) else {}
        if "dropout" in name.api and isinstance(args, list):
            named = dict(zip(("input", "p", "training"), args)) | named
        share, training = (item.get("value") if isinstance(item := named.get(key), Mapping) else None for key in ("p", "training"))
        given = named.get("dropout_p")
        share = given.get("value") if isinstance(given, Mapping) else share
        drops = ("dropout" in name.api or given is not None) and share not in (0, 0.0) and training is not False
        return "draws random numbers: no two devices draw the same" if drops else None

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
            text = self.dtype(value)
            return f"dtype({text})" if text and self.raises(value) else text
        if kind == "torch.Size" and isinstance(value, list) and all(type(n) is int for n in value):
            return f"torch.Size({value!r})"
        if kind == "torch.memory_format" and item.get("format") in _FORMATS:
            return f"torch.{item['format']}"
        if kind == "torch.layout" and (value is None or value in _LAYOUTS):
            return str(value or _LAYOUTS[0])
        return "device" if kind == "torch.device" else None

    def support(self) -> str:
        """Texts of the support module and of the verdict."""
        support, verdict = (files(__package__).joinpath(f"{part}.py").read_text("utf-8") for part in ("support", "verdict"))
        head, main, tail = support.partition(_MAIN)
        return f"{head.rstrip()}\n\n\n{MARK}{verdict.partition(MARK)[2].strip()}\n\n\n{main}{tail}"

    def data(self, tensor: Any) -> bytes:
        """A tensor as a ``.pt`` file of its own storage."""
        buffer = io.BytesIO()
        torch.save(tensor.detach().clone(), buffer)
        return buffer.getvalue()
