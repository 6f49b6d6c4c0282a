"""`SingleSave`: named tensors of a training loop (prompt, response, log probabilities, rewards), saved by a call of the user."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from msprobe_engine.core import names, redaction
from msprobe_engine.core.backend import load_backend
from msprobe_engine.core.errors import DumpFormatError, MissingExtraError, UsageError
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.core.log import get_logger, one_line

_log = get_logger()
_MAX_DEPTH = 12
_BACKENDS = {"pytorch": "torch", "mindspore": "mindspore"}
NATIVE = ("float32", "float64", "int32", "int64", "complex64", "complex128")
"""Types that keep theirs in a file."""


class SingleSave:
    """One per process: a second construction returns the first object. The other methods are class methods.

    ::

        {dump_path}/
          configurations.json
          data/{key}/step{n}/rank{r}/micro_step{m}/{key}.npy       one tensor; of a list {key}.{i}.npy, of a dict {key}.{name}.npy
                                                  /{key}.json      max, min, mean, norm and shape of each

    The micro step counts the calls of `save` with this key within a step. Values are saved as numpy has them; types it does not
    have (bfloat16, float8) and small ones become float32, which holds them exactly. What is saved is read from the device at once:
    this is a call of the user, no hook. What cannot be saved is said and left out, and the training goes on.

    Args:
        dump_path: root of the output.
        fmk: ``pytorch`` or ``mindspore``.

    Raises:
        UsageError: an argument is wrong.
        MissingExtraError: the framework is not installed.
    """

    _instance: ClassVar[SingleSave | None] = None

    dump_path: Path
    step_count: int
    _counts: dict[str, int]
    _backend: Any

    def __new__(cls, dump_path: str | Path, fmk: str = "pytorch") -> SingleSave:
        if cls._instance is not None:
            if Path(dump_path) != cls._instance.dump_path:
                _log.warning("SingleSave exists already and goes on writing to %s, not to %s", cls._instance.dump_path, dump_path)
            return cls._instance
        if not isinstance(dump_path, (str, Path)) or not os.fspath(dump_path):
            raise UsageError(f"SingleSave: dump_path is {dump_path!r}; allowed: a directory")
        if fmk not in _BACKENDS:
            raise UsageError(f"SingleSave: fmk is {fmk!r}; allowed: {', '.join(map(repr, _BACKENDS))}")
        self = super().__new__(cls)
        self.dump_path = Path(dump_path)
        self.step_count = 0
        self._counts = {}
        try:
            self._backend = load_backend(_BACKENDS[fmk])
        except ImportError as error:
            if error.name not in ("torch", "mindspore"):
                raise
            raise MissingExtraError(error.name, error.name, "SingleSave") from None
        cls._instance = self
        return self

    @classmethod
    def save(cls, data: Any) -> None:
        """Save tensors as the next micro step of their keys.

        Args:
            data: key to a tensor, or to a list, tuple or dict of tensors (nested too). A key becomes a directory: a plain name.
        """
        self = cls._get()
        if not isinstance(data, Mapping):
            self._skip(f"save() takes a dict of tensors, not a {type(data).__name__}")
            return
        for key, value in data.items():
            count = self._counts.get(key, 0) if isinstance(key, str) else 0
            if self._one(key, value, count):
                self._counts[key] = count + 1

    @classmethod
    def save_ex(cls, data: Any, micro_batch: int | None = None) -> None:
        """Save tensors under a micro step of the caller's choice; None: directly in the rank directory."""
        self = cls._get()
        if not isinstance(data, Mapping):
            self._skip(f"save_ex() takes a dict of tensors, not a {type(data).__name__}")
            return
        for key, value in data.items():
            self._one(key, value, micro_batch)

    @classmethod
    def save_config(cls, data: Any) -> None:
        """Write the settings of the run to ``configurations.json``.

        Raises:
            UsageError: `data` is nothing that JSON can hold.
        """
        self = cls._get()
        try:
            text = json.dumps(data, indent=4)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"SingleSave.save_config: {error}; allowed: numbers, texts, lists and dicts") from None
        self._write(self.dump_path, {"configurations.json": [text.encode("ascii")]})

    @classmethod
    def step(cls) -> None:
        """The training step is over: the next `save` belongs to the next one."""
        self = cls._get()
        self._counts.clear()
        self.step_count += 1

    @classmethod
    def _get(cls) -> SingleSave:
        if cls._instance is None:
            raise UsageError("SingleSave is not there yet: construct it first, SingleSave('./single_save')")
        return cls._instance

    def _one(self, key: Any, value: Any, micro_step: int | None) -> bool:
        problem = _bad_key(key) or _bad_value(value, str(key), 0, self._backend.is_tensor)
        if problem is not None:
            self._skip(problem)
            return False
        rank = self._backend.rank() or 0
        directory = self.dump_path / "data" / key / f"step{self.step_count}" / f"rank{rank}"
        if micro_step is not None:
            directory /= f"micro_step{micro_step}"
        files: dict[str, list[bytes | memoryview]] = {}

        def describe_value(node: Any, name: str) -> Any:
            if self._backend.is_tensor(node):
                array: npt.NDArray[Any] = self._backend.host_array(node)
                if redaction.active() is not None and redaction.is_integer(array.dtype.name):
                    return {"max": None, "min": None, "mean": None, "norm": None, "shape": list(array.shape), "redacted": True}
                array = array if array.dtype.name in NATIVE else array.astype(np.float32)
                header = io.BytesIO()
                np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
                files[f"{name}.npy"] = [header.getvalue(), array.reshape(-1).view(np.uint8).data] if array.size else [header.getvalue()]
                return _facts(array)
            if isinstance(node, Mapping):
                return {str(k): describe_value(v, f"{name}.{k}") for k, v in node.items()}
            return [describe_value(v, f"{name}.{i}") for i, v in enumerate(node)]

        try:
            facts = describe_value(redaction.hide_names(value), key)
        except (RuntimeError, TypeError, NotImplementedError) as error:  # a layout or type without a way to numpy
            self._skip(f"{key!r} cannot be turned into numbers on the host: {error}")
            return False
        files[f"{key}.json"] = [json.dumps({"data": facts}, indent=4).encode("ascii")]
        return self._write(directory, files)

    def _write(self, directory: Path, files: Mapping[str, list[bytes | memoryview]]) -> bool:
        file = directory
        try:
            make_directories(os.fspath(directory))
            for name, parts in files.items():
                file = directory / name
                write_file(file, parts)
        except OSError as error:
            _log.error("SingleSave: cannot write %s: %s; the training goes on", file, error.strerror or error)
            return False
        return True

    @staticmethod
    def _skip(problem: str) -> None:
        _log.warning("SingleSave: nothing is saved: %s", one_line(problem))


