"""What a process of the online pre-check does with torch: judges results that a training has sent."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.accuracy.precheck.options import ONLY_ACCELERATOR, Check, Work
from msprobe_engine.accuracy.results import ERROR, NOT_RUN, PASS, SKIP, WARNING, CallResult, build_skipped_result
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.tensors.reader import SAFETENSORS, TensorFiles, TensorSource
from msprobe_integrations.torch.op_tools.accuracy.checker import Bench, Checker, Target
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import load_operators
from msprobe_integrations.torch.op_tools.accuracy.precheck import resolve_device

_SHARDS = 32
"""Shards whose headers are remembered."""
_TENSOR_BYTES = 64 << 20
"""Bytes of read tensors that are remembered: what is one call's output is the next one's input."""


class ReceivedTensors:
    """The tensors of one call at a time, in shards of a step that is still coming in; see `Files` of `accuracy.arguments`."""

    def __init__(self) -> None:
        self._directory = Path()
        self._places: Mapping[str, tuple[str, str]] = {}
        self._read: OrderedDict[tuple[str, str, str], torch.Tensor] = OrderedDict()
        self._bytes = 0

    def use(self, directory: str, places: Mapping[str, tuple[str, str]]) -> None:
        """From now on the tensors of this call: shard and key by data name."""
        self._directory, self._places = Path(directory) / layout.TENSORS, places

    def load(self, name: str, backend: Any) -> Any:
        """The tensor of this ``data_name``.

        Raises:
            UsageError: it has not arrived.
            DumpFormatError: its shard is damaged.
        """
        place = self._places.get(name)
        if place is None:
            raise UsageError(f"{name}: has not arrived")
        return self._load_tensor(*place, backend).clone()  # an operator may write into its argument

    def same(self, name: str) -> object:
        """Equal for names of one tensor of the training."""
        return self._places.get(name, name)

    def _load_tensor(self, shard: str, key: str, backend: Any) -> torch.Tensor:
        known = (str(self._directory), shard, key)
        tensor = self._read.get(known)
        if tensor is not None:
            self._read.move_to_end(known)
            return tensor
        path = self._directory / shard
        source = _sources(str(path), path.stat().st_mtime_ns)[key]
        assert source.format == SAFETENSORS
        with open_input(path, follow=False) as file:
            file.seek(source.offset)
            data = file.read(source.nbytes)
        made: torch.Tensor = backend.from_bytes(data, source.dtype, source.shape)
        self._remember(known, made)
        return made

    def _remember(self, known: tuple[str, str, str], tensor: torch.Tensor) -> None:
        self._read[known] = tensor
        self._bytes += tensor.nbytes
        while self._bytes > _TENSOR_BYTES and self._read:
            _, old = self._read.popitem(last=False)
            self._bytes -= old.nbytes


@lru_cache(maxsize=_SHARDS)
def _sources(path: str, _changed: int) -> dict[str, TensorSource]:
    return TensorFiles.of_shard(path).sources()


def make_check(work: Work) -> Check:
    """See `msprobe_engine.accuracy.precheck.options.Check`.

    Raises:
        UsageError: there is no such device here, or a file of operators cannot be loaded.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(work.threads)
    load_operators(*work.operators)
    device = resolve_device(work.second.removeprefix(ONLY_ACCELERATOR), work.jit_compile) if work.second else ""
    second = Target(device) if device and not (work.second.startswith(ONLY_ACCELERATOR) and device == "cpu") else None
    bench = Bench(resolve_device(work.bench, work.jit_compile), work.bench_dtype)
    files = ReceivedTensors()
    checker = Checker(files, None, bench, seed=work.seed, condition=work.condition, second=second, quantized=work.quantized)

    def check(
        name: str, record: Mapping[str, Any], backward: Mapping[str, Any] | None, directory: str, tensors: Mapping[str, tuple[str, str]]
    ) -> CallResult:
        inputs = [record.get("input_args"), record.get("input_kwargs"), (backward or {}).get("input")]
        places = {data_name: (shard, key) for data_name, (shard, key) in tensors.items()}
        for item in _tensors_in(inputs):
            if item.get("data_name") not in places and not item.get("ignored"):
                return build_skipped_result(
                    name, f"a tensor of it ({item.get('data_name') or 'without values'}) has not arrived or was not saved"
                )
        files.use(directory, places)
        result = checker.check(name, record, backward, recorded=True).result
        return _as_existing(result) if work.compat else result

    return Check(check)


def _as_existing(result: CallResult) -> CallResult:
    """With the verdicts of the existing tool: in a direction that of the last tensor that does not pass."""

    def of(direction: str, status: str) -> str:
        if status in (SKIP, NOT_RUN):
            return status
        bad = [t.old_status for t in result.tensors if f".{direction}." in t.name and t.old_status in (ERROR, WARNING)]
        return bad[-1] if bad else PASS

    tensors = tuple(replace(tensor, status=tensor.old_status, message="") for tensor in result.tensors)
    forward, backward = of("forward", result.forward), of("backward", result.backward)
    return replace(result, forward=forward, backward=backward, tensors=tensors)


def _tensors_in(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        if isinstance(node.get("dtype"), str) and "shape" in node:
            yield node
        else:
            for child in node.values():
                yield from _tensors_in(child)
    elif isinstance(node, list):
        for child in node:
            yield from _tensors_in(child)
