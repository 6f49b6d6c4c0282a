"""Arguments of a recorded call, made again: saved tensors where the dump has them, otherwise drawn from their statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from msprobe_engine.accuracy.draw import draw
from msprobe_engine.errors import DumpFormatError, UsageError
from msprobe_integrations.torch.accuracy.purposes import Purpose, purpose
from msprobe_integrations.torch.accuracy.resolve import CannotRun
from msprobe_integrations.torch.backend import TorchBackend

Place = tuple[int | str, ...]
"""Where a value stands in the arguments: ``(0,)``, ``(1, 2)``, ``("out",)``."""

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST = 20
_SPECIAL = ("layout", "nnz", "quantized", "nested_size", "freed", "pending")


class Files(Protocol):
    """What gives saved tensors: `msprobe_engine.dump.tensor_reader.TensorFiles`."""

    def load(self, name: str, backend: Any) -> Any:
        """The tensor of this ``data_name``."""
        ...


class Arguments:
    """Makes arguments of records.

    Args:
        files: the saved tensors of their rank directory, or None.
        seed: of what is drawn, together with the name of the call and the place of the argument.

    Attributes:
        drawn: places of the arguments that the last `of` has drawn and not read.
    """

    def __init__(self, files: Files | None, seed: int = 0) -> None:
        self._files = files
        self._seed = seed
        self._backend = TorchBackend()
        self.drawn: list[Place] = []

    def of(self, name: str, record: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of a forward record, on the CPU.

        Args:
            name: of the call, ``"Torch.matmul.0"``.

        Raises:
            CannotRun: an argument cannot be made.
        """
        self.drawn = []
        args, kwargs = record.get("input_args") or [], record.get("input_kwargs") or {}
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise CannotRun("its arguments are damaged")
        api = name.split(".")[-2] if name.count(".") > 1 else name

        def make(item: Any, place: Place) -> Any:
            return self._make(item, place, f"{name} input", lambda where: purpose(api, where, args))

        return [make(item, (n,)) for n, item in enumerate(args)], {str(key): make(item, (str(key),)) for key, item in kwargs.items()}

    def gradients(self, name: str, record: Mapping[str, Any]) -> list[torch.Tensor | None]:
        """What came into the backward of a call: one for each differentiable output, None where nothing did.

        Raises:
            CannotRun: they cannot be made.
        """
        drawn, self.drawn = self.drawn, []
        try:
            made = self._make(record.get("input") or [], (), f"{name} gradient", lambda _: Purpose())
        finally:
            self.drawn = drawn
        return [g for g in _leaves(made) if g is None or isinstance(g, torch.Tensor)]

    def recorded(self, items: Any) -> list[Any]:
        """Leaves of recorded results: saved tensors and plain values.

        Raises:
            CannotRun: a tensor was not saved.
        """
        drawn, self.drawn = self.drawn, []
        try:
            return _leaves(self._make(items, (), "", None))
        finally:
            self.drawn = drawn

    def _make(self, item: Any, place: Place, what: str, purposes: Any) -> Any:
        if len(place) > _DEEPEST:
            raise CannotRun("its arguments are nested too deep")
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, list):
            return [self._make(child, (*place, n), what, purposes) for n, child in enumerate(item)]
        if not isinstance(item, Mapping):
            raise CannotRun(f"an argument is a {type(item).__name__}")
        kind = item.get("type")
        if isinstance(item.get("dtype"), str) and "shape" in item:
            return self._tensor(item, place, what, purposes)
        if kind is None:
            return {str(key): self._make(child, (*place, str(key)), what, purposes) for key, child in item.items()}
        return _plain(str(kind), item.get("value"))

    def _tensor(self, item: Mapping[str, Any], place: Place, what: str, purposes: Any) -> torch.Tensor:
        if special := [key for key in _SPECIAL if key in item]:
            raise CannotRun(f"an argument is no plain tensor ({special[0]}: {item[special[0]]!s:.40})")
        name = item.get("data_name")
        problem = "was not saved"
        if self._files is not None and isinstance(name, str) and name not in ("", "-1"):
            try:
                loaded = self._files.load(name, self._backend)
                if isinstance(loaded, np.ndarray):
                    loaded = torch.from_numpy(loaded)
                if isinstance(loaded, torch.Tensor):
                    return loaded.detach()
            except (DumpFormatError, UsageError) as error:
                problem = str(error)  # not saved, or damaged: drawn, and the result says so
        if purposes is None:
            raise CannotRun(f"a recorded result cannot be had: {problem}")
        self.drawn.append(place)
        return drawn(item, f"{self._seed} {what} {'.'.join(map(str, place))}", purposes(place) if place else Purpose())


def drawn(item: Mapping[str, Any], seed_text: str, wanted: Purpose | None = None) -> torch.Tensor:
    """A tensor of the recorded type and shape with the recorded statistics, see `msprobe_engine.accuracy.draw.draw`.

    Raises:
        CannotRun: type or shape is not one of torch, or the tensor would be too large.
    """
    dtype = getattr(torch, str(item["dtype"]).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRun(f"a tensor of type {str(item['dtype'])[:40]} and shape {str(item.get('shape'))[:80]}")
    try:
        values = draw(item, seed_text, *(wanted or Purpose()))
    except DumpFormatError as error:
        raise CannotRun(str(error)) from None
    return torch.from_numpy(values).to(dtype)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for child in value for leaf in _leaves(child)] if isinstance(value, list) else [value]


def _plain(kind: str, value: Any) -> Any:
    if kind == "slice" and isinstance(value, list) and len(value) == 3:
        return slice(*value)
    if kind == "ellipsis":
        return ...
    if kind == "torch.Size" and isinstance(value, Sequence):
        return torch.Size(value)
    if kind in ("torch.dtype", "torch.memory_format", "torch.layout"):
        found = getattr(torch, str(value).removeprefix("torch."), None)
        if isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
            return found
    if kind == "torch.device":
        return torch.device("cpu")
    if kind.startswith("numpy.") and isinstance(value, (bool, int, float)):
        return value
    if kind in ("int", "float", "bool", "str", "NoneType"):
        return _WORDS.get(value, value) if kind == "float" and isinstance(value, str) else value
    if kind == "complex":
        try:
            return complex(value)
        except (TypeError, ValueError):
            pass
    raise CannotRun(f"an argument of type {kind[:80]} cannot be made from a dump")
