"""Multiplies chosen tensors by matrices before they are compared (``--config`` of 26.2.0): calibration of quantized layers, rotations.

The file is YAML. Keys at the top: ``right_matmul``, ``left_matmul`` with ``target_tensor_map`` and ``golden_tensor_map``, and
``left_right_matmul`` with ``left_`` and ``right_`` before these. A map goes from the file of a matrix (.pt, .npy) to a list of data names.
Right products are taken first, then left ones, then those of both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import DumpFormatError, UsageError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.yaml_text import parse_yaml
from msprobe_engine.formats.mapping_file import LARGEST
from msprobe_engine.formats.tensors.blocks import open_file, whole

Array = npt.NDArray[Any]
_LARGEST_MATRIX = 1 << 30
_SECTIONS = {
    "right_matmul": (("target_tensor_map", True), ("golden_tensor_map", True)),
    "left_matmul": (("target_tensor_map", False), ("golden_tensor_map", False)),
    "left_right_matmul": (
        ("left_target_tensor_map", False),
        ("right_target_tensor_map", True),
        ("left_golden_tensor_map", False),
        ("right_golden_tensor_map", True),
    ),
}


class _Product(NamedTuple):
    matrix: Path
    right: bool


class Postprocess:
    """What to multiply.

    Args:
        config: the YAML file, or what is in one.

    Raises:
        UsageError: it is no such file, or holds keys that are not known.
    """

    def __init__(self, config: Any = None) -> None:
        self._target: dict[str, list[_Product]] = {}
        self._golden: dict[str, list[_Product]] = {}
        if config is None:
            return
        root, where = Path(), "postprocess"
        if isinstance(config, (str, Path)):
            root, where = Path(config).parent, str(config)
            try:
                config = parse_yaml(read_input(config, LARGEST).decode())
            except (OSError, ValueError) as error:
                raise UsageError(f"{where}: is no YAML file that can be read ({str(error)[:200]})") from None
        for section, entry in _require_mapping(config, where).items():
            if section not in _SECTIONS:
                raise UsageError(f"{where}: unknown key {str(section)[:80]!r}; allowed: {', '.join(_SECTIONS)}")
            maps = dict(_SECTIONS[section])
            given = _require_mapping(entry, f"{where}: {section}")
            unknown = [key for key in given if key not in maps]
            if unknown:
                raise UsageError(f"{where}: {section} has the unknown key {str(unknown[0])[:80]!r}; allowed: {', '.join(maps)}")
            for key, right in maps.items():
                side = self._target if "target" in key else self._golden
                for matrix, names in _require_mapping(given.get(key), f"{where}: {section}: {key}").items():
                    if not isinstance(names, (list, tuple)):
                        raise UsageError(f"{where}: {section}: {key}: {str(matrix)[:80]!r} must have a list of data names")
                    for name in names:
                        side.setdefault(str(name), []).append(_Product(_resolve_path(root, str(matrix)), right))

    def __bool__(self) -> bool:
        return bool(self._target or self._golden)

    def applies_to(self, target: str, golden: str) -> bool:
        """One of these two data names is to be multiplied."""
        return target in self._target or golden in self._golden

    def apply(self, target: Array, golden: Array, names: tuple[str, str]) -> tuple[Array, Array, str]:
        """Both tensors after it, and a message when a product could not be taken; that tensor stays as it is."""
        problems = []
        made = []
        for side, array, name in zip((self._target, self._golden), (target, golden), names):
            for matrix, right in side.get(name, ()):
                try:
                    other = _matrix(matrix)
                    array = np.matmul(array, other) if right else np.matmul(other, array)
                except (DumpFormatError, ValueError, TypeError) as error:
                    problems.append(f"{name} could not be multiplied by {matrix}: {str(error)[:160]}")
            made.append(array)
        return made[0], made[1], "; ".join(problems)


def _require_mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: is a {type(value).__name__}; a mapping is needed")
    return value


def _resolve_path(root: Path, name: str) -> Path:
    """As written, from where the program runs; else beside the YAML file."""
    path = Path(name)
    return path if os.path.exists(name) or path.is_absolute() else root / name


@lru_cache(maxsize=16)
def _matrix(path: Path) -> Array:
    if path.suffix not in (".npy", ".pt", ".pth"):
        raise DumpFormatError(f"{path}: a matrix is in a .pt or .npy file")
    with open_file(path) as matrix:
        if matrix.size > _LARGEST_MATRIX:
            raise DumpFormatError(f"{path}: has {matrix.size} elements; a matrix of at most {_LARGEST_MATRIX} can be used")
        return whole(matrix)
