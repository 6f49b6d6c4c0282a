"""How operator scripts are written for MindSpore: names of functions, types and values, and data files."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.accuracy.scripts.literals import CannotWrite
from msprobe_engine.accuracy.scripts.source import MARK
from msprobe_engine.core import names
from msprobe_engine.core.dtypes import plain_name
from msprobe_integrations.mindspore.capture.api_names import Api, apis
from msprobe_integrations.mindspore.op_tools.accuracy.arguments import Tensor, type_of
from msprobe_integrations.mindspore.op_tools.accuracy.execute import FLOATS, array_of
from msprobe_integrations.mindspore.op_tools.free_benchmark.calls import left_out

_INCLUDED = ("core/dtypes.py", "accuracy/verdict/rounding.py", "accuracy/verdict/condition.py")
_HEAD = re.compile(r'\A""".*?"""\n|^(?:from|import) [^\n]*\n|^Array = npt\.NDArray\[Any\]\n', re.DOTALL | re.MULTILINE)
"""Docstring and imports of these modules."""


class Call(NamedTuple):
    """See `msprobe_engine.accuracy.scripts.source.Function`."""

    expression: str
    method: str = ""
    imports: tuple[str, ...] = ()


class MindSporeDialect:
    """See `msprobe_engine.accuracy.scripts.source.Dialect`."""

    framework = "mindspore"
    suffix = ".npy"
    says_gradients = False
    tuples = True

    @cached_property
    def _apis(self) -> dict[str, Api]:
        found: dict[str, Api] = {}
        for api in apis():
            found.setdefault(f"{api.prefix}.{api.name}", api)
        return found

    def function(self, name: names.ApiName) -> Call:
        """The function of a record, one of those that the dump knows as APIs.

        Raises:
            CannotWrite: it is none.
        """
        api = self._apis.get(f"{name.prefix}.{name.api}")
        if name.prefix.partition(".")[0] == "Primitive":
            raise CannotWrite("a primitive that a Cell holds: a dump does not have its attributes")
        if api is None:
            raise CannotWrite(f"{name.prefix}.{name.api} is no function of the installed MindSpore that calculates with tensors")
        if api.owner is Tensor:
            return Call(f"mindspore.Tensor.{api.name}", api.name)
        return Call(f"{api.owner.__name__}.{api.name}", "", (api.owner.__name__,))

    def explain_refusal(self, name: names.ApiName, record: Mapping[str, Any]) -> str | None:
        """Communication, and what draws random numbers."""
        named = record.get("input_kwargs")
        plain = {key: item.get("value") for key, item in named.items() if isinstance(item, Mapping)} if isinstance(named, Mapping) else {}
        why = left_out(self._apis[f"{name.prefix}.{name.api}"], (), plain)
        return {"random": "draws random numbers", "communication": "communication: other ranks take part in it"}.get(why or "")

    def dtype(self, name: str) -> str | None:
        """``mindspore.float32`` of ``Float32``."""
        plain = plain_name(name)
        return None if type_of(name) is None else f"mindspore.{'bool_' if plain == 'bool' else plain}"

    def raises(self, name: str) -> bool:
        """Floating point types."""
        return name in FLOATS

    def differentiable(self, name: str) -> bool:
        """Floating point types."""
        return name in FLOATS

    def special(self, kind: str, item: Mapping[str, Any]) -> str | None:
        """Types."""
        value = item.get("value")
        if kind != "mindspore.dtype" or not isinstance(value, str):
            return None
        found = self.dtype(value)
        return f"dtype({found})" if found and self.raises(value) else found

    def support(self) -> str:
        """Text of the support module, with that of the modules of the engine that it uses."""
        text = files(__package__).joinpath("support.py").read_text("utf-8")
        engine = files("msprobe_engine")
        parts = [_HEAD.sub("", engine.joinpath(name).read_text("utf-8")).strip() for name in _INCLUDED]
        before, mark, after = text.partition(MARK)
        return before + mark + "Array = npt.NDArray[Any]\n\n\n" + "\n\n\n".join((*parts, after.strip())) + "\n"

    def data(self, tensor: Any) -> bytes:
        """A tensor as a ``.npy`` file."""
        buffer = io.BytesIO()
        np.save(buffer, array_of(tensor), allow_pickle=False)
        return buffer.getvalue()
