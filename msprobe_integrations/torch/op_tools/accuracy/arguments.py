"""Arguments of a recorded call of torch, made again; see `msprobe_integrations.common.op_tools.accuracy.arguments`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun, Files, Place, RecordedArguments
from msprobe_integrations.common.op_tools.accuracy.purposes import Purpose
from msprobe_integrations.torch.tensors.byte_forms import TensorBytes

__all__ = ["Arguments", "Files", "Place", "draw_tensor"]


class Arguments(RecordedArguments):
    """Makes arguments of records, see there."""

    def __init__(self, files: Files | None, seed: int = 0) -> None:
        super().__init__(files, seed)
        self._loader = TensorBytes()
        self._loaded: dict[object, torch.Tensor] = {}

    def of(self, name: str, record: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """See there; what is one tensor at several places of the call is one here."""
        self._loaded.clear()
        return super().of(name, record)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def load(self, files: Files, name: str, _item: Mapping[str, Any]) -> torch.Tensor | None:
        """A saved tensor; an array of numpy becomes one."""
        same = files.same(name)
        if same not in self._loaded:
            loaded = files.load(name, self._loader)
            if isinstance(loaded, np.ndarray):
                loaded = torch.from_numpy(loaded)
            if not isinstance(loaded, torch.Tensor):
                return None
            self._loaded[same] = loaded.detach()
        return self._loaded[same]

    def tensor(self, values: npt.NDArray[Any], dtype: str) -> torch.Tensor:
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise CannotRun(f"a tensor of type {dtype[:40]} and shape {list(values.shape)}")
        return torch.from_numpy(values).to(kind)

    def special(self, kind: str, item: Mapping[str, Any]) -> Any:
        """Sizes, types, memory formats, layouts, devices."""
        value = item.get("value")
        if kind == "torch.Size" and isinstance(value, Sequence):
            return torch.Size(value)
        if kind in ("torch.dtype", "torch.memory_format", "torch.layout"):
            constant = getattr(torch, str(item.get("format", value)).removeprefix("torch."), None)
            if isinstance(constant, (torch.dtype, torch.memory_format, torch.layout)):
                return constant
        if kind == "torch.layout" and value is None:  # dumps do not say which; results that are sparse are not compared
            return torch.strided
        if kind == "torch.device":
            return torch.device("cpu")
        raise CannotRun(f"an argument of type {kind[:80]} cannot be made from a dump")


def draw_tensor(item: Mapping[str, Any], seed_text: str, wanted: Purpose | None = None) -> torch.Tensor:
    """A tensor of the recorded type and shape with the recorded statistics, see `RecordedArguments.draw`."""
    found: torch.Tensor = Arguments(None).draw(item, seed_text, wanted)
    return found
