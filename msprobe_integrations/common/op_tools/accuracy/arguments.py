"""Arguments of a recorded call, made again: saved tensors where the dump has them, otherwise drawn from their statistics."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy.typing as npt

from msprobe_engine.accuracy.draw import draw
from msprobe_engine.accuracy.results import UNREADABLE, CallResult
from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.log import one_line
from msprobe_engine.formats.dump.dump_table import WORDS_OF_NUMBERS
from msprobe_integrations.common.op_tools.accuracy.purposes import Purpose, purpose

Place = tuple[int | str, ...]
"""Where a value stands in the arguments: ``(0,)``, ``(1, 2)``, ``("out",)``."""

_NUMPY = re.compile(r"(?:float|int|uint)[0-9]{1,3}|bool_?")
_DEEPEST = 20
_SPECIAL = ("layout", "nnz", "quantized", "nested_size", "freed", "pending")


class CannotRun(Exception):
    """The call is not run; the text says why, for the result files."""


class Files(Protocol):
    """What gives saved tensors: `msprobe_engine.formats.tensors.reader.TensorFiles`."""

    def load(self, name: str, backend: Any) -> Any:
        """The tensor of this ``data_name``."""
        ...

    def same(self, name: str) -> object:
        """Equal for names of one tensor, which a call may have at several places."""
        ...


class RecordedArguments(ABC):
    """Makes arguments of records; a framework says what its tensors and other values are.

    Args:
        files: the saved tensors of their rank directory, or None.
        seed: of what is drawn, together with the name of the call and the place of the argument.

    Attributes:
        drawn: places of the arguments that the last `of` has drawn and not read.
        unreadable: what the dump names a file for that cannot be read, since `add_unreadable` was last called.
    """

    def __init__(self, files: Files | None, seed: int = 0) -> None:
        self._files = files
        self._seed = seed
        self.drawn: list[Place] = []
        self.unreadable: list[str] = []

    @abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Is this a tensor of the framework?"""

    @abstractmethod
    def load(self, files: Files, name: str, item: Mapping[str, Any]) -> Any:
        """A saved tensor on the CPU, in the recorded type; None: what was saved is no tensor.

        Raises:
            DumpFormatError, UsageError: it is damaged, or not there.
        """

    @abstractmethod
    def tensor(self, values: npt.NDArray[Any], dtype: str) -> Any:
        """A tensor on the CPU of drawn values, in a type as dumps name it.

        Raises:
            CannotRun: the framework has no such type.
        """

    @abstractmethod
    def special(self, kind: str, item: Mapping[str, Any]) -> Any:
        """A value that only the framework has.

        Raises:
            CannotRun: it cannot be made.
        """

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

        def make_argument(item: Any, place: Place) -> Any:
            return self._make_argument(item, place, f"{name} input", lambda where: purpose(api, where, args))

        return [make_argument(item, (n,)) for n, item in enumerate(args)], {
            str(key): make_argument(item, (str(key),)) for key, item in kwargs.items()
        }

    def gradients(self, name: str, record: Mapping[str, Any]) -> list[Any]:
        """What came into the backward of a call: one for each differentiable output, None where nothing did.

        Raises:
            CannotRun: they cannot be made.
        """
        drawn, self.drawn = self.drawn, []
        try:
            made = self._make_argument(record.get("input") or [], (), f"{name} gradient", lambda _: Purpose())
        finally:
            self.drawn = drawn
        return [g for g in _leaves(made) if g is None or self.is_tensor(g)]

    def read_recorded(self, items: Any) -> list[Any]:
        """Leaves of recorded results: saved tensors and plain values.

        Raises:
            CannotRun: a tensor was not saved.
        """
        drawn, self.drawn = self.drawn, []
        try:
            return _leaves(self._make_argument(items, (), "", None))
        finally:
            self.drawn = drawn

    def add_unreadable(self, result: CallResult) -> CallResult:
        """The result of a call whose arguments were made last; its message says which saved tensors could not be read."""
        new = [line for line in dict.fromkeys(self.unreadable) if line not in result.message]
        self.unreadable = []
        return replace(result, message="\n".join(filter(None, (result.message, *new)))) if new else result

    def _make_argument(self, item: Any, place: Place, what: str, purposes: Any) -> Any:
        if len(place) > _DEEPEST:
            raise CannotRun("its arguments are nested too deep")
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, list):
            return [self._make_argument(child, (*place, n), what, purposes) for n, child in enumerate(item)]
        if not isinstance(item, Mapping):
            raise CannotRun(f"an argument is a {type(item).__name__}")
        if "redacted" in item:
            raise CannotRun("the values of an argument were redacted (redact: [tokens])")
        kind = item.get("type")
        if isinstance(item.get("dtype"), str) and "shape" in item:
            return self._tensor(item, place, what, purposes)
        if kind is None:
            return {str(key): self._make_argument(child, (*place, str(key)), what, purposes) for key, child in item.items()}
        return self._plain(str(kind), item)

    def _tensor(self, item: Mapping[str, Any], place: Place, what: str, purposes: Any) -> Any:
        if special := [key for key in _SPECIAL if key in item]:
            raise CannotRun(f"an argument is no plain tensor ({special[0]}: {item[special[0]]!s:.40})")
        name = item.get("data_name")
        problem = ""
        if self._files is not None and isinstance(name, str) and name not in ("", "-1"):
            try:
                loaded = self.load(self._files, name, item)
                if loaded is not None:
                    return loaded
                problem = f"{name} holds no tensor"
            except (DumpFormatError, UsageError) as error:  # not there, or damaged: drawn, and the result says so
                problem = str(error)
        where = f"{what.rpartition(' ')[2] or 'recorded result'} {'.'.join(map(str, place))}"
        if problem:
            problem = one_line(f"{where}: {UNREADABLE}: {problem}")
            self.unreadable.append(f"{problem}; drawn from its statistics instead" if purposes is not None else problem)
        if purposes is None:
            raise CannotRun(problem or "a recorded result was not saved")
        self.drawn.append(place)
        return self.draw(item, f"{self._seed} {what} {'.'.join(map(str, place))}", purposes(place) if place else Purpose())

    def draw(self, item: Mapping[str, Any], seed_text: str, wanted: Purpose | None = None) -> Any:
        """A tensor of the recorded type and shape with the recorded statistics, see `msprobe_engine.accuracy.draw.draw`.

        Raises:
            CannotRun: type or shape cannot be, or the tensor would be too large.
        """
        try:
            return self.tensor(draw(item, seed_text, *(wanted or Purpose())), str(item["dtype"]))
        except DumpFormatError as error:
            raise CannotRun(str(error)) from None

    def _plain(self, kind: str, item: Mapping[str, Any]) -> Any:
        value = item.get("value")
        if kind == "slice" and isinstance(value, list) and len(value) == 3:
            return slice(*value)
        if kind == "ellipsis":
            return ...
        if (kind.startswith("numpy.") or _NUMPY.fullmatch(kind)) and isinstance(value, (bool, int, float)):
            return value
        if kind in ("int", "float", "bool", "str", "NoneType"):
            return WORDS_OF_NUMBERS.get(value, value) if kind == "float" and isinstance(value, str) else value
        if kind == "complex":
            try:
                return complex(str(value))
            except ValueError:
                pass
        return self.special(kind, item)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for child in value for leaf in _leaves(child)] if isinstance(value, list) else [value]