def _bad_key(key: Any) -> str | None:
    if not isinstance(key, str):
        return f"the key {key!r} is a {type(key).__name__}; allowed: a text"
    try:
        names.check_file_name(key, "SingleSave")
    except DumpFormatError:
        return f"the key {key!r} is no plain name; it becomes a directory: leave out / and control characters"
    return None


def _bad_value(value: Any, place: str, depth: int, is_tensor: Callable[[Any], bool]) -> str | None:
    if is_tensor(value):
        return None
    if depth > _MAX_DEPTH:
        return f"{place} is nested too deeply"
    if isinstance(value, Mapping):
        children = [(str(k), v, _bad_key(k)) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(str(i), v, None) for i, v in enumerate(value)]
    else:
        return f"{place} is a {type(value).__name__}; allowed: a tensor, or a list, tuple or dict of tensors"
    return next((p for name, v, bad in children if (p := bad or _bad_value(v, f"{place}.{name}", depth + 1, is_tensor))), None)


def _facts(array: npt.NDArray[Any]) -> dict[str, Any]:
    """max, min, mean, norm (of the absolute value for complex numbers) and shape; null without elements."""
    if not array.size:
        return {"max": None, "min": None, "mean": None, "norm": None, "shape": list(array.shape)}
    numbers = np.abs(array) if array.dtype.kind == "c" else array
    with np.errstate(over="ignore", invalid="ignore"):
        norm = math.sqrt(float(np.square(numbers, dtype=np.float64).sum()))
        mean = float(numbers.mean(dtype=np.float64))
    return {"max": float(numbers.max()), "min": float(numbers.min()), "mean": mean, "norm": norm, "shape": list(array.shape)}
