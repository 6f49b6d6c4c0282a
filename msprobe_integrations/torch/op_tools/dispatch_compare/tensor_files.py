"""Tensors of the dispatch compare: ``npu/`` has the inputs and results of the device, ``cpu/`` the benchmark's results, as ``.npy``."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_integrations.torch.tensors.arrays import as_array

DEVICE, BENCH = "npu", "cpu"
"""Directories of the two sides; names of the existing tool, whatever the devices are."""


class TensorFiles:
    """Writes tensors of single calls.

    Args:
        root: directory of the run; both directories are made in it.

    Raises:
        SinkError: a directory cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self._device, self._bench = root / DEVICE, root / BENCH
        for directory in (self._device, self._bench):
            make_directory(directory, "dispatch compare")

    def write(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: Sequence[Any], bench: Sequence[Any]) -> None:
        """Write ``{name}_input.{n}``, ``{name}_input_{keyword}``, ``{name}_output`` (``.{n}`` where there are several).

        Raises:
            OSError: a file cannot be written.
        """
        for n, value in enumerate(args):
            _write(self._device, f"{name}_input.{n}", value)
        for key, value in kwargs.items():
            _write(self._device, f"{name}_input_{key}", value)
        for directory, values in ((self._device, device), (self._bench, bench)):
            for suffix, value in number_results(values):
                _write(directory, f"{name}_output{suffix}", value)


def number_results(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Results with what is put behind their names: nothing for a single one."""
    if len(values) == 1:
        yield "", values[0]
    else:
        for n, value in enumerate(values):
            yield f".{n}", value


def _write(directory: Path, stem: str, value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for n, child in enumerate(value):
            _write(directory, f"{stem}.{n}", child)
    elif isinstance(value, (torch.Tensor, bool, int, float)):
        file = io.BytesIO()
        np.save(file, np.asarray(as_array(value)), allow_pickle=False)
        write_file(directory / f"{stem}.npy", [file.getvalue()])
