"""Metrics that users add: files ``alg_<name>.py`` with ``column_name()`` and ``compare(n, b)``.

The contract is that of the existing tool (26.2.0): `compare` gets both tensors (torch tensors where torch is installed, else numpy
arrays) and returns a number, a text, or one of both with a message. Such files are code and run with all rights of the user, so only what
is named on the command line is loaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.backend import load_backend
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.formats.dump.dump_table import TENSOR
from msprobe_engine.formats.tensors.reader import Loader
from msprobe_engine.measure.columns import columns
from msprobe_engine.measure.options import GENERATIONS

_log = get_logger()
_FILE = re.compile(r"alg_([a-z0-9_]+)\.py")

Cell = float | int | str | None


class Metric(NamedTuple):
    """A loaded metric."""

    column: str
    function: Callable[[Any, Any], Any]
    path: Path


def load_metrics(paths: Iterable[Path]) -> tuple[Metric, ...]:
    """Load the files, and all ``alg_*.py`` of directories, by name.

    Raises:
        UsageError: a file is not there, is no metric, fails when it is loaded, or has the name of another column.
    """
    taken = {column for generation in GENERATIONS for column in columns(generation, TENSOR, True)}
    loaded: list[Metric] = []
    for path in paths:
        for file in _files(Path(path)):
            metric = _load(file)
            if metric.column in taken:
                raise UsageError(f"{file}: its column is called {metric.column!r}, as another one; give it another name")
            taken.add(metric.column)
            loaded.append(metric)
    return tuple(loaded)


def apply(metric: Metric, target: npt.NDArray[Any], golden: npt.NDArray[Any]) -> tuple[Cell, str]:
    """(cell, message). A metric that fails gives ``unsupported``, and says why."""
    try:
        result = metric.function(*_tensors(target, golden))
    except Exception as error:  # whatever the user's code raises
        reason = f"{metric.path.name} failed ({type(error).__name__}: {one_line(str(error))[:120]})"
        _log.error("%s", reason)
        return "unsupported", reason
    message = ""
    if isinstance(result, tuple) and len(result) == 2:
        result, message = result
    if isinstance(result, np.generic):
        result = result.item()
    if isinstance(result, bool) or not isinstance(result, (int, float, str)):
        return "unsupported", f"{metric.path.name} returned a {type(result).__name__}; a number or a text is allowed"
    return result, str(message)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _FILE.fullmatch(file.name) and file.is_file())
        if not files:
            raise UsageError(f"{path}: holds no file alg_<name>.py; metrics are called so")
        return files
    if not path.is_file() or not _FILE.fullmatch(path.name):
        raise UsageError(f"{path}: is no metric; a file alg_<name>.py (small letters, digits, _) or a directory of such is needed")
    return [path]


def _load(path: Path) -> Metric:
    spec = importlib.util.spec_from_file_location(f"msprobe_metric_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        column, function = module.column_name(), module.compare
        needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    except Exception as error:  # whatever the user's code raises
        raise UsageError(f"{path}: cannot be loaded as a metric ({type(error).__name__}: {one_line(str(error))[:160]})") from None
    if not isinstance(column, str) or not column.strip() or len(needed) != 2:
        raise UsageError(f"{path}: column_name() must return a text, and compare must have two arguments")
    return Metric(column, function, path)


def _tensors(target: npt.NDArray[Any], golden: npt.NDArray[Any]) -> tuple[Any, Any]:
    try:
        backend = cast(Loader, load_backend("torch"))
    except (ImportError, UsageError):
        return target, golden
    made = [backend.from_bytes(np.ascontiguousarray(side).tobytes(), f"torch.{side.dtype.name}", side.shape) for side in (target, golden)]
    return made[0], made[1]
